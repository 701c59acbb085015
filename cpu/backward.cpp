// cpu/backward.cpp: the backward pass on the CPU. A thread takes a tile of Bc keys of a key head, walks the tiles of
// queries that see it (gradient.h), and takes the next. So dKj and dVj are sums of one thread. dQi is a sum over tiles
// of keys. Threads add to it in the order of the keys, so its bits don't depend on the number of threads.
//
// A tile of keys waits only for tiles that were taken before it. So the earliest unfinished tile never waits, and all
// tiles end. The first tiles of all key heads are taken first, so that threads rarely wait. Where a bias wants its
// gradient a thread takes several tiles at once (bias_gradient.h).

#include "flash.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>
#endif

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "cpu/threads.h"
#include "cpu/tiles.h"
#include "ranges.h"
#include "cpu/bias_gradient.h"

namespace minimal_attn::cpu {

constexpr int gradient_Br = 64;  // rows of Q of a tile

struct GradientTile {
    int64_t b, h;  // batch, key head
    int j0;
};

int64_t query_tiles_of_head(const Attention &a) { return round_up(rows_of_key_head(a), gradient_Br) / gradient_Br; }

// Tile n of the queries of all key heads.
QueryTile query_tile(const Attention &a, int64_t n) {
    const int64_t Tr = query_tiles_of_head(a), bh = n / Tr, first_row = n % Tr * gradient_Br;
    const int rows = (int)std::min<int64_t>(gradient_Br, rows_of_key_head(a) - first_row);
    return {bh / a.Hkv, bh % a.Hkv, a.Hq / a.Hkv, first_row, rows};
}

// A thread's memory, in float32. D and D_v are d and d_v rounded up to multiples of 16. Kj may hold rows of V.
struct GradientBuffers {
    float *Kj, *dKj, *dVj, *Kj_T, *Vj_T, *Qi, *dOi, *Pij, *dSij;
    float *Qi_double, *Sij_double;  // in float64, of tiles that have a row with a large lse
    float *slopes, *Zij;            // with softcap, with dropout; else null
    float *dQi;                     // only if all keys are one tile; else it is in GradientWorkspace::dQ
    int64_t size = 0;

    // memory begins at a multiple of 64 bytes, and so does every buffer. With null only the size is computed.
    GradientBuffers(float *memory, const Attention &a) {
        const int64_t D = D_of(a), D_v = D_v_of(a), Br = gradient_Br;
        const auto take = [&](float *&buffer, int64_t floats) {
            buffer = memory ? memory + size : nullptr;
            size += floats;
        };
        take(Kj, Bc * std::max(D, D_v)), take(dKj, Bc * D), take(dVj, Bc * D_v), take(Kj_T, Bc * D),
            take(Vj_T, Bc * D_v);
        take(Qi, Br * D), take(dOi, Br * D_v), take(Pij, Br * Bc), take(dSij, Br * Bc);
        take(Qi_double, 2 * Br * D), take(Sij_double, 2 * Br * Bc);
        take(dQi, a.Nk > Bc ? 0 : Br * D);
        take(slopes, Br * Bc), take(Zij, Br * Bc);
        if (!has_softcap(a)) slopes = nullptr;
        if (!has_dropout(a)) Zij = nullptr;
    }

    // The buffers of a tile that begins so many keys later. In the transposed ones it ends behind Bc columns, which are
    // not read.
    GradientBuffers from(int key, const Attention &a) const {
        GradientBuffers later = *this;
        const int64_t D = D_of(a);
        later.Kj += key * D, later.dKj += key * D, later.dVj += key * D_v_of(a), later.Kj_T += key, later.Vj_T += key;
        return later;
    }
};

// A row in the backward pass. Where lse is large, m and log_l replace it: P = exp(softmax_scale (S - m) - log_l). lse
// is +inf where terms (scores.h) hide all keys: then P = 0.
struct GradientRow {
    float lse, D, D_low;  // D + D_low = rowsum(dO o O) - dlse
    double m, log_l;      // m is a score before the scaling
};

// What the threads share.
struct GradientWorkspace {
    GradientRow *rows;  // (B, Hkv, rows of the key head)
    float *dQ;  // (B, Hkv, rows of the key head, d rounded up to a multiple of 16), unless all keys are one tile
    std::atomic<int> *turns;  // for each tile of queries, how many tiles of keys its dQi has
    int64_t size = 0;         // bytes

    GradientWorkspace(void *memory, const Attention &a) {
        const int64_t rows = rows_of_key_head(a), heads = a.B * a.Hkv;
        const auto take = [&](int64_t bytes) {
            char *const taken = (char *)memory + size;
            size += round_up(bytes, 64);
            return taken;
        };
        this->rows = (GradientRow *)take(heads * rows * sizeof(GradientRow));
        dQ = (float *)take(a.Nk > Bc ? heads * rows * D_of(a) * sizeof(float) : 0);
        turns = (std::atomic<int> *)take(heads * query_tiles_of_head(a) * sizeof(int));
    }
    GradientRow *rows_of(const Attention &a, const QueryTile &t) const {
        return rows + (t.b * a.Hkv + t.h) * rows_of_key_head(a) + t.first_row;
    }
};

struct BackwardFunctions {
    bool (*begin_rows)(const Gradient &, const QueryTile &, GradientRow *);
    void (*normalize_rows)(const Gradient &, const QueryTile &, GradientRow *, const GradientBuffers &);
    void (*backward_tile)(const Gradient &, const GradientTile &, const GradientWorkspace &, const GradientBuffers &,
                          BiasSums &);
};

#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx512f")
namespace gradient_avx512 {
constexpr int W = 16, max_R = 4, sums = 16, few_rows = 8;
#include "cpu/gradient.h"
}  // namespace gradient_avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace gradient_avx2 {
constexpr int W = 8, max_R = 2, sums = 12, few_rows = 4;
#include "cpu/gradient.h"
}  // namespace gradient_avx2
#pragma GCC pop_options
#endif

namespace gradient_portable {
constexpr int W = 4, max_R = 4, sums = 8, few_rows = 4;
#include "cpu/gradient.h"
}  // namespace gradient_portable

namespace {

BackwardFunctions functions_for(const char *instructions, Dtype dtype) {
#if defined(__x86_64__) && !defined(__clang__)
    if (!std::strcmp(instructions, "AVX-512")) return gradient_avx512::functions_of(dtype);
    if (!std::strcmp(instructions, "AVX2")) return gradient_avx2::functions_of(dtype);
#endif
    return gradient_portable::functions_of(dtype);
}

void store_sums(const Gradient &g, const Item &item, BiasSums &sums) {
    if (!g.dbias) return;
    if (g.dbias_dtype == Dtype::float32) return sums.store(g, item, (float *)g.dbias);
    if (g.dbias_dtype == Dtype::float16) return sums.store(g, item, (c10::Half *)g.dbias);
    sums.store(g, item, (c10::BFloat16 *)g.dbias);
}

}  // namespace
}  // namespace minimal_attn::cpu

namespace minimal_attn {

Plan plan_cpu_backward(const Gradient &g, const Device &) {
    const Attention &a = g.a;
    Plan plan{};
    plan.kernel = cpu::vector_instructions();
    plan.threads = at::get_num_threads();
    plan.Br = cpu::gradient_Br, plan.Bc = cpu::Bc, plan.D = cpu::round_up(most_columns(a), 16);
    plan.grid = cpu::items(g);
    plan.workspace = cpu::GradientWorkspace(nullptr, a).size;
    return plan;
}

const char *launch_cpu_backward(const Gradient &g, const Plan &plan, void *memory, CUstream_st *) {
    const Attention &a = g.a;
    const cpu::BackwardFunctions functions = cpu::functions_for(plan.kernel, a.dtype);
    const cpu::GradientWorkspace workspace(memory, a);
    const int64_t query_tiles = a.B * a.Hkv * cpu::query_tiles_of_head(a);
    std::atomic<int64_t> next_query_tile{0}, next_item{0};
    const auto allocate = [&] {
        return c10::GetCPUAllocator()->allocate(cpu::GradientBuffers(nullptr, a).size * sizeof(float));
    };
    cpu::in_threads(std::min<int64_t>(query_tiles, plan.threads), [&] {
        at::DataPtr own;
        for (int64_t n; (n = next_query_tile++) < query_tiles;) {
            const cpu::QueryTile tile = cpu::query_tile(a, n);
            cpu::GradientRow *const rows = workspace.rows_of(a, tile);
            if (!functions.begin_rows(g, tile, rows) || !g.is_complete) continue;
            if (!own) own = allocate();
            functions.normalize_rows(g, tile, rows, cpu::GradientBuffers((float *)own.get(), a));
        }
    });
    std::memset((void *)workspace.turns, 0, (char *)memory + workspace.size - (char *)workspace.turns);
    cpu::in_threads(std::min<int64_t>(plan.grid, plan.threads), [&] {
        const auto own = allocate();
        const cpu::GradientBuffers buffers((float *)own.get(), a);
        cpu::BiasSums sums(g);  // before an item is taken: other threads would wait for one that bad_alloc ended
        for (int64_t n; (n = next_item++) < plan.grid;) {
            const cpu::Item item = cpu::item_at(g, n);
            sums.clear();
            for (int64_t tile = item.tile0; tile < item.tile1; ++tile)
                for (int64_t b = item.b0; b < item.b1; ++b)
                    for (int64_t h = item.h0; h < item.h1; ++h)
                        functions.backward_tile(g, {b, h, (int)(tile * cpu::Bc)}, workspace, buffers, sums);
            cpu::store_sums(g, item, sums);
        }
    });
    return nullptr;
}

}  // namespace minimal_attn
