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

namespace minimal_attn {
namespace {

// Python's arguments of forward and explain, in their order.
using Window = std::pair<Number<int64_t>, Number<int64_t>>;
using PythonTypes =
    TypeList<const Tensor &, const Tensor &, const Tensor &, Flag, Window, std::optional<Number<double>>,
             const MaybeTensor &, const MaybeTensor &, std::optional<Number<int64_t>>, const MaybeTensor &,
             const std::string &, const std::optional<State> &, Flag, const MaybeTensor &, Flag, const MaybeTensor &,
             const MaybeTensor &>;
struct PythonArguments {
    const Tensor &q, &k, &v;
    Flag causal;
    Window window_size;
    std::optional<Number<double>> softmax_scale;
    const MaybeTensor &seqlens_k, &leftpad_k;
    std::optional<Number<int64_t>> offset;
    const MaybeTensor &offsets;
    const std::string &backend;
    const std::optional<State> &state;
    Flag return_state;
    const MaybeTensor &sinks;
    Flag return_lse;
    const MaybeTensor &out, &block_table;

    Returns returns() const { return return_lse ? Returns::lse : state || return_state ? Returns::state : Returns::o; }
};

// use(arguments): the operator's arguments.
template <class Use>
auto with_arguments(const PythonArguments &p, const Use &use) {
    const std::array<SymInt, 2> window = {p.window_size.first.value, p.window_size.second.value};
    const auto scale = p.softmax_scale ? std::optional<double>(*p.softmax_scale) : std::nullopt;
    const auto offset = p.offset ? std::optional<SymInt>(*p.offset) : std::nullopt;
    MaybeTensor o, l, m;
    if (p.state) std::tie(o, l, m) = *p.state;
    return use(Arguments{p.q, p.k, p.v, p.causal, window, scale, p.seqlens_k, p.leftpad_k, offset, p.offsets, p.backend,
                         o, l, m, p.sinks, p.block_table});
}

// What Python calls while not compiling: the same operator.
std::variant<Tensor, Lse, State> call_operator(const PythonArguments &p) {
    return with_arguments(p, [&](const Arguments &a) -> std::variant<Tensor, Lse, State> {
        const auto call = [&](const auto &operation, const auto &...out) {
            return std::apply([&](const auto &...all) { return operation(all..., out...); }, forward_arguments_of(a));
        };
        if (p.out) return call(Overload<Forward<void, const Tensor &>>::call, *p.out), *p.out;
        if (p.return_lse) return call(Overload<Forward<Lse>>::call);
        if (p.returns() == Returns::state) return call(Overload<Forward<State>>::call);
        return call(Overload<Forward<Tensor>>::call);
    });
}

pybind11::dict explain_call(const PythonArguments &p, bool backward) {
    using namespace pybind11::literals;
    const Tensor *const out = p.out ? &*p.out : nullptr;
    const Explanation found =
        with_arguments(p, [&](const Arguments &a) { return explain(a, p.returns(), out, backward); });
    pybind11::dict others;
    for (const auto &[name, why] : found.others) others[name.c_str()] = why;
    const Plan &plan = found.plan;
    return pybind11::dict("backend"_a = found.backend, "kernel"_a = plan.kernel, "Br"_a = plan.Br, "Bc"_a = plan.Bc,
                          "d"_a = plan.D, "grid"_a = plan.grid, "threads"_a = plan.threads,
                          "shared_memory"_a = plan.shared_memory, "workspace"_a = plan.workspace,
                          "copied"_a = found.copied, "others"_a = others);
}

template <class Types>
struct PythonFunctions;
template <class... Types>
struct PythonFunctions<TypeList<Types...>> {
    static std::variant<Tensor, Lse, State> forward(Types... arguments) { return call_operator({arguments...}); }
    static pybind11::dict explain(Types... arguments, Flag backward) { return explain_call({arguments...}, backward); }
};
using Python = PythonFunctions<PythonTypes>;

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
    m.def("explain", torch::wrap_pybind_function(Python::explain), "What minimal_attn.explain returns, as a dict");
    m.def("override_sdpa", torch::wrap_pybind_function(sdpa::override_operators),
          "Let F.scaled_dot_product_attention's operators take our kernels");
    m.def("set_sdpa_strict", &sdpa::set_strict, "Whether a call that leaves our kernels raises");
    m.def("restore_sdpa", &sdpa::restore_operators, "Undo override_sdpa");
    m.def("has_fast_backward", &has_fast_backward, "Whether our gradients of q are as fast as PyTorch's");
    m.def("sdpa_calls", &sdpa::calls, "Calls of those operators since the import, by outcome");
    m.def("backends", &backend_names, "The backends that this build can run on, by name");
    m.def("cuda_architectures", &cuda_architectures, "What CUDA code was compiled for; empty in a CPU-only build");
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
