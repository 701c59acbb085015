// cpu/forward.cpp: attention on the CPU: which instruction set, which tiles, which threads.
//
// A thread takes a tile of Br rows of Q, walks its keys in tiles of Bc (kernel.h), then takes the next. kernel.h is
// compiled once for each instruction set, in a namespace of its own. The plan chooses between these at run time.

#include "flash.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>
#endif

#include <c10/core/CPUAllocator.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "cpu/amx.h"
#include "cpu/threads.h"
#include "cpu/tiles.h"
#include "ranges.h"

namespace minimal_attn::cpu {

#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
constexpr int W = 16, max_R = 4, sums = 16, few_rows = 8;
#include "cpu/kernel.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int W = 8, max_R = 2, sums = 12, few_rows = 4;
#include "cpu/kernel.h"
}  // namespace avx2
#pragma GCC pop_options
#endif

namespace portable {
constexpr int W = 4, max_R = 4, sums = 8, few_rows = 4;
#include "cpu/kernel.h"
}  // namespace portable

namespace {

struct InstructionSet {
    const char *name;
    bool (*is_here)();
    bool uses_amx;
    void (*forward)(const Attention &, const QueryTile &, const QueryTile &next, const Buffers &);
};

// The best first.
constexpr InstructionSet sets[] = {
#if defined(__x86_64__) && !defined(__clang__)
    {"AMX", has_amx, true, avx512::forward},
    {"AVX-512", [] { return (bool)__builtin_cpu_supports("avx512f"); }, false, avx512::forward},
    {"AVX2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, false, avx2::forward},
#endif
    {"portable C++", [] { return true; }, false, portable::forward},
};
std::atomic<int> best_allowed{0};  // index of the first one that plans may choose

int choose_set(const Attention &a) {
    int i = best_allowed;
    while (!sets[i].is_here() || (sets[i].uses_amx && !is_worth_amx(a))) ++i;
    return i;
}

}  // namespace

const char *vector_instructions() {
    int i = best_allowed;
    while (!sets[i].is_here() || sets[i].uses_amx) ++i;
    return sets[i].name;
}

namespace {

// The rows of a key head, in tiles.
struct Rows {
    int64_t first, all;
    int count;
};

Rows rows_at(const Attention &a, int64_t tile, int Br) {
    const int64_t all = rows_of_key_head(a), first = (round_up(all, Br) / Br - 1 - tile) * Br;  // causal: longest first
    return {first, all, (int)std::min<int64_t>(Br, all - first)};
}

// Documents with many keys for each query: no tile has queries of two, since it would meet all keys between theirs.
bool cuts_at_documents(const Attention &a) { return a.cu_seqlens_q && has_many_keys(a.Nq, a.Nk); }

// The queries before the first document, those of each, those behind the last one.
std::vector<Rows> rows_of_documents(const Attention &a, int Br) {
    std::vector<Rows> tiles;
    const int64_t group = a.Hq / a.Hkv;
    int64_t begin = 0;
    for (int n = 0; n <= a.documents + 1; ++n) {
        const int64_t end = group * (n <= a.documents ? a.cu_seqlens_q[n] : a.Nq);
        for (int64_t first = begin; first < end; first += Br)
            tiles.push_back({first, end - begin, (int)std::min<int64_t>(Br, end - first)});
        begin = end;
    }
    return tiles;
}

}  // namespace
}  // namespace minimal_attn::cpu

namespace minimal_attn {

const char *const *cpu_instructions() {
    static const auto names = [] {
        std::array<const char *, std::size(cpu::sets) + 1> names{};
        int n = 0;
        for (const auto &set : cpu::sets)
            if (set.is_here()) names[n++] = set.name;
        return names;
    }();
    return names.data();
}

const char *limit_cpu_instructions(const char *name) {
    const auto same = [&](const cpu::InstructionSet &set) { return !std::strcmp(set.name, name) && set.is_here(); };
    const auto found = std::find_if(std::begin(cpu::sets), std::end(cpu::sets), same);
    if (found == std::end(cpu::sets)) return nullptr;
    int before = cpu::best_allowed.exchange(found - std::begin(cpu::sets));
    while (!cpu::sets[before].is_here()) ++before;
    return cpu::sets[before].name;
}

// Br is 128, or 64 if the tiles were too few for all threads. From N 512 on, 128 is up to 7 % faster on two Intel
// cores, 4 % on two AMD cores. With AMX each tile of queries splits its keys again, so Br is 256: 1 to 9 % faster.
// Results have the same bits whatever Br is.
Plan plan_cpu(const Attention &a, const Device &) {
    Plan plan{};
    plan.tile = cpu::choose_set(a);
    plan.kernel = cpu::sets[plan.tile].name;
    plan.threads = at::get_num_threads();
    const int64_t rows = cpu::rows_of_key_head(a), heads = a.B * a.Hkv;
    const auto enough_for = [&](int Br) { return heads * rows >= 4 * Br * plan.threads; };
    const bool uses_amx = cpu::sets[plan.tile].uses_amx;
    plan.Br = rows <= cpu::most_few_rows ? rows : uses_amx && enough_for(256) ? 256 : enough_for(128) ? 128 : 64;
    plan.Bc = cpu::Bc;
    plan.D = cpu::round_up(most_columns(a), 16);
    plan.grid = heads * (cpu::round_up(rows, plan.Br) / plan.Br);
    return plan;
}

const char *launch_cpu(const Attention &a, const Plan &plan, void *, CUstream_st *) {
    const bool uses_amx = cpu::sets[plan.tile].uses_amx;
    const auto forward = cpu::sets[plan.tile].forward;
    const auto cut = cpu::cuts_at_documents(a) ? cpu::rows_of_documents(a, plan.Br) : std::vector<cpu::Rows>();
    const int64_t Tr = cut.empty() ? plan.grid / (a.B * a.Hkv) : (int64_t)cut.size(), tiles = a.B * a.Hkv * Tr;
    const auto tile_at = [&](int64_t tile) {
        const int64_t bh = tile / Tr;
        const cpu::Rows rows = cut.empty() ? cpu::rows_at(a, tile % Tr, plan.Br) : cut[tile % Tr];
        return cpu::QueryTile{bh / a.Hkv, bh % a.Hkv, a.Hq / a.Hkv, rows.first, rows.count, rows.all};
    };
    std::atomic<int64_t> next_tile{0};
    const int64_t threads = std::min<int64_t>(tiles, plan.threads);
    cpu::in_threads(threads, [&] {
        const int64_t floats = cpu::Buffers(nullptr, a, plan.Br, uses_amx).size;
        const auto memory = c10::GetCPUAllocator()->allocate(floats * sizeof(float));
        const cpu::Buffers buffers((float *)memory.get(), a, plan.Br, uses_amx);
        for (int64_t tile; (tile = next_tile++) < tiles;)
            forward(a, tile_at(tile), tile_at(std::min(tile + threads, tiles - 1)), buffers);
    });
    return nullptr;
}

}  // namespace minimal_attn
