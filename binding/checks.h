// checks.h: the checks that refuse bad arguments before anything is launched.
//
// Each error is one line: the argument's name, what it must be, what it was. All checks work on symbolic sizes, so that
// Meta (shapes without data, torch.compile) refuses what the backends refuse. A size that depends on data is
// "unbacked": an ordinary comparison of it can't be traced.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "binding/arguments.h"

namespace minimal_attn {

// Queries and keys are numbered by ints, and narrow() in flash.h needs room above them.
constexpr int64_t kMaxTokens = int64_t(1) << 28;
constexpr int64_t kMaxPages = int64_t(1) << 31;  // pages are numbered by ints

// A relation between sizes. Where symbols don't decide it, the graph that is traced asserts it when it runs.
inline bool holds(const c10::SymBool &relation) {
    return relation.is_heap_allocated() ? relation.expect_true(__FILE__, __LINE__) : relation.as_bool_unchecked();
}

// A limit. Where symbols don't decide it, nothing is added to the graph: the operator checks it when the graph runs.
inline bool may_hold(const c10::SymBool &limit) {
    return limit.is_heap_allocated() ? !limit.sym_not().statically_known_true(__FILE__, __LINE__)
                                     : limit.as_bool_unchecked();
}

inline bool has_shape(const Tensor &t, c10::SymIntArrayRef shape) {
    const auto sizes = t.sym_sizes();
    return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(),
                      [](const SymInt &x, const SymInt &y) { return holds(x.sym_eq(y)); });
}

inline std::string name_of(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

inline void check_like_q(const Tensor &q, const Tensor &t, const char *name, at::ScalarType dtype) {
    TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " must be a dense tensor, but its layout is ", t.layout());
    TORCH_CHECK_VALUE(t.device() == q.device(), name, " must be on q's device ", q.device(), ", but is on ",
                      t.device());
    TORCH_CHECK_VALUE(t.scalar_type() == dtype, name, " must be ", name_of(dtype), ", but is ",
                      name_of(t.scalar_type()));
}

// The same for a tensor of o's shape, (B, Hq, Nq, d_v), and for one number of each of its rows.
inline void check_like_o(const Arguments &a, const Tensor &t, const char *name, at::ScalarType dtype) {
    check_like_q(a.q, t, name, dtype);
    const auto q = a.q.sym_sizes();
    const std::array<SymInt, 4> shape = {q[0], q[1], q[2], a.v.sym_size(3)};
    TORCH_CHECK_VALUE(has_shape(t, shape), name, " must have shape (B, Hq, Nq, d_v) = ", c10::SymIntArrayRef(shape),
                      ", but has shape ", t.sym_sizes());
}
inline void check_of_rows(const Arguments &a, const Tensor &t, const char *name) {
    check_like_q(a.q, t, name, at::kFloat);
    const auto shape = a.q.sym_sizes().slice(0, 3);
    TORCH_CHECK_VALUE(has_shape(t, shape), name, " must have shape (B, Hq, Nq) = ", shape, ", but has shape ",
                      t.sym_sizes());
}

// Of a batch, in pages or not.
inline SymInt number_of_keys(const Arguments &a) {
    return a.block_table ? a.block_table->sym_size(1) * a.k.sym_size(2) : a.k.sym_size(2);
}

// Whether a shape broadcasts to `pairs`, (B, Hq, Nq, Nk). fits(n, all): n is 1 or all.
template <class Fits>
bool broadcasts(c10::SymIntArrayRef shape, const std::array<SymInt, 4> &pairs, const Fits &fits) {
    bool all_fit = shape.size() <= 4;
    for (size_t i = 0; i < shape.size() && all_fit; ++i) all_fit = fits(shape[i], pairs[4 - shape.size() + i]);
    return all_fit;
}

// What the shapes of q and k betray, for an error: heads and tokens in each other's place.
inline const char *hint_at_layout(const Arguments &a) {
    const SymInt Hkv = a.k.sym_size(2);
    const auto is_multiple = [&](const SymInt &n) { return TORCH_GUARD_OR_FALSE((n % Hkv).sym_eq(0)); };
    if (!TORCH_GUARD_OR_FALSE(Hkv.sym_gt(0))) return "";
    if (a.block_table && is_multiple(a.q.sym_size(1)))
        return "; if the pages are (pages, page_size, Hkv, d), as in vLLM, pass k.transpose(1, 2), v.transpose(1, 2)";
    if (is_multiple(a.q.sym_size(2)))
        return "; if they are (B, N, H, d), as in flash_attn, pass x.transpose(1, 2) of each";
    return "";
}

inline void check_q_k_v(const Arguments &a) {
    const auto dtype = a.q.scalar_type();
    TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                      "q must be float32, float16 or bfloat16, but is ", name_of(dtype));
    for (const auto &[t, name] : {std::pair{&a.q, "q"}, {&a.k, "k"}, {&a.v, "v"}}) {
        check_like_q(a.q, *t, name, dtype);
        TORCH_CHECK_VALUE(t->dim() == 4, name, " must have 4 dimensions, (B, H, N, d), but has shape ", t->sym_sizes());
        TORCH_CHECK_VALUE(may_hold(t->sym_size(2).sym_lt(kMaxTokens)), name, " must have fewer than ", kMaxTokens,
                          " tokens, but has shape ", t->sym_sizes());
    }
    const auto q = a.q.sym_sizes(), k = a.k.sym_sizes(), v = a.v.sym_sizes();
    TORCH_CHECK_VALUE(may_hold(q[3].sym_ge(1)) && may_hold(q[3].sym_le(kMostD)),
                      "q must have a head dimension d from 1 to ", kMostD, ", but has shape ", q);
    const bool has_d = holds(k[3].sym_eq(q[3]));
    TORCH_CHECK_VALUE(a.block_table || (has_d && holds(k[0].sym_eq(q[0]))),
                      "k must have q's batch size and head dimension, (", q[0], ", Hkv, Nk, ", q[3],
                      "), but has shape ", k);
    TORCH_CHECK_VALUE(!a.block_table || (has_d && may_hold(k[0].sym_ge(1)) && may_hold(k[0].sym_lt(kMaxPages)) &&
                                         may_hold(k[2].sym_ge(1))),
                      "k must be pages of q's head dimension with block_table, (pages, Hkv, page_size, ", q[3],
                      "), at least 1 page of 1 key, but has shape ", k);
    bool is_like_k = may_hold(v[3].sym_ge(1)) && may_hold(v[3].sym_le(kMostD));
    for (int i = 0; i < 3; ++i) is_like_k = is_like_k && holds(v[i].sym_eq(k[i]));
    TORCH_CHECK_VALUE(is_like_k, "v must have k's shape but for its head dimension d_v from 1 to ", kMostD, ", (", k[0],
                      ", ", k[1], ", ", k[2], ", d_v), but has shape ", v);
    TORCH_CHECK_VALUE(may_hold((q[1] % k[1].max(1)).sym_eq(0)) && may_hold(k[1].sym_gt(0) | q[1].sym_eq(0)),
                      "q must have a multiple of k's heads, but q has ", q[1], " and k has ", k[1], hint_at_layout(a));
}

inline void check_ints(const Tensor &q, const Tensor &t, const char *name) {
    const auto dtype = t.scalar_type();
    TORCH_CHECK_VALUE(at::isIntegralType(dtype, /*includeBool=*/false) && dtype != at::kUInt64, name,
                      " must be int32 or another integer type (not uint64), but is ", name_of(dtype));
    check_like_q(q, t, name, dtype);
}

inline void check_per_batch(const Tensor &q, const MaybeTensor &t, const char *name) {
    if (!t) return;
    check_ints(q, *t, name);
    TORCH_CHECK_VALUE(has_shape(*t, q.sym_sizes().slice(0, 1)), name, " must have shape (B,) = (", q.sym_size(0),
                      ",), but has shape ", t->sym_sizes());
}

inline void check_block_table(const Arguments &a) {
    if (!a.block_table) return;
    check_ints(a.q, *a.block_table, "block_table");
    const auto shape = a.block_table->sym_sizes();
    TORCH_CHECK_VALUE(shape.size() == 2 && holds(shape[0].sym_eq(a.q.sym_size(0))),
                      "block_table must have shape (B, n) = (", a.q.sym_size(0), ", n), but has shape ", shape);
    TORCH_CHECK_VALUE(
        may_hold(shape[1].sym_lt(kMaxTokens)) && may_hold((shape[1] * a.k.sym_size(2)).sym_lt(kMaxTokens)),
        "block_table must have pages for fewer than ", kMaxTokens, " keys a batch, but has shape ", shape,
        " and pages of ", a.k.sym_size(2));
}

inline void check_key_ranges(const Arguments &a) {
    if (!a.key_ranges) return;
    check_ints(a.q, *a.key_ranges, "key_ranges");
    const auto q = a.q.sym_sizes(), ranges = a.key_ranges->sym_sizes();
    TORCH_CHECK_VALUE(ranges.size() == 3 && holds(ranges[0].sym_eq(1) | ranges[0].sym_eq(q[0])) &&
                          holds(ranges[1].sym_eq(q[2])) && holds(ranges[2].sym_eq(2)),
                      "key_ranges must have shape (B or 1, Nq, 2) = (", q[0], " or 1, ", q[2], ", 2), but has shape ",
                      ranges);
}

inline void check_cu_seqlens(const Arguments &a) {
    if (!a.cu_seqlens_q && !a.cu_seqlens_k) return;
    for (const auto &[t, name] : {std::pair{&a.cu_seqlens_q, "cu_seqlens_q"}, {&a.cu_seqlens_k, "cu_seqlens_k"}}) {
        TORCH_CHECK_VALUE(*t, name, " must be given with ", a.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k",
                          ", but was None");
        check_ints(a.q, **t, name);
        const auto shape = (*t)->sym_sizes(), of_q = a.cu_seqlens_q->sym_sizes();
        TORCH_CHECK_VALUE(shape.size() == 1 && may_hold(shape[0].sym_ge(1)) && holds(shape[0].sym_eq(of_q[0])), name,
                          " must have shape (documents + 1,), both the same, but has shape ", shape);
    }
    TORCH_CHECK_VALUE(holds(a.q.sym_size(0).sym_eq(1)),
                      "q must have all documents in one batch with cu_seqlens_q, (1, Hq, total, d), but has shape ",
                      a.q.sym_sizes());
    for (const auto &[given, name] : {std::pair{a.seqlens_k.has_value(), "seqlens_k"},
                                      {a.leftpad_k.has_value(), "leftpad_k"},
                                      {a.offset || a.offsets, "offset"}})
        TORCH_CHECK_VALUE(!given, name, " must be None with cu_seqlens_q, but was given");
}

inline void check_per_document(const Arguments &a, const MaybeTensor &t, const char *name) {
    if (!t) return;
    check_ints(a.q, *t, name);
    const SymInt documents = a.cu_seqlens_q->sym_size(0) - 1;
    TORCH_CHECK_VALUE(has_shape(*t, {&documents, 1}), name, " must have shape (documents,) with cu_seqlens_q, (",
                      documents, ",), but has shape ", t->sym_sizes());
}

// A tensor for (B, Hq), or for (Hq,) heads of all batches.
inline void check_per_head(const Tensor &q, const Tensor &t, const char *name) {
    const auto heads = q.sym_sizes().slice(0, 2), shape = t.sym_sizes();
    TORCH_CHECK_VALUE(has_shape(t, shape.size() == 1 ? heads.slice(1) : heads), name, " must have shape (Hq,) = (",
                      heads[1], ",) or (B, Hq), but has shape ", shape);
}

inline void check_alibi_slopes(const Arguments &a) {
    if (!a.alibi_slopes) return;
    check_like_q(a.q, *a.alibi_slopes, "alibi_slopes", at::kFloat);
    check_per_head(a.q, *a.alibi_slopes, "alibi_slopes");
}

inline void check_dropout(const Arguments &a) {
    const double p = a.dropout_p.value_or(0.);
    TORCH_CHECK_VALUE(p >= 0. && p <= 1., "dropout_p must be None or from 0 to 1, but was ", p);
    TORCH_CHECK_VALUE(p == 0. || a.dropout_seed, "dropout_seed must be given with dropout_p ", p, ", but was None");
    if (!a.dropout_seed) return;
    check_like_q(a.q, *a.dropout_seed, "dropout_seed", at::kLong);
    TORCH_CHECK_VALUE(holds(a.dropout_seed->sym_numel().sym_eq(1)), "dropout_seed must have one number, but has shape ",
                      a.dropout_seed->sym_sizes());
}

// attn_mask and bias: of each query head, query and key, or broadcast.
inline void check_pairs(const Arguments &a, const MaybeTensor &t, const char *name, bool may_be_bool) {
    if (!t) return;
    const auto dtype = t->scalar_type(), of_q = a.q.scalar_type();
    TORCH_CHECK_VALUE((may_be_bool && dtype == at::kBool) || dtype == of_q || dtype == at::kFloat, name, " must be ",
                      may_be_bool ? "bool (True: visible), float32 or q's " : "float32 or q's ", name_of(of_q),
                      " (added to scores), but is ", name_of(dtype));
    check_like_q(a.q, *t, name, dtype);
    const std::array<SymInt, 4> pairs = {a.q.sym_size(0), a.q.sym_size(1), a.q.sym_size(2), number_of_keys(a)};
    const auto fits = [](const SymInt &n, const SymInt &all) { return holds(n.sym_eq(1) | n.sym_eq(all)); };
    TORCH_CHECK_VALUE(broadcasts(t->sym_sizes(), pairs, fits), name,
                      " must broadcast to (B, Hq, Nq, Nk) = ", c10::SymIntArrayRef(pairs), ", but has shape ",
                      t->sym_sizes());
}

// What is added to scores, if anything.
inline const MaybeTensor &bias_of(const Arguments &a) {
    return a.attn_mask && a.attn_mask->scalar_type() != at::kBool ? a.attn_mask : a.bias;
}

inline void check_options(const Arguments &a) {
    check_block_table(a);
    const auto window = a.window_size;
    TORCH_CHECK_VALUE(window.size() == 2 && may_hold(window[0].sym_ge(-1)) && may_hold(window[1].sym_ge(-1)),
                      "window_size must be (left, right), each at least 0, or -1 for no bound, but was ", window);
    TORCH_CHECK_VALUE(!a.softmax_scale || std::isfinite((float)*a.softmax_scale),
                      "softmax_scale must be a finite float32, but was ", *a.softmax_scale);
    const double softcap = a.softcap.value_or(0.);
    TORCH_CHECK_VALUE(softcap == 0. || (softcap >= 1e-30 && softcap <= 1e30),
                      "softcap must be None, 0 (both: none) or from 1e-30 to 1e30, but was ", softcap);
    TORCH_CHECK_VALUE(!(a.offset && a.offsets), "offset must be an int or a tensor, but was both");
    check_per_batch(a.q, a.seqlens_k, "seqlens_k");
    check_per_batch(a.q, a.leftpad_k, "leftpad_k");
    check_per_batch(a.q, a.offsets, "offset");
    check_key_ranges(a);
    check_cu_seqlens(a);
    a.cu_seqlens_q ? check_per_document(a, a.prefix_k, "prefix_k") : check_per_batch(a.q, a.prefix_k, "prefix_k");
    TORCH_CHECK_VALUE(a.cu_seqlens_q || !a.seqused_k, "seqused_k must be None without cu_seqlens_q, but was given");
    check_per_document(a, a.seqused_k, "seqused_k");
    check_alibi_slopes(a);
    check_dropout(a);
    check_pairs(a, a.attn_mask, "attn_mask", /*may_be_bool=*/true);
    check_pairs(a, a.bias, "bias", /*may_be_bool=*/false);
    TORCH_CHECK_VALUE(!a.bias || !a.attn_mask || a.attn_mask->scalar_type() == at::kBool,
                      "attn_mask must be bool with a bias, but is ", name_of(a.attn_mask->scalar_type()));
}

inline void check_sinks(const Arguments &a) {
    if (!a.sinks) return;
    const auto dtype = a.sinks->scalar_type();
    TORCH_CHECK_VALUE(at::isFloatingType(dtype), "sinks must be of a floating dtype, but is ", name_of(dtype));
    check_like_q(a.q, *a.sinks, "sinks", dtype);
    check_per_head(a.q, *a.sinks, "sinks");
    TORCH_CHECK_VALUE(!a.o, "sinks must be None with a state: give them to the call with the first keys");
}

inline void check_state(const Arguments &a) {
    check_sinks(a);
    const bool any = a.o || a.l || a.m, all = a.o && a.l && a.m;
    TORCH_CHECK_VALUE(any == all, "state must be (o, l, m), all three, but some are missing");
    if (!any) return;
    check_like_o(a, *a.o, "state's o", at::kFloat);
    check_of_rows(a, *a.l, "state's l"), check_of_rows(a, *a.m, "state's m");
}

inline void check_out(const Arguments &a, const Tensor &out) {
    check_like_o(a, out, "out", a.q.scalar_type());
    const auto size = out.sym_sizes(), stride = out.sym_strides();
    bool is_own = may_hold(size[3].sym_eq(1) | stride[3].sym_eq(1));
    for (int i = 0; i < 3; ++i) is_own = is_own && may_hold(size[i].sym_le(1) | stride[i].sym_ne(0));
    TORCH_CHECK_VALUE(is_own, "out must have a contiguous last dimension and no stride of 0, but has strides ", stride);
}

// The arguments that backward has and forward has not.
inline void check_gradients(const Arguments &a, const Tensor &do_, const Tensor &o, const Tensor &lse,
                            const MaybeTensor &dlse, std::optional<at::ScalarType> out_dtype) {
    const auto dtype = a.q.scalar_type();
    for (const auto &[t, name] : {std::pair{&do_, "do"}, {&o, "o"}})
        check_like_o(a, *t, name, t->scalar_type() == at::kFloat ? at::kFloat : dtype);
    check_of_rows(a, lse, "lse");
    if (dlse) check_of_rows(a, *dlse, "dlse");
    TORCH_CHECK_VALUE(!out_dtype || *out_dtype == at::kFloat || *out_dtype == dtype,
                      "out_dtype must be float32 or q's ", name_of(dtype), ", but was ",
                      name_of(out_dtype.value_or(dtype)));
}

// What is below is for tensors that have data.

// From a tensor's first element to the end of its last one, in bytes.
inline int64_t span_of(const Tensor &t) {
    if (t.numel() == 0) return 0;
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return (last + 1) * t.element_size();
}

// A storage may have shrunk since the tensor was made: FSDP frees parameters by untyped_storage().resize_(0).
inline void check_memory(const Tensor &t, const char *name) {
    const int64_t needed = t.numel() ? t.storage_offset() * t.element_size() + span_of(t) : 0;
    TORCH_CHECK_VALUE(needed <= (int64_t)t.storage().nbytes(), name, " must have memory, but needs ", needed,
                      " bytes of a storage that has ", t.storage().nbytes(), " (was it resized?)");
}

// Each of the tensors among the arguments, with its name.
template <class Function>
void for_each_tensor(const Arguments &a, const Function &function) {
    const auto visit = [&](const auto &x, const char *name) {
        using T = std::decay_t<decltype(x)>;
        if constexpr (std::is_same_v<T, Tensor>) function(x, name);
        if constexpr (std::is_same_v<T, MaybeTensor>)
            if (x) function(*x, name);
    };
    const char *const *name = kNames;
    std::apply([&](const auto &...all) { (..., visit(all, *name++)); }, forward_arguments_of(a));
}

inline void check_overlap(const Arguments &a, const Tensor &out) {
    std::array<std::pair<int64_t, int64_t>, 3> dimensions;  // stride and size, by stride
    for (int i = 0; i < 3; ++i) dimensions[i] = {out.stride(i), out.size(i)};
    std::sort(dimensions.begin(), dimensions.end());
    int64_t least = out.size(3);
    for (const auto &[stride, size] : dimensions) {
        TORCH_CHECK_VALUE(size <= 1 || out.numel() == 0 || stride >= least,
                          "out must not overlap itself, but has strides ", out.strides());
        if (size > 1) least = stride * size;
    }
    const char *const begin = (const char *)out.const_data_ptr(), *const end = begin + span_of(out);
    for_each_tensor(a, [&](const Tensor &t, const char *name) {
        const char *const t_begin = (const char *)t.const_data_ptr();
        TORCH_CHECK_VALUE(t_begin + span_of(t) <= begin || end <= t_begin, "out must not overlap ", name,
                          " in memory, but does");
    });
}

// The values of cu_seqlens, on a CPU. On a GPU that would synchronise: there values are clamped (ranges.h).
inline void check_values(const MaybeTensor &cu_seqlens, const SymInt &total, const char *name) {
    if (!cu_seqlens || !cu_seqlens->is_cpu()) return;
    const Tensor ints = cu_seqlens->to(at::kLong).contiguous();
    const int64_t *const begin = ints.const_data_ptr<int64_t>(), *const last = begin + ints.numel() - 1;
    TORCH_CHECK_VALUE(*begin >= 0 && std::is_sorted(begin, last + 1) && *last <= total, name,
                      " must never decrease, begin at 0 or later and end at ", total, " or before, but was ",
                      at::IntArrayRef(begin, std::min<int64_t>(ints.numel(), 8)), ints.numel() > 8 ? " ..." : "");
}

// All that needs the tensors' data.
inline void check_inputs(const Arguments &a) {
    for_each_tensor(a, check_memory);
    check_values(a.cu_seqlens_q, a.q.sym_size(2), "cu_seqlens_q");
    check_values(a.cu_seqlens_k, number_of_keys(a), "cu_seqlens_k");
    for (const auto &[t, name] : {std::pair{&a.prefix_k, "prefix_k"}, {&a.seqused_k, "seqused_k"}}) {
        if (!*t || !(*t)->is_cpu() || (*t)->numel() == 0) continue;
        const int64_t least = (*t)->to(at::kLong).min().item<int64_t>();
        TORCH_CHECK_VALUE(least >= 0, name, " must be at least 0, but has ", least);
    }
}

inline void check_data(const Arguments &a, const Tensor *out) {
    check_inputs(a);
    if (out) check_memory(*out, "out"), check_overlap(a, *out);
}

}  // namespace minimal_attn
