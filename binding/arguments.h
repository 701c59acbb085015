// arguments.h: the arguments of the operators minimal_attn::forward and minimal_attn::backward. An argument stands here
// as a field, a type, a schema, a name and in a tuple, always in one order, and where other arguments have defaults. The
// operators' signatures, the check of each tensor's memory and what autograd saves follow.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace minimal_attn {

using at::Tensor;
using c10::SymInt;
using MaybeTensor = std::optional<Tensor>;

// The arguments as the dispatcher hands them over.
struct Arguments {
    const Tensor &q, &k, &v;
    // The options: forward and backward have them.
    bool causal;
    c10::SymIntArrayRef window_size;
    std::optional<double> softmax_scale;
    const MaybeTensor &seqlens_k, &leftpad_k;
    const std::optional<SymInt> &offset;
    const MaybeTensor &offsets;
    std::string_view backend;
    // Of forward alone
    const MaybeTensor &o, &l, &m;  // the earlier state: all three or none
    const MaybeTensor &sinks;
    const MaybeTensor &block_table;
    // Of backward alone
    bool deterministic = false, complete = false;
};

// use(arguments): a call with the defaults of all other arguments.
template <class Use>
auto with_defaults(const Tensor &q, const Tensor &k, const Tensor &v, bool causal, std::optional<double> softmax_scale,
                   const std::optional<SymInt> &offset, const Use &use) {
    static const MaybeTensor none;
    static const std::array<SymInt, 2> window = {-1, -1};
    return use(Arguments{q, k, v, causal, window, softmax_scale, none, none, offset, none, "auto", none, none, none,
                         none, none});
}

// A call of backward: it has none of the arguments of forward alone.
template <class... Options>
Arguments backward_arguments(const Tensor &q, const Tensor &k, const Tensor &v, bool deterministic, bool complete,
                             const Options &...options) {
    static const MaybeTensor none;
    return {q, k, v, options..., none, none, none, none, none, deterministic, complete};
}

template <class... Types>
struct TypeList {};
using OptionTypes = TypeList<bool, c10::SymIntArrayRef, std::optional<double>, const MaybeTensor &, const MaybeTensor &,
                             std::optional<SymInt>, const MaybeTensor &, std::string_view>;
using ForwardTypes =
    TypeList<const MaybeTensor &, const MaybeTensor &, const MaybeTensor &, const MaybeTensor &, const MaybeTensor &>;

inline constexpr const char *kOptions =
    "bool causal=False, SymInt[2] window_size=-1, float? softmax_scale=None, Tensor? seqlens_k=None, "
    "Tensor? leftpad_k=None, SymInt? offset=None, Tensor? offsets=None, str backend=\"auto\"";
inline constexpr const char *kForwardOptions =
    "Tensor? o=None, Tensor? l=None, Tensor? m=None, Tensor? sinks=None, Tensor? block_table=None";

// The names of forward's arguments in errors. Python's `offset` is two here: an int, and a tensor.
inline constexpr std::array<const char *, 17> kNames = {
    "q",      "k",       "v",         "causal",    "window_size", "softmax_scale", "seqlens_k",   "leftpad_k", "offset",
    "offset", "backend", "state's o", "state's l", "state's m",   "sinks",         "block_table", "out"};

inline auto options_of(const Arguments &a) {
    return std::tie(a.causal, a.window_size, a.softmax_scale, a.seqlens_k, a.leftpad_k, a.offset, a.offsets, a.backend);
}
inline auto forward_arguments_of(const Arguments &a) {
    return std::tuple_cat(std::tie(a.q, a.k, a.v), options_of(a), std::tie(a.o, a.l, a.m, a.sinks, a.block_table));
}

// A signature with the types of lists behind its own.
template <class Signature, class... Lists>
struct Extended {
    using type = Signature;
};
template <class Result, class... Own, class... Types, class... Lists>
struct Extended<Result(Own...), TypeList<Types...>, Lists...> : Extended<Result(Own..., Types...), Lists...> {};

// What forward's overloads return, and backward.
using Lse = std::tuple<Tensor, Tensor>;            // o in q's dtype, the log-sum-exp
using State = std::tuple<Tensor, Tensor, Tensor>;  // o, l, m in float32
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// The operators' signatures: Out is `const Tensor &` for forward.out.
template <class Result, class... Out>
using Forward = typename Extended<Result(const Tensor &, const Tensor &, const Tensor &), OptionTypes, ForwardTypes,
                                  TypeList<Out...>>::type;
// do, q, k, v, o, lse, dlse; the options; out_dtype, deterministic, complete
using Backward = typename Extended<Gradients(const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                                             const Tensor &, const Tensor &, const MaybeTensor &),
                                   OptionTypes, TypeList<std::optional<at::ScalarType>, bool, bool>>::type;

}  // namespace minimal_attn
