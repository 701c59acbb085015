// serving.h: which calls of F.scaled_dot_product_attention our kernels serve, and why not the others: for the operators
// that minimal_attn.activate() replaces (sdpa.h), and for minimal_attn.scaled_dot_product_attention.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint_like.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/call.h"
#include "binding/checks.h"
#include "ranges.h"

namespace minimal_attn::sdpa {

// What becomes of a call: our kernels serve it, or PyTorch's do, for one of these reasons.
enum Outcome {
    served,
    mask,
    dropout,
    dtype,
    shapes,
    head_dimension,
    scale_value,
    debug_mask,
    unfused,
    unfused_wanted,
    fast_path,
    layout,
    device,
    slow_gradients,
    forward_mode
};
struct Description {
    const char *name;
    const char *advice = "";
};
inline constexpr std::array<Description, 15> kOutcomes = {
    {{"minimal_attn"},
     {"PyTorch: attn_mask is given"},
     {"PyTorch: dropout_p is not 0"},
     {"PyTorch: the dtype is not float32, float16 or bfloat16"},
     {"PyTorch: the shapes are empty or don't fit together"},
     {"PyTorch: a head dimension above 512 (in float32 on a GPU 256)"},
     {"PyTorch: scale is not finite"},
     {"PyTorch: return_debug_mask is set"},
     {"PyTorch chose no fused kernel",
      ", but separate steps. minimal_attn.explain_scaled_dot_product_attention says whether "
      "minimal_attn.scaled_dot_product_attention would serve the arguments"},
     {"PyTorch: sdpa_kernel allows no fused kernel"},
     {"PyTorch: MultiheadAttention's fast path",
      ", which calls no F.scaled_dot_product_attention. torch.backends.mha.set_fastpath_enabled(False) lets it"},
     {"PyTorch: a tensor is not dense, or nested"},
     {"PyTorch: the tensors are on two devices, or on one that this build doesn't serve"},
     {"PyTorch: gradients are wanted, which PyTorch's kernels compute faster on this GPU"},
     {"PyTorch: forward-mode derivatives are wanted"}}};
inline std::array<std::atomic<int64_t>, kOutcomes.size()> counts{};  // they only grow
inline std::array<std::atomic<bool>, kOutcomes.size()> told{};       // which have warned since the last activate()
inline std::atomic<bool> is_strict{false};
inline thread_local int64_t calls_of_thread = 0;

inline std::map<std::string, int64_t> calls() {
    std::map<std::string, int64_t> calls;
    for (size_t i = 0; i < counts.size(); ++i)
        if (counts[i]) calls[kOutcomes[i].name] = counts[i];
    return calls;
}

inline void tell(Outcome outcome, bool strict, int stacklevel) {
    const auto &[name, advice] = kOutcomes[outcome];
    const pybind11::gil_scoped_acquire gil;
    pybind11::module_::import("minimal_attn._fallback")
        .attr("passed_on")(std::string(name) + advice, strict, pybind11::arg("stacklevel") = stacklevel);
}

// Counts a call. One that leaves our kernels warns once for each reason, or raises if that was asked for.
inline void count(Outcome outcome) {
    ++calls_of_thread;
    counts[outcome].fetch_add(1, std::memory_order_relaxed);
    if (outcome != served && (is_strict || !told[outcome].exchange(true))) tell(outcome, is_strict, /*stacklevel=*/2);
}

struct Call {
    const Tensor &q, &k, &v;
    const MaybeTensor &attn_mask;
    double dropout_p;
    bool is_causal;
    std::optional<double> scale;
    bool enable_gqa = true;    // operators don't ask
    bool may_look = true;      // at attn_mask's numbers
    MaybeTensor key_ranges{};  // of attn_mask: outcome_of looks
    MaybeTensor pairs{};       // attn_mask, if it gives no key_ranges
    MaybeTensor seed{};        // of dropout; without it a call with dropout isn't served
};

// Autograd passes an undefined mask.
inline bool has_mask(const Call &c) { return c.attn_mask && c.attn_mask->defined(); }

// What symbols leave open while a graph is traced, the operator checks.
inline bool is(const SymInt &x, int64_t y) { return TORCH_GUARD_OR_FALSE(x.sym_eq(y)); }
inline bool differ(const SymInt &x, const SymInt &y) { return TORCH_GUARD_OR_FALSE(x.sym_ne(y)); }

// key_ranges of a mask that is the same for all heads and gives each query an interval of keys; else nothing. Bool, or
// a bias in q's dtype that is 0 or -inf: PyTorch makes one of a bool mask.
inline MaybeTensor ranges_of_mask(const Call &c) {
    const std::array<int64_t, 4> shape = {c.q.size(0), c.q.size(1), c.q.size(2), c.k.size(2)};
    Tensor seen = *c.attn_mask;
    if (seen.dim() < 2 || seen.dim() > 4 || seen.numel() == 0) return {};
    while (seen.dim() < 4) seen = seen.unsqueeze(0);
    for (int i = 0; i < 4; ++i) {
        if (seen.size(i) != 1 && seen.size(i) != shape[i]) return {};
        if (seen.stride(i) == 0) seen = seen.narrow(i, 0, 1);
    }
    if (seen.stride(3) != 1) seen = seen.contiguous();
    const auto type = seen.scalar_type();
    Tensor ranges;
    for (int64_t h = 0; h < seen.size(1); ++h) {
        const Tensor head = seen.select(1, h), found = at::empty({head.size(0), head.size(1), 2}, at::kInt);
        const auto find = [&](auto hidden, auto visible) {
            return find_ranges_cpu((const decltype(hidden) *)head.const_data_ptr(), hidden, visible, head.stride(0),
                                   head.stride(1), head.size(0), head.size(1), (int)head.size(2),
                                   found.mutable_data_ptr<int>());
        };
        const bool are_ranges = type == at::kBool           ? find(uint8_t(0), uint8_t(1))
                                : type != c.q.scalar_type() ? false
                                : type == at::kFloat        ? find(uint32_t(0xff800000), uint32_t(0))
                                : type == at::kHalf         ? find(uint16_t(0xfc00), uint16_t(0))
                                                            : find(uint16_t(0xff80), uint16_t(0));
        if (!are_ranges || (h > 0 && !found.equal(ranges))) return {};
        ranges = found;
    }
    if (seen.size(3) == 1) ranges.mul_(shape[3]);  // one number for all keys
    return ranges.expand({seen.size(0), shape[2], 2});
}

// Whether forward takes attn_mask as it is.
inline bool is_mask_of_pairs(const Call &c) {
    const auto type = c.attn_mask->scalar_type();
    const bool has_type = type == at::kBool || type == at::kFloat || type == c.q.scalar_type();
    const std::array<SymInt, 4> pairs = {c.q.sym_size(0), c.q.sym_size(1), c.q.sym_size(2), c.k.sym_size(2)};
    const auto fits = [](const SymInt &n, const SymInt &all) { return is(n, 1) || !differ(n, all); };
    return has_type && c.attn_mask->dim() >= 2 && broadcasts(c.attn_mask->sym_sizes(), pairs, fits);
}

// Of (B, H, N, d). On a CPU a mask's contents decide. On a GPU looking would synchronise, and kernels look; there
// PyTorch's operators have no masks served, but minimal_attn::forward has.
inline Outcome outcome_of(Call &c, bool by_forward = false) {
    const bool takes_mask = by_forward || c.q.is_cpu();
    if (has_mask(c) && (c.is_causal || c.attn_mask->device() != c.q.device() || !takes_mask)) return mask;
    if (c.dropout_p != 0 && !(c.seed && c.dropout_p > 0 && c.dropout_p <= 1)) return dropout;
    const auto type = c.q.scalar_type();
    if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) return dtype;
    if (c.k.scalar_type() != type || c.v.scalar_type() != type) return dtype;
    if (c.q.dim() != 4 || c.k.dim() != 4 || c.v.dim() != 4) return shapes;
    const auto q = c.q.sym_sizes(), k = c.k.sym_sizes(), v = c.v.sym_sizes();
    const int most_d = c.q.is_cuda() && type == at::kFloat ? 256 : 512;  // above, no kernel is fast
    if (q[3] > most_d || v[3] > most_d) return head_dimension;
    bool fit = may_hold(q[2].sym_lt(kMaxTokens)) && may_hold(k[2].sym_lt(kMaxTokens)) && !differ(k[0], q[0]);
    for (int i = 0; i < 4; ++i)
        fit = fit && !is(q[i], 0) && !is(k[i], 0) && !is(v[i], 0) && (i == 3 || !differ(k[i], v[i]));
    fit = fit && !differ(k[3], q[3]);
    if (!fit || differ(q[1] % k[1], 0)) return shapes;
    if (c.scale && !std::isfinite((float)*c.scale)) return scale_value;
    if (!has_mask(c)) return served;
    if (c.may_look) c.key_ranges = ranges_of_mask(c);
    if (!c.key_ranges && is_mask_of_pairs(c)) c.pairs = c.attn_mask;
    return c.key_ranges || c.pairs ? served : mask;
}

// The one with the larger head dimension, which decides whether gradients have a fast kernel.
inline const Tensor &wider(const Call &c) {
    return TORCH_GUARD_OR_FALSE(c.v.sym_size(3).sym_gt(c.q.sym_size(3))) ? c.v : c.q;
}

// Which query and key is_causal aligns: the last ones in FlashAttention's operator on CUDA, the first ones elsewhere.
enum class Aligned { first, last };

// function(arguments): the call as run() and differentiate() take it.
template <class Function>
auto with_arguments(const Call &c, Aligned aligned, const Function &function) {
    const std::optional<SymInt> offset = aligned == Aligned::last ? std::nullopt : std::optional<SymInt>(0);
    return function(Arguments{.q = c.q,
                              .k = c.k,
                              .v = c.v,
                              .causal = c.is_causal,
                              .softmax_scale = c.scale,
                              .offset = offset,
                              .key_ranges = c.key_ranges,
                              .attn_mask = c.pairs,
                              .dropout_p = c.dropout_p,
                              .dropout_seed = c.seed});
}

// Whether torch.nn.attention.sdpa_kernel leaves PyTorch one of the fused kernels that q's device has.
inline bool allows_fused_kernels(const Tensor &q) {
    const auto &context = at::globalContext();
    return context.userEnabledFlashSDP() ||
           (q.is_cuda() && (context.userEnabledMemEfficientSDP() || context.userEnabledCuDNNSDP()));
}

// ------------------------------------------------------------------------------- calls of minimal_attn::forward

// The shape in which all broadcast, as torch.broadcast_shapes; false where they don't.
inline bool broadcast(std::vector<SymInt> &all, c10::SymIntArrayRef shape) {
    if (all.size() < shape.size()) all.insert(all.begin(), shape.size() - all.size(), SymInt(1));
    for (size_t i = 1; i <= shape.size(); ++i) {
        SymInt &to = all[all.size() - i];
        const SymInt &from = shape[shape.size() - i];
        if (is(to, 1)) to = from;
        if (!is(from, 1) && differ(from, to)) return false;
    }
    return true;
}

// q, k and v as (B, H, N, d): PyTorch's function takes other dimensions, too, and broadcasts batches and heads.
struct Views {
    Tensor q, k, v;
    std::vector<SymInt> shape;  // of the result; empty: as computed
};

// Views, or copies where strides don't allow them. Heads of keys that broadcast stay one.
inline std::optional<Views> views_of(const Call &c) {
    const auto size = [](const Tensor &t, int64_t i) { return t.dim() >= i ? t.sym_size(-i) : SymInt(1); };
    const Tensor *const all[] = {&c.q, &c.k, &c.v};
    const int64_t least = std::min({c.q.dim(), c.k.dim(), c.v.dim()}),
                  most = std::max({c.q.dim(), c.k.dim(), c.v.dim()});
    if (least < (c.enable_gqa ? 3 : 2) || differ(size(c.k, 2), size(c.v, 2))) return {};
    for (const Tensor *t : all)
        if (is(t->sym_numel(), 0)) return {};
    SymInt Hq = size(c.q, 3);
    const SymInt Hk = size(c.k, 3), Hv = size(c.v, 3), Hkv = is(Hk, 1) ? Hv : Hk;
    const bool has_whole_groups = c.enable_gqa || is(Hkv, 1) || !differ(Hkv, Hq);
    if (least == 4 && most == 4 && has_whole_groups && !differ(Hk, Hv) && !differ(size(c.k, 4), size(c.q, 4)) &&
        !differ(size(c.v, 4), size(c.q, 4)))
        return Views{c.q, c.k, c.v, {}};
    if (!is(Hv, 1) && differ(Hv, Hkv)) return {};
    if (!c.enable_gqa && is(Hq, 1)) Hq = Hkv;
    if (differ(Hq % Hkv, 0) || !(c.enable_gqa || is(Hkv, 1) || !differ(Hkv, Hq))) return {};
    std::vector<SymInt> batch;
    for (const Tensor *t : all)
        if (t->dim() > 3 && !broadcast(batch, t->sym_sizes().slice(0, t->dim() - 3))) return {};
    const auto view = [&](const Tensor &t, const SymInt &H) {
        auto shape = batch;
        shape.insert(shape.end(), {H, size(t, 2), size(t, 1)});
        return t.expand_symint(shape).reshape_symint({SymInt(-1), H, size(t, 2), size(t, 1)});
    };
    Views views{view(c.q, Hq), view(c.k, Hkv), view(c.v, Hkv), batch};
    if (most > 2) views.shape.push_back(Hq);
    views.shape.insert(views.shape.end(), {size(c.q, 2), size(c.v, 1)});
    return views;
}

// Returns attn_mask with at most 4 dimensions. In views_of all dimensions before the heads became one batch dimension;
// those of the mask become one here. The mask is copied only if it broadcasts along some of them, as AlphaFold's pair
// bias (B, 1, H, Q, K) does with B > 1. Returns nothing if the mask would make the result larger.
inline MaybeTensor mask_of(const Call &c, const Views &views) {
    const Tensor &mask = *c.attn_mask;
    if (views.shape.empty()) return mask;
    const int64_t own = mask.dim() - 3;
    if (mask.dim() > (int64_t)views.shape.size()) return {};
    if (own <= 0) return mask;
    const auto batches = mask.sym_sizes().slice(0, own);
    if (std::all_of(batches.begin(), batches.end(), [](const SymInt &n) { return is(n, 1); }))
        return mask.flatten(0, own - 1);
    std::vector<SymInt> shape(views.shape.begin(), views.shape.end() - 3);
    if (!broadcast(shape, batches)) return {};
    shape.insert(shape.end(), {mask.sym_size(-3), mask.sym_size(-2), mask.sym_size(-1)});
    return mask.expand_symint(shape).flatten(0, -4);
}

// Whether nothing traces the call, transforms it or watches it, or differentiates the mask: then its contents may
// decide now.
inline bool may_look_at_mask(const Call &c) {
    using Key = c10::DispatchKey;
    constexpr c10::DispatchKeySet ordinary{Key::CPU, Key::AutogradCPU, Key::AutocastCPU, Key::BackendSelect,
                                           Key::ADInplaceOrView};
    const auto tls = c10::impl::tls_local_dispatch_key_set();
    const auto keys = c.q.key_set() | c.k.key_set() | c.v.key_set() | c.attn_mask->key_set() | tls.included_;
    return !(c.attn_mask->requires_grad() && at::GradMode::is_enabled()) &&
           !((keys - tls.excluded_ - ordinary).raw_repr() & ~c10::full_backend_mask);
}

// Whether forward takes a call's mask: on a GPU one that isn't differentiated, where our kernels are the faster ones.
inline bool takes_pairs(const Call &c) {
    if (c.q.is_cpu()) return true;
    const bool wants_grad = has_mask(c) && c.attn_mask->requires_grad() && at::GradMode::is_enabled();
    return !wants_grad && has_fast_pairs(c.q) && has_fast_pairs(c.v);
}

// Whether a call with dropout is served. On a CPU PyTorch computes it in separate steps. On a GPU its kernels are
// faster without a mask and with d up to 128 (docs/dropout.md).
inline bool serves_dropout(const Call &c) {
    if (c.dropout_p == 0) return false;
    const bool is_wide = TORCH_GUARD_OR_FALSE(c.q.sym_size(-1).sym_gt(128) | c.v.sym_size(-1).sym_gt(128));
    return c.q.is_cpu() || ((is_wide || has_mask(c)) && takes_pairs(c));
}

// use(arguments, the result's shape) where minimal_attn::forward serves a call of PyTorch's function; or why not.
template <class Use>
Outcome serve(const Call &c, const Use &use, bool draws_seed = false) {
    // First, since views_of may copy.
    const bool may_look = has_mask(c) && c.q.is_cpu() && may_look_at_mask(c);
    if (has_mask(c) && c.q.is_cpu() && c.attn_mask->scalar_type() == at::kBool && !may_look) return mask;
    bool wants_grad = false;
    for (const Tensor *t : {&c.q, &c.k, &c.v}) {
        if (t->is_nested() || t->layout() != at::kStrided) return layout;
        if (t->device() != c.q.device()) return device;
        if (t->_fw_grad(/*level=*/0).defined()) return forward_mode;
        wants_grad = wants_grad || t->requires_grad();
    }
    if (has_mask(c) && c.attn_mask->_fw_grad(/*level=*/0).defined()) return forward_mode;
    if (!c.q.is_cpu() && !(c.q.is_cuda() && *cuda_architectures())) return device;
    if (!allows_fused_kernels(c.q)) return unfused_wanted;
    const auto views = views_of(c);
    if (!views) return shapes;
    MaybeTensor of_views = c.attn_mask;
    if (has_mask(c)) {
        if (!takes_pairs(c)) return mask;  // before a copy
        if (!(of_views = mask_of(c, *views))) return mask;
    }
    Call call{views->q, views->k, views->v, of_views, c.dropout_p, c.is_causal, c.scale, c.enable_gqa, may_look};
    if (serves_dropout(c)) call.seed = at::empty({1}, c.q.options().dtype(at::kLong));
    if (const Outcome outcome = outcome_of(call, /*by_forward=*/true)) return outcome;
    if (wants_grad && at::GradMode::is_enabled() && !has_fast_backward(wider(call))) return slow_gradients;
    if (call.seed && draws_seed) call.seed = at::randint_like(*call.seed, int64_t(1) << 62);  // PyTorch's generator
    with_arguments(call, Aligned::first, [&](const Arguments &a) { use(a, views->shape); });
    return served;
}

}  // namespace minimal_attn::sdpa
