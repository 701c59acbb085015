// autograd.h: derivatives of the operator minimal_attn::forward. Autograd records a node for each call that needs one; the
// node calls the operator minimal_attn::backward for q, k and v. What else may require grad are a few values a row: an
// earlier state and sinks, whose gradients are written as tensor operations here.
//
// l and m are not independent results: only the log-sum-exp m + log(l) means something. So m counts as a constant, and
// the gradient in l is that in lse = log(l) + m, times l.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "checks.h"

namespace minimal_attn {

using Lse = std::tuple<Tensor, Tensor>;            // o in q's dtype, the log-sum-exp
using State = std::tuple<Tensor, Tensor, Tensor>;  // o, l, m in float32
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// The operators as C++ calls them: forward with one of its results, and backward.
template <class Result>
using Forward = Result(const Tensor &q, const Tensor &k, const Tensor &v, bool causal, c10::SymIntArrayRef window_size,
                       std::optional<double> softmax_scale, const MaybeTensor &seqlens_k, const MaybeTensor &leftpad_k,
                       std::optional<SymInt> offset, const MaybeTensor &offsets, std::string_view backend,
                       const MaybeTensor &o, const MaybeTensor &l, const MaybeTensor &m, const MaybeTensor &sinks);
using Backward = Gradients(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o,
                           const Tensor &lse, const MaybeTensor &dlse, bool causal, c10::SymIntArrayRef window_size,
                           std::optional<double> softmax_scale, const MaybeTensor &seqlens_k,
                           const MaybeTensor &leftpad_k, std::optional<SymInt> offset, const MaybeTensor &offsets,
                           std::string_view backend, std::optional<at::ScalarType> out_dtype);

// Looked up once, which is faster than torch.ops.
template <class Signature>
const auto &typed_handle(const char *name, const char *overload = "") {
    static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
    return handle;
}

namespace autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline bool wants_grad(const Tensor &t) { return t.defined() && t.requires_grad(); }
inline bool wants_grad(const MaybeTensor &t) { return t && t->requires_grad(); }
template <class T>
bool wants_grad(const T &) {
    return false;
}

// Gradients in an earlier state (o, l, m), or in sinks. The state counts as one more key of each row with the score
// lse_in = m + log(l) and the value o; a sink as one with its own score and the value 0.
struct EarlierGradients {
    Tensor o, l, m, sinks;
};
inline EarlierGradients gradients_of_earlier(const Tensor &do_, const Tensor &o, const Tensor &lse, const Tensor &dlse,
                                             const Tensor &o_in, const Tensor &l_in, const Tensor &m_in,
                                             const Tensor &sinks) {
    const auto row_dot = [](const Tensor &x, const Tensor &y) { return (x.to(at::kFloat) * y).sum(-1); };
    Tensor D = row_dot(do_, o);
    if (dlse.defined()) D = D - dlse;
    const Tensor score = sinks.defined() ? sinks.to(at::kFloat).unsqueeze(-1) : m_in + l_in.log();
    // Where nothing else was seen P is 1, also if both are -inf: the row of the state was copied.
    const Tensor P = at::where(score == lse, 1., (score - lse).exp());
    if (sinks.defined()) {
        const Tensor dS = at::where(score == -INFINITY, 0., -P * D);
        return {{}, {}, {}, (sinks.dim() == 1 ? dS.sum(at::IntArrayRef({0, 2})) : dS.sum(2)).to(sinks.scalar_type())};
    }
    // A state that counts for nothing may hold NaN.
    const Tensor dS = at::where(P == 0., 0., P * (row_dot(do_, o_in) - D));
    return {P.unsqueeze(-1) * do_.to(at::kFloat), at::where(l_in == 0., 0., dS / l_in), dS, {}};
}

class Attend : public torch::autograd::Function<Attend> {
public:
    static variable_list forward(AutogradContext *ctx, const Tensor &q, const Tensor &k, const Tensor &v,
                                 const MaybeTensor &o_in, const MaybeTensor &l_in, const MaybeTensor &m_in,
                                 const MaybeTensor &sinks, const Arguments &a, Returns returns) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const auto call = [&](const auto &op) {
            return op.call(q, k, v, a.causal, a.window_size, a.softmax_scale, a.seqlens_k, a.leftpad_k, a.offset,
                           a.offsets, a.backend, o_in, l_in, m_in, sinks);
        };
        Tensor o, l, m, lse;
        if (returns == Returns::state) {
            std::tie(o, l, m) = call(typed_handle<Forward<State>>("minimal_attn::forward", "state"));
            ctx->mark_non_differentiable({m});
        } else {
            std::tie(o, lse) = call(typed_handle<Forward<Lse>>("minimal_attn::forward", "lse"));
        }
        const auto maybe = [](const MaybeTensor &t) { return t ? *t : Tensor(); };
        ctx->save_for_backward({q, k, v, o, l, m, lse, maybe(a.seqlens_k), maybe(a.leftpad_k), maybe(a.offsets),
                                maybe(o_in), maybe(l_in), maybe(m_in), maybe(sinks)});
        ctx->set_materialize_grads(false);
        auto &options = ctx->saved_data;
        options["causal"] = a.causal, options["window_size"] = a.window_size;
        options["softmax_scale"] = a.softmax_scale, options["offset"] = a.offset;
        options["backend"] = std::string(a.backend);
        if (returns == Returns::state) return {o, l, m};
        return returns == Returns::lse ? variable_list{o, lse} : variable_list{o};
    }

    static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
        const variable_list saved = ctx->get_saved_variables();
        const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &o = saved[3], &l = saved[4], &m = saved[5];
        const Tensor lse = l.defined() ? m + l.log() : saved[6];
        const Tensor do_ = grads[0].defined() ? grads[0] : at::zeros_like(o);
        const Tensor second = grads.size() > 1 ? grads[1] : Tensor();
        const Tensor dlse = second.defined() && l.defined() ? second * l : second;
        const auto maybe = [](const Tensor &t) { return t.defined() ? MaybeTensor(t) : std::nullopt; };

        variable_list results(9);  // one for each argument of forward
        auto &options = ctx->saved_data;
        if (ctx->needs_input_grad(0) || ctx->needs_input_grad(1) || ctx->needs_input_grad(2))
            std::tie(results[0], results[1], results[2]) =
                typed_handle<Backward>("minimal_attn::backward")
                    .call(do_, q, k, v, o, lse, maybe(dlse), options["causal"].toBool(),
                          options["window_size"].toSymIntVector(), options["softmax_scale"].toOptional<double>(),
                          maybe(saved[7]), maybe(saved[8]), options["offset"].toOptional<SymInt>(), maybe(saved[9]),
                          options["backend"].toStringRef(), std::nullopt);
        const Tensor &o_in = saved[10], &l_in = saved[11], &m_in = saved[12], &sinks = saved[13];
        if (o_in.defined() || sinks.defined()) {
            const auto earlier = gradients_of_earlier(do_, o, lse, dlse, o_in, l_in, m_in, sinks);
            results[3] = earlier.o, results[4] = earlier.l, results[5] = earlier.m, results[6] = earlier.sinks;
        }
        return results;
    }
};

// minimal_attn::backward itself can't be differentiated. The error comes only from what asks for that: torch.func.grad
// and create_graph=True record it in any case.
class Once : public torch::autograd::Function<Once> {
public:
    template <class... Options>
    static variable_list forward(AutogradContext *, const Tensor &do_, const Tensor &q, const Tensor &k,
                                 const Tensor &v, const Tensor &o, const Tensor &lse, const MaybeTensor &dlse,
                                 const Options &...options) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const auto &op = typed_handle<Backward>("minimal_attn::backward");
        const auto [dq, dk, dv] = op.call(do_, q, k, v, o, lse, dlse, options...);
        return {dq, dk, dv};
    }
    static variable_list backward(AutogradContext *, const variable_list &) {
        TORCH_CHECK(false, "minimal_attn has no second derivatives: the gradients of forward can't be differentiated");
    }
};

// The Autograd kernel of minimal_attn::backward.
template <class... Args>
Gradients record_once(c10::DispatchKeySet keys, Args... args) {
    if (at::GradMode::is_enabled() && (... || wants_grad(args))) {
        const variable_list results = Once::apply(args...);
        return {results[0], results[1], results[2]};
    }
    const at::AutoDispatchBelowAutograd guard;
    return typed_handle<Backward>("minimal_attn::backward").redispatch(keys & c10::after_autograd_keyset, args...);
}
template <class... Args>
constexpr auto record_once_of(Gradients (*)(Args...)) {
    return &record_once<Args...>;
}

}  // namespace autograd
}  // namespace minimal_attn
