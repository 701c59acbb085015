#include "hopper/epilogue.h"
#include "hopper/launch.h"
#include "hopper/scheduler.h"
#include "hopper/softmax.h"
namespace minimal_attn::hopper {
namespace {

// D, Br, Bc; stages of the rings of Q tiles and of K and V tiles; blocks on a multiprocessor
template <int D_, int Br_, int Bc_, int QStages_, int Stages_, int BlocksPerSM_ = 1>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, QStages = QStages_, Stages = Stages_, BlocksPerSM = BlocksPerSM_;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);  // a consumer warpgroup has 64 rows
    static constexpr int LaunchRegisters = 65536 / (Threads * BlocksPerSM) / 8 * 8;
    static constexpr int ProducerRegisters = 32;
    static constexpr int ConsumerRegisters =
        (LaunchRegisters * (1 + Consumers) - ProducerRegisters) / Consumers / 8 * 8;
    static constexpr int Boxes = (D + kBoxColumns - 1) / kBoxColumns;
    static constexpr int QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128;
    static constexpr bool OReusesQ = QStages > 1 && Consumers > 1;
    static constexpr bool OReusesV = QStages == 1 && Consumers <= Stages && QBytes <= KBytes;
    static constexpr bool kAlignKeys = false;
    static_assert(Bc % 16 == 0 && D % 32 == 0 && QStages <= 2);
};

template <class Tile>
struct SharedStorage {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char Kj[Tile::Stages][Tile::KBytes], Vj[Tile::Stages][Tile::KBytes];
    WorkTile work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], Q[Tile::Consumers][Tile::QStages], K[Tile::Stages], V[Tile::Stages];
    Barrier O_staged[Tile::Consumers];  // if O takes the places of Vj
};

template <class Tile>
__device__ WorkTile publish_work_tile(const Parameters &p, SharedStorage<Tile> &shared,
                                      Pipeline<kQueueStages> &tile_queue, int n) {
    const WorkTile work = TileScheduler<Tile>{p}.tile(n);
    static_cast<WorkTile &>(shared.work[tile_queue.stage()]) = work;
    arrive(shared.tile_queue[tile_queue.stage()].full);
    return work;
}

// 8. Qi, 64 rows for each consumer
template <class Tile>
__device__ void produce_Q(const Parameters &p, SharedStorage<Tile> &shared, int i0, int h, int b,
                          Pipeline<Tile::QStages> &Q) {
    for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
        Q.barriers = shared.Q[warpgroup];
        Q.producer_acquire();
        load_tile<64, Tile::Boxes>(shared.Qi[warpgroup][Q.stage()], p.Q, i0 + 64 * warpgroup, h, b, Q.full());
    }
    Q.advance();
}

// Half types: whether a consumer leaves O for TMA, which stores boxes of 64 rows. All must be the work's: what follows
// in O is another's. In the places of Vj this work must have had a tile in each: or else the last work's O may still be
// there, of which V's `empty` says nothing.
template <class Tile>
__device__ bool stages_O(const Parameters &p, const WorkTile &work, int warpgroup) {
    return (Tile::OReusesQ ||
            (Tile::OReusesV && work.visible.end - work.visible.begin > (Tile::Stages - 1) * Tile::Bc)) &&
           p.tma_stores_O && work.i0 + 64 * (warpgroup + 1) <= work.i1;
}

// 13. What a consumer left of O to HBM
template <class Tile>
__device__ void store_staged_O(const Parameters &p, const WorkTile &work, int warpgroup, const unsigned char *tile) {
    for (int box = 0; box < Tile::Boxes; ++box)
        tma_store(p.O.map, tile + box * 64 * 128, box * kBoxColumns, work.i0 + 64 * warpgroup, work.h * p.O.head,
                  work.b * p.O.batch);
}

// Half types, thread 32's: Qi; then, if O takes the place of Qi, 13. O of the work before to HBM, before the next Qi
// but this one comes there. One thread can do both: the work that has that Qi isn't announced before this O is there
// (kQueueStages).
template <class Tile>
__device__ void load_Q_and_store_O(const Parameters &p, SharedStorage<Tile> &shared) {
    static_assert(!Tile::OReusesQ || Tile::QStages == kQueueStages);
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    Pipeline<Tile::QStages> Q{}, O{};
    for (WorkTile last{-1};;) {
        tile_queue.consumer_wait();
        const WorkTile work = shared.work[tile_queue.stage()];
        if (work.b >= 0) produce_Q<Tile>(p, shared, work.i0, work.h, work.b, Q);
        tile_queue.consumer_release();
        if (Tile::OReusesQ && last.b >= 0) {
            for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
                wait(shared.Q[warpgroup][O.stage()].empty, O.phase());
                if (stages_O<Tile>(p, last, warpgroup))
                    store_staged_O<Tile>(p, last, warpgroup, shared.Qi[warpgroup][O.stage()]);
            }
            tma_store_wait_read();
            O.advance();
        }
        if (work.b < 0) return;
        last = work;
    }
}

// Half types. 5. - 6. for j: Kj, or Vj; before() comes before each load
template <class Tile, class Before>
__device__ void load_KV_tiles(const TensorMap &tensor, const WorkTile &work, Pipeline<Tile::Stages> &pipeline,
                              unsigned char (*tiles)[Tile::KBytes], const Before &before) {
    for (int j0 = work.visible.begin; j0 < work.visible.end; j0 += Tile::Bc) {
        before();
        pipeline.producer_acquire();
        load_tile<Tile::Bc, Tile::Boxes>(tiles[pipeline.stage()], tensor, j0, work.key_head, work.b, pipeline.full());
        pipeline.advance();
    }
}

// Half types, thread 64's: Vj. If O takes the places of the next Vj, 13. O of the work before to HBM, one consumer's
// before each of the first Vj, so that none of these waits for a slower consumer.
template <class Tile>
__device__ void load_V_and_store_O(const Parameters &p, SharedStorage<Tile> &shared) {
    Pipeline<Tile::Stages> V{shared.V};
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    uint32_t parities = 0;  // of O_staged, a bit each
    for (WorkTile last{-1};; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const WorkTile work = shared.work[tile_queue.stage()];
        Pipeline<Tile::Stages> O = V;
        int warpgroup = Tile::OReusesV && last.b >= 0 ? 0 : Tile::Consumers;  // whose O is the next
        const auto store_next_O = [&] {
            if (warpgroup == Tile::Consumers) return;
            if (stages_O<Tile>(p, last, warpgroup)) {
                wait(shared.O_staged[warpgroup], parities >> warpgroup & 1);
                parities ^= 1u << warpgroup;
                store_staged_O<Tile>(p, last, warpgroup, shared.Vj[O.stage()]);
                tma_store_wait_read();
            }
            O.advance();
            ++warpgroup;
        };
        if (work.b >= 0) load_KV_tiles<Tile>(p.V, work, V, shared.Vj, store_next_O);
        while (warpgroup < Tile::Consumers) store_next_O();
        if (work.b < 0) return;
        last = work;
    }
}

template <class Tile>
__device__ void produce(const Parameters &p, SharedStorage<Tile> &shared) {
    Pipeline<Tile::Stages> tiles{};
    tiles.barriers = shared.K;
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    const TileScheduler<Tile> scheduler{p};
    for (int n = -1;; tile_queue.advance()) {
        tile_queue.producer_acquire();
        n = scheduler.next(n);
        const WorkTile work = publish_work_tile<Tile>(p, shared, tile_queue, n);
        if (work.b < 0) return;
        load_KV_tiles<Tile>(p.K, work, tiles, shared.Kj, [] {});
    }
}

// Sij = Qi Kj^T, begun
template <class T, class Tile, int Count>
__device__ void issue_QK(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj) {
    constexpr int QBox = 64 * 128, KBox = Tile::Bc * 128;
    Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < Tile::D; x += 16)
        wgmma_ABt(T(), Sij, Q + x / kBoxColumns * QBox + x % kBoxColumns * 2,
                  K + x / kBoxColumns * KBox + x % kBoxColumns * 2, x > 0);
    wgmma_commit();
}

// Oi += Pij Vj, begun
template <class T, class Tile, int CountO, int CountP>
__device__ void issue_PV(float (&Oi)[CountO], const uint32_t (&Pij)[CountP], const unsigned char *Vj) {
    const Descriptor V = descriptor(Vj, Tile::Bc * 128);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) wgmma_AB(T(), Oi, &Pij[j / 4], V + j * 128);
    wgmma_commit();
}

// Pij as the A of Pij Vj: a thread's places in the accumulator Sij, in pairs, are its places in A
template <class T, int Count>
__device__ void pack_P(uint32_t (&Pij)[Count], const float (&Sij)[2 * Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) Pij[x] = pack<T>(Sij[2 * x], Sij[2 * x + 1]);
}

// Transposes what 4 neighbours have of a row: x[n] of neighbour `quad` goes to x[quad] of neighbour n.
__device__ void transpose_quad(uint32_t (&x)[4], int quad) {
    for (int step = 1; step <= 2; step *= 2)
        for (int n = 0; n < 4; ++n) {
            if (n & step) continue;
            const bool upper = quad & step;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? x[n] : x[n + step], step);
            x[n] = upper ? received : x[n];
            x[n + step] = upper ? x[n + step] : received;
        }
}

// 12. O = Oi / li as T, of row i, which is r of a thread's two: says its columns 8 x + 2 (lane % 4) and the next.
template <class T, int Count>
__device__ auto divided(const WorkTile &work, int i, int r, const float (&Oi)[Count], const SoftmaxState &softmax) {
    const bool sees_key = !empty(keys_of_row(work.band, i));
    const float weight = __fdividef(1.f, row_sum<4>(softmax.l[r]));
    return
        [=, &Oi](int x) { return sees_key ? pack<T>(weight * Oi[4 * x + 2 * r], weight * Oi[4 * x + 2 * r + 1]) : 0; };
}

// 13. O to HBM, rows i and i + 8, where TMA doesn't store it. All shuffles come before the first branch, so that they
// overlap.
template <class T, int Count>
__device__ void store_o(const Parameters &p, const WorkTile &work, int i, const float (&Oi)[Count],
                        const SoftmaxState &softmax) {
    const int quad = threadIdx.x % 4;
    uint32_t eight[2][Count / 16][4];  // of row r the columns 32 n + 8 quad + 0..7
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const auto two = divided<T>(work, i + 8 * r, r, Oi, softmax);
#pragma unroll
        for (int n = 0; n < Count / 16; ++n) {
            for (int y = 0; y < 4; ++y) eight[r][n][y] = two(4 * n + y);
            transpose_quad(eight[r][n], quad);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        T *const o = (T *)p.a.o + row_offset(p.a.o_stride, work, i) + 8 * quad;
        const int columns = i < work.i1 ? p.a.d - 8 * quad : 0;
        if (p.aligned) {
#pragma unroll
            for (int n = 0; n < Count / 16; ++n)
                if (32 * n < columns) *(uint4 *)(o + 32 * n) = *(const uint4 *)eight[r][n];
        } else {
#pragma unroll
            for (int n = 0; n < Count / 16; ++n)
                for (int y = 0; y < 8; ++y)
                    if (32 * n + y < columns) o[32 * n + y] = ((const T *)eight[r][n])[y];
        }
    }
}

// O to `tile`, the place of Qi or of a Vj, swizzled, for TMA to store
template <class T, int Count>
__device__ void stage_O(const WorkTile &work, int i, const float (&Oi)[Count], const SoftmaxState &softmax,
                        unsigned char *tile) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // of the 64 there
    tile += row * 128 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const auto two = divided<T>(work, i + 8 * r, r, Oi, softmax);
#pragma unroll
        for (int x = 0; x < Count / 4; ++x)
            *(uint32_t *)(tile + x / 8 * (64 * 128) + r * (8 * 128) + (x % 8 ^ row % 8) * 16) = two(x);
    }
    fence_async();
}

// By an m from before the tile, a thread's Pij of the tile may add up to so much, those of a row to 4 times that; else
// m moves. Equal scores come to 64, and must do. float16 ends at 65504. Oi has room for n such tiles if V is below 3e35
// / n; if m moved with every tile, below 3e38 / (n Bc).
constexpr float kMostByStaleMax = 256.f;

template <class Tile>
struct PingPong {
    int warpgroup;
    __device__ void wait_turn() const {
        if constexpr (Tile::OReusesQ) named_barrier_sync(1 + warpgroup, 256);
    }
    __device__ void pass_turn() const {
        if constexpr (Tile::OReusesQ) named_barrier_arrive(1 + (warpgroup + 1) % Tile::Consumers, 256);
    }
};

template <class T, class Tile>
__device__ void consume(const Parameters &p, SharedStorage<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc, Consumers = Tile::Consumers;
    // So many of a thread's exponentials come before the wait for Pij Vj. Three consumers hide them by one another (and
    // have no registers for more). Two are 3 % slower with 16 or 28 at d 128, the same from 8 on at d 256.
    constexpr int Early = Consumers > 2 ? 2 : 22;
    const Attention &a = p.a;
    const int warpgroup = consumer_index();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // and row + 8
    const float c = scale_of(a);
    const bool negated = a.softmax_scale < 0.f;

    // If OReusesQ, warpgroups take turns in starting products, but for a work's first: one's softmax beside another's
    // products.
    const PingPong<Tile> ping_pong{warpgroup};
    if (warpgroup == Consumers - 1) ping_pong.pass_turn();  // the first turn is warpgroup 0's

    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    Pipeline<Tile::QStages> Q{shared.Q[warpgroup]};
    Pipeline<Tile::Stages> K{shared.K}, V{shared.V};
    float Oi[D / 2], Sij[Bc / 2];
    uint32_t Pij[Bc / 4];
    SoftmaxState softmax;

    // Rows of the last Vj past seqlens_k must be 0: Pij = 0 times NaN is NaN. Each warpgroup writes all of these zeros.
    const auto clear_rows_past = [&](int end, int j0) {
        if (end - j0 >= Bc || end == a.Nk) return;
        for (int at = (end - j0) * 128 + threadIdx.x % 128 * 16; at < Bc * 128; at += 128 * 16)
            for (int box = 0; box < Tile::Boxes; ++box)
                *(uint4 *)(shared.Vj[V.stage()] + box * Bc * 128 + at) = uint4{};
        fence_async();
        named_barrier_sync(1 + Consumers + warpgroup, 128);
    };
    // 9. for j: the mask, and, if the state is wanted, whose m is exact, the largest score. Most tiles skip both by one
    // branch.
    float most[2];  // of a thread's scores
    const auto mask_and_note_most = [&](const WorkTile &work, int j0, Keys fully_visible) {
        const bool is_cut = j0 < fully_visible.begin || j0 + Bc > fully_visible.end;
        if (!is_cut && !a.l) return;
        if (is_cut) {
            if (negated) negate(Sij);
            mask_scores(Sij, work.band, work.i0 + row, j0);
        }
        if (!a.l) return;
#pragma unroll
        for (int x = 0; x < Bc / 2; x += 2) most[x / 2 % 2] = fmaxf(most[x / 2 % 2], fmaxf(Sij[x], Sij[x + 1]));
    };
    bool needs_max;  // the next tile's exponentials can't do without: in the warp m is subtracted first, or -inf
    // 10. - 11.
    const auto move_m_and_find_Pij = [&] {
        needs_max = update_row_max<false>(Sij, softmax, c);
        exponentiate<false>(Sij, softmax, c);
        pack_P<T>(Pij, Sij);
    };

    // 9. The first Sij of the next work
    bool more;
    const auto begin_work = [&] {
        tile_queue.consumer_wait();
        more = shared.work[tile_queue.stage()].b >= 0;
        if (more) {  // else it multiplies stale tiles, for nothing: under an if ptxas would wait for it at once (C7517)
            Q.consumer_wait();
            K.consumer_wait();
        }
        issue_QK<T, Tile>(Sij, shared.Qi[warpgroup][Q.stage()], shared.Kj[K.stage()]);
    };
    begin_work();
    wgmma_wait<0>(Sij);
    while (more) {
        const WorkTile &work = shared.work[tile_queue.stage()];
        // The keys that this warpgroup's rows see may end before those of the block; at least one tile is computed.
        const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, work.i1), end = work.visible.end;
        const int my_end = i0 < i1 ? min(keys_of_any(work.band, i0, i1).end, end) : 0;
        const Keys fully_visible = fully_visible_keys(p, work, i0);
        int j0 = work.visible.begin;
        K.consumer_release();
        softmax = SoftmaxState();
        most[0] = most[1] = -INFINITY;
        mask_and_note_most(work, j0, fully_visible);
        move_m_and_find_Pij();
#pragma unroll
        for (int x = 0; x < D / 2; ++x) Oi[x] = 0.f;

        // 5. for j
        for (; j0 + Bc < my_end; j0 += Bc) {
            // 9. the next Sij = Qi Kj+1^T; 12. Oi += Pij Vj
            K.consumer_wait();
            ping_pong.wait_turn();
            issue_QK<T, Tile>(Sij, shared.Qi[warpgroup][Q.stage()], shared.Kj[K.stage()]);
            V.consumer_wait();
            issue_PV<T, Tile>(Oi, Pij, shared.Vj[V.stage()]);
            ping_pong.pass_turn();
            wgmma_wait<1>(Sij);
            mask_and_note_most(work, j0 + Bc, fully_visible);
            // 10. - 11. by the m that is there: most tiles move no row's far enough to matter, and without a maximum
            // there is nothing to wait for, and nothing to rescale. Sij is kept for move_m_and_find_Pij.
            float P[Bc / 2], sum[2] = {0.f, 0.f};  // of this tile alone, as in exponentiate
            const auto exponentiate_by_stale_max = [&](int begin, int end) {
#pragma unroll
                for (int x = begin; x < end; ++x)
                    sum[x / 2 % 2] += P[x] = exp2_fast(fmaf(Sij[x], c, -softmax.cm[x / 2 % 2]));
            };
            if (!needs_max) exponentiate_by_stale_max(0, Early);
            K.consumer_release(sum[0] + sum[1]);  // or else ptxas would move the wait up
            wgmma_wait<0>(Oi);
            V.consumer_release();
            if (!needs_max) {
                exponentiate_by_stale_max(Early, Bc / 2);
                pack_P<T>(Pij, P);
            }
            const bool fits = !needs_max && sum[0] + sum[1] <= kMostByStaleMax;  // no if one is NaN
            if (__all_sync(~0u, fits)) {
                for (int r = 0; r < 2; ++r) softmax.l[r] += sum[r];
            } else {
                move_m_and_find_Pij();
                rescale(Oi, softmax);  // 12. Oi = diag(alpha) Oi
            }
        }
        Pipeline<kQueueStages> ending = tile_queue;  // released when O is stored, or left
        Pipeline<Tile::QStages> of_O = Q;            // likewise, where O takes the place of Qi
        if constexpr (Tile::OReusesQ)
            Q.advance();
        else
            Q.consumer_release();
        tile_queue.advance();
        ping_pong.wait_turn();  // besides, all of the warpgroup have used Qi then: OReusesQ relies on it
        V.consumer_wait();
        clear_rows_past(work.band.keys.end, j0);
        issue_PV<T, Tile>(Oi, Pij, shared.Vj[V.stage()]);  // 12. for the last time
        ping_pong.pass_turn();
        const bool is_last = j0 + Bc >= end;
        if (!is_last) {  // the other warpgroups need more tiles, and they this one's place: let them pass
            wgmma_wait<0>(Oi);
            V.consumer_release();
            for (j0 += Bc; j0 < end; j0 += Bc) {
                K.skip_stage();
                ping_pong.wait_turn();
                ping_pong.pass_turn();
                V.skip_stage();
            }
        }
        // With room for two Qi the next work begins beside the end of this one.
        if constexpr (Tile::QStages > 1) begin_work();
        wgmma_wait<Tile::QStages - 1>(Oi);
        if (is_last) V.consumer_release();
        if (a.l) {
            // m may be short of the largest score. It moves there, as by a tile of these.
            float two_of_each_row[4] = {most[0], most[0], most[1], most[1]};
            update_row_max<false>(two_of_each_row, softmax, c);
            for (int r = 0; r < 2; ++r) softmax.l[r] *= softmax.alpha[r];
            rescale(Oi, softmax);
            store_state<false>(p, work, work.i0 + row, Oi, softmax, c);
        } else if (stages_O<Tile>(p, work, warpgroup)) {
            if constexpr (Tile::OReusesV) {
                Pipeline<Tile::Stages> next = V;  // each consumer's O goes where another of the next Vj will
                for (int n = 0; n < warpgroup; ++n) next.advance();
                next.producer_acquire();  // this work's own tile there (stages_O) is used by all
                stage_O<T>(work, work.i0 + row, Oi, softmax, shared.Vj[next.stage()]);
                __syncwarp();
                if (lane == 0) arrive(shared.O_staged[warpgroup]);
            } else {
                stage_O<T>(work, work.i0 + row, Oi, softmax, shared.Qi[warpgroup][of_O.stage()]);
            }
        } else {
            store_o<T>(p, work, work.i0 + row, Oi, softmax);
        }
        __syncwarp();  // all lanes have read the work, and left O
        if constexpr (Tile::OReusesQ) of_O.consumer_release();
        ending.consumer_release();
        if constexpr (Tile::QStages == 1) begin_work();
        wgmma_wait<0>(Sij);
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    hopper_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    SharedStorage<Tile> &shared = *(SharedStorage<Tile> *)memory;
    if (threadIdx.x == 0) {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, warps + 2);
        for (auto &pipeline : shared.Q) init_pipeline(pipeline, 4);
        init_pipeline(shared.K, warps), init_pipeline(shared.V, warps);
        if constexpr (Tile::OReusesV)
            for (Barrier &there : shared.O_staged) init(there, 4);
        fence_async();
    }
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
    __syncthreads();
    if (threadIdx.x < 128) {
        deallocate_registers<Tile::ProducerRegisters>();
        if (threadIdx.x == 0) produce<Tile>(p, shared);
        if (threadIdx.x == 32) load_Q_and_store_O<Tile>(p, shared);
        if (threadIdx.x == 64) load_V_and_store_O<Tile>(p, shared);
    } else {
        allocate_registers<Tile::ConsumerRegisters>();
        consume<T, Tile>(p, shared);
    }
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for something else than sm_90a, which no launch should come to
#endif
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

enum class TileOf { few_queries, d64, d96, d128, d192, d256 };

TileOf tile_of(const Attention &a) {
    if (a.d <= 64) return a.Nq <= 64 ? TileOf::few_queries : TileOf::d64;
    return a.d <= 96 ? TileOf::d96 : a.d <= 128 ? TileOf::d128 : a.d <= 192 ? TileOf::d192 : TileOf::d256;
}

template <class Use>
auto with_tile(TileOf tile, const Use &use) {
    // D, Br, Bc, stages of Q, of K and V, blocks on a multiprocessor; NOTES.md has what others gave.
    switch (tile) {
        // 48 KB, so that three blocks hide one another's latencies.
        case TileOf::few_queries:
            return use(Tile<64, 64, 64, 2, 2, 3>());
        // 176 KB. With three consumers 7 % faster than with two (an earlier loop): exponentials are half the work.
        case TileOf::d64:
            return use(Tile<64, 192, 128, 2, 4>());
        // 192 KB, a quarter fewer products than 128. 128 x 128 was 5 to 12 % faster at N 512, 4 to 12 % slower from
        // 2048.
        case TileOf::d96:
            return use(Tile<96, 192, 96, 2, 2>());
        // 192 KB. Bc 144, 160 or 176, with one Qi, lost 9 to 21 % at N 512 and gained at most 2 % at N 8192.
        case TileOf::d128:
            return use(Tile<128, 128, 128, 2, 2>());
        // 216 KB, a quarter fewer products than 256. Bc 80 with two Qi was 8 % slower at N 8192.
        case TileOf::d192:
            return use(Tile<192, 128, 112, 1, 2>());
        // 224 KB. Bc 64 was up to 8 % slower, in an earlier loop.
        default:
            return use(Tile<256, 128, 80, 1, 2>());
    }
}

template <class Tile>
Order order_of_halves(const Attention &a, int multiprocessors) {
    return order_of<Tile>(a, multiprocessors, 2, true);
}

template <class T, class Tile>
const char *launch(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    Parameters p{a};
    if (!make_input_maps<Tile>(p, a)) return "cuTensorMapEncodeTiled refused q, k or v";
    p.aligned = is_aligned(a.o, a.o_stride, a.l ? sizeof(float) : sizeof(T), a.d);
    p.tma_stores_O = (Tile::OReusesQ || Tile::OReusesV) && !a.l && p.aligned &&
                     make_tensor_map(p.O, a.dtype, a.o, a.o_stride, a.B, a.Hq, a.Nq, a.d, 64);
    static_assert(sizeof(SharedStorage<Tile>) * Tile::BlocksPerSM <= 227 * 1024);
    fill_schedule<Tile>(p, a, plan, order_of_halves<Tile>(a, plan.multiprocessors), (int *)workspace);
    return launch_kernel(hopper_kernel<T, Tile>, p, plan, p.tile_counter, sizeof(int), stream);
}

}  // namespace

Plan plan_half(const Attention &a, const Device &device) {
    const TileOf choice = tile_of(a);
    return with_tile(choice, [&](auto tile) {
        using Tile = decltype(tile);
        const Order order = order_of_halves<Tile>(a, device.multiprocessors);
        Plan plan{"half", (int)choice, Tile::Br, Tile::Bc, Tile::D};
        plan.grid = order.grid, plan.threads = Tile::Threads, plan.shared_memory = sizeof(SharedStorage<Tile>);
        plan.workspace = order.uses_counter ? sizeof(int) : 0;
        plan.multiprocessors = device.multiprocessors;
        plan.error = why_no_encoder();
        return plan;
    });
}

const char *launch_half(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return with_tile((TileOf)plan.tile, [&](auto tile) {
        using Tile = decltype(tile);
        return a.dtype == Dtype::float16 ? launch<__half, Tile>(a, plan, workspace, stream)
                                         : launch<__nv_bfloat16, Tile>(a, plan, workspace, stream);
    });
}

}  // namespace minimal_attn::hopper
