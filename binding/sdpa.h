// sdpa.h: minimal_attn.activate(): the operators by which F.scaled_dot_product_attention computes, served by run().
//
// PyTorch chooses an operator (flash, efficient or cuDNN on CUDA, flash on a CPU). Autograd records its backward
// operator, which is replaced as well. Our passes exchange o and the log-sum-exp in PyTorch's form: so our forward pass
// works with PyTorch's backward pass, and PyTorch's with ours. A call that isn't served goes to PyTorch's kernel
// directly: the dispatcher would come back here.
//
// Three more operators are replaced. The function itself gives masks and dropout to minimal_attn::forward, or avoids
// cuDNN's kernel for masks. The separate steps, which PyTorch takes where no fused kernel fits, and
// MultiheadAttention's fast path are counted.
#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/_native_multi_head_attention_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>

#ifdef WITH_CUDA
#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_cuda_dispatch.h>
#endif

#include <array>
#include <list>
#include <optional>
#include <tuple>
#include <vector>

#include "binding/call.h"
#include "binding/overload.h"
#include "binding/serving.h"
#include "binding/tensors.h"

namespace minimal_attn::sdpa {

// Whether our kernels serve the call; counts it.
inline bool serves(Call &call, bool return_debug_mask = false) {
    const Outcome outcome = return_debug_mask ? debug_mask : outcome_of(call);
    count(outcome);
    return outcome == served;
}

// o has the strides of PyTorch's kernels and of their shapes on Meta: q's, or those of (B, Nq, Hq, d) in memory.
enum class Layout { of_q, tokens_first };

inline Tensor empty_in(Layout layout, const Tensor &t, int64_t d) {
    if (layout == Layout::of_q) return d == t.size(3) ? at::empty_like(t) : empty_like_q(t, d, t.scalar_type());
    const int64_t row = t.size(1) * d;
    return at::empty_strided({t.size(0), t.size(1), t.size(2), d}, {t.size(2) * row, d, row, 1}, t.options());
}

// Returns o and, where lse is given, fills it: (B, Hq, Nq or more rows) of any strides.
inline Tensor compute(const Call &c, const Tensor &lse, Layout layout = Layout::of_q,
                      Aligned aligned = Aligned::first) {
    const Tensor o = empty_in(layout, c.q, c.v.size(3));
    const Tensor result = has_contiguous_rows(o) ? o : Tensor();
    const Tensor computed = with_arguments(c, aligned, [&](const Arguments &a) {
        return run(a, lse.defined() ? Returns::lse : Returns::o, nullptr, {result, {}, {}, lse}).o;
    });
    return result.defined() ? computed : o.copy_(computed);
}

// dq, dk and dv, from an lse of at least Nq rows.
inline Gradients compute_backward(const Call &c, const Tensor &do_, const Tensor &o, const Tensor &lse,
                                  Layout layout = Layout::of_q, Aligned aligned = Aligned::first) {
    const auto result = [&](const Tensor &t) {
        const Tensor like = empty_in(layout, t, t.size(3));
        return has_contiguous_rows(like) ? like : Tensor();
    };
    return with_arguments(c, aligned, [&](Arguments a) {
        a.complete = true;
        const Tensor rows = lse.narrow(2, 0, c.q.size(2)).reshape(c.q.sizes().slice(0, 3));
        return differentiate(a, do_, o, rows, {}, std::nullopt, {result(c.q), result(c.k), result(c.v)});
    });
}

// Whether the backward pass of a call is ours, too.
inline bool serves_backward(Call &c) { return outcome_of(c) == served && has_fast_backward(wider(c)); }

inline Tensor empty_floats(const Call &c, at::IntArrayRef size) {
    return at::empty(size, c.q.options().dtype(at::kFloat));
}

inline std::tuple<Tensor, Tensor> flash_cpu(const Tensor &q, const Tensor &k, const Tensor &v, double dropout_p,
                                            bool is_causal, const MaybeTensor &attn_mask, std::optional<double> scale) {
    Call call{q, k, v, attn_mask, dropout_p, is_causal, scale};
    if (!serves(call))
        return at::cpu::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask, scale);
    const Tensor lse = empty_floats(call, {q.size(0), q.size(2), q.size(1)}).transpose(1, 2);  // PyTorch's strides
    const Tensor o = compute(call, lse);
    if (has_mask(call)) lse.masked_fill_(lse == -INFINITY, 0);  // as PyTorch's backward pass wants it of hidden rows
    return {o, lse};
}

inline Gradients flash_cpu_backward(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v,
                                    const Tensor &o, const Tensor &lse, double dropout_p, bool is_causal,
                                    const MaybeTensor &attn_mask, std::optional<double> scale) {
    Call call{q, k, v, attn_mask, dropout_p, is_causal, scale};
    if (!serves_backward(call))
        return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(do_, q, k, v, o, lse, dropout_p, is_causal,
                                                                             attn_mask, scale);
    return compute_backward(call, do_, o, lse, Layout::tokens_first);
}

#ifdef WITH_CUDA
using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

// What the operators of flash and cuDNN return. Behind o and the log-sum-exp come sequence bounds and the state of
// dropout, which are not in use.
inline ForwardResults forward_results(const Call &c, const Tensor &o, const Tensor &lse, at::IntArrayRef seed_size,
                                      at::ScalarType seed) {
    const auto empty = [&](at::IntArrayRef size, at::ScalarType type) {
        return at::empty(size, c.q.options().dtype(type));
    };
    const Tensor offset = empty({}, seed), debug_mask = empty({0}, c.q.scalar_type());
    return {o, lse, {}, {}, c.q.size(2), c.k.size(2), empty(seed_size, seed), offset, debug_mask};
}

inline ForwardResults flash_cuda(const Tensor &q, const Tensor &k, const Tensor &v, double dropout_p, bool is_causal,
                                 bool return_debug_mask, std::optional<double> scale) {
    Call call{q, k, v, {}, dropout_p, is_causal, scale};
    if (!serves(call, return_debug_mask))
        return at::cuda::_scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, return_debug_mask, scale);
    const Tensor lse = empty_floats(call, {q.size(0), q.size(1), q.size(2)});
    return forward_results(call, compute(call, lse, Layout::of_q, Aligned::last), lse, {2}, at::kUInt64);
}

inline ForwardResults cudnn(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &attn_bias,
                            bool compute_log_sumexp, double dropout_p, bool is_causal, bool return_debug_mask,
                            std::optional<double> scale) {
    Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
    if (!serves(call, return_debug_mask))
        return at::cuda::_scaled_dot_product_cudnn_attention(q, k, v, attn_bias, compute_log_sumexp, dropout_p,
                                                             is_causal, return_debug_mask, scale);
    const Tensor lse = compute_log_sumexp ? empty_floats(call, {q.size(0), q.size(1), q.size(2), 1}) : Tensor();
    return forward_results(call, compute(call, lse), lse, {}, at::kLong);
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_cuda(const Tensor &q, const Tensor &k, const Tensor &v,
                                                                 const MaybeTensor &attn_bias, bool compute_log_sumexp,
                                                                 double dropout_p, bool is_causal,
                                                                 std::optional<double> scale) {
    Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
    if (!serves(call))
        return at::cuda::_scaled_dot_product_efficient_attention(q, k, v, attn_bias, compute_log_sumexp, dropout_p,
                                                                 is_causal, scale);
    // The backward pass reads rows in groups of 32.
    const int64_t N = q.size(2), padded = compute_log_sumexp ? (N + 31) / 32 * 32 : 0;
    const Tensor lse = empty_floats(call, {q.size(0), q.size(1), padded});
    // PyTorch's backward kernels of half types assume these strides of o and don't check them.
    const Tensor o = compute(call, compute_log_sumexp ? lse : Tensor(), Layout::tokens_first);
    // As PyTorch has them without dropout
    const bool in_graph = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    const auto options = at::TensorOptions(at::kLong).device(in_graph ? q.device() : at::Device(at::kCPU));
    const auto seed = [&] { return at::empty({}, options); };
    return {o, lse, seed(), seed()};
}

inline Gradients flash_cuda_backward(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v,
                                     const Tensor &o, const Tensor &lse, const Tensor &cum_seq_q,
                                     const Tensor &cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p,
                                     bool is_causal, const Tensor &seed, const Tensor &seed_offset,
                                     std::optional<double> scale) {
    Call call{q, k, v, {}, dropout_p, is_causal, scale};
    if (serves_backward(call)) return compute_backward(call, do_, o, lse, Layout::of_q, Aligned::last);
    return at::cuda::_scaled_dot_product_flash_attention_backward(
        do_, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, seed_offset, scale);
}

inline Gradients cudnn_backward(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o,
                                const Tensor &lse, const Tensor &seed, const Tensor &seed_offset,
                                const Tensor &attn_bias, const Tensor &cum_seq_q, const Tensor &cum_seq_k,
                                int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                std::optional<double> scale) {
    Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
    if (serves_backward(call)) return compute_backward(call, do_, o, lse);
    return at::cuda::_scaled_dot_product_cudnn_attention_backward(do_, q, k, v, o, lse, seed, seed_offset, attn_bias,
                                                                  cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                                                                  is_causal, scale);
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_cuda_backward(
    const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &attn_bias, const Tensor &o,
    const Tensor &lse, const Tensor &seed, const Tensor &seed_offset, double dropout_p,
    std::array<bool, 4> grad_input_mask, bool is_causal, std::optional<double> scale) {
    Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
    if (grad_input_mask[3] || !serves_backward(call))  // a bias is differentiated or missing
        return at::cuda::_scaled_dot_product_efficient_attention_backward(
            do_, q, k, v, attn_bias, o, lse, seed, seed_offset, dropout_p, grad_input_mask, is_causal, scale);
    const auto [dq, dk, dv] = compute_backward(call, do_, o, lse, Layout::tokens_first);
    return {dq, dk, dv, Tensor()};
}
#endif

// ------------------------------------------------------------------------------- what PyTorch does itself

#ifdef WITH_CUDA
// Whether PyTorch would give a call with a mask to cuDNN's kernel, its first choice for half types on Hopper.
inline bool takes_cudnn(const Call &c) {
    const auto type = c.q.scalar_type();
    bool may = c.attn_mask && c.attn_mask->is_cuda() && !c.is_causal && (type == at::kHalf || type == at::kBFloat16) &&
               at::globalContext().userEnabledCuDNNSDP();
    for (const Tensor *t : {&c.q, &c.k, &c.v}) may = may && t->is_cuda() && t->scalar_type() == type && t->dim() == 4;
    if (!may) return false;
    const auto choice =
        at::cuda::_fused_sdp_choice(c.q, c.k, c.v, c.attn_mask, c.dropout_p, c.is_causal, c.scale, c.enable_gqa);
    return choice == (int64_t)at::SDPBackend::cudnn_attention;
}

// What the memory-efficient kernel reads: rows of a multiple of 16 bytes. Its own checks raise.
inline Tensor with_aligned_rows(const Tensor &t) {
    bool fits = t.sym_storage_offset() % 8 == 0;
    for (int i = 0; i < 3; ++i) fits &= t.sym_size(i) == 1 || t.sym_stride(i) % 8 == 0;
    return fits ? t : t.contiguous();
}

// A bias as that kernel reads it: (B, Hq, Nq, Nk), in rows of a multiple of 16 numbers. What is expanded stays so.
inline Tensor padded_bias(Tensor bias, const Tensor &q, const Tensor &k) {
    for (int64_t i = 0; i + 1 < bias.dim(); ++i)
        if (bias.sym_stride(i) == 0 && bias.sym_size(i) > 1) bias = bias.narrow(i, 0, 1);
    const SymInt Nk = k.sym_size(2), more = (SymInt(16) - Nk % 16) % 16;
    auto rows = bias.sym_sizes().vec();
    rows.back() = Nk;
    const Tensor padded = at::constant_pad_nd_symint(bias.expand_symint(rows), {SymInt(0), more}).contiguous();
    return padded.slice_symint(-1, 0, Nk).expand_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), Nk});
}

// A call that takes_cudnn, computed by PyTorch's other kernels. In cuDNN's a row that a bool mask hides gets the
// softmax over all keys, since PyTorch writes -65504 for False there (torch 2.11). A float32 mask of half types gives
// NaN.
inline Tensor without_cudnn(const Call &c) {
    const auto &[q, k, v] = std::tie(c.q, c.k, c.v);
    const bool is_bool = c.attn_mask->scalar_type() == at::kBool;
    const Tensor bias =
        is_bool ? at::where(c.attn_mask->logical_not(), -INFINITY, at::scalar_tensor(0., q.options())) : *c.attn_mask;
    // Under torch.vmap, in which there may be torch.func.grad, PyTorch's rule for the other kernel expects a mask with
    // the batch of q.
    constexpr c10::DispatchKeySet kWrapped{c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper};
    const bool is_wrapped = (q.key_set() | k.key_set() | v.key_set() | bias.key_set()).has_any(kWrapped);
    // Separate steps add a float32 mask as it is. Rounded to a half type, a bias of large numbers would be another one.
    if (bias.scalar_type() != q.scalar_type() || is_wrapped || !at::globalContext().userEnabledMemEfficientSDP())
        return std::get<0>(
            at::_scaled_dot_product_attention_math(q, k, v, bias, c.dropout_p, false, {}, c.scale, c.enable_gqa));
    const auto repeated = [&](const Tensor &t) {  // the kernel has no grouped heads
        const SymInt Hq = q.sym_size(1), Hkv = t.sym_size(1);
        return with_aligned_rows(Hq == Hkv ? t : t.repeat_interleave_symint(Hq / Hkv, 1));
    };
    const bool wants_grad = q.requires_grad() || k.requires_grad() || v.requires_grad() || bias.requires_grad();
    return std::get<0>(at::_scaled_dot_product_efficient_attention(
        with_aligned_rows(q), repeated(k), repeated(v), padded_bias(bias, q, k),
        wants_grad && at::GradMode::is_enabled(), c.dropout_p, false, c.scale));
}
#endif

// The whole call by minimal_attn::forward, or why not.
inline Outcome attend(const Call &c, Tensor &o) {
    const auto compute = [&](const Arguments &a, const std::vector<SymInt> &shape) {
        o = std::apply([](const auto &...all) { return Overload<Forward<Tensor>>::call(all...); },
                       forward_arguments_of(a));
        if (!shape.empty()) o = o.reshape_symint(shape);
    };
    return serve(c, compute, /*draws_seed=*/true);
}

// Whether dimensions, batches and heads are as PyTorch's operators want them. Others go to its separate steps.
inline bool fits_operators(const Call &c) {
    if (c.q.dim() != 4 || c.k.dim() != 4 || c.v.dim() != 4) return false;
    return !differ(c.k.sym_size(0), c.q.sym_size(0)) && !differ(c.v.sym_size(0), c.q.sym_size(0)) &&
           !differ(c.k.sym_size(1), c.v.sym_size(1)) && (c.enable_gqa || !differ(c.k.sym_size(1), c.q.sym_size(1)));
}

// F.scaled_dot_product_attention while our kernels are active. PyTorch would make a bias of a bool mask for its
// operators, which look at it, too; here looking takes less time and memory. On a CPU no operator takes two head
// dimensions, or dropout.
inline Tensor attention(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &attn_mask,
                        double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
    Call call{q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa};
    const bool has_two_d = differ(q.sym_size(-1), v.sym_size(-1));
    const bool has_no_operator =
        has_mask(call) || (has_two_d && q.is_cpu()) || serves_dropout(call) || !fits_operators(call);
    if (Tensor o; has_no_operator && attend(call, o) == served) {
        count(served);
        return o;
    }
#ifdef WITH_CUDA
    if (takes_cudnn(call)) return without_cudnn(call);
#endif
    return at::native::scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

// A call that minimal_attn.scaled_dot_product_attention passes on. Autocast has not cast the arguments yet.
inline Tensor by_pytorch(const Call &c) {
#ifdef WITH_CUDA
    if (c.attn_mask && c.q.is_cuda()) {
        const bool casts = at::autocast::is_autocast_enabled(at::kCUDA);  // before the guard, which turns it off
        const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
        const auto cast = [&](const Tensor &t) {
            const auto type = at::autocast::get_autocast_dtype(at::kCUDA);
            return casts ? at::autocast::cached_cast(type, t, at::kCUDA) : t;
        };
        const Tensor q = cast(c.q), k = cast(c.k), v = cast(c.v);
        const MaybeTensor mask = cast(*c.attn_mask);
        const Call as_cast{q, k, v, mask, c.dropout_p, c.is_causal, c.scale, c.enable_gqa};
        if (takes_cudnn(as_cast)) return without_cudnn(as_cast);
    }
#endif
    return at::scaled_dot_product_attention(c.q, c.k, c.v, c.attn_mask, c.dropout_p, c.is_causal, c.scale,
                                            c.enable_gqa);
}

// minimal_attn.scaled_dot_product_attention, the operator.
inline Tensor function(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &attn_mask,
                       double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, bool strict) {
    Tensor o;
    const Call call{q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa};
    const Outcome outcome = attend(call, o);
    if (outcome == served) return o;
    if (strict) tell(outcome, strict, /*stacklevel=*/3);
    o = by_pytorch(call);
    tell(outcome, strict, /*stacklevel=*/3);  // not before, since PyTorch may refuse the arguments
    return o;
}

// The separate steps. On the Meta device nothing is computed.
inline std::tuple<Tensor, Tensor> separate_steps(const Tensor &q, const Tensor &k, const Tensor &v,
                                                 const MaybeTensor &attn_mask, double dropout_p, bool is_causal,
                                                 const MaybeTensor &dropout_mask, std::optional<double> scale,
                                                 bool enable_gqa) {
    if (q.is_cpu() || q.is_cuda()) count(allows_fused_kernels(q) ? unfused : unfused_wanted);
    return at::native::_scaled_dot_product_attention_math(q, k, v, attn_mask, dropout_p, is_causal, dropout_mask, scale,
                                                          enable_gqa);
}

// MultiheadAttention's and TransformerEncoderLayer's fast path. On CUDA it may call the function after all.
template <auto compute>
std::tuple<Tensor, Tensor> multihead(const Tensor &q, const Tensor &k, const Tensor &v, int64_t embed_dim,
                                     int64_t num_head, const Tensor &qkv_weight, const Tensor &qkv_bias,
                                     const Tensor &proj_weight, const Tensor &proj_bias, const MaybeTensor &mask,
                                     bool need_weights, bool average_attn_weights, std::optional<int64_t> mask_type) {
    const int64_t before = calls_of_thread;
    auto result = compute(q, k, v, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
                          need_weights, average_attn_weights, mask_type);
    if (calls_of_thread == before) count(fast_path);
    return result;
}

// While this list has elements, our kernels come before PyTorch's.
inline std::list<torch::Library> overriding;

// Where a function of other operators is registered, for torch.vmap, too.
inline constexpr std::array<c10::DispatchKey, 3> kComposite = {c10::DispatchKey::CompositeImplicitAutograd,
                                                               c10::DispatchKey::FuncTorchBatchedDecomposition,
                                                               c10::DispatchKey::FuncTorchVmapMode};

inline void define_operators(torch::Library &m) {
    m.def(
        "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
        "float dropout_p=0., bool is_causal=False, float? scale=None, bool enable_gqa=False, bool strict=False) "
        "-> Tensor",
        {at::Tag::pt2_compliant_tag});
    for (const auto key : kComposite) m.impl("scaled_dot_product_attention", torch::dispatch(key, &function));
}

// With strict a call that leaves our kernels raises.
inline void set_strict(bool strict) { is_strict = strict; }

inline void override_operators() {
    for (auto &is_told : told) is_told = false;
    if (!overriding.empty()) return;
    overriding.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__)
        .impl("_scaled_dot_product_flash_attention_for_cpu", &flash_cpu)
        .impl("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_cpu_backward);
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::NestedTensorCPU})
        overriding.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__)
            .impl("_native_multi_head_attention", &multihead<at::native::native_multi_head_attention_cpu>);
    for (const auto key : kComposite)
        overriding.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__)
            .impl("scaled_dot_product_attention", &attention)
            .impl("_scaled_dot_product_attention_math", &separate_steps);
#ifdef WITH_CUDA
    overriding.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__)
        .impl("_scaled_dot_product_flash_attention", &flash_cuda)
        .impl("_scaled_dot_product_cudnn_attention", &cudnn)
        .impl("_scaled_dot_product_efficient_attention", &efficient_cuda)
        .impl("_scaled_dot_product_flash_attention_backward", &flash_cuda_backward)
        .impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward)
        .impl("_scaled_dot_product_efficient_attention_backward", &efficient_cuda_backward);
    for (const auto key : {c10::DispatchKey::CUDA, c10::DispatchKey::NestedTensorCUDA})
        overriding.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__)
            .impl("_native_multi_head_attention", &multihead<at::native::native_multi_head_attention_cuda>);
#endif
}

inline void restore_operators() { overriding.clear(); }

}  // namespace minimal_attn::sdpa
