#include "hopper/epilogue.h"
#include "hopper/launch.h"
#include "hopper/float32/fallback.h"
#include "hopper/scheduler.h"
#include "hopper/softmax.h"
#include "hopper/float32/split.h"
#include "hopper/float32/workspace.h"
namespace minimal_attn::hopper {
namespace {

// By a counter from the first tile on: only a block that runs has one, as others wait for what it splits.
template <class Tile>
__device__ int tile_after(const ParametersOfParts &p, int n) {
    if (p.workspace.heads) return atomicAdd(p.workspace.works_taken, 1);
    return TileScheduler<Tile>{p}.next(n);
}

template <int D>
constexpr bool kAlwaysSubtracts = D > 128;  // of float32

// For D > 128 (tiles of 32 keys) no more tiles are added up in Oi, since each addition is rounded: with one sum of 2048
// the error at N 65536 was 0.93 times SDPA efficient's, with these 0.48 times.
constexpr int kTilesInOi = 256;

// Tensor cores truncate every sum towards 0, so that Sij and Tij are, in the mean, too small by these parts of
// themselves. What they are multiplied by anyway makes up for it, which takes a quarter off the error of O (NOTES.md);
// as floats it is 0.58 and 1.27 times 2^-23. For D > 128 Sij is four sums of 64 columns, each as short as d 64's. The
// m that is returned stays as it is: exact where Sij is.
template <int D>
constexpr double kShortS = (D <= 64 || D > 128 ? 0.8 : 1.4) * 0x1p-23;
template <int D>
constexpr float kLog2eOfS = 1.4426950408889634 * (1 + kShortS<D>);
// Of Tij, a sum of 64 keys; for D > 128 of 32, which is short by half of 2^-23, and no float says half. Not where few
// keys have the weight, as the only one that a row sees: such a sum isn't truncated. Of l a key has 1 at most by its
// row's largest score as m; by an m from before up to 15.99, and is corrected for nothing, by 2^-23.
template <int D>
constexpr float kShortT = D <= 128 ? 0x1p-23f : 0.f;

// 5. - 6. for j: the parts of Kj and Vj, in the order in which they are used
template <class Tile>
__device__ void produce_parts(const ParametersOfParts &p, SharedOfParts<Tile> &shared, const WorkOfParts &work,
                              Pipeline<Tile::Stages> &KV) {
    if (work.by_floats) return;
    const Workspace &w = p.workspace;
    fence_async_global();  // the parts were written by threads, and are read by asynchronous copies
    const int head = head_of(p, work), end = 2 * tiles_before<Tile>(work.visible.end);
    for (int n = 2 * (work.visible.begin / Tile::Bc); n < end; ++n) {
        KV.producer_acquire();
        arrive_expect_tx(KV.full(), Tile::KBytes + sizeof(float4));
        bulk_load(shared.tiles[KV.stage()], parts_of<Tile>(w, head, n), Tile::KBytes, KV.full());
        bulk_load(&shared.unscale[KV.stage()], w.unscale + place_of(w, head, n), sizeof(float4), KV.full());
        KV.advance();
    }
}

// 7. for i: says what the n-th tile is, or that there is none; of float32 once its K and V are split.
template <class Tile>
__device__ WorkTile publish_work_tile(const ParametersOfParts &p, SharedOfParts<Tile> &shared,
                                      Pipeline<kQueueStages> &tile_queue, int n) {
    const WorkTile work = TileScheduler<Tile>{p}.tile(n);
    static_cast<WorkTile &>(shared.work[tile_queue.stage()]) = work;
    {
        WorkOfParts &there = shared.work[tile_queue.stage()];
        there.n = n, there.place = tile_queue.position, there.by_floats = false;
        if (work.b >= 0) {
            for (int i0 = work.i0, warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup, i0 += 64) {
                there.ends[warpgroup] =
                    i0 < work.i1 ? min(keys_of_any(work.band, i0, min(i0 + 64, work.i1)).end, work.visible.end) : 0;
                there.fully_visible[warpgroup] = fully_visible_keys(p, work, i0);
            }
            if constexpr (Tile::FromWorkspace) await_parts<Tile>(p, there);
        }
    }
    arrive(shared.tile_queue[tile_queue.stage()].full);
    return work;
}

// 8. Qi, 64 rows for each consumer
template <class Tile>
__device__ void produce_Q(const ParametersOfParts &p, SharedOfParts<Tile> &shared, int i0, int h, int b,
                          Pipeline<Tile::QStages> &Q) {
    for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
        Q.barriers = shared.Q[warpgroup];
        Q.producer_acquire();
        load_tile<64, Tile::Boxes, kBoxColumns / Tile::Parts>(shared.Qi[warpgroup][Q.stage()], p.Q, i0 + 64 * warpgroup,
                                                              h, b, Q.full());
    }
    Q.advance();
}

// Of the small tile: all warps split Kj, then Vj, where TMA put them. Thread 0 does what produce does, too, but loads
// first, and writes what is learnt of the scales.
template <class Tile>
__device__ void produce_and_split(const ParametersOfParts &p, SharedOfParts<Tile> &shared) {
    Pipeline<1> Q{};
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    int parity = 0;  // of this work's phase of floats_there and KV
    const auto load_whole = [&](bool is_V, int key_head, int b) {
        wait(shared.KV[is_V].empty, parity ^ 1);
        load_tile<Tile::Bc, Tile::Boxes, kBoxColumns / Tile::Parts>(shared.tiles[is_V], is_V ? p.V : p.K, 0, key_head,
                                                                    b, shared.floats_there[is_V]);
    };
    const auto split_whole = [&](bool is_V, WorkOfParts &work) {
        wait(shared.floats_there[is_V], parity);
        const float unscale = split_in_place(Team<Tile, Tile::Bc, 4>{shared, Tile::Consumers}, shared.tiles[is_V],
                                             {work.band.keys, is_V}, shared.unscale[is_V].x);
        if (threadIdx.x == 0) {
            if (is_V)
                work.unscaleV = unscale;
            else
                work.unscaleK = or_of_zeros(unscale);
            arrive(shared.KV[is_V].full);
        }
    };
    for (int n = -1;; parity ^= 1, __syncwarp(), tile_queue.consumer_release()) {
        if (threadIdx.x == 0) {
            tile_queue.producer_acquire();
            n = tile_after<Tile>(p, n);
            // Tile n is head n, from row 0, since Nq <= Br and Nk <= Bc: its loads needn't wait for work_of.
            if (n < p.work_tiles) {
                const int b = n / p.Hq, h = n % p.Hq, key_head = h / p.group;
                load_whole(false, key_head, b);
                produce_Q<Tile>(p, shared, 0, h, b, Q);
                load_whole(true, key_head, b);
            }
            publish_work_tile<Tile>(p, shared, tile_queue, n);
        }
        __syncwarp();
        tile_queue.consumer_wait();
        WorkOfParts &work = shared.work[tile_queue.stage()];
        if (work.b < 0) return;
        split_whole(false, work);
        split_whole(true, work);
    }
}

template <class Tile>
__device__ void produce(const ParametersOfParts &p, SharedOfParts<Tile> &shared) {
    Pipeline<Tile::QStages> Q{};
    Pipeline<Tile::Stages> tiles{};
    tiles.barriers = shared.KV;
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    for (int n = -1;; tile_queue.advance()) {
        tile_queue.producer_acquire();
        n = tile_after<Tile>(p, n);
        const WorkTile work = publish_work_tile<Tile>(p, shared, tile_queue, n);
        if (work.b < 0) return;
        const WorkOfParts &there = shared.work[tile_queue.stage()];  // not `work`: registers are short
        produce_Q<Tile>(p, shared, there.i0, there.h, there.b, Q);
        produce_parts<Tile>(p, shared, there, tiles);
    }
}

// x, in a place of a ring, for all lanes. One lane reads it, the one whose arrival gives the place back: another's read
// could still be under way then, since an arrival doesn't wait for a load. Its own has to be used before, see
// release(x).
__device__ float by_one(const float &x, bool is_lane_0) { return broadcast_lane0(is_lane_0 ? x : 0.f); }
// Whether this is a warp's first lane, out of a shuffle, so that it is kept: ptxas would ask for threadIdx.x anew in a
// loop, where others wait for the answer (S2R; NOTES.md).
__device__ bool kept_lane_0() { return __shfl_sync(~0u, threadIdx.x, threadIdx.x % 32) % 32 == 0; }

// Sij = Qi Kj^T of columns x0 to x1, begun. In parts: the products with a low part first, while the sum is small
template <class T, class Tile, int Count>
__device__ void issue_QK(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj, int x0 = 0,
                         int x1 = Tile::D) {
    constexpr int Parts = Tile::Parts, QBox = 64 * 128, KBox = Tile::Bc * 128;
    Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    if (Parts == 2) Q.low = broadcast_lane0(Q.low);  // or else what follows from it is kept in local memory
    wgmma_fence();
#pragma unroll
    for (int product = Parts == 2 ? 0 : 2; product < 3; ++product)
#pragma unroll
        for (int x = x0; x < x1; x += 16)
            wgmma_ABt(T(), Sij, Q + x / kBoxColumns * (Parts * QBox) + x % kBoxColumns * 2 + (product == 0) * QBox,
                      K + x / kBoxColumns * (Parts * KBox) + x % kBoxColumns * 2 + (product == 1) * KBox,
                      x > x0 || (Parts == 2 && product > 0));
    wgmma_commit();
}

// Tij = Pij Vj, begun, and not added to what Tij was
template <class Tile, int CountT, int CountP>
__device__ void issue_PV_parts(float (&Tij)[CountT], const uint32_t (&hi)[CountP], const uint32_t (&lo)[CountP],
                               const unsigned char *Vj) {
    const Descriptor V = descriptor(Vj, 2 * Tile::Bc * 128);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) {
        wgmma_AB(__half(), Tij, &hi[j / 4], V + Tile::Bc * 128 + j * 128, j > 0);
        wgmma_AB(__half(), Tij, &lo[j / 4], V + j * 128);
    }
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) wgmma_AB(__half(), Tij, &hi[j / 4], V + j * 128);
    wgmma_commit();
}

// 12. - 13. O alone, of float32s. What is rare goes to store_state: code that runs once a work is waited for, line by
// line (NOTES.md), so that it should be short and in one piece.
template <int D, int Count>
__device__ void store_floats(const ParametersOfParts &p, const WorkTile &work, int i, const float (&Oi)[Count],
                             const SoftmaxState &softmax, const float (&l)[2], float c, float unit, float unitO) {
    // A row that sees no key has l = 0, too.
    if (p.a.l || !p.aligned || __any_sync(~0u, l[0] == 0.f || l[1] == 0.f))
        return store_state<kAlwaysSubtracts<D>>(p, work, i, Oi, softmax, c, unit, unitO, kShortT<D>);
    const int quad = opaque(threadIdx.x) % 4, first = first_column(quad);
    float *const o = (float *)p.a.o + row_offset(p.a.o_stride, work, i) + first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float4 x[Count / 8];
        exchange_columns(x, Oi, r, quad);
        // 1 / l by a step of Newton's: shorter than a division
        const float near = __fdividef(1.f, l[r]), inverse = fmaf(near, fmaf(-l[r], near, 1.f), near);
        const float weight = inverse * undo_truncation(unitO, l[r], kShortT<D>);
        store_row(o + 8 * r * p.a.o_stride.row, i + 8 * r < work.i1 ? p.a.d - first : 0, weight, x);
    }
}

// Whether rows of O are far below V, so that what the parts lose may count: of small Vj, as where the largest Pij are
// those of rows of zeros in V, or of small Pij, as where a few small Vj have the weight. Each Pij, scaled, may lose
// 2^-25, one way or the other (dither_of), n of them sqrt(n) times that: by the second bound 2^-20 of O's largest
// number, if the Vj that count are as large as the largest. Means of as many ordinary numbers are 2^5 larger than both
// bounds. Rows with nearly all the weight on one key of small values (a sink) may be below: 13 to 17 times the time.
// A row with l = 0 sees no key.
template <class Tile, int Count>
__device__ bool are_small(const float (&Oi)[Count], const float (&l)[2], const WorkOfParts &work, float unitO) {
    const float unit = work.unscaleV * inverse_of_power(unitO), n = work.visible.end - work.visible.begin;
    bool small = false;
    for (int r = 0; r < 2; ++r) {
        float most = 0.f;
#pragma unroll
        for (int x = 2 * r; x < Count; x += x % 2 ? 3 : 1) most = fmaxf(most, fabsf(Oi[x]));
        small |= row_max<4>(most) < unit * rsqrtf(n) * fmaxf(256.f * l[r], 0x1p11f / kP<Tile> * n) && l[r] > 0.f &&
                 work.i0 + row_of_thread() + 8 * r < work.i1;
    }
    return __any_sync(~0u, small);
}

// If m moved in the warp, l goes to shared memory, of the whole row, and begins at 0: what is added before m's next
// move may be so little, tile by tile, that beside it all would be lost. With a row's first tile m moves, from -inf.
__device__ void set_l_aside(SoftmaxState &softmax, float *l_of_rows, bool is_first) {
    if (!__any_sync(~0u, softmax.alpha[0] != 1.f || softmax.alpha[1] != 1.f)) return;
    for (int r = 0; r < 2; ++r) {
        float &aside = l_of_rows[row_of_thread() + 8 * r];
        const float l = row_sum<4>(softmax.l[r]), sum = is_first ? l : fmaf(aside, softmax.alpha[r], l);
        __syncwarp();  // the row's four lanes have read it
        if (threadIdx.x % 4 == 0) aside = sum;
        softmax.l[r] = 0.f;
    }
}

// At the end what was set aside is added, by the row's first lane.
__device__ void join_l(SoftmaxState &softmax, const float *l_of_rows) {
    for (int r = 0; r < 2; ++r)
        if (threadIdx.x % 4 == 0) softmax.l[r] += l_of_rows[row_of_thread() + 8 * r];
}

// consume for float32, in parts
template <class Tile>
__device__ void consume_parts(const ParametersOfParts &p, SharedOfParts<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc;
    constexpr int Columns = Tile::Consumers == 2 ? 128 : 64;  // of Vj at once: registers for Tij
    constexpr int InOi = kTilesInOi * Bc, Sums = D > 128 ? 4 : 1;
    // The small tile has one tile of keys, so what only a loop needs is left out: code that runs once is waited for,
    // line by line (NOTES.md).
    constexpr bool loops = !Tile::SplitsAll;
    const Attention &a = p.a;
    const int warpgroup = consumer_index();
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    Pipeline<Tile::Stages> KV{shared.KV};
    const float dither_of_first = dither_of(0);
    for (;; tile_queue.consumer_release()) {
        // If the work isn't there yet, its K and V are being split. All go the same way, who see the phase end and who
        // don't.
        if (Tile::FromWorkspace && p.workspace.heads && a.d % 4 == 0)
            while (
                !named_barrier_any(barrier_of(warpgroup), 128, phase_is_over(tile_queue.full(), tile_queue.phase())) &&
                help<Tile>(p, shared, warpgroup)) {
            }
        tile_queue.consumer_wait();
        const WorkOfParts &work = shared.work[tile_queue.stage()];
        if (work.b < 0) {
            if (!named_barrier_any(barrier_of(warpgroup), 128, shared.left[threadIdx.x / 32 - 4] >= 0)) return;
            break;
        }
        // Q's one place goes with the works: in step, so that it needs no register of its own.
        const auto Q = [&] { return Pipeline<1>{shared.Q[warpgroup], (loops ? work.place : tile_queue.position) % 2}; };
        const auto at = [&](bool is_V) { return loops ? KV.stage() : is_V; };  // of the small tile a constant
        const auto pass_tiles = [&](int j0) {                                  // that other warpgroups need
            for (; j0 < work.visible.end; j0 += Bc) KV.skip_stage(), KV.skip_stage();
        };
        const auto unit = [&] { return work.unscaleK * or_of_zeros(shared.unscaleQ[warpgroup]); };  // of m
        Q().consumer_wait();
        bool by_floats = work.by_floats;
        if (!by_floats) {
            split_in_place(Team<Tile, 64, 4>{shared, warpgroup}, shared.Qi[warpgroup][0],
                           {{0, work.i1 - work.i0 - 64 * warpgroup}, false}, shared.unscaleQ[warpgroup]);
            if constexpr (Tile::SplitsAll) KV.consumer_wait();  // Kj's unscale is known
            // If the parts don't carry Qi or, of the small tile, Kj (inf), or m couldn't be a float in this unit, or
            // products may lose too much of a score (kMostUnit); or softmax_scale is NaN.
            const float scale = fabsf(a.softmax_scale);
            by_floats = !(unit() > 1e-30f && unit() * fmaxf(scale, 1.f) < 1e30f && unit() * scale * a.d < kMostUnit);
            if (by_floats) pass_tiles(work.visible.begin);
        }
        if (by_floats) {
            Q().consumer_release();
        } else {
            const bool is_lane_0 = kept_lane_0();
            const float c = scale_of(a, unit(), kLog2eOfS<D>);
            float Oi[D / 2] = {};
            // Oi times unitO is what it stands for: unscaleV / kP of the last Vj that wasn't zeros, 0 before there was
            // one, 1 after add_up.
            float unitO = 0.f;
            SoftmaxState softmax = SoftmaxState();
            int j0 = work.visible.begin, end;
            do {  // 5. for j
                if constexpr (D > 128) {
                    const int keys = j0 - work.visible.begin;
                    if (keys > 0 && keys % InOi == 0)
                        add_up(p, work, Oi, unitO, softmax, c, shared.m_of_O, keys == InOi, false);
                }
                // What shared memory is asked comes before products, or behind the last one begun: between two, where
                // ptxas would put it but for the __syncwarps, the second product waits for the answer.
                const Keys fully_visible = work.fully_visible[warpgroup];
                const bool is_cut = j0 < fully_visible.begin || j0 + Bc > fully_visible.end;
                const bool is_last = !loops || j0 + Bc >= work.ends[warpgroup];
                // 9. Sij = Qi Kj^T, for long rows as several sums: the tensor cores truncate less
                KV.consumer_wait();
                const float unscaleK = by_one(shared.unscale[at(false)].x, is_lane_0);
                const unsigned char *const Qi = shared.Qi[warpgroup][0], *const Kj = shared.tiles[at(false)];
                float sums[Sums][Bc / 2], (&Sij)[Bc / 2] = sums[0];
#pragma unroll
                for (int n = 0; n < Sums; ++n)
                    issue_QK<__half, Tile>(sums[n], Qi, Kj, n * (D / Sums), (n + 1) * (D / Sums));
                __syncwarp();  // keeps what follows behind the products, see above
                // Kj's unit in units of m, the head's largest. Below 2^-60 its scores are next to 0 (kMostUnit limits
                // units), as are those of zeros. c_tile is not 0, or else 0 times a hidden -inf.
                const float tile_unit = fmaxf(unscaleK * inverse_of_power(work.unscaleK), 0x1p-60f);
                const float c_tile = fmaxf(c * tile_unit, kLeastScale);
                const bool needs_max = subtracts_first<kAlwaysSubtracts<D>>(softmax.cm[0]) ||
                                       subtracts_first<kAlwaysSubtracts<D>>(softmax.cm[1]);
                const bool hopes = Tile::Hopes && !a.l && __all_sync(~0u, !needs_max);
                const auto dither_here = [&] { return loops ? dither_of(j0) : dither_of_first; };
                const float dither = dither_here();
                wgmma_wait<0>(Sij);
#pragma unroll
                for (int n = 1; n < Sums; ++n) {
                    wgmma_wait<0>(sums[n]);
#pragma unroll
                    for (int x = 0; x < Bc / 2; ++x) Sij[x] += sums[n][x];
                }
                KV.consumer_release(unscaleK, is_lane_0);
                if (is_last) Q().consumer_release(0.f, is_lane_0);
                if (is_cut) negate_and_mask(Sij, a, work, j0);
                // 10. - 11. Pij in two parts, times kP: the A's of Pij Vj
                uint32_t hi[Bc / 4], lo[Bc / 4];
                float sum[2] = {0.f, 0.f};  // of this tile alone, as in exponentiate
                const auto are_all_finite = [&] {
                    uint32_t largest = 0;  // of the hi's, two at a time, as ints: the largest are NaN and inf
#pragma unroll
                    for (int x = 0; x < Bc / 4; x += 2) largest = __vimax3_s16x2(largest, hi[x], hi[x + 1]);
                    return are_finite(largest);
                };
                if (hopes) {
#pragma unroll
                    for (int x = 0; x < Bc / 4; ++x) {
                        const float P[2] = {exp2_fast(fmaf(Sij[2 * x], c_tile, -softmax.cm[x % 2])),
                                            exp2_fast(fmaf(Sij[2 * x + 1], c_tile, -softmax.cm[x % 2]))};
                        sum[x % 2] += P[0], sum[x % 2] += P[1];
                        split_P<Tile>(P[0], P[1], dither, x, hi[x], lo[x]);
                    }
                }
                // Mostly the sums say that none times kP is beyond float16.
                if (Tile::Hopes &&
                    __all_sync(~0u, hopes && (sum[0] + sum[1] < 65000.f / kP<Tile> || are_all_finite()))) {
                    for (int r = 0; r < 2; ++r) softmax.l[r] += sum[r], softmax.alpha[r] = 1.f;
                } else {
                    update_row_max<kAlwaysSubtracts<D>>(Sij, softmax, c, tile_unit);
                    exponentiate<kAlwaysSubtracts<D>>(Sij, softmax, c_tile);
                    if (Tile::Hopes) set_l_aside(softmax, shared.l_of_rows, j0 == work.visible.begin);
                    const float dither = dither_here();  // again: kept, it would take a register
#pragma unroll
                    for (int x = 0; x < Bc / 4; ++x) split_P<Tile>(Sij[2 * x], Sij[2 * x + 1], dither, x, hi[x], lo[x]);
                }
                // 12. Oi = diag(alpha) Oi + Pij Vj in one FMA, not of all columns at a time: registers are short
                KV.consumer_wait();
                float unscaleV, factor[2];
#pragma unroll
                for (int x0 = 0; x0 < D / 2; x0 += Columns / 2) {
                    float Tij[Columns / 2];
                    issue_PV_parts<Tile>(Tij, hi, lo, shared.tiles[at(true)] + 2 * x0 / kBoxColumns * (2 * Bc * 128));
                    if (x0 == 0) {
                        __syncwarp();  // likewise
                        unscaleV = by_one(shared.unscale[at(true)].x, is_lane_0);
                        end = work.ends[warpgroup];
                        const float unitT = unscaleV > 0.f ? unscaleV / kP<Tile> : unitO;
                        const float in_unitT = unitO * inverse_of_power(unitT);
                        factor[0] = softmax.alpha[0] * in_unitT, factor[1] = softmax.alpha[1] * in_unitT;
                        unitO = unitT;
                    }
                    wgmma_wait<0>(Tij);
#pragma unroll
                    for (int x = 0; x < Columns / 2; ++x) Oi[x0 + x] = fmaf(Oi[x0 + x], factor[x / 2 % 2], Tij[x]);
                }
                KV.consumer_release(unscaleV, is_lane_0);
                j0 += Bc;
            } while (loops && j0 < end);  // not is_last, with which Vj's place is given back later
            if constexpr (D > 128)
                if (j0 - work.visible.begin > InOi) add_up(p, work, Oi, unitO, softmax, c, shared.m_of_O, false, true);
            if (Tile::Hopes) join_l(softmax, shared.l_of_rows);
            const float l[2] = {row_sum<4>(softmax.l[0]), row_sum<4>(softmax.l[1])};  // of whole rows
            by_floats = work.unscaleV == INFINITY || are_small<Tile>(Oi, l, work, unitO);
            if (unitO < 0x1p-60f || a.l_in) {  // or else unitO times the row's weight could be subnormal
#pragma unroll
                for (float &x : Oi) x *= unitO;
                unitO = 1.f;
            }
            store_floats<D>(p, work, work.i0 + row_of_thread(), Oi, softmax, l, c, unit(), unitO);
            pass_tiles(j0);
        }
        if (by_floats) leave<Tile>(p, shared, work);
        if (loops)
            tile_queue.position = work.place;  // the same, read again: so it takes no register while the work lasts
        __syncwarp();                          // all lanes have read the work
    }
    if constexpr (loops)
        attend_to_left<Tile>(p, shared, KV);
    else
        attend_to_left_elsewhere<Tile>(p, shared, KV);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    hopper_kernel(const __grid_constant__ ParametersOfParts p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    SharedOfParts<Tile> &shared = *(SharedOfParts<Tile> *)memory;
    if (threadIdx.x == 0) {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, warps + (Tile::SplitsAll ? 4 : 0));  // and who splits
        for (auto &pipeline : shared.Q) init_pipeline(pipeline, 4);
        init_pipeline(shared.KV, warps);
        for (Barrier &there : shared.floats_there) init(there, 1);
        for (auto &places : shared.now)
            for (Share &now : places) now.head = -1;
        for (Share &next : shared.next) next.head = 0;
        for (int &left : shared.left) left = -1;
        fence_async();
    }
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
    __syncthreads();
    if (threadIdx.x < 128) {
        deallocate_registers<Tile::ProducerRegisters>();
        if constexpr (Tile::SplitsAll) {
            produce_and_split<Tile>(p, shared);
        } else {
            if (threadIdx.x == 0) produce<Tile>(p, shared);
            constexpr int threads = 32 * Tile::SplitterWarps, first = 128 - Tile::Splitters * threads;
            if (threadIdx.x >= first && p.workspace.heads)
                split_K_and_V<Tile>(p, shared,
                                    Tile::Splitters > 1 ? broadcast_lane0((threadIdx.x - first) / threads) : 0);
        }
    } else {
        allocate_registers<Tile::ConsumerRegisters>();
        consume_parts<Tile>(p, shared);
    }
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for something else than sm_90a, which no launch should come to
#endif
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

// The single tile is for at most 64 queries and keys: no other tile reads its K and V, so the producer's warps split
// them in place, and two blocks share a multiprocessor.
enum class TileOf { single, d64_few, d64, d128_few, d128, d256 };

// d 64 has four consumers, unless rows or work tiles are few. d 128 has three, and one splitter of two warps. It has two
// consumers and two splitters where those have a tenth fewer rows to go through: a head's last tile of 192 would be
// emptier, up to N 640 (N 512 causal 3 to 5 %, full 3 %; at N 1024 they are up to 1 % slower, at 2048 4 %), or a
// multiprocessor has one or two work tiles ((1, 32, 1024) 33 %, causal 12 %).
TileOf tile_of(const Attention &a, int multiprocessors) {
    const auto work_tiles = [&](int rows) { return a.B * a.Hq * ((a.Nq + rows - 1) / rows); };
    const auto rows_each = [&](int rows) { return (work_tiles(rows) + multiprocessors - 1) / multiprocessors * rows; };
    if (a.d <= 64 && a.Nq <= 64 && a.Nk <= 64) return TileOf::single;
    if (a.d <= 64) return a.Nq <= 192 || work_tiles(256) < multiprocessors ? TileOf::d64_few : TileOf::d64;
    if (a.d > 128) return TileOf::d256;
    const bool may_be_few = a.Nq <= 640 || work_tiles(192) <= 2 * multiprocessors;
    return may_be_few && 10 * rows_each(128) <= 9 * rows_each(192) ? TileOf::d128_few : TileOf::d128;
}

// 48, 208, 208 and three of 224 KB, of which `floats` are 0, 48, 48, 64, 32 and 32. Other d go to the next of 64, 128
// and 256. Seven places for four consumers at d 64: the same within 3 %.
template <class Use>
auto with_tile(TileOf tile, const Use &use) {
    switch (tile) {
        case TileOf::single:
            return use(Tile<64, 64, 64, 1, 2, 2>());
        case TileOf::d64_few:
            return use(Tile<64, 192, 64, 1, 7, 1, 3>());
        case TileOf::d64:
            return use(Tile<64, 256, 64, 1, 6, 1, 3>());
        case TileOf::d128_few:
            return use(Tile<128, 128, 64, 1, 3, 1, 2>());
        case TileOf::d128:
            return use(Tile<128, 192, 64, 1, 3, 1>());
        default:
            return use(Tile<256, 128, 32, 1, 2, 1>());
    }
}

// Heads of k and v that are one and the same (stride 0) are split once.
Attention with_distinct_heads(Attention a) {
    if (a.k_stride.head == 0 && a.v_stride.head == 0) a.Hkv = 1;
    return a;
}

// How the split of K and V is shared out: a share is a tile, or more where there are many, so that those in which
// nothing counts are soon passed over. Returns the number of shares of all heads.
int64_t share_out(Workspace &w, int64_t key_heads, int multiprocessors) {
    w.tiles_a_share = clamp(2 * w.Tc * key_heads / (16 * multiprocessors), int64_t(1), std::max<int64_t>(1, w.Tc / 32));
    w.shares = (2 * w.Tc + w.tiles_a_share - 1) / w.tiles_a_share;
    return w.shares * key_heads;
}

template <class Tile>
Order order_of_floats(const Attention &a, int multiprocessors) {
    return order_of<Tile>(a, multiprocessors, sizeof(float), false);
}

template <class Tile>
Plan plan_tile(const Attention &a, TileOf choice, const Device &device) {
    const Order order = order_of_floats<Tile>(a, device.multiprocessors);
    Workspace w;
    Plan plan{Tile::SplitsAll ? "float32, a single tile" : "float32", (int)choice, Tile::Br, Tile::Bc, Tile::D};
    plan.grid = order.grid, plan.threads = Tile::Threads, plan.shared_memory = sizeof(SharedOfParts<Tile>);
    plan.workspace = lay_out<Tile>(a, nullptr, w);
    if (plan.workspace > 0) {
        const int64_t shares = share_out(w, w.batches * a.Hkv, device.multiprocessors);
        const int64_t tiles = a.B * a.Hq * ((a.Nq + Tile::Br - 1) / Tile::Br);
        plan.grid = std::min<int64_t>(std::max(tiles, shares), device.multiprocessors * Tile::BlocksPerSM);
    } else if (order.uses_counter) {
        plan.workspace = sizeof(int);
    }
    plan.multiprocessors = device.multiprocessors;
    plan.error = why_no_encoder();
    return plan;
}

template <class Tile>
const char *launch(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    ParametersOfParts p{{a}};
    if (!make_input_maps<Tile>(p, a)) return "cuTensorMapEncodeTiled refused q, k or v";
    p.aligned = is_aligned(a.o, a.o_stride, sizeof(float), a.d);
    p.tma_stores_O = false;
    static_assert(sizeof(SharedOfParts<Tile>) * Tile::BlocksPerSM <= 227 * 1024);
    Workspace &w = p.workspace;
    Order order = order_of_floats<Tile>(a, plan.multiprocessors);
    if (lay_out<Tile>(a, workspace, w) > 0) {
        share_out(w, w.batches * a.Hkv, plan.multiprocessors);
        fill_schedule<Tile>(p, a, plan, order, w.works_taken);
        return launch_kernel(hopper_kernel<float, Tile>, p, plan, w.heads,
                             (char *)(w.shares_taken + 1) - (char *)w.heads, stream);
    }
    fill_schedule<Tile>(p, a, plan, order, (int *)workspace);
    return launch_kernel(hopper_kernel<float, Tile>, p, plan, p.tile_counter, sizeof(int), stream);
}

}  // namespace

Plan plan_float32(const Attention &attention, const Device &device) {
    const Attention a = with_distinct_heads(attention);
    const TileOf choice = tile_of(a, device.multiprocessors);
    return with_tile(choice, [&](auto tile) { return plan_tile<decltype(tile)>(a, choice, device); });
}

const char *launch_float32(const Attention &attention, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Attention a = with_distinct_heads(attention);
    return with_tile((TileOf)plan.tile, [&](auto tile) { return launch<decltype(tile)>(a, plan, workspace, stream); });
}

}  // namespace minimal_attn::hopper
