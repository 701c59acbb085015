// arguments.h: the arguments of the operators minimal_attn::forward and minimal_attn::backward, in one list.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace minimal_attn {

using at::Tensor;
using c10::SymInt;
using MaybeTensor = std::optional<Tensor>;

// The arguments behind q, k and v, in the operators' order: of(type, name, its schema, its name in errors). The list
// defines the fields of Arguments, the operators' signatures and the types of Python's arguments (main.cpp). It also
// says which tensors autograd saves, and whose memory is checked. A macro holds the list, because C++ has no function
// that makes fields and types of one.
// clang-format off
#define MINIMAL_ATTN_OPTIONS(of)                                                           \
    of(bool, causal, "bool causal=False", "causal")                                        \
    of(c10::SymIntArrayRef, window_size, "SymInt[2] window_size=-1", "window_size")        \
    of(std::optional<double>, softmax_scale, "float? softmax_scale=None", "softmax_scale") \
    of(const MaybeTensor &, seqlens_k, "Tensor? seqlens_k=None", "seqlens_k")              \
    of(const MaybeTensor &, leftpad_k, "Tensor? leftpad_k=None", "leftpad_k")              \
    of(std::optional<SymInt>, offset, "SymInt? offset=None", "offset")                     \
    of(const MaybeTensor &, offsets, "Tensor? offsets=None", "offset")                     \
    of(std::string_view, backend, "str backend=\"auto\"", "backend")                       \
    of(const MaybeTensor &, key_ranges, "Tensor? key_ranges=None", "key_ranges")           \
    of(const MaybeTensor &, cu_seqlens_q, "Tensor? cu_seqlens_q=None", "cu_seqlens_q")     \
    of(const MaybeTensor &, cu_seqlens_k, "Tensor? cu_seqlens_k=None", "cu_seqlens_k")     \
    of(const MaybeTensor &, prefix_k, "Tensor? prefix_k=None", "prefix_k")                 \
    of(std::optional<double>, softcap, "float? softcap=None", "softcap")                   \
    of(const MaybeTensor &, alibi_slopes, "Tensor? alibi_slopes=None", "alibi_slopes")     \
    of(const MaybeTensor &, attn_mask, "Tensor? attn_mask=None", "attn_mask")              \
    of(const MaybeTensor &, bias, "Tensor? bias=None", "bias")                             \
    of(std::optional<double>, dropout_p, "float? dropout_p=None", "dropout_p")             \
    of(const MaybeTensor &, dropout_seed, "Tensor? dropout_seed=None", "dropout_seed")
// Of forward alone. o, l and m are the earlier state: all three or none.
#define MINIMAL_ATTN_OF_FORWARD(of)                               \
    of(const MaybeTensor &, o, "Tensor? o=None", "state's o")     \
    of(const MaybeTensor &, l, "Tensor? l=None", "state's l")     \
    of(const MaybeTensor &, m, "Tensor? m=None", "state's m")     \
    of(const MaybeTensor &, sinks, "Tensor? sinks=None", "sinks") \
    of(const MaybeTensor &, block_table, "Tensor? block_table=None", "block_table") \
    of(const MaybeTensor &, seqused_k, "Tensor? seqused_k=None", "seqused_k")
// clang-format on

// Of each type, the value of an argument that isn't given.
template <class T>
inline const std::decay_t<T> kDefault{};
template <>
inline const std::array<SymInt, 2> kDefault<c10::SymIntArrayRef> = {-1, -1};
template <>
inline const std::string_view kDefault<std::string_view> = "auto";

#define FIELD(type, name, schema, error) type name = kDefault<type>;
#define LISTED(type, name, schema, error) TypeList<type>,
#define SCHEMA(type, name, schema, error) ", " schema
#define NAME(type, name, schema, error) error,
#define TIED(type, name, schema, error) std::tie(a.name),

// The arguments as the dispatcher hands them over.
struct Arguments {
    const Tensor &q, &k, &v;
    MINIMAL_ATTN_OPTIONS(FIELD)
    MINIMAL_ATTN_OF_FORWARD(FIELD)
    bool deterministic = false, complete = false;  // of backward alone
    bool sees_prefix = false;                      // the second part of a call with prefix_k (call.cpp)
};

inline constexpr const char *kOptions = MINIMAL_ATTN_OPTIONS(SCHEMA);
inline constexpr const char *kForwardOptions = MINIMAL_ATTN_OF_FORWARD(SCHEMA);

// The names of forward's arguments in errors. Python's `offset` is two here: an int, and a tensor.
inline constexpr const char *kNames[] = {"q", "k", "v", MINIMAL_ATTN_OPTIONS(NAME) MINIMAL_ATTN_OF_FORWARD(NAME) "out"};

inline auto options_of(const Arguments &a) { return std::tuple_cat(MINIMAL_ATTN_OPTIONS(TIED) std::tuple<>()); }
inline auto forward_arguments_of(const Arguments &a) {
    return std::tuple_cat(std::tie(a.q, a.k, a.v), options_of(a), MINIMAL_ATTN_OF_FORWARD(TIED) std::tuple<>());
}

template <class... Types>
struct TypeList {};

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
using GradientsAndBias = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // dbias last

// The types of the options alone, and of all behind q, k and v.
using OptionTypes = Extended<void(), MINIMAL_ATTN_OPTIONS(LISTED) TypeList<>>::type;
using OwnTypes = Extended<void(), MINIMAL_ATTN_OPTIONS(LISTED) MINIMAL_ATTN_OF_FORWARD(LISTED) TypeList<>>::type;

// The operators' signatures: Out is `const Tensor &` for forward.out.
template <class Result, class... Out>
using Forward = typename Extended<Result(const Tensor &, const Tensor &, const Tensor &),
                                  MINIMAL_ATTN_OPTIONS(LISTED) MINIMAL_ATTN_OF_FORWARD(LISTED) TypeList<Out...>>::type;
// do, q, k, v, o, lse, dlse; the options; out_dtype, deterministic, complete
template <class Result>
using Backward =
    typename Extended<Result(const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                             const Tensor &, const MaybeTensor &),
                      MINIMAL_ATTN_OPTIONS(LISTED) TypeList<std::optional<at::ScalarType>, bool, bool>>::type;

#undef FIELD
#undef LISTED
#undef SCHEMA
#undef NAME
#undef TIED

}  // namespace minimal_attn
