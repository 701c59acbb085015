// main.cpp: from Python's arguments to the operators, and what Python finds in minimal_attn._C.
//
// minimal_attn.forward (minimal_attn/_forward.py) -> pybind11 below -> PyTorch's dispatcher, operator
// minimal_attn::forward (binding/overload.h) -> run() in binding/call.cpp: checks once, allocates the results, fills
// flash.h's `Attention` -> a backend. The dispatcher chooses between Autocast (casts q, k, v), Autograd
// (binding/autograd.h), Meta (shapes only), CPU, CUDA. Gradients likewise: operator minimal_attn::backward ->
// differentiate(), which fills `Gradient` -> a backend.

#define AT_PER_OPERATOR_HEADERS  // torch's headers then include what they need, not all operators: 5 s of compiling

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "binding/call.h"
#include "binding/casters.h"
#include "binding/overload.h"
#include "binding/sdpa.h"
#include "scores.h"

namespace minimal_attn {
namespace {

// What Python hands over for a type of the operator, and the value that the operator takes.
template <class T>
struct FromPython {
    using type = T;
};
template <>
struct FromPython<bool> {
    using type = Flag;
};
template <>
struct FromPython<c10::SymIntArrayRef> {
    using type = std::pair<Number<int64_t>, Number<int64_t>>;
};
template <>
struct FromPython<std::optional<double>> {
    using type = std::optional<Number<double>>;
};
template <>
struct FromPython<std::optional<SymInt>> {
    using type = std::optional<Number<int64_t>>;
};
template <>
struct FromPython<std::string_view> {
    using type = const std::string &;
};
template <class T>
const T &value_of(const T &x) {
    return x;
}
template <class T>
std::optional<T> value_of(const std::optional<Number<T>> &x) {
    return x ? std::optional<T>(x->value) : std::nullopt;
}
std::array<SymInt, 2> value_of(const std::pair<Number<int64_t>, Number<int64_t>> &x) {
    return {x.first.value, x.second.value};
}

Returns returns_of(const Arguments &a, bool return_state, bool return_lse) {
    return return_lse ? Returns::lse : a.o || return_state ? Returns::state : Returns::o;
}

// What Python calls while not compiling: the same operator.
std::variant<Tensor, Lse, State> call_operator(const Arguments &a, bool return_state, bool return_lse,
                                               const MaybeTensor &out) {
    const Returns returns = returns_of(a, return_state, return_lse);
    const auto call = [&](const auto &operation, const auto &...out) {
        return std::apply([&](const auto &...all) { return operation(all..., out...); }, forward_arguments_of(a));
    };
    if (out) return call(Overload<Forward<void, const Tensor &>>::call, *out), *out;
    if (returns == Returns::lse) return call(Overload<Forward<Lse>>::call);
    if (returns == Returns::state) return call(Overload<Forward<State>>::call);
    return call(Overload<Forward<Tensor>>::call);
}

pybind11::dict explain_call(const Arguments &a, bool return_state = false, bool return_lse = false,
                            const MaybeTensor &out = {}, bool backward = false) {
    using namespace pybind11::literals;
    const Returns returns = returns_of(a, return_state, return_lse);
    const Explanation found = explain(a, returns, out ? &*out : nullptr, backward);
    pybind11::dict others;
    for (const auto &[name, why] : found.others) others[name.c_str()] = why;
    const Plan &plan = found.plan;
    std::string kernel = plan.kernel;
    if (found.prefix_kernel) kernel += std::string(" and for prefix_k ") + found.prefix_kernel;
    if (plan.grid > 0) kernel += found.mask;
    if (*kScore && a.alibi_slopes) kernel += std::string(" with ") + kScore;
    return pybind11::dict("backend"_a = found.backend, "kernel"_a = kernel, "Br"_a = plan.Br, "Bc"_a = plan.Bc,
                          "d"_a = plan.D, "grid"_a = plan.grid, "threads"_a = plan.threads,
                          "shared_memory"_a = plan.shared_memory, "workspace"_a = plan.workspace,
                          "copied"_a = found.copied, "others"_a = others);
}

void check_rows(const Tensor &t) {
    TORCH_CHECK_VALUE(t.numel() == 0 || t.size(3) == 1 || t.stride(3) == 1,
                      "a result must have contiguous rows, but has strides ", t.strides());
}

// The operator's arguments, then what decides the result.
template <class Types>
struct PythonFunctions;
template <class... Types>
struct PythonFunctions<void(Types...)> {
    static auto forward(const Tensor &q, const Tensor &k, const Tensor &v, typename FromPython<Types>::type... all,
                        Flag return_state, Flag return_lse, const MaybeTensor &out) {
        return call_operator({q, k, v, value_of(all)...}, return_state, return_lse, out);
    }
    static auto explain(const Tensor &q, const Tensor &k, const Tensor &v, typename FromPython<Types>::type... all,
                        Flag return_state, Flag return_lse, const MaybeTensor &out, Flag backward) {
        return explain_call({q, k, v, value_of(all)...}, return_state, return_lse, out, backward);
    }
    // For rings: results go to the caller's tensors, and autograd and autocast know nothing of them. Their dtypes and
    // sizes aren't checked: with lse o has q's dtype; with l and m, which are contiguous, it is float32.
    static void forward_into(const Tensor &q, const Tensor &k, const Tensor &v, typename FromPython<Types>::type... all,
                             const Tensor &o, const MaybeTensor &l, const MaybeTensor &m, const MaybeTensor &lse) {
        check_rows(o);
        run({q, k, v, value_of(all)...}, lse ? Returns::lse : Returns::state, nullptr,
            {o, l.value_or(Tensor()), m.value_or(Tensor()), lse.value_or(Tensor())});
    }
};
template <class Types>
struct PythonBackward;
template <class... Types>
struct PythonBackward<void(Types...)> {
    static void backward_into(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o,
                              const Tensor &lse, const MaybeTensor &dlse, typename FromPython<Types>::type... options,
                              const Tensor &dq, const Tensor &dk, const Tensor &dv) {
        check_rows(dq), check_rows(dk), check_rows(dv);
        differentiate({q, k, v, value_of(options)...}, do_, o, lse, dlse, dq.scalar_type(), {dq, dk, dv});
    }
};
using Python = PythonFunctions<OwnTypes>;

// minimal_attn.scaled_dot_product_attention: the same operator that torch.compile takes.
Tensor scaled_dot_product_attention(const Tensor &query, const Tensor &key, const Tensor &value,
                                    const MaybeTensor &attn_mask, Number<double> dropout_p, Flag is_causal,
                                    std::optional<Number<double>> scale, Flag enable_gqa, Flag strict) {
    return typed_handle<decltype(sdpa::function)>("minimal_attn::scaled_dot_product_attention")
        .call(query, key, value, attn_mask, dropout_p, is_causal, value_of(scale), enable_gqa, strict);
}

// What explain says of it, or why the call is PyTorch's.
std::variant<pybind11::dict, std::string> explain_sdpa(const Tensor &query, const Tensor &key, const Tensor &value,
                                                       const MaybeTensor &attn_mask, Number<double> dropout_p,
                                                       Flag is_causal, std::optional<Number<double>> scale,
                                                       Flag enable_gqa) {
    pybind11::dict found;
    const sdpa::Call call{query, key, value, attn_mask, dropout_p, is_causal, value_of(scale), enable_gqa};
    const auto outcome = sdpa::serve(call, [&](const Arguments &a, const auto &) { found = explain_call(a); });
    if (outcome == sdpa::served) return found;
    return sdpa::kOutcomes[outcome].name;
}

}  // namespace

TORCH_LIBRARY(minimal_attn, m) {
    Overload<Forward<Tensor>>::define(m, "", "Tensor");
    Overload<Forward<Lse>>::define(m, "", "(Tensor o, Tensor lse)");
    Overload<Forward<State>>::define(m, "", "(Tensor o, Tensor l, Tensor m)");
    Overload<Forward<void, const Tensor &>>::define(m, ", *, Tensor(a!) result", "()");
    BackwardOperator<OptionTypes>::define(m);
    sdpa::define_operators(m);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("built_for") = "minimal_attn for torch " MINIMAL_ATTN_TORCH;  // which _load.py finds in the file, too
    m.doc() = "minimal_attn's C++ part; minimal_attn.forward is the documented way in";
    m.def("forward", torch::wrap_pybind_function_no_gil(Python::forward));
    m.def("forward_into", torch::wrap_pybind_function_no_gil(Python::forward_into));
    m.def("backward_into", torch::wrap_pybind_function_no_gil(PythonBackward<OptionTypes>::backward_into));
    m.def("explain", torch::wrap_pybind_function(Python::explain), "What minimal_attn.explain returns, as a dict");
    m.def("scaled_dot_product_attention", torch::wrap_pybind_function_no_gil(scaled_dot_product_attention));
    m.def("explain_sdpa", torch::wrap_pybind_function(explain_sdpa));
    m.def("override_sdpa", torch::wrap_pybind_function(sdpa::override_operators),
          "Let F.scaled_dot_product_attention's operators take our kernels");
    m.def("set_sdpa_strict", &sdpa::set_strict, "Whether a call that leaves our kernels raises");
    m.def("restore_sdpa", &sdpa::restore_operators, "Undo override_sdpa");
    m.def("has_fast_backward", &has_fast_backward, "Whether our gradients of q are as fast as PyTorch's");
    m.def("has_fast_pairs", &has_fast_pairs, "Whether masks and biases of q's kind are as fast as PyTorch's");
    m.def("sdpa_calls", &sdpa::calls, "Calls of those operators since the import, by outcome");
    m.def("backends", &backend_names, "The backends that this build can run on, by name");
    m.def("cuda_architectures", &cuda_architectures, "What CUDA code was compiled for; empty in a CPU-only build");
    m.def("score", [] { return kScore; }, "MINIMAL_ATTN_SCORE of the build, what alibi_slopes multiply; empty: ALiBi");
    m.def("has_all_tiles", &has_all_tiles, "Whether shared_memory_limit may be less than a Hopper GPU has");
    m.def("shared_memory_limit", &limit_shared_memory,
          "Let a block use at most so many bytes of shared memory, as a smaller GPU would; returns the last limit");
    m.def(
        "cpu_instructions",
        [] {
            std::vector<std::string> names;
            for (auto name = cpu_instructions(); *name; ++name) names.push_back(*name);
            return names;
        },
        "The instruction sets that the CPU backend can use here, the best first");
    m.def(
        "limit_cpu_instructions",
        [](const std::string &name) {
            const char *before = limit_cpu_instructions(name.c_str());
            TORCH_CHECK_VALUE(before, "name must be one of cpu_instructions(), but was \"", name, "\"");
            return std::string(before);
        },
        "Use no better instruction set than this one; returns the last limit");
}

}  // namespace minimal_attn
