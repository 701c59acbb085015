// call.cpp: a call's way to a backend: checks, memory for the results, flash.h's `Attention` or `Gradient`, the
// backend's `Plan`, its launch.

#define AT_PER_OPERATOR_HEADERS  // torch's headers then include what they need, not all operators: 5 s of compiling

#include "binding/call.h"

#include <ATen/Context.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "binding/backends.h"
#include "binding/checks.h"
#include "binding/tensors.h"
#include "dropout.h"
#include "portable/portable.h"
#include "ranges.h"
#include "scores.h"

#ifdef WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace minimal_attn {
namespace {

std::atomic<int> shared_memory_limit{std::numeric_limits<int>::max()};

// The backend that "auto" or the name means; null for meta tensors, which need none.
const Backend *check_backend(const Arguments &a) {
    const auto device = a.q.device().type();
    const bool is_auto = a.backend == "auto";
    bool is_known = is_auto;
    for (const Backend &backend : backends()) {
        if (!is_auto && backend.name != a.backend) continue;
        is_known = true;
        if (backend.device != device) continue;
        const std::string refusal = backend.refusal(a.q);
        if (refusal.empty()) return &backend;
        TORCH_CHECK_VALUE(is_auto, "backend \"", backend.name, "\" serves ", refusal);
    }
    size_t length = std::min<size_t>(a.backend.size(), 40);
    while (length < a.backend.size() && (a.backend[length] & 0xC0) == 0x80) --length;  // not within a UTF-8 character
    auto name = std::string(a.backend.substr(0, length));
    std::replace_if(name.begin(), name.end(), [](unsigned char c) { return c < ' '; }, '?');  // an error is one line
    TORCH_CHECK_VALUE(is_known, "backend must be \"auto\" or one of this build's backends ", backend_names(),
                      ", but was \"", name, "\"");
    if (device == at::kMeta) return nullptr;
    TORCH_CHECK_VALUE(is_auto, "backend must serve q's device ", a.q.device(), ", but \"", name, "\" doesn't");
    TORCH_CHECK_VALUE(false, "q must be on the cpu, but is on ", a.q.device(),
                      ": this build of minimal_attn has no CUDA code; rebuild it where the GPU is, by make build");
}

// ---------------------------------------------------------------------------------------------- results

// What the caller gets and hasn't given.
void allocate(const Arguments &a, Returns returns, Results &results) {
    const bool is_state = returns == Returns::state;
    if (!results.o.defined()) results.o = empty_like_q(a.q, a.v.sym_size(3), is_state ? at::kFloat : a.q.scalar_type());
    const auto allocate_rows = [&](Tensor &t, bool is_wanted) {
        if (is_wanted && !t.defined())
            t = at::empty_symint(a.q.sym_sizes().slice(0, 3), a.q.options().dtype(at::kFloat));
    };
    allocate_rows(results.l, is_state), allocate_rows(results.m, is_state);
    allocate_rows(results.lse, returns == Returns::lse);
}

// ---------------------------------------------------------------------------------------------- a call

int64_t sum_within(int64_t x, int64_t y) {  // any int64 plus any int64, kept within +-kNoBound
    const __int128 sum = (__int128)x + y;
    return sum < -kNoBound ? -kNoBound : sum > kNoBound ? kNoBound : (int64_t)sum;
}

void set_mask(Attention &attention, const Arguments &a) {
    const int64_t left = a.window_size[0].expect_int(), right = a.causal ? 0 : a.window_size[1].expect_int();
    const int64_t offset = a.offset ? a.offset->expect_int() : 0;
    attention.first = left < 0 ? -kNoBound : sum_within(offset, -left);
    attention.last = right < 0 ? kNoBound : sum_within(offset, right);
    attention.offset_from_end = !a.offset && !a.offsets;
}

void set_scores(Attention &attention, const Arguments &a) {
    const float scale = (float)a.softmax_scale.value_or(1.0 / std::sqrt((double)attention.d));
    attention.softmax_scale = scale, attention.scores = {scale};
    if (!a.softcap || *a.softcap == 0.) return;
    const float softcap = (float)*a.softcap, most = std::numeric_limits<float>::max();
    const float ratio = std::clamp(scale / softcap, -most, most);
    if (scale != 0.f && !std::isnormal(ratio)) return;  // no score that float32 holds comes near such a softcap
    attention.softmax_scale = softcap, attention.scores = {scale, softcap, ratio};
}

// Whether two neighbouring numbers may be read at once: those of neighbouring keys are neighbours, and lie at even
// places.
bool lies_in_pairs(const Tensor &t) {
    const auto is_even = [&](int64_t dim) { return t.size(dim) == 1 || t.stride(dim) % 2 == 0; };
    return t.stride(3) == 1 && t.size(3) % 2 == 0 && is_even(0) && is_even(1) && is_even(2) &&
           (uintptr_t)t.const_data_ptr() % (2 * t.element_size()) == 0;
}

// What is added to scores. The caller's tensors have the memory.
void set_terms(Attention &attention, const Arguments &a) {
    Terms &terms = attention.terms;
    constexpr int64_t far = int64_t(1) << 60;  // beyond all keys, and sums with it fit
    terms.offset = a.offset ? std::clamp(a.offset->expect_int(), -far, far) : 0;
    if (a.alibi_slopes) {
        const Tensor slopes = a.alibi_slopes->expand({attention.B, attention.Hq});
        terms.alibi_slopes = slopes.const_data_ptr<float>();
        terms.slopes_stride = slopes.stride(0), terms.slope_stride = slopes.stride(1);
    }
    const bool is_bool = a.attn_mask && a.attn_mask->scalar_type() == at::kBool;
    terms.in_pairs = true;
    const auto expanded = [&](const Tensor &t, PairStrides &stride) {
        const Tensor all = t.expand({attention.B, attention.Hq, attention.Nq, attention.Nk});
        stride = {all.stride(0), all.stride(1), all.stride(2), all.stride(3)};
        terms.in_pairs &= lies_in_pairs(all);
        return all.const_data_ptr();
    };
    if (is_bool) terms.mask = (const unsigned char *)expanded(*a.attn_mask, terms.mask_stride);
    if (const MaybeTensor &bias = bias_of(a)) {
        terms.bias = expanded(*bias, terms.bias_stride);
        terms.bias_is_float32 = bias->scalar_type() == at::kFloat;
    }
    if (has_terms(attention)) terms.unit = std::exchange(attention.softmax_scale, 1.f);
}

void set_dropout(Attention &attention, const Arguments &a) {
    const int steps = (int)std::lround(a.dropout_p.value_or(0.) * kDropoutSteps);
    if (steps == 0) return;
    // All, or at most so many that float16 holds what the others are multiplied by.
    const int dropped = steps == kDropoutSteps ? steps : std::min(steps, kDropoutSteps - 2);
    const float kept = dropped == kDropoutSteps ? 0.f : (float)kDropoutSteps / (kDropoutSteps - dropped);
    attention.dropout = {(unsigned)dropped, kept, a.dropout_seed->const_data_ptr<int64_t>()};
}

// With prefix_k and a window a call has two parts, which see different keys: those of the window, and of the first
// prefix_k keys those before the window. Both are masks that the backends know.
bool has_two_parts(const Arguments &a) { return a.prefix_k && a.window_size[0].expect_int() >= 0; }
Arguments second_part_of(Arguments a) { return a.sees_prefix = true, a; }

Device gpu_of(const Tensor &q) {
#ifdef WITH_CUDA
    if (q.is_cuda()) {
        const auto *gpu = at::cuda::getDeviceProperties(q.device().index());
        return {gpu->multiProcessorCount, std::min((int)gpu->sharedMemPerBlockOptin, shared_memory_limit.load())};
    }
#endif
    return {};
}

void check_launch(const char *error, const Tensor &q) {
    if (!error) return;
#ifdef WITH_CUDA
    const auto *gpu = at::cuda::getCurrentDeviceProperties();
    const bool has_no_code = std::string_view(error).find("no kernel image") != std::string_view::npos;
    TORCH_CHECK(!has_no_code, "q is on ", q.device(), ", a ", gpu->name, " of compute capability ", gpu->major, ".",
                gpu->minor, ", for which this build has no code (", error, "): it has code for ", cuda_architectures(),
                "; code for this GPU is built by TORCH_CUDA_ARCH_LIST=", gpu->major, ".", gpu->minor, " make build");
    TORCH_CHECK(false, "the launch on ", q.device(), ", a ", gpu->name, ", failed: ", error);
#endif
}

// From PyTorch's allocator directly: a tensor would cost 0.5 us more.
c10::DataPtr allocate_bytes(int64_t bytes, const Tensor &q) {
    return bytes > 0 ? c10::GetAllocator(q.device().type())->allocate(bytes) : c10::DataPtr();
}

CUstream_st *stream_of(const Tensor &q) {
#ifdef WITH_CUDA
    if (q.is_cuda()) return at::cuda::getCurrentCUDAStream();
#endif
    return nullptr;
}

// `call` is an Attention or a Gradient.
template <class Call>
void plan_and_launch(const Call &call, Plan (*make_plan)(const Call &, const Device &),
                     const char *(*launch)(const Call &, const Plan &, void *, CUstream_st *), const Tensor &q) {
    const Plan plan = make_plan(call, gpu_of(q));
    check_launch(plan.error, q);
    const c10::DataPtr workspace = allocate_bytes(plan.workspace, q);
    check_launch(launch(call, plan, workspace.get(), stream_of(q)), q);
}

const int *ints_of(const Tensor &t) { return t.defined() ? t.const_data_ptr<int>() : nullptr; }
const float *floats_of(const Tensor &t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }

// The earlier state, as kernels read it: l and m dense. A sink is a key that was seen before, with the score sink and
// the value 0: m = sink, l = 1, o = 0. A sink of -inf is no key.
Results earlier_state(const Arguments &a) {
    if (a.o) return {has_contiguous_rows(*a.o) ? *a.o : aligned_copy(*a.o), a.l->contiguous(), a.m->contiguous()};
    if (!a.sinks) return {};
    const Tensor m = a.sinks->to(at::kFloat).unsqueeze(-1).expand(a.q.sizes().slice(0, 3)).contiguous();
    const Tensor zero = at::zeros({1, 1, 1, a.v.size(3)}, m.options());
    return {zero.expand({a.q.size(0), a.q.size(1), a.q.size(2), -1}),
            m.ne(-std::numeric_limits<double>::infinity()).to(at::kFloat), m};
}

constexpr size_t kIntOptions = 8, kKeyRanges = 3;  // how many there are below; which one has three dimensions
// set(tensor, where Attention has it) for each option that is a tensor of ints.
template <class Set>
void for_each_int_option(const Arguments &a, Attention &attention, const Set &set) {
    set(a.seqlens_k, attention.seqlens_k), set(a.leftpad_k, attention.leftpad_k), set(a.offsets, attention.offset);
    set(a.key_ranges, attention.key_ranges);
    set(a.cu_seqlens_q, attention.cu_seqlens_q), set(a.cu_seqlens_k, attention.cu_seqlens_k);
    set(a.sees_prefix ? a.prefix_k : kDefault<const MaybeTensor &>, attention.prefix_k);
    set(a.seqused_k, attention.seqused_k);
}

// The second part's keys end where prefix_k does: in a batch as by seqlens_k. Positions stay.
void end_at_prefix(Attention &attention, std::array<Tensor, kIntOptions> &ints) {
    auto &[seqlens, leftpad, offset, ranges, cu_seqlens_q, cu_seqlens_k, prefix, seqused] = ints;
    if (cu_seqlens_k.defined()) return;  // band_of_document (ranges.h) knows prefix_k
    Tensor end = leftpad.defined() ? prefix.clamp(0, attention.Nk).add(leftpad.clamp(0, attention.Nk)) : prefix;
    if (seqlens.defined()) {
        seqlens = seqlens.clamp(0, attention.Nk), end = end.minimum(seqlens);
        if (attention.offset_from_end) offset = seqlens.sub(attention.Nq);
    } else if (attention.offset_from_end) {
        attention.last += attention.Nk - attention.Nq, attention.terms.offset += attention.Nk - attention.Nq;
    }
    seqlens = end, attention.seqlens_k = ints_of(seqlens), attention.offset = ints_of(offset);
    attention.offset_from_end = false;
}

// Sets these options, as int32. The tensors that it returns have the memory.
std::array<Tensor, kIntOptions> set_int32s(const Arguments &a, Attention &attention) {
    std::array<Tensor, kIntOptions> tensors;
    auto next = tensors.begin();
    for_each_int_option(a, attention, [&](const MaybeTensor &t, const int *&to) {
        *next = int32_of(t);
        to = ints_of(*next++);
    });
    const Tensor &ranges = tensors[kKeyRanges];
    if (attention.key_ranges) attention.key_ranges_stride = ranges.size(0) > 1 ? ranges.stride(0) : 0;
    if (a.sees_prefix) end_at_prefix(attention, tensors);
    return tensors;
}

// Fills the tables of ranges.h where the call has ranges. What it returns has their memory.
c10::DataPtr make_tables(Attention &attention, bool backward, const Tensor &q) {
    if (!has_ranges(attention)) return {};
    c10::DataPtr memory = allocate_bytes(place_ranges(attention, backward, nullptr), q);
    place_ranges(attention, backward, (char *)memory.get());
#ifdef WITH_CUDA
    if (q.is_cuda()) {
        check_launch(make_ranges_cuda(attention, backward, stream_of(q)), q);
        return memory;
    }
#endif
    make_ranges_cpu(attention);
    return memory;
}

// The part of flash.h's struct that the shapes, strides and options decide. With a block_table k and v are pages.
Attention describe(const Arguments &a, Returns returns, const Tensor &q, const Tensor &k, const Tensor &v,
                   const Tensor &block_table) {
    Attention attention{};
    attention.dtype = dtype_of(q);
    attention.o_dtype = returns == Returns::state ? Dtype::float32 : attention.dtype;
    attention.B = q.size(0), attention.Hq = q.size(1), attention.Hkv = k.size(1);
    attention.Nq = (int)q.size(2), attention.Nk = (int)k.size(2), attention.d = (int)q.size(3);
    attention.d_v = (int)v.size(3);
    attention.q = q.const_data_ptr(), attention.k = k.const_data_ptr(), attention.v = v.const_data_ptr();
    attention.q_stride = strides_of(q), attention.k_stride = strides_of(k), attention.v_stride = strides_of(v);
    if (block_table.defined()) {
        attention.Nk = (int)(block_table.size(1) * k.size(2));
        attention.block_table = (const int *)block_table.const_data_ptr();
        attention.block_table_stride = block_table.stride(0);
        attention.pages = k.size(0), attention.page_size = (int)k.size(2);
    }
    set_scores(attention, a);
    set_mask(attention, a);
    set_terms(attention, a);
    set_dropout(attention, a);
    if (a.cu_seqlens_q) attention.documents = (int)(a.cu_seqlens_q->size(0) - 1);
    // Of any integer dtype: plans ask only whether they are there. set_int32s() sets them anew.
    for_each_int_option(a, attention, [](const MaybeTensor &t, const int *&to) {
        to = t ? (const int *)t->const_data_ptr() : nullptr;
    });
    if (a.sees_prefix) {
        attention.last = attention.first - 1, attention.first = -kNoBound;
        if (!a.cu_seqlens_k) attention.seqlens_k = attention.prefix_k;  // end_at_prefix()
    }
    return attention;
}

// Which tables the backend's kernels read: those of sequences.h, of ranges.h, or none.
void choose_tables(Attention &attention, const Arguments &a, const Backend &backend, bool backward = false) {
    if (!backend.takes_decode) return;
    TORCH_CHECK_VALUE(kHasGeneral || !needs_general(attention),
                      has_dropout(attention)   ? "dropout_p must be None or 0"
                      : has_softcap(attention) ? "softcap must be None or 0"
                      : a.alibi_slopes         ? "alibi_slopes must be None"
                      : a.attn_mask            ? "attn_mask must be None"
                                               : "bias must be None",
                      " in backend \"", backend.name,
                      "\", but was given: this build has no kernels for it (MINIMAL_ATTN_KERNELS=plain)");
    // Documents one by one. Where they have about as many keys as queries, ranges are faster. With pages or seqused_k
    // no such ratio is known.
    const bool has_few_queries = a.seqused_k || a.block_table || has_many_keys(a.q.size(2), a.k.size(2));
    attention.by_sequence = a.cu_seqlens_q && !a.key_ranges && has_few_queries && !backward &&
                            !needs_general(attention) && !portable::is_wide(attention);
    attention.is_general = needs_general(attention) && (backward || !backend.takes_decode(attention, gpu_of(a.q)));
    attention.mask_tables.skips_tiles =
        has_mask_tables(attention) && backend.skips_tiles && backend.skips_tiles(attention, backward);
}

#ifdef WITH_CUDA
// Documents one by one, by the tables of sequences.h.
void run_by_sequence(Attention &attention, const Backend &backend, const Tensor &q) {
    const Device device = gpu_of(q);
    portable::FewQueries few = portable::plan_few_queries(attention, device);
    const Plan plan = backend.plan(attention, device);  // of documents with more queries
    const bool has_few = few.sequences.most_queries > 0, has_others = !has_few || !few.sequences.each_query;
    if (has_others) check_launch(plan.error, q);
    few.sequences.Br = plan.Br;
    const c10::DataPtr tables = allocate_bytes(place_sequences(attention, plan.Br, nullptr), q);
    place_sequences(attention, plan.Br, (char *)tables.get());
    check_launch(fill_sequences_cuda(attention, few.sequences, stream_of(q)), q);
    const c10::DataPtr workspace = allocate_bytes(has_others ? plan.workspace : 0, q);
    if (has_others) check_launch(backend.launch(attention, plan, workspace.get(), stream_of(q)), q);
    if (!has_few) return;
    const c10::DataPtr of_few = allocate_bytes(few.decode.workspace, q);
    check_launch(portable::launch_few_queries(attention, few, of_few.get(), stream_of(q)), q);
}
#else
void run_by_sequence(Attention &, const Backend &, const Tensor &) {}
#endif

// q, k, v, or what a backward pass reads besides.
Tensor readable(const Backend &backend, const Tensor &t) {
    return t.numel() == 0 || backend.reads(t) ? t : aligned_copy(t);
}

// Whether the backend reads k and v page by page, in each part. Else gather() copies them first.
bool reads_pages(const Arguments &a, const Backend &backend, const Tensor &block_table) {
    if (has_two_parts(a) && !a.sees_prefix && !reads_pages(second_part_of(a), backend, block_table)) return false;
    Attention attention = describe(a, Returns::o, a.q, a.k, a.v, block_table);
    choose_tables(attention, a, backend);
    return backend.reads(a.k) && backend.reads(a.v) && backend.reads_pages(attention, gpu_of(a.q));
}

}  // namespace

Results run(const Arguments &a, Returns returns, const Tensor *out, Results results) {
    check_q_k_v(a);
    check_options(a);
    const Backend *backend = check_backend(a);
    check_state(a);
    if (out) check_out(a, *out), results.o = *out;
#ifdef WITH_CUDA
    const c10::cuda::OptionalCUDAGuard guard(a.q.is_cuda() ? std::optional(a.q.device()) : std::nullopt);
#endif
    allocate(a, returns, results);
    if (!backend || a.q.numel() == 0) return results;
    check_data(a, out);

    // What is copied here lives until the launch is queued; the allocator keeps the order of the stream.
    Tensor block_table = int32_of(a.block_table), k = a.k, v = a.v;
    if (a.block_table && !reads_pages(a, *backend, block_table)) {
        k = gather(k, block_table), v = gather(v, block_table);
        block_table = Tensor();
    }
    const Tensor q = readable(*backend, a.q);
    k = readable(*backend, k), v = readable(*backend, v);
    const auto compute = [&](const Arguments &part, Returns returns, const Results &before, const Results &results) {
        Attention attention = describe(part, returns, q, k, v, block_table);
        choose_tables(attention, part, *backend);
        const auto ints = set_int32s(part, attention);
        const c10::DataPtr tables = make_tables(attention, /*backward=*/false, q);
        if (before.o.defined()) attention.o_in_stride = strides_of(before.o);
        attention.o_in = floats_of(before.o), attention.l_in = floats_of(before.l),
        attention.m_in = floats_of(before.m);

        attention.o = results.o.mutable_data_ptr(), attention.o_stride = strides_of(results.o);
        const auto written = [](const Tensor &t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; };
        attention.l = written(results.l), attention.m = written(results.m), attention.lse = written(results.lse);
        if (attention.lse)
            attention.lse_stride = strides_of(results.lse), attention.lse_rows = (int)results.lse.size(2);
        if (attention.by_sequence)
            run_by_sequence(attention, *backend, q);
        else
            plan_and_launch(attention, backend->plan, backend->launch, q);
#ifdef WITH_CUDA
        // hopper may pass general calls on to portable. A general call with a band promises what a band does. paper may
        // compute what is wide, and a term may hide all from one row: then each row is looked at.
        const int rows_alike = portable::is_wide(attention) || has_terms(attention) ? 1
                               : attention.is_general ? std::min(backend->rows_alike, kRowsAlikeOfPortable)
                                                      : backend->rows_alike;
        if (q.is_cuda() && (attention.key_ranges || (attention.cu_seqlens_q && !attention.by_sequence)))
            check_launch(isolate_rows_cuda(attention, rows_alike, stream_of(q)), q);
#endif
    };
    if (!has_two_parts(a)) return compute(a, returns, earlier_state(a), results), results;
    Results window;
    allocate(a, Returns::state, window);
    compute(a, Returns::state, earlier_state(a), window);
    compute(second_part_of(a), returns, window, results);
    return results;
}

namespace {

// What the backward passes of a call read. As in run(), what is copied here lives until the launch is queued.
struct BackwardInputs {
    Tensor q, k, v, do_, o, lse, dlse;
};

// Where the kernels write the gradient of a bias, in its shape or a broadcast one.
void set_dbias(Gradient &g, const Tensor &dbias) {
    g.dbias = dbias.mutable_data_ptr(), g.dbias_dtype = dtype_of(dbias);
    std::array<int64_t, 4> strides{};
    for (int64_t i = 0, n = dbias.dim(); i < n; ++i) strides[4 - n + i] = dbias.size(i) > 1 ? dbias.stride(i) : 0;
    g.dbias_stride = {strides[0], strides[1], strides[2], strides[3]};
}

// The gradients of one part of a call. dbias may be undefined.
void differentiate_part(const Arguments &a, const Backend &backend, const BackwardInputs &in, const Gradients &results,
                        const Tensor &dbias) {
    Gradient g{describe(a, Returns::o, in.q, in.k, in.v, {})};
    choose_tables(g.a, a, backend, /*backward=*/true);
    g.o = in.o.const_data_ptr(), g.o_stride = strides_of(in.o);
    g.do_ = in.do_.const_data_ptr(), g.do_stride = strides_of(in.do_);
    g.lse = floats_of(in.lse), g.dlse = floats_of(in.dlse);
    g.is_complete = a.complete && !has_two_parts(a);
    g.deterministic = a.deterministic || at::globalContext().deterministicAlgorithms();
    const auto &[dq, dk, dv] = results;
    g.out_dtype = dtype_of(dq);
    g.dq = dq.mutable_data_ptr(), g.dq_stride = strides_of(dq);
    g.dk = dk.mutable_data_ptr(), g.dk_stride = strides_of(dk);
    g.dv = dv.mutable_data_ptr(), g.dv_stride = strides_of(dv);
    const bool has_bias_pass = dbias.defined() && backend.sums_bias && !backend.sums_bias(g);
    if (dbias.defined() && !has_bias_pass) set_dbias(g, dbias);
    const auto ints = set_int32s(a, g.a);
    c10::DataPtr tables = make_tables(g.a, /*backward=*/true, in.q);
    plan_and_launch(g, backend.plan_backward, backend.launch_backward, in.q);
#ifdef WITH_CUDA
    if (!has_bias_pass) return;
    set_dbias(g, dbias);
    if (!g.a.is_general) g.a.is_general = true, tables = make_tables(g.a, /*backward=*/true, in.q);  // as its kernel is
    plan_and_launch(g, plan_bias_cuda, launch_bias_cuda, in.q);
#endif
}

void check_bias_gradient(const Arguments &a) {
    TORCH_CHECK_VALUE(bias_of(a), "bias must be given for its gradient, but was None");
    TORCH_CHECK_VALUE(kHasGeneral || !a.q.is_cuda(),
                      "bias must not require grad in this build, but does (MINIMAL_ATTN_KERNELS=plain)");
#ifdef WITH_CUDA
    // large_rows.cu has no kernel there.
    TORCH_CHECK_VALUE(!a.q.is_cuda() || a.q.scalar_type() != at::kBFloat16 ||
                          at::cuda::getDeviceProperties(a.q.device().index())->major >= 8,
                      "bias must not require grad in bfloat16 before compute capability 8.0, but does: use float16");
#endif
}

}  // namespace

Gradients differentiate(const Arguments &a, const Tensor &do_, const Tensor &o, const Tensor &lse,
                        const MaybeTensor &dlse, std::optional<at::ScalarType> out_dtype, Gradients results,
                        Tensor *dbias) {
    const Tensor &q = a.q, &k = a.k, &v = a.v;
    check_q_k_v(a);
    check_options(a);
    check_gradients(a, do_, o, lse, dlse, out_dtype);
    const Backend *backend = check_backend(a);
    if (dbias) check_bias_gradient(a);
#ifdef WITH_CUDA
    const c10::cuda::OptionalCUDAGuard guard(q.is_cuda() ? std::optional(q.device()) : std::nullopt);
#endif
    const auto allocate = [&](at::ScalarType dtype, Gradients found = {}) {
        auto &[dq, dk, dv] = found;
        for (const auto &[t, like] : {std::pair{&dq, &q}, {&dk, &k}, {&dv, &v}})
            if (!t->defined()) *t = empty_like_q(*like, like->sym_size(3), dtype);
        return found;
    };
    const auto allocate_bias = [&](std::optional<at::ScalarType> dtype) {
        if (!dbias) return Tensor();
        const Tensor &bias = *bias_of(a);
        return at::empty_symint(bias.sym_sizes(), bias.options().dtype(dtype.value_or(bias.scalar_type())));
    };
    results = allocate(out_dtype.value_or(q.scalar_type()), std::move(results));
    const Tensor of_bias = allocate_bias(std::nullopt);
    if (dbias) *dbias = of_bias;
    if (!backend) return results;
    auto &[dq, dk, dv] = results;
    if (q.numel() == 0 || k.numel() == 0) {
        for (Tensor *t : {&dq, &dk, &dv}) t->zero_();
        if (dbias) dbias->zero_();
        return results;
    }
    check_inputs(a);
    for (const auto &[t, name] : {std::pair{&do_, "do"}, {&o, "o"}, {&lse, "lse"}, {dlse ? &*dlse : &lse, "dlse"}})
        check_memory(*t, name);
    const auto of_q = [&](const Tensor &t) { return readable(*backend, t.to(q.scalar_type())); };
    const BackwardInputs inputs = {
        of_q(q), of_q(k), of_q(v), of_q(do_), of_q(o), lse.contiguous(), dlse ? dlse->contiguous() : Tensor()};
    if (!has_two_parts(a)) return differentiate_part(a, *backend, inputs, results, of_bias), results;
    const Gradients window = dq.scalar_type() == at::kFloat ? results : allocate(at::kFloat);
    const Gradients prefix = allocate(at::kFloat);
    const Tensor bias_of_window = allocate_bias(at::kFloat), bias_of_prefix = allocate_bias(at::kFloat);
    differentiate_part(a, *backend, inputs, window, bias_of_window);
    differentiate_part(second_part_of(a), *backend, inputs, prefix, bias_of_prefix);
    at::add_out(dq, std::get<0>(window), std::get<0>(prefix));
    at::add_out(dk, std::get<1>(window), std::get<1>(prefix));
    at::add_out(dv, std::get<2>(window), std::get<2>(prefix));
    if (dbias) at::add_out(*dbias, bias_of_window, bias_of_prefix);
    return results;
}

bool has_fast_backward(const Tensor &q) {
    if (q.is_cpu()) return true;
    Gradient g{};
    g.a.dtype = g.out_dtype = dtype_of(q);
    g.a.B = g.a.Hq = g.a.Hkv = 1, g.a.Nq = g.a.Nk = 8;
    // Its dtype, device, and whether it is wide decide; other sizes may be symbols.
    g.a.d = g.a.d_v = TORCH_GUARD_OR_FALSE(q.sym_size(3).sym_gt(portable::kMostColumns)) ? portable::kMostOfHalf : 64;
    const Device device = gpu_of(q);
    // On the other GPUs tf32_backward.cu is slower than PyTorch's kernel from d 128 on, though not than paper's.
    if (q.is_cuda() && g.a.dtype == Dtype::float32 && device.shared_memory < portable::kSharedMemoryOfFastTf32)
        return false;
    for (const Backend &backend : backends())
        if (backend.device == q.device().type() && backend.refusal(q).empty())
            return std::string_view(backend.plan_backward(g, device).kernel) != kPaperBackward;
    return false;
}

bool has_fast_pairs(const Tensor &q) {
    if (q.is_cpu()) return true;
    if (q.dim() < 3) return false;
    const auto type = q.scalar_type();
    const bool is_half = type == at::kHalf || type == at::kBFloat16;
    const Backend &best = backends().front();
    return q.is_cuda() && is_half && TORCH_GUARD_OR_FALSE(q.sym_size(-1).sym_le(portable::kMostColumns)) &&
           best.name == "hopper" && kHasGeneral && best.refusal(q).empty();
}

// ---------------------------------------------------------------------------------------------- this build

std::vector<std::string> backend_names() {
    std::vector<std::string> names;
    for (const Backend &backend : backends()) names.push_back(backend.name);
    return names;
}

const char *cuda_architectures() {
#ifdef WITH_CUDA
    return MINIMAL_ATTN_ARCHS;
#else
    return "";
#endif
}

bool has_all_tiles() {
#ifdef MINIMAL_ATTN_ALL_TILES
    return true;
#else
    return std::string_view(cuda_architectures()).find("9.0a") == std::string_view::npos;
#endif
}

int limit_shared_memory(int bytes) { return shared_memory_limit.exchange(bytes); }

}  // namespace minimal_attn

#include "binding/explain.h"
