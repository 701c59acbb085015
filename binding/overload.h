// overload.h: the operators minimal_attn::forward and backward as PyTorch's dispatcher sees them: schemas, and what
// the dispatch keys do before anything is computed. Autocast casts q, k and v, Autograd records a node (autograd.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "binding/autograd.h"

// Of ATen/autocast_mode.h, which includes all operators: 3 s of compiling
namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor &arg, c10::DeviceType device_type);
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API bool is_autocast_enabled(c10::DeviceType device_type);
}  // namespace at::autocast

namespace minimal_attn {

constexpr size_t place_of(std::string_view name) {
    size_t i = 0;
    while (kNames[i] != name) ++i;
    return i;
}

// Whether autograd has to record the call. Refuses what can't be differentiated.
inline bool check_grad(const Tensor &t, const char *name, const char *refused_with) {
    TORCH_CHECK(!t._fw_grad(/*level=*/0).defined(), name,
                " must not be a dual tensor, but is: minimal_attn has no forward-mode derivative");
    const bool is_wanted = t.requires_grad() && at::GradMode::is_enabled();
    TORCH_CHECK(!is_wanted || name != std::string_view("alibi_slopes"),
                "alibi_slopes must not require grad, but do: they have no gradient; detach them");
    TORCH_CHECK(!is_wanted || !refused_with, name, " must not require grad where ", refused_with,
                " is given, but does: call it without ", refused_with, ", or under torch.no_grad()");
    return is_wanted;
}
inline bool check_grad(const MaybeTensor &t, const char *name, const char *refused_with) {
    return t && check_grad(*t, name, refused_with);
}
template <class T>
inline bool check_grad(const T &, const char *, const char *) {
    return false;
}

// One overload as the dispatcher sees it: the computation and what other dispatch keys do before. Its signature decides
// what is returned. forward: o; forward.lse: (o, log-sum-exp); forward.state: (o, l, m); forward.out writes o into its
// last argument.
template <class Signature>
struct Overload;

template <class Result, class... Args>
struct Overload<Result(Args...)> {
    static constexpr bool is_lse = std::is_same_v<Result, Lse>, is_state = std::is_same_v<Result, State>;
    static constexpr Returns returns = is_lse ? Returns::lse : is_state ? Returns::state : Returns::o;
    static constexpr const char *name = is_lse ? "lse" : is_state ? "state" : std::is_void_v<Result> ? "out" : "";

    // `out` is the last argument where there is one.
    static Result compute(Args... args) {
        if constexpr (std::is_void_v<Result>)
            run(without_last(std::tie(args...), std::make_index_sequence<sizeof...(Args) - 1>()), returns,
                &std::get<sizeof...(Args) - 1>(std::tie(args...)));
        else
            return result_of(run(Arguments{args...}, returns));
    }
    template <class All, size_t... i>
    static Arguments without_last(const All &args, std::index_sequence<i...>) {
        return {std::get<i>(args)...};
    }
    static Result result_of(Results &&results) {
        if constexpr (is_state)
            return {std::move(results.o), std::move(results.l), std::move(results.m)};
        else if constexpr (is_lse)
            return {std::move(results.o), std::move(results.lse)};
        else
            return std::move(results.o);
    }

    static Result call(Args... args) { return handle().call(std::forward<Args>(args)...); }

    static const auto &handle() { return typed_handle<Result(Args...)>("minimal_attn::forward", name); }

    // This must be the Autograd kernel, since torch.compile runs the others with grad mode off.
    static Result autograd(c10::DispatchKeySet keys, Args... args) {
        size_t i = 0;
        bool is_wanted = false;
        const auto &block_table = std::get<place_of("block_table")>(std::tie(args...)),
                   &seqused_k = std::get<place_of("seqused_k")>(std::tie(args...));
        const char *const refused_with = std::is_void_v<Result> ? "out"
                                         : block_table          ? "block_table"
                                         : seqused_k            ? "seqused_k"
                                                                : nullptr;
        (..., (is_wanted |= check_grad(args, kNames[i++], refused_with)));
        if constexpr (!std::is_void_v<Result>)
            if (is_wanted) return result_of(autograd::record(Arguments{args...}, returns));
        const at::AutoDispatchBelowAutograd guard;
        return handle().redispatch(keys & c10::after_autograd_keyset, std::forward<Args>(args)...);
    }
    // Autograd must know that `out`, the last argument, changes; in inference mode, too.
    static Result bump_version(c10::DispatchKeySet keys, Args... args) {
        const Tensor &out = std::get<sizeof...(Args) - 1>(std::tie(args...));
        if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
        const at::AutoDispatchBelowADInplaceOrView guard;
        return handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, std::forward<Args>(args)...);
    }

    // Views that are negated lazily. PyTorch's own kernel for them expects `out` among the results, and crashes.
    static Result resolve_negative(Args... args) {
        const Tensor &out = std::get<sizeof...(Args) - 1>(std::tie(args...));
        TORCH_CHECK_VALUE(!out.is_neg(), "out must not be a view with the negative bit, but is: pass another tensor");
        return call(resolve(std::forward<Args>(args))...);
    }
    static Tensor resolve(const Tensor &t) { return t.resolve_neg(); }
    static MaybeTensor resolve(const MaybeTensor &t) { return t ? MaybeTensor(t->resolve_neg()) : t; }
    template <class T>
    static T &&resolve(T &&t) {
        return std::forward<T>(t);
    }

    // torch.vmap's rule (minimal_attn/_operator_rules.py) returns new tensors.
    static Result refuse_vmap(Args...) {
        TORCH_CHECK_VALUE(false, "out must be None under torch.vmap, which makes one call of all elements");
    }

    // q, k and v in autocast's dtype, as F.scaled_dot_product_attention casts them.
    static Result autocast(c10::DispatchKeySet keys, Args... args) {
        const auto key = keys.highestPriorityTypeId();
        const c10::impl::ExcludeDispatchKeyGuard guard(key);
        const auto device = key == c10::DispatchKey::AutocastCUDA ? at::kCUDA : at::kCPU;
        const auto cast = [device](const Tensor &t) {
            return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
        };
        return [&](const Tensor &q, const Tensor &k, const Tensor &v, auto &&...rest) {
            return call(cast(q), cast(k), cast(v), std::forward<decltype(rest)>(rest)...);
        }(std::forward<Args>(args)...);
    }

    static void define(torch::Library &m, const char *out, const char *returns) {
        const auto full_name = std::string("forward") + (*name ? "." : "") + name;
        const std::string arguments = std::string("(Tensor q, Tensor k, Tensor v") + kOptions + kForwardOptions;
        m.def((full_name + arguments + out + ") -> " + returns).c_str(), {at::Tag::pt2_compliant_tag});
        // A build without CUDA code has the CUDA key, too: check_backend then raises an error that says what to do.
        for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta})
            m.impl(full_name.c_str(), torch::dispatch(key, &compute));
        m.impl(full_name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, &autograd));
        if constexpr (std::is_void_v<Result>) {
            m.impl(full_name.c_str(), torch::dispatch(c10::DispatchKey::ADInplaceOrView, &bump_version));
            m.impl(full_name.c_str(), torch::dispatch(c10::DispatchKey::Negative, &resolve_negative));
            m.impl(full_name.c_str(), torch::dispatch(c10::DispatchKey::FuncTorchBatched, &refuse_vmap));
        }
        for (const auto key : {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA})
            m.impl(full_name.c_str(), torch::dispatch(key, &autocast));
    }
};

// The operators minimal_attn::backward and backward_and_bias, which also returns the gradient of what is added to
// scores.
template <class Options>
struct BackwardOperator;

template <class... Options>
struct BackwardOperator<void(Options...)> {
    template <class Result>
    static Result compute(const Tensor &do_, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o,
                          const Tensor &lse, const MaybeTensor &dlse, Options... options,
                          std::optional<at::ScalarType> out_dtype, bool deterministic, bool complete) {
        Arguments a{q, k, v, options...};
        a.deterministic = deterministic, a.complete = complete;
        if constexpr (std::is_same_v<Result, Gradients>) return differentiate(a, do_, o, lse, dlse, out_dtype);
        Tensor dbias;
        const Gradients gradients = differentiate(a, do_, o, lse, dlse, out_dtype, {}, &dbias);
        if constexpr (!std::is_same_v<Result, Gradients>) return std::tuple_cat(gradients, std::tuple(dbias));
    }

    template <class Result>
    static void define_one(torch::Library &m, const char *name, const char *more_results) {
        const std::string schema = std::string(name) +
                                   "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse" +
                                   kOptions +
                                   ", ScalarType? out_dtype=None, bool deterministic=False, bool complete=False)"
                                   " -> (Tensor dq, Tensor dk, Tensor dv" +
                                   more_results + ")";
        m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
        for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta})
            m.impl(name, torch::dispatch(key, &compute<Result>));
        m.impl(name, torch::dispatch(c10::DispatchKey::Autograd, autograd::record_backward_of(&compute<Result>)));
    }

    static void define(torch::Library &m) {
        define_one<Gradients>(m, "backward", "");
        define_one<GradientsAndBias>(m, "backward_and_bias", ", Tensor dbias");
    }
};

}  // namespace minimal_attn
