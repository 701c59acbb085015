// autograd.h: derivatives of the operator minimal_attn::forward. Autograd records a node for each call that needs one.
// The node calls the operator minimal_attn::backward for q, k and v. Tensor operations here compute the gradients of an
// earlier state and of sinks, which are few numbers. The nodes are made as PyTorch makes its own:
// torch::autograd::Function would be shorter, but torch.func refuses it.
//
// l and m are not independent results: only the log-sum-exp m + log(l) means something. So m counts as a constant, and
// the gradient in lse is the gradient in l times l.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding/call.h"
#include "binding/checks.h"

namespace minimal_attn {

// An operator for calls from C++, looked up once: faster than torch.ops.
template <class Signature>
const auto &typed_handle(const char *name, const char *overload = "") {
    static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
    return handle;
}

namespace autograd {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

inline bool wants_grad(const Tensor &t) { return t.defined() && t.requires_grad(); }
inline bool wants_grad(const MaybeTensor &t) { return t && t->requires_grad(); }
template <class T>
bool wants_grad(const T &) {
    return false;
}

// Gradients in an earlier state (o, l, m), or in sinks. The state counts as one more key of each row, with the score
// lse_in = m + log(l) and the value o. A sink counts as one with its own score and the value 0.
struct EarlierGradients {
    Tensor o, l, m, sinks;
};
inline EarlierGradients gradients_of_earlier(const Tensor &do_, const Tensor &o, const Tensor &lse, const Tensor &dlse,
                                             const Tensor &o_in, const Tensor &l_in, const Tensor &m_in,
                                             const Tensor &sinks) {
    const auto row_dot = [](const Tensor &x, const Tensor &y) { return (x.to(at::kFloat) * y).sum(-1); };
    // Where a row sees no key, o is 0 and do_ may hold NaN.
    Tensor D = sinks.defined() ? at::where(o == 0, 0., do_.to(at::kFloat) * o).sum(-1) : row_dot(do_, o);
    if (dlse.defined()) D = D - dlse;
    const Tensor score = sinks.defined() ? sinks.to(at::kFloat).unsqueeze(-1) : m_in + l_in.log();
    // Where the row sees no key P is 1, even if both scores are -inf: the state's row was copied.
    const Tensor P = at::where(score == lse, 1., (score - lse).exp());
    if (sinks.defined()) {
        const Tensor dS = at::where(score == -INFINITY, 0., -P * D);
        return {{}, {}, {}, (sinks.dim() == 1 ? dS.sum(at::IntArrayRef({0, 2})) : dS.sum(2)).to(sinks.scalar_type())};
    }
    // A state that counts for nothing may hold NaN.
    const Tensor dS = at::where(P == 0., 0., P * (row_dot(do_, o_in) - D));
    return {P.unsqueeze(-1) * do_.to(at::kFloat), at::where(l_in == 0., 0., dS / l_in), dS, {}};
}

// What a node keeps of an option.
inline std::vector<SymInt> kept(c10::SymIntArrayRef option) { return option.vec(); }
inline std::string kept(std::string_view option) { return std::string(option); }
inline SavedVariable kept(const MaybeTensor &option) { return SavedVariable(option, false); }
template <class T>
T kept(const T &option) {
    return option;
}
inline auto kept_options(const Arguments &a) {
    return std::apply([](const auto &...all) { return std::tuple{kept(all)...}; }, options_of(a));
}

// The node of a call. Its edges are those of q, k, v, o, l, m, sinks and what is added to scores, in this order.
class AttentionNode : public torch::autograd::Node {
public:
    explicit AttentionNode(const Arguments &a)
        : q(a.q, false),
          k(a.k, false),
          v(a.v, false),
          options(kept_options(a)),
          o_in(a.o, false),
          l_in(a.l, false),
          m_in(a.m, false),
          sinks(a.sinks, false) {
        set_next_edges(torch::autograd::collect_next_edges(a.q, a.k, a.v, a.o, a.l, a.m, a.sinks, bias_of(a)));
    }

    // The results, whose gradients apply() gets; m gets none. Called when they are part of the graph.
    void save(const Results &results) {
        const auto as_output = [](const Tensor &t) { return SavedVariable(t, t.defined() && t.requires_grad()); };
        o = as_output(results.o), l = as_output(results.l), m = as_output(results.m), lse = as_output(results.lse);
    }

    std::string name() const override { return "MinimalAttnBackward"; }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable *t : {&q, &k, &v, &o_in, &l_in, &m_in, &sinks, &o, &l, &m, &lse}) t->reset_data();
        const auto release = [](auto &option) {
            if constexpr (std::is_same_v<std::decay_t<decltype(option)>, SavedVariable>) option.reset_data();
        };
        std::apply([&](auto &...all) { (release(all), ...); }, options);
    }

    variable_list apply(variable_list &&grads) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto unpack = [&](const SavedVariable &t) { return t.unpack(getptr()); };
        const auto maybe = [](const Tensor &t) { return t.defined() ? MaybeTensor(t) : std::nullopt; };
        const auto unpack_option = [&](const auto &option) -> decltype(auto) {
            if constexpr (std::is_same_v<std::decay_t<decltype(option)>, SavedVariable>)
                return maybe(unpack(option));
            else
                return (option);
        };
        const Tensor o_ = unpack(o), l_ = unpack(l), m_ = unpack(m);
        const Tensor lse_ = l_.defined() ? m_ + l_.log() : unpack(lse);
        const Tensor do_ = grads[0].defined() ? grads[0] : at::zeros_like(o_);
        const Tensor second = grads.size() > 1 ? grads[1] : Tensor();
        const Tensor dlse = second.defined() && l_.defined() ? second * l_ : second;
        const Tensor o_before = unpack(o_in), sinks_ = unpack(sinks);

        variable_list results(8);
        const bool complete = !o_before.defined() && !sinks_.defined();
        const auto compute = [&](const auto &op) {
            const auto call = [&](const auto &...all) {
                return op.call(do_, unpack(q), unpack(k), unpack(v), o_, lse_, maybe(dlse), unpack_option(all)...,
                               std::nullopt, /*deterministic=*/false, complete);
            };
            return std::apply(call, options);
        };
        if (task_should_compute_output(7))
            std::tie(results[0], results[1], results[2], results[7]) =
                compute(typed_handle<Backward<GradientsAndBias>>("minimal_attn::backward_and_bias"));
        else if (task_should_compute_output(0) || task_should_compute_output(1) || task_should_compute_output(2))
            std::tie(results[0], results[1], results[2]) =
                compute(typed_handle<Backward<Gradients>>("minimal_attn::backward"));
        if (o_before.defined() || sinks_.defined()) {
            const auto earlier =
                gradients_of_earlier(do_, o_, lse_, dlse, o_before, unpack(l_in), unpack(m_in), sinks_);
            results[3] = earlier.o, results[4] = earlier.l, results[5] = earlier.m, results[6] = earlier.sinks;
        }
        for (size_t i = 0; i < results.size(); ++i)
            if (!task_should_compute_output(i)) results[i] = Tensor();
        return results;
    }

private:
    // Hooks of saved tensors see them in this order.
    SavedVariable q, k, v;
    decltype(kept_options(std::declval<Arguments>())) options;
    SavedVariable o_in, l_in, m_in, sinks, o, l, m, lse;
};

// PyTorch counts a node's owners by std::shared_ptr or, in newer versions, by c10::intrusive_ptr.
template <class Node, class... Args>
auto make_node(Args &&...args) {
    using Pointer = decltype(torch::autograd::Edge::function);
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
        return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...), [](Node *node) { deleteNode(node); });
    else
        return c10::make_intrusive<Node>(std::forward<Args>(args)...);
}

// The forward pass, with a node behind o and lse or l.
inline Results record(const Arguments &a, Returns returns) {
    const auto node = make_node<AttentionNode>(a);
    Results results;
    {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const auto call = [&](const auto &op) {
            return std::apply([&](const auto &...all) { return op.call(all...); }, forward_arguments_of(a));
        };
        if (returns == Returns::state)
            std::tie(results.o, results.l, results.m) =
                call(typed_handle<Forward<State>>("minimal_attn::forward", "state"));
        else
            std::tie(results.o, results.lse) = call(typed_handle<Forward<Lse>>("minimal_attn::forward", "lse"));
    }
    set_history(results.o, node);
    if (returns == Returns::state) set_history(results.l, node);
    if (results.lse.defined()) set_history(results.lse, node);  // gradients of sinks depend on it
    node->save(results);
    return results;
}

// The Autograd kernel of the operators minimal_attn::backward and backward_and_bias. Neither has a derivative.
// create_graph=True and torch.func.grad always record this node. So the node raises the error, and only when a second
// derivative is computed.
template <class Result, class... Args>
Result record_backward(c10::DispatchKeySet keys, Args... args) {
    const auto compute = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const bool of_bias = std::is_same_v<Result, GradientsAndBias>;
        const char *const name = of_bias ? "minimal_attn::backward_and_bias" : "minimal_attn::backward";
        return typed_handle<Result(Args...)>(name).redispatch(keys & c10::after_autograd_keyset, args...);
    };
    if (!at::GradMode::is_enabled() || !(... || wants_grad(args))) return compute();
    const auto node = make_node<torch::autograd::Error>(
        "minimal_attn has no second derivatives: the gradients of forward can't be differentiated");
    [&](const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o, const Tensor &lse,
        const MaybeTensor &dlse, const auto &...) {
        node->set_next_edges(torch::autograd::collect_next_edges(do_, q, k, v, o, lse, dlse));
    }(args...);
    Result results = compute();
    std::apply([&](auto &...t) { (..., set_history(t, node)); }, results);
    return results;
}
template <class Result, class... Args>
constexpr auto record_backward_of(Result (*)(Args...)) {
    return &record_backward<Result, Args...>;
}

}  // namespace autograd
}  // namespace minimal_attn
