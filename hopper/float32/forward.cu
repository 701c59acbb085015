// forward.cu: float32 on Hopper's tensor cores: each number is hi + lo, two float16s, and each product three of theirs.
// docs/float32.md has its budget, measurements and what was tried. Read half.cu first.
//
//     K, V, float32, in global memory
//        | TMA, a tile at a time                 | ordinary loads, into registers
//        v                                       v
//     float32_tiles in shared memory          a consumer warpgroup that waits for its next work tile
//        | a splitter group of the producer      |
//        v                                       v
//     workspace: hi and lo of each tile, its inverse scale; published by HeadStatus::tiles_split
//        | bulk copies by the producer warp, in any block, once for each work tile that needs the tile
//        v
//     tiles[stage] in shared memory ---> wgmma by the consumer warpgroups
//
// So K and V are split once a call, by whichever block is free. Qi, 64 rows, is split in place by its consumer. If d,
// Nq and Nk are at most 64 and there are no ranges, single.h replaces the producer and the splitters. Then there is no
// workspace. The tables below are for the other tiles.
//
// role                | warps            | registers | does
// producer warp       | 0, one thread    | 32 to 56  | takes work tiles, waits for their split, loads Qi, Kj, Vj.
//                     |                  |           | With ranges all its lanes wait, each for some tiles
// splitter groups     | the last 2 or 3  | 32 to 56  | take split jobs: see splitters.h
// consumer warpgroups | 4 each, 2 to 4   | 112 to 232| 64 rows of a work tile each; take split jobs while they wait;
//                     |                  |           | last, the rows for the fallback: see below
//
// barrier                | arrives                  | waits               | then
// tile_queue full, empty | producer; consumers      | consumers; producer | a work tile's description: written; read
// Q full, empty          | producer, TMA; consumer  | consumer; producer  | Qi: has arrived, as float32s; is read
// KV full, empty         | producer, TMA; consumers | consumers; producer | Kj or Vj, and its scale: arrived; are read
// tile_loaded            | a group's thread 0, TMA  | a splitter group    | its float32 tile is in shared memory
// named, 1 + group       | the group                | the group           | votes, jobs, maxima; fallback.h: tiles
// named, kAllConsumers   | consumers                | consumers           | no more work tiles: memory for the fallback
// in global memory:
// tiles_split            | a thread of the group    | producer warps      | hi and lo of a head are in the workspace
// tiles, with ranges     | a thread of the group    | producer warps      | likewise of one tile
// tiles_taken            | producer warps           | splitter groups     | splitters don't run too far ahead
//
// A consumer warp arrives once; at tile_queue's `empty`, each thread does. producer_acquire waits for `empty`,
// consumer_wait for `full`; consumer_release arrives at `empty`.
//
// Units. hi + lo is a number times the scale of its tile, a power of 2. So a number's unit is the inverse scale:
//
//     variable          | its unit: the true value is the variable times
//     Qi, Kj, Vj        | inverse_scale_Q of the consumer's 64 rows; inverse_scale_K, inverse_scale_V of this tile
//     Sij               | unit_of_S = inverse_scale_Q inverse_scale_K; not stored: it is S_to_m unit_of_m
//     m, m_of_O         | unit_of_m = inverse_scale_Q work.inverse_scale_K, the largest unit_of_S of the head, or
//                       | with ranges of the tiles that the work tile sees
//     Pij, l, flushed_l | 1; relative to m, so a larger m rescales l by alpha. hi + lo of Pij: 1 / kPScale
//     Tij = Pij Vj      | unit_of_T = inverse_scale_V / kPScale
//     Oi                | unit_of_O = unit_of_T of the last Vj that wasn't zeros; 0 before the first, 1 after flush_O
//     O, in HBM         | 1
//
//     a factor | converts
//     S_to_m   | Sij S_to_m is in units of m: S_to_m = unit_of_S / unit_of_m <= 1 (softmax.h)
//     O_to_T   | Oi O_to_T is in units of Tij: O_to_T = unit_of_O / unit_of_T
//     c_of_m   | scores in units of m to exponents of 2: c_of_m = |softmax_scale| log2(e) unit_of_m
//     c_of_S   | likewise Sij, so Pij = exp2(c_of_S Sij - c_of_m m): c_of_S = c_of_m S_to_m
//
// softmax_scale is in no score and not in m, but in both c. If it is negative, mask_scores negates Sij.
//
// Fallback. Each consumer decides for its 64 rows of a work tile, by a vote. The FMA units compute such rows from the
// float32 inputs after the last work tile, since they need the memory of Qi, Kj and Vj (fallback.h).
//
//     found by               | when                              | if
//     wait_for_split, by the | before Qi is loaded, for all rows | hi and lo can't represent a tile of K or V; two Vj
//     producer               |                                   | have scales 2^60 apart; there is no key. With
//                            |                                   | ranges only tiles that the work tile sees count
//     scores_fit             | after Qi is split                 | unit_of_m is too large, too small or NaN
//     any_row_small          | after the last Vj; O is stored    | a row of O is small beside V
//
// Names from other files:
//
//     scheduler.h  TileScheduler: which work tile is next; end_of_keys, fully_visible_keys: keys that 64 rows see
//     pipeline.h   Pipeline; run_roles: starts the roles; opaque (device.h): hides a value from the compiler
//     tma.h        load_Q: Qi of all consumers, in boxes of 32 float32s a row
//     tile.h       Float32Tile, SharedStorage; Float32Work: a work tile, its scales and which keys each consumer sees
//     workspace.h  the workspace: its layout; wait_for_split; tiles_before: how many tiles begin before a key
//     splitters.h  run_splitter; split_while_waiting: a consumer takes split jobs until its work tile has arrived
//     split.h      split_in_place: Qi to hi and lo; barrier_of_group, kAllConsumers; how hi and lo lie in a tile:
//                  boxes of 64 columns, 128 bytes a row, hi and lo in turn
//     hi_lo.h      split_P: a pair of Pij, dithered, to hi and lo; kPScale; nonzero_inverse_scale: 2^-24 for a 0
//     softmax.h    SoftmaxState: m, cm = c_of_m m, l, alpha; mask_scores; update_row_max, exponentiate: the exact
//                  maximum; subtracts_first: |cm| is so large that m must be subtracted before the scaling
//     consumer.h   issue_QK, issue_PV; scores_fit, any_row_small; flush_O: Oi is added to O, in HBM; store_O;
//                  kLog2eS: log2(e), a little more, since tensor cores truncate
//     fallback.h   defer: puts 64 rows on the consumer's list; run_deferred: computes the list
//     launch.h     make_plan, launch_kernels
#include "hopper/float32/fallback.h"
#include "hopper/float32/single.h"
#include "hopper/float32/splitters.h"
#include "hopper/launch.h"

namespace minimal_attn::hopper {
namespace {

// Each addition to l and Oi rounds, and equal terms round alike. So at the tile that begins at a multiple of
// kKeysInSum both move to sums in memory: flush_row_sum, flush_O. docs/numerics.md has what longer sums lose.
constexpr int kKeysInSum = 8192;

// ------------------------------------------------------------------------------ producer warp

// 7. for i. With ranges lane 0 does all but wait_for_split. With a workspace a block's first work tile comes from the
// counter, too. So running blocks get the lowest numbers, and no block waits for splits of a block that has not
// started.
template <class Tile, class Mask>
__device__ void produce(const Float32Parameters &p, SharedStorage<Tile, Mask> &shared) {
    constexpr bool by_warp = kIsRanges<Mask>;  // else one thread runs this
    const Workspace &w = p.workspace;
    Pipeline<1> Q{};
    Pipeline<Tile::Stages> KV{shared.KV};
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    for (int n = -1, b;; tile_queue.advance()) {
        if (!by_warp || threadIdx.x == 0) {
            tile_queue.producer_acquire();
            n = w.heads ? atomicAdd(w.tiles_taken, 1) : TileScheduler<Tile, Mask>{p}.next(n);
            b = describe_work(p, shared, tile_queue, n).b;
        }
        Float32Work<Mask> &work = shared.work[tile_queue.stage()];  // read from there: registers are short
        if constexpr (by_warp) __syncwarp(), b = work.b;
        if (b >= 0) wait_for_split<Tile>(p, work);
        if (by_warp && threadIdx.x != 0) {
            if (b < 0) return;
            continue;
        }
        arrive(tile_queue.full());
        if (b < 0) return;
        load_Q<Tile, 32>(shared, p.Q, work.i0, work.h, work.b, Q);
        if (work.fallback) continue;
        fence_async_global();  // threads wrote the tiles, bulk copies read them
        const int head = workspace_head(p, work), end = 2 * tiles_before<Tile>(work.visible.end);
        for (int tile = 2 * (work.visible.begin / Tile::Bc); tile < end; ++tile) {  // 5. - 6. for j: Kj, then Vj
            KV.producer_acquire();
            arrive_expect_tx(KV.full(), Tile::KBytes + sizeof(float4));
            bulk_load(shared.tiles[KV.stage()], hi_lo_tile<Tile>(w, head, tile), Tile::KBytes, KV.full());
            bulk_load(&shared.inverse_scale[KV.stage()], w.inverse_scale + tile_index(w, head, tile), sizeof(float4),
                      KV.full());
            KV.advance();
        }
    }
}

// ------------------------------------------------------------------------------ consumer warpgroups

// When m rises, and after kKeysInSum keys, the row sum moves to shared memory and l begins again at 0. The sums of
// later tiles may be so small that adding them to the whole sum would lose them. On a row's first tile m rises from
// -inf.
__device__ inline void flush_row_sum(SoftmaxState &softmax, double *flushed_l, bool is_first, bool is_due) {
    if (!is_due && !__any_sync(~0u, softmax.alpha[0] != 1.f || softmax.alpha[1] != 1.f)) return;
    for (int r = 0; r < 2; ++r) {
        double &flushed = flushed_l[row_of_thread() + 8 * r];
        const double l = row_sum<4>(softmax.l[r]), sum = is_first ? l : fma(flushed, (double)softmax.alpha[r], l);
        __syncwarp();  // the row's four lanes have read it
        if (threadIdx.x % 4 == 0) flushed = sum;
        softmax.l[r] = 0.f;
    }
}

// 10. - 11. Pij as hi and lo, for a tile of keys from j0 on. A stale maximum m is that of earlier tiles: Pij may exceed
// 1. If one, times kPScale, exceeds float16, all are computed again by the exact maximum.
template <class Tile, int Count, class FlushO>
__device__ void compute_P(uint32_t (&hi)[Count / 2], uint32_t (&lo)[Count / 2], float (&Sij)[Count],
                          SoftmaxState &softmax, float c_of_m, float c_of_S, float S_to_m, bool uses_stale_max,
                          float dither, const int &begin, int j0, double *flushed_l, const FlushO &flush_O_if_due) {
    float sum[2] = {0.f, 0.f};  // of this tile alone, as in exponentiate
    if (uses_stale_max) {
#pragma unroll
        for (int x = 0; x < Count / 2; ++x) {
            const float P[2] = {exp2_fast(fmaf(Sij[2 * x], c_of_S, -softmax.cm[x % 2])),
                                exp2_fast(fmaf(Sij[2 * x + 1], c_of_S, -softmax.cm[x % 2]))};
            sum[x % 2] += P[0], sum[x % 2] += P[1];
            split_P<Tile>(P[0], P[1], dither, x, hi[x], lo[x]);
        }
    }
    const auto are_all_finite = [&] {
        uint32_t largest = 0;  // of hi, two at a time, as ints: NaN and inf are the largest
#pragma unroll
        for (int x = 0; x < Count / 2; x += 2) largest = __vimax3_s16x2(largest, hi[x], hi[x + 1]);
        return are_finite(largest);
    };
    // No Pij exceeds its sum. Usually the sums are so small that `hi` need not be searched for an inf.
    if (!Tile::IsSingle &&
        __all_sync(~0u, uses_stale_max && (sum[0] + sum[1] < 65000.f / kPScale<Tile> || are_all_finite()))) {
        for (int r = 0; r < 2; ++r) softmax.l[r] += sum[r], softmax.alpha[r] = 1.f;
    } else {
        if (!Tile::IsSingle) flush_O_if_due();
        update_row_max(Sij, softmax, c_of_m, S_to_m);
        exponentiate(Sij, softmax, c_of_S);
        if (!Tile::IsSingle) flush_row_sum(softmax, flushed_l, j0 == begin, j0 % kKeysInSum == 0);
        const float dither = dither_at(j0);  // again: kept, it would take a register
#pragma unroll
        for (int x = 0; x < Count / 2; ++x) split_P<Tile>(Sij[2 * x], Sij[2 * x + 1], dither, x, hi[x], lo[x]);
    }
}

// 12. - 13. O to HBM. Returns whether hi and lo couldn't represent the thread's rows: then the fallback must compute
// them.
template <class Tile, class Mask, class Unit, int Count>
__device__ bool finish_rows(const Parameters &p, const SharedStorage<Tile, Mask> &shared, const Float32Work<Mask> &work,
                            float (&Oi)[Count], SoftmaxState &softmax, float c_of_m, const Unit &unit_of_m,
                            float unit_of_O) {
    for (int r = 0; !Tile::IsSingle && r < 2; ++r)
        if (threadIdx.x % 4 == 0) softmax.l[r] += (float)shared.flushed_l[row_of_thread() + 8 * r];
    const float l[2] = {row_sum<4>(softmax.l[0]), row_sum<4>(softmax.l[1])};  // of whole rows
    // inverse_scale_V is inf with the single tile alone: in other tiles work.fallback is set instead.
    const bool fallback = work.inverse_scale_V == INFINITY || any_row_small<Tile>(Oi, l, work, unit_of_O);
    if (unit_of_O < 0x1p-60f || p.a.l_in) {  // else its product with the row's weight could be subnormal
#pragma unroll
        for (float &x : Oi) x *= unit_of_O;
        unit_of_O = 1.f;
    }
    store_O<Tile>(p, work, work.i0 + row_of_thread(), Oi, softmax, l, c_of_m, unit_of_m(), unit_of_O);
    return fallback;
}

// A consumer warpgroup: splits jobs while it waits for work tiles, then computes its 64 rows of each.
template <class Tile, class Mask>
__device__ void consume(const Float32Parameters &p, SharedStorage<Tile, Mask> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc;
    constexpr int Columns = Tile::Consumers == 2 ? 128 : 64;  // of Tij = Pij Vj at a time: registers are short
    constexpr int Sums = D > 128 ? 4 : 1;                     // of Sij, for long rows: the tensor cores truncate less
    const Attention &a = p.a;
    const int warpgroup = consumer_index();
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    Pipeline<Tile::Stages> KV{shared.KV};
    for (;; tile_queue.consumer_release_by_each()) {
        if constexpr (!Tile::IsSingle) split_while_waiting<Tile>(p, shared, warpgroup, tile_queue);
        tile_queue.consumer_wait();
        const Float32Work<Mask> &work = shared.work[tile_queue.stage()];
        if (work.b < 0) break;
        // Q has one stage, in step with the tile queue, so that its position needs no register.
        const auto Q = [&] { return Pipeline<1>{shared.Q[warpgroup], work.position % 2}; };
        const int &begin = begin_of(work, warpgroup);
        const auto skip_tiles = [&](int j0, const int &end) {  // other warpgroups need them
            for (; j0 < end; j0 += Bc) KV.skip_stage(), KV.skip_stage();
        };
        const auto unit_of_m = [&] {
            return work.inverse_scale_K * nonzero_inverse_scale(shared.inverse_scale_Q[warpgroup]);
        };
        Q().consumer_wait();
        bool fallback = work.fallback;  // false with the single tile
        if (!fallback) {
            split_in_place(SplitterGroup<D, 64, 4>{shared.groups[warpgroup], warpgroup}, shared.Qi[warpgroup][0],
                           {{0, max(work.i1 - work.i0 - 64 * warpgroup, 0)}, false}, shared.inverse_scale_Q[warpgroup]);
            if constexpr (Tile::IsSingle) KV.consumer_wait();  // Kj's inverse scale is known
            fallback = !scores_fit(a, unit_of_m);
            if (fallback) skip_tiles(work.visible.begin, work.visible.end);
        }
        if (fallback) {
            Q().consumer_release();
        } else {
            if constexpr (kIsRanges<Mask>) skip_tiles(work.visible.begin, begin);
            const bool is_lane_0 = is_lane0_kept();
            const float c_of_m = scale_of(a, unit_of_m(), kLog2eS<D>);
            float Oi[D / 2] = {};
            float unit_of_O = 0.f;
            SoftmaxState softmax = SoftmaxState();
            int j0 = begin, end;
            do {  // 5. for j
                // Shared memory is read before the first or after the last wgmma of a group: a load between two would
                // delay the second. The __syncwarps keep ptxas from moving loads there.
                const Keys fully_visible = work.fully_visible[warpgroup];
                const bool needs_mask = j0 < fully_visible.begin || j0 + Bc > fully_visible.end;
                const bool is_last = Tile::IsSingle || j0 + Bc >= work.ends[warpgroup];
                // 9. Sij = Qi Kj^T
                KV.consumer_wait();
                const float inverse_scale_K = read_by_lane0(shared.inverse_scale[KV.stage()].x, is_lane_0);
                const unsigned char *const Qi = shared.Qi[warpgroup][0], *const Kj = shared.tiles[KV.stage()];
                float sums[Sums][Bc / 2], (&Sij)[Bc / 2] = sums[0];
#pragma unroll
                for (int n = 0; n < Sums; ++n) issue_QK<Tile>(sums[n], Qi, Kj, n * (D / Sums), (n + 1) * (D / Sums));
                __syncwarp();
                // A score below 2^-60, in units of m, is next to 0 (kMaxScoreUnit), so S_to_m need not be smaller.
                // c_of_S isn't 0, since 0 times a hidden -inf is NaN.
                const float S_to_m = fmaxf(inverse_scale_K * inverse_of_power(work.inverse_scale_K), 0x1p-60f);
                const float c_of_S = fmaxf(c_of_m * S_to_m, kLeastScale);
                // In the first tile m is -inf: then needs_max is true, too. With a.l m is a result, and must be exact.
                const bool needs_max = subtracts_first(softmax.cm[0]) || subtracts_first(softmax.cm[1]);
                const bool uses_stale_max =
                    !Tile::IsSingle && !a.l && j0 % kKeysInSum != 0 && __all_sync(~0u, !needs_max);
                const float dither = dither_at(j0);
                wgmma_wait<0>(Sij);
#pragma unroll
                for (int n = 1; n < Sums; ++n) {
                    wgmma_wait<0>(sums[n]);
#pragma unroll
                    for (int x = 0; x < Bc / 2; ++x) Sij[x] += sums[n][x];
                }
                KV.consumer_release(inverse_scale_K, is_lane_0);
                if (is_last) Q().consumer_release(0.f, is_lane_0);
                if (needs_mask) mask_scores(Sij, a, work.mask, work.i0 + row_of_thread(), j0);
                // 10. - 11.
                uint32_t hi[Bc / 4], lo[Bc / 4];
                compute_P<Tile>(hi, lo, Sij, softmax, c_of_m, c_of_S, S_to_m, uses_stale_max, dither, begin, j0,
                                shared.flushed_l, [&] {
                                    if (j0 % kKeysInSum == 0 && j0 > begin)
                                        flush_O(p, work, Oi, unit_of_O, softmax, c_of_m, shared.m_of_O,
                                                j0 - begin <= kKeysInSum, false);
                                });
                // 12. Oi = diag(alpha) Oi + Pij Vj, in one FMA
                KV.consumer_wait();
                float inverse_scale_V, factor[2];
#pragma unroll
                for (int x0 = 0; x0 < D / 2; x0 += Columns / 2) {
                    float Tij[Columns / 2];
                    issue_PV<Tile>(Tij, hi, lo, shared.tiles[KV.stage()] + 2 * x0 / kBoxColumns * (2 * Bc * 128));
                    if (x0 == 0) {
                        __syncwarp();
                        inverse_scale_V = read_by_lane0(shared.inverse_scale[KV.stage()].x, is_lane_0);
                        end = work.ends[warpgroup];
                        const float unit_of_T = inverse_scale_V > 0.f ? inverse_scale_V / kPScale<Tile> : unit_of_O;
                        const float O_to_T = unit_of_O * inverse_of_power(unit_of_T);
                        factor[0] = softmax.alpha[0] * O_to_T, factor[1] = softmax.alpha[1] * O_to_T;
                        unit_of_O = unit_of_T;
                    }
                    wgmma_wait<0>(Tij);
#pragma unroll
                    for (int x = 0; x < Columns / 2; ++x)
                        Oi[x0 + x] = Tile::IsSingle ? Tij[x] : fmaf(Oi[x0 + x], factor[x / 2 % 2], Tij[x]);
                }
                KV.consumer_release(inverse_scale_V, is_lane_0);
                j0 += Bc;
            } while (!Tile::IsSingle && j0 < end);  // the same as !is_last, with which ptxas releases Vj's stage later
            if (!Tile::IsSingle && (j0 - 1) / kKeysInSum * kKeysInSum > begin)  // it was flushed before
                flush_O(p, work, Oi, unit_of_O, softmax, c_of_m, shared.m_of_O, false, true);
            fallback = finish_rows<Tile>(p, shared, work, Oi, softmax, c_of_m, unit_of_m, unit_of_O);
            if constexpr (!Tile::IsSingle) skip_tiles(j0, work.visible.end);
        }
        if (named_barrier_any(barrier_of_group(warpgroup), 128, fallback)) defer(p, shared, work, warpgroup);
        tile_queue.position = work.position;  // the same number, read again: so it took no register in the loop
    }
    named_barrier_sync(kAllConsumers, 128 * Tile::Consumers);  // all consumers have read Qi, Kj and Vj
    run_deferred(p, shared, warpgroup);
}

template <class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    float32_hopper_kernel(const __grid_constant__ Float32Parameters p) {
    auto &shared = shared_storage<SharedStorage<Tile, Mask>>();
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, Tile::IsSingle ? 256 : 32 * warps);  // single.h: the producer's threads, too
        for (auto &Q : shared.Q) init_pipeline(Q, 4);
        init_pipeline(shared.KV, warps);
        for (int &deferred : shared.deferred) deferred = -1;
        for (Barrier &loaded : shared.tile_loaded) init(loaded, 1);
        for (SplitJob &job : shared.current_job) job.head = -1;
        for (SplitJob &next : shared.next_job) next.head = 0;
    };
    const auto produce_or_split = [&] {
        if constexpr (Tile::IsSingle) return produce_and_split(p, shared);
        if (threadIdx.x < (kIsRanges<Mask> ? 32 : 1)) produce(p, shared);
        constexpr int threads = 32 * Tile::SplitterWarps, first = 128 - Tile::Splitters * threads;
        if (threadIdx.x >= first && p.workspace.heads)
            run_splitter(p, shared, Tile::Splitters > 1 ? broadcast_lane0((threadIdx.x - first) / threads) : 0);
    };
    run_roles<Tile>(init_barriers, produce_or_split, [&] { consume(p, shared); });
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

// D, Br, Bc, stages, splitter groups. Other d use the next of 64, 128 and 256. d 64 with seven stages and four
// consumers: the same within 3 %.
using Tiles = TileList<Float32Tile<64, 64, 64, 2, 1, 2>,     // single: 48 KB of shared memory, two blocks; single.h
                       Float32Tile<64, 192, 64, 7, 3>,       // d64_few: 208 KB
                       Float32Tile<64, 256, 64, 6, 3>,       // d64: 208 KB
                       Float32Tile<128, 128, 64, 3, 2>,      // d128_few: 224 KB
                       Float32Tile<128, 192, 64, 3, 1>,      // d128: 224 KB
                       Float32Tile<256, 128, 32, 2, 1>>;     // d256: 224 KB
enum TileOf { single, d64_few, d64, d128_few, d128, d256 };  // its place in Tiles

// d 64 has four consumers, unless rows or work tiles are few. d 128 has three, and one splitter group. It has two of
// both where work tiles are few, or where tiles of 128 rows have a tenth fewer rows in all: a head's last is fuller.
TileOf tile_of(const Attention &a, int multiprocessors) {
    const auto work_tiles = [&](int rows) { return a.B * a.Hq * ((a.Nq + rows - 1) / rows); };
    const auto rows_each = [&](int rows) { return (work_tiles(rows) + multiprocessors - 1) / multiprocessors * rows; };
    if (has_ranges(a)) return a.d <= 64 ? d64 : a.d <= 128 ? d128_few : d256;
    if (a.d <= 64 && a.Nq <= 64 && a.Nk <= 64) return single;
    if (a.d <= 64) return a.Nq <= 192 || work_tiles(256) < multiprocessors ? d64_few : d64;
    if (a.d > 128) return d256;
    const bool may_be_few = a.Nq <= 640 || work_tiles(192) <= 2 * multiprocessors;
    return may_be_few && 10 * rows_each(128) <= 9 * rows_each(192) ? d128_few : d128;
}

template <class Tile, class Use>
auto with_mask_of(const Attention &a, const Use &use) {
    if constexpr (Tile::ServesRanges)
        return with_mask(a, use);
    else
        return use(Band());
}

// Heads of k and v that are one and the same (stride 0) are split once.
Attention with_distinct_heads(Attention a) {
    if (a.k_stride.head == 0 && a.v_stride.head == 0) a.Hkv = 1;
    return a;
}

}  // namespace

Plan plan_float32(const Attention &attention, const Device &device) {
    const Attention a = with_distinct_heads(attention);
    const TileOf choice = tile_of(a, device.multiprocessors);
    return with_tile(choice, Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        const char *const name = Tile::IsSingle ? "float32, a single tile" : "float32";
        Plan plan = with_mask_of<Tile>(a, [&](auto mask) {
            return make_plan<Tile, SharedStorage<Tile, Narrow<decltype(mask)>>>(a, device, name, choice);
        });
        Workspace w;
        const int64_t bytes = layout_workspace<Tile>(a, device.multiprocessors, nullptr, w);
        if (bytes > 0) {
            const int64_t jobs = (int64_t)w.jobs_per_head * w.batches * a.Hkv;
            plan.workspace = bytes;
            plan.grid = std::min<int64_t>(std::max(plan.grid, jobs), device.multiprocessors * Tile::BlocksPerSM);
        }
        return plan;
    });
}

const char *launch_float32(const Attention &attention, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Attention a = with_distinct_heads(attention);
    return with_tile(plan.tile, Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        Float32Parameters p{{a}};
        const bool has_workspace = layout_workspace<Tile>(a, plan.multiprocessors, workspace, p.workspace) > 0;
        const Zeros counters(workspace, has_workspace ? p.workspace.counter_bytes : plan.workspace, stream);
        if (has_workspace) move_counters(p.workspace, workspace, counters);
        return with_mask_of<Tile>(a, [&](auto mask) {
            return launch_kernels<Tile>({float32_hopper_kernel<Tile, Narrow<decltype(mask)>>}, p, plan, counters,
                                        stream);
        });
    });
}

}  // namespace minimal_attn::hopper
