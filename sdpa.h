// sdpa.h: minimal_attn.activate(): the operators by which F.scaled_dot_product_attention computes, served by run().
//
// PyTorch chooses an operator (flash, efficient or cuDNN on CUDA, flash on a CPU). Autograd records its backward operator,
// which is replaced as well. Both passes exchange o and the log-sum-exp as PyTorch's do, so that each works with PyTorch's
// other one. A call that isn't served goes to PyTorch's kernel directly: the dispatcher would come back here.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward_cuda_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_cuda_dispatch.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "autograd.h"
#include "checks.h"
#include "tensors.h"

namespace minimal_attn::sdpa {

// What becomes of a call: our kernels serve it, or it is passed on to PyTorch's, for one of these reasons.
enum Outcome { served, mask, dropout, dtype, shapes, head_dimension, scale_value, debug_mask };
inline constexpr std::array<const char *, 8> kOutcomes = {"minimal_attn",
                                                          "PyTorch: attn_mask is given",
                                                          "PyTorch: dropout_p is not 0",
                                                          "PyTorch: the dtype is not float32, float16 or bfloat16",
                                                          "PyTorch: the shapes are empty or don't fit together",
                                                          "PyTorch: a head dimension above 256, or two different ones",
                                                          "PyTorch: scale is not finite",
                                                          "PyTorch: return_debug_mask is set"};
inline std::array<std::atomic<int64_t>, kOutcomes.size()> counts{};  // they only grow

inline std::map<std::string, int64_t> calls() {
    std::map<std::string, int64_t> calls;
    for (size_t i = 0; i < counts.size(); ++i)
        if (counts[i]) calls[kOutcomes[i]] = counts[i];
    return calls;
}

struct Call {
    const Tensor &q, &k, &v;
    const MaybeTensor &attn_mask;
    double dropout_p;
    bool is_causal;
    std::optional<double> scale;
};

inline Outcome outcome_of(const Call &c, bool return_debug_mask) {
    if (c.attn_mask && c.attn_mask->defined()) return mask;  // autograd passes an undefined one
    if (c.dropout_p != 0) return dropout;
    if (return_debug_mask) return debug_mask;
    const auto type = c.q.scalar_type();
    if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) return dtype;
    if (c.k.scalar_type() != type || c.v.scalar_type() != type) return dtype;
    if (c.q.dim() != 4 || c.k.dim() != 4 || c.v.dim() != 4) return shapes;
    if (c.q.size(3) > 256 || c.k.size(3) != c.q.size(3) || c.v.size(3) != c.q.size(3)) return head_dimension;
    const bool fit = c.q.numel() > 0 && c.k.numel() > 0 && c.k.sizes() == c.v.sizes() && c.k.size(0) == c.q.size(0) &&
                     c.q.size(1) % c.k.size(1) == 0 && c.q.size(2) < kMaxTokens && c.k.size(2) < kMaxTokens;
    if (!fit) return shapes;
    return c.scale && !std::isfinite((float)*c.scale) ? scale_value : served;
}

// Whether our kernels serve the call; counts it.
inline bool serves(const Call &call, bool return_debug_mask = false) {
    const Outcome outcome = outcome_of(call, return_debug_mask);
    counts[outcome].fetch_add(1, std::memory_order_relaxed);
    return outcome == served;
}

// o has the strides of PyTorch's kernels and of their shapes on Meta: q's, or those of (B, Nq, Hq, d) in memory.
enum class Layout { of_q, tokens_first };

// Which query and key is_causal aligns: the last ones in FlashAttention's operator on CUDA, the first ones elsewhere.
enum class Aligned { first, last };

// function(arguments): the call as run() and differentiate() take it.
template <class Function>
auto with_arguments(const Call &c, Aligned aligned, const Function &function) {
    static const MaybeTensor none;
    static const std::array<SymInt, 2> window = {-1, -1};
    const std::optional<SymInt> offset = aligned == Aligned::last ? std::nullopt : std::optional<SymInt>(0);
    return function(Arguments{c.q, c.k, c.v, c.is_causal, window, c.scale, none, none, offset, none, "auto", none, none,
                              none, none, none});
}

inline Tensor empty_in(Layout layout, const Tensor &t) {
    if (layout == Layout::of_q) return at::empty_like(t);
    const int64_t row = t.size(1) * t.size(3);
    return at::empty_strided(t.sizes(), {t.size(2) * row, t.size(3), row, 1}, t.options());
}

// Returns o and, where lse is given, fills it: (B, Hq, Nq or more rows) of any strides.
inline Tensor compute(const Call &c, const Tensor &lse, Layout layout = Layout::of_q,
                      Aligned aligned = Aligned::first) {
    const Tensor o = empty_in(layout, c.q);
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
        const Tensor like = empty_in(layout, t);
        return has_contiguous_rows(like) ? like : Tensor();
    };
    return with_arguments(c, aligned, [&](Arguments a) {
        a.complete = true;
        const Tensor rows = lse.narrow(2, 0, c.q.size(2)).reshape(c.q.sizes().slice(0, 3));
        return differentiate(a, do_, o, rows, {}, std::nullopt, {result(c.q), result(c.k), result(c.v)});
    });
}

// Whether the backward pass of a call is ours, too.
inline bool serves_backward(const Call &c) { return outcome_of(c, false) == served && has_fast_backward(c.q); }

inline Tensor empty_floats(const Call &c, at::IntArrayRef size) {
    return at::empty(size, c.q.options().dtype(at::kFloat));
}

inline std::tuple<Tensor, Tensor> flash_cpu(const Tensor &q, const Tensor &k, const Tensor &v, double dropout_p,
                                            bool is_causal, const MaybeTensor &attn_mask, std::optional<double> scale) {
    const Call call{q, k, v, attn_mask, dropout_p, is_causal, scale};
    if (!serves(call))
        return at::cpu::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask, scale);
    const Tensor lse = empty_floats(call, {q.size(0), q.size(2), q.size(1)}).transpose(1, 2);  // PyTorch's strides
    return {compute(call, lse), lse};
}

inline Gradients flash_cpu_backward(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v,
                                    const Tensor &o, const Tensor &lse, double dropout_p, bool is_causal,
                                    const MaybeTensor &attn_mask, std::optional<double> scale) {
    const Call call{q, k, v, attn_mask, dropout_p, is_causal, scale};
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
    const Call call{q, k, v, {}, dropout_p, is_causal, scale};
    if (!serves(call, return_debug_mask))
        return at::cuda::_scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, return_debug_mask, scale);
    const Tensor lse = empty_floats(call, {q.size(0), q.size(1), q.size(2)});
    return forward_results(call, compute(call, lse, Layout::of_q, Aligned::last), lse, {2}, at::kUInt64);
}

inline ForwardResults cudnn(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &attn_bias,
                            bool compute_log_sumexp, double dropout_p, bool is_causal, bool return_debug_mask,
                            std::optional<double> scale) {
    const Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
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
    const Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
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
    const Call call{q, k, v, {}, dropout_p, is_causal, scale};
    if (serves_backward(call)) return compute_backward(call, do_, o, lse, Layout::of_q, Aligned::last);
    return at::cuda::_scaled_dot_product_flash_attention_backward(
        do_, q, k, v, o, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, seed_offset, scale);
}

inline Gradients cudnn_backward(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o,
                                const Tensor &lse, const Tensor &seed, const Tensor &seed_offset,
                                const Tensor &attn_bias, const Tensor &cum_seq_q, const Tensor &cum_seq_k,
                                int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                std::optional<double> scale) {
    const Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
    if (serves_backward(call)) return compute_backward(call, do_, o, lse);
    return at::cuda::_scaled_dot_product_cudnn_attention_backward(do_, q, k, v, o, lse, seed, seed_offset, attn_bias,
                                                                  cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                                                                  is_causal, scale);
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_cuda_backward(
    const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &attn_bias, const Tensor &o,
    const Tensor &lse, const Tensor &seed, const Tensor &seed_offset, double dropout_p,
    std::array<bool, 4> grad_input_mask, bool is_causal, std::optional<double> scale) {
    const Call call{q, k, v, attn_bias, dropout_p, is_causal, scale};
    if (grad_input_mask[3] || !serves_backward(call))  // a bias is differentiated or missing
        return at::cuda::_scaled_dot_product_efficient_attention_backward(
            do_, q, k, v, attn_bias, o, lse, seed, seed_offset, dropout_p, grad_input_mask, is_causal, scale);
    const auto [dq, dk, dv] = compute_backward(call, do_, o, lse, Layout::tokens_first);
    return {dq, dk, dv, Tensor()};
}
#endif

// While this list has elements, our kernels come before PyTorch's.
inline std::list<torch::Library> overriding;

inline void override_operators() {
    if (!overriding.empty()) return;
    overriding.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__)
        .impl("_scaled_dot_product_flash_attention_for_cpu", &flash_cpu)
        .impl("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_cpu_backward);
#ifdef WITH_CUDA
    overriding.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__)
        .impl("_scaled_dot_product_flash_attention", &flash_cuda)
        .impl("_scaled_dot_product_cudnn_attention", &cudnn)
        .impl("_scaled_dot_product_efficient_attention", &efficient_cuda)
        .impl("_scaled_dot_product_flash_attention_backward", &flash_cuda_backward)
        .impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward)
        .impl("_scaled_dot_product_efficient_attention_backward", &efficient_cuda_backward);
#endif
}

inline void restore_operators() { overriding.clear(); }

}  // namespace minimal_attn::sdpa
