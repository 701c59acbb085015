// explain.h: what a call would do, and why no other backend does it. call.cpp includes it, behind the functions that
// make a call: it plans by the same ones, and launches nothing.
#pragma once

#include "binding/call.h"

namespace minimal_attn {
namespace {

using Reasons = decltype(Explanation::others);

// What follows the kernel's name: which tables it reads.
const char *tables_of(const Attention &a) {
    return a.by_sequence                    ? ", by sequence"
           : a.mask_tables.skips_tiles      ? ", general, hidden tiles skipped"
           : a.is_general                   ? ", general"
           : a.key_ranges || a.cu_seqlens_q ? ", ranges"
                                            : "";
}

// Why each backend but `taken` isn't taken, by name. `plan_of` gives a backend's plan of the call.
template <class PlanOf>
Reasons why_not_others(const Arguments &a, const Backend &taken, const Plan &taken_plan, const PlanOf &plan_of) {
    const Tensor &q = a.q;
    Reasons others;
#ifndef WITH_CUDA
    for (const char *name : {"hopper", "portable", "paper"}) others.emplace_back(name, "this build has no CUDA code");
#endif
    bool is_slower = false;
    for (const Backend &other : backends()) {
        if (&other == &taken) {
            is_slower = true;
            continue;
        }
        const auto why_not = [&]() -> std::string {
            if (other.device != q.device().type())
                return c10::str("serves tensors on a ", other.device == at::kCPU ? "CPU" : "CUDA GPU", ", but q is on ",
                                q.device());
            if (const std::string refusal = other.refusal(q); !refusal.empty()) return "serves " + refusal;
            if (q.numel() == 0) return "there is nothing to compute";
            const Plan plan = plan_of(other);
            if (plan.error) return c10::str("this build has no code for q's GPU: ", plan.error);
            // Names of kernels differ as pointers, not always as text.
            if (plan.kernel == taken_plan.kernel && plan.tile == taken_plan.tile && plan.grid == taken_plan.grid)
                return "runs the same kernel as " + taken.name;
            return is_slower ? "is slower than " + taken.name : c10::str("backend=\"", a.backend, "\" was given");
        };
        others.emplace_back(other.name, why_not());
    }
    return others;
}

}  // namespace

Explanation explain(const Arguments &a, Returns returns, const Tensor *out, bool backward) {
    check_q_k_v(a);
    check_options(a);
    const Backend *taken = check_backend(a);
    TORCH_CHECK_VALUE(taken, "q must have data, but is on the meta device");
    TORCH_CHECK_VALUE(!backward || !a.block_table, "block_table must be None with backward=True, but was given");
    check_state(a);
    if (out) check_out(a, *out);
    const bool is_empty = a.q.numel() == 0;
    if (!is_empty) check_data(a, out);
    const Tensor table = a.block_table.value_or(Tensor());
    const auto gathers = [&](const Backend &by) { return a.block_table && !is_empty && !reads_pages(a, by, table); };
    Explanation found{taken->name};
    for (const auto &[t, name] : {std::pair{&a.q, "q"}, {&a.k, "k"}, {&a.v, "v"}})
        if (t->numel() > 0 && (!taken->reads(*t) || (t != &a.q && gathers(*taken)))) found.copied.push_back(name);
    const bool has_prefix = has_two_parts(a) && !is_empty;
    float any;  // plans ask only whether some arguments are there, so that any pointer does
    const auto call_of = [&](const Backend &by, const Arguments &part, Returns returns) {
        Attention call = describe(part, returns, a.q, a.k, a.v, table);
        if (returns == Returns::state) call.l = call.m = &any;
        if (returns == Returns::lse) call.lse = &any;
        if (a.o || a.sinks || part.sees_prefix) call.o_in = call.l_in = call.m_in = &any;
        if (a.o) call.o_in_stride = strides_of(*a.o);
        if (gathers(by)) call.block_table = nullptr;
        choose_tables(call, part, by, backward);
        return call;
    };
    const auto plan_part = [&](const Backend &by, const Arguments &part, Returns returns) {
        Attention call = call_of(by, part, returns);
        Gradient gradient{call};
        gradient.out_dtype = has_prefix ? Dtype::float32 : call.dtype;
        gradient.deterministic = at::globalContext().deterministicAlgorithms();
        Plan plan = backward ? by.plan_backward(gradient, gpu_of(a.q)) : by.plan(call, gpu_of(a.q));
        if (has_ranges(call)) plan.workspace += place_ranges(call, backward, nullptr);
#ifdef WITH_CUDA
        if (call.by_sequence) {
            const auto few = portable::plan_few_queries(call, gpu_of(a.q));
            const int Br = plan.Br;
            if (few.sequences.each_query)
                plan = few.decode;
            else
                plan.workspace += few.decode.workspace;
            plan.workspace += place_sequences(call, Br, nullptr);
        }
#endif
        return plan;
    };
    const auto plan_of = [&](const Backend &by) { return plan_part(by, a, has_prefix ? Returns::state : returns); };
    found.plan = is_empty ? Plan{"nothing to compute"} : plan_of(*taken);
    found.mask = is_empty ? "" : tables_of(call_of(*taken, a, has_prefix ? Returns::state : returns));
    if (has_prefix) {
        const Plan prefix = plan_part(*taken, second_part_of(a), returns);
        found.prefix_kernel = prefix.kernel;
        found.plan.workspace = std::max(found.plan.workspace, prefix.workspace);
    }
    found.others = why_not_others(a, *taken, found.plan, plan_of);
    return found;
}

}  // namespace minimal_attn
