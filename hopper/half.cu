#include "hopper/epilogue.h"
#include "hopper/scheduler.h"
#include "hopper/softmax.h"
namespace minimal_attn {
namespace {

using namespace hopper;

// D, Br, Bc; stages of the rings of Q tiles and of K and V tiles; blocks on a multiprocessor
template <int D_, int Br_, int Bc_, int QStages_, int Stages_, int BlocksPerSM_ = 1>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, QStages = QStages_, Stages = Stages_, BlocksPerSM = BlocksPerSM_;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);  // a consumer warpgroup has 64 rows
    static constexpr int LaunchRegisters = 65536 / (Threads * BlocksPerSM) / 8 * 8;
    static constexpr int ProducerRegisters = 32;
    static constexpr int ConsumerRegisters =
        (LaunchRegisters * (1 + Consumers) - ProducerRegisters) / Consumers / 8 * 8;
    static constexpr int Boxes = (D + kBox - 1) / kBox;
    static constexpr int QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128;
    static constexpr bool OTakesQ = QStages > 1 && Consumers > 1;
    static constexpr bool OTakesV = QStages == 1 && Consumers <= Stages && QBytes <= KBytes;
    static constexpr bool kAlignKeys = false;
    static_assert(Bc % 16 == 0 && D % 32 == 0 && QStages <= 2);
};

template <class Tile>
struct SharedOfHalves {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char Kj[Tile::Stages][Tile::KBytes], Vj[Tile::Stages][Tile::KBytes];
    Work work[kWorks];
    Stage works[kWorks], Q[Tile::Consumers][Tile::QStages], K[Tile::Stages], V[Tile::Stages];
    Barrier O_there[Tile::Consumers];  // if O takes the places of Vj
};

template <class T>
__device__ uint32_t pack(float x, float y) {
    uint32_t two;
    if constexpr (std::is_same_v<T, __half>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
}

// A tile's boxes. float32s come as they are.
template <class Tile, int Rows>
__device__ void load(unsigned char *tile, const TensorMap &tensor, int row, int h, int b, Barrier &full) {
    arrive_expecting(full, Rows * Tile::Boxes * 128);
    for (int box = 0; box < Tile::Boxes; ++box)
        load_box(tile + box * Rows * 128, tensor.map, box * kBox, row, h * tensor.head,
                 b * tensor.batch, full);
}

template <class Tile>
__device__ Work announce_work(const Parameters &p, SharedOfHalves<Tile> &shared, Ring<kWorks> &works, int n) {
    const Work work = TileScheduler<Tile>{p}.tile(n);
    static_cast<Work &>(shared.work[works.at()]) = work;
    arrive(shared.works[works.at()].full);
    return work;
}

// 8. Qi, 64 rows for each consumer
template <class Tile>
__device__ void produce_Q(const Parameters &p, SharedOfHalves<Tile> &shared, int i0, int h, int b, Ring<Tile::QStages> &Q) {
    for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
        Q.stages = shared.Q[warpgroup];
        Q.wait_empty();
        load<Tile, 64>(shared.Qi[warpgroup][Q.at()], p.Q, i0 + 64 * warpgroup, h, b, Q.full());
    }
    Q.advance();
}

// Half types: whether a consumer leaves O for TMA, which stores boxes of 64 rows. All must be the work's: what follows
// in O is another's. In the places of Vj this work must have had a tile in each: or else the last work's O may still be
// there, of which V's `empty` says nothing.
template <class Tile>
__device__ bool leaves_O(const Parameters &p, const Work &work, int warpgroup) {
    return (Tile::OTakesQ || (Tile::OTakesV && work.seen.end - work.seen.begin > (Tile::Stages - 1) * Tile::Bc)) &&
           p.tma_stores_O && work.i0 + 64 * (warpgroup + 1) <= work.i1;
}

// 13. What a consumer left of O to HBM
template <class Tile>
__device__ void store_left_O(const Parameters &p, const Work &work, int warpgroup, const unsigned char *tile) {
    for (int box = 0; box < Tile::Boxes; ++box)
        store_box(p.O.map, tile + box * 64 * 128, box * kBox, work.i0 + 64 * warpgroup, work.h * p.O.head,
                  work.b * p.O.batch);
}

// Half types, thread 32's: Qi; then, if O takes the place of Qi, 13. O of the work before to HBM, before the next Qi
// but this one comes there. One thread can do both: the work that has that Qi isn't announced before this O is there
// (kWorks).
template <class Tile>
__device__ void produce_Q_and_store_O(const Parameters &p, SharedOfHalves<Tile> &shared) {
    static_assert(!Tile::OTakesQ || Tile::QStages == kWorks);
    Ring<kWorks> works{shared.works};
    Ring<Tile::QStages> Q{}, O{};
    for (Work last{-1};;) {
        works.wait_full();
        const Work work = shared.work[works.at()];
        if (work.b >= 0) produce_Q<Tile>(p, shared, work.i0, work.h, work.b, Q);
        works.release();
        if (Tile::OTakesQ && last.b >= 0) {
            for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
                wait(shared.Q[warpgroup][O.at()].empty, O.parity());
                if (leaves_O<Tile>(p, last, warpgroup))
                    store_left_O<Tile>(p, last, warpgroup, shared.Qi[warpgroup][O.at()]);
            }
            wait_until_read();
            O.advance();
        }
        if (work.b < 0) return;
        last = work;
    }
}

// Half types. 5. - 6. for j: Kj, or Vj; before() comes before each load
template <class Tile, class Before>
__device__ void produce_tiles(const TensorMap &tensor, const Work &work, Ring<Tile::Stages> &ring,
                              unsigned char (*tiles)[Tile::KBytes], const Before &before) {
    for (int j0 = work.seen.begin; j0 < work.seen.end; j0 += Tile::Bc) {
        before();
        ring.wait_empty();
        load<Tile, Tile::Bc>(tiles[ring.at()], tensor, j0, work.key_head, work.b, ring.full());
        ring.advance();
    }
}

// Half types, thread 64's: Vj. If O takes the places of the next Vj, 13. O of the work before to HBM, one consumer's
// before each of the first Vj, so that none of these waits for a slower consumer.
template <class Tile>
__device__ void produce_V_and_store_O(const Parameters &p, SharedOfHalves<Tile> &shared) {
    Ring<Tile::Stages> V{shared.V};
    Ring<kWorks> works{shared.works};
    uint32_t parities = 0;  // of O_there, a bit each
    for (Work last{-1};; works.release()) {
        works.wait_full();
        const Work work = shared.work[works.at()];
        Ring<Tile::Stages> O = V;
        int warpgroup = Tile::OTakesV && last.b >= 0 ? 0 : Tile::Consumers;  // whose O is the next
        const auto store_next_O = [&] {
            if (warpgroup == Tile::Consumers) return;
            if (leaves_O<Tile>(p, last, warpgroup)) {
                wait(shared.O_there[warpgroup], parities >> warpgroup & 1);
                parities ^= 1u << warpgroup;
                store_left_O<Tile>(p, last, warpgroup, shared.Vj[O.at()]);
                wait_until_read();
            }
            O.advance();
            ++warpgroup;
        };
        if (work.b >= 0) produce_tiles<Tile>(p.V, work, V, shared.Vj, store_next_O);
        while (warpgroup < Tile::Consumers) store_next_O();
        if (work.b < 0) return;
        last = work;
    }
}

template <class Tile>
__device__ void produce(const Parameters &p, SharedOfHalves<Tile> &shared) {
    Ring<Tile::Stages> tiles{};
    tiles.stages = shared.K;
    Ring<kWorks> works{shared.works};
    const TileScheduler<Tile> scheduler{p};
    for (int n = -1;; works.advance()) {
        works.wait_empty();
        n = scheduler.next(n);
        const Work work = announce_work<Tile>(p, shared, works, n);
        if (work.b < 0) return;
        produce_tiles<Tile>(p.K, work, tiles, shared.Kj, [] {});
    }
}

// Sij = Qi Kj^T, begun
template <class T, class Tile, int Count>
__device__ void begin_QK(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj) {
    constexpr int QBox = 64 * 128, KBox = Tile::Bc * 128;
    Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    fence();
#pragma unroll
    for (int x = 0; x < Tile::D; x += 16)
        multiply_transposed(T(), Sij, Q + x / kBox * QBox + x % kBox * 2, K + x / kBox * KBox + x % kBox * 2, x > 0);
    commit();
}

// Oi += Pij Vj, begun
template <class T, class Tile, int CountO, int CountP>
__device__ void begin_PV(float (&Oi)[CountO], const uint32_t (&Pij)[CountP], const unsigned char *Vj) {
    const Descriptor V = descriptor(Vj, Tile::Bc * 128);
    fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) multiply(T(), Oi, &Pij[j / 4], V + j * 128);
    commit();
}

// Pij as the A of Pij Vj: a thread's places in the accumulator Sij, in pairs, are its places in A
template <class T, int Count>
__device__ void pack(uint32_t (&Pij)[Count], const float (&Sij)[2 * Count]) {
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
__device__ auto divided(const Work &work, int i, int r, const float (&Oi)[Count], const Rows &rows) {
    const bool sees_key = !empty(keys_of_row(work.band, i));
    const float weight = __fdividef(1.f, row_sum<4>(rows.l[r]));
    return
        [=, &Oi](int x) { return sees_key ? pack<T>(weight * Oi[4 * x + 2 * r], weight * Oi[4 * x + 2 * r + 1]) : 0; };
}

// 13. O to HBM, rows i and i + 8, where TMA doesn't store it. All shuffles come before the first branch, so that they
// overlap.
template <class T, int Count>
__device__ void store_o(const Parameters &p, const Work &work, int i, const float (&Oi)[Count], const Rows &rows) {
    const int quad = threadIdx.x % 4;
    uint32_t eight[2][Count / 16][4];  // of row r the columns 32 n + 8 quad + 0..7
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const auto two = divided<T>(work, i + 8 * r, r, Oi, rows);
#pragma unroll
        for (int n = 0; n < Count / 16; ++n) {
            for (int y = 0; y < 4; ++y) eight[r][n][y] = two(4 * n + y);
            transpose_quad(eight[r][n], quad);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        T *const o = (T *)p.a.o + row_at(p.a.o_stride, work, i) + 8 * quad;
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
__device__ void leave_o(const Work &work, int i, const float (&Oi)[Count], const Rows &rows, unsigned char *tile) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // of the 64 there
    tile += row * 128 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const auto two = divided<T>(work, i + 8 * r, r, Oi, rows);
#pragma unroll
        for (int x = 0; x < Count / 4; ++x)
            *(uint32_t *)(tile + x / 8 * (64 * 128) + r * (8 * 128) + (x % 8 ^ row % 8) * 16) = two(x);
    }
    fence_async();
}

// By an m from before the tile, a thread's Pij of the tile may add up to so much, those of a row to 4 times that; else
// m moves. Equal scores come to 64, and must do. float16 ends at 65504. Oi has room for n such tiles if V is below 3e35
// / n; if m moved with every tile, below 3e38 / (n Bc).
constexpr float kMostByOldM = 256.f;

template <class Tile>
struct PingPong {
    int warpgroup;
    __device__ void wait_turn() const {
        if constexpr (Tile::OTakesQ) sync(1 + warpgroup, 256);
    }
    __device__ void pass_turn() const {
        if constexpr (Tile::OTakesQ) arrive(1 + (warpgroup + 1) % Tile::Consumers, 256);
    }
};

template <class T, class Tile>
__device__ void consume(const Parameters &p, SharedOfHalves<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc, Consumers = Tile::Consumers;
    // So many of a thread's exponentials come before the wait for Pij Vj. Three consumers hide them by one another (and
    // have no registers for more). Two are 3 % slower with 16 or 28 at d 128, the same from 8 on at d 256.
    constexpr int Early = Consumers > 2 ? 2 : 22;
    const Attention &a = p.a;
    const int warpgroup = which_consumer();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // and row + 8
    const float c = scale_of(a);
    const bool negated = a.softmax_scale < 0.f;

    // If OTakesQ, warpgroups take turns in starting products, but for a work's first: one's softmax beside another's
    // products.
    const PingPong<Tile> ping_pong{warpgroup};
    if (warpgroup == Consumers - 1) ping_pong.pass_turn();  // the first turn is warpgroup 0's

    Ring<kWorks> works{shared.works};
    Ring<Tile::QStages> Q{shared.Q[warpgroup]};
    Ring<Tile::Stages> K{shared.K}, V{shared.V};
    float Oi[D / 2], Sij[Bc / 2];
    uint32_t Pij[Bc / 4];
    Rows rows;

    // Rows of the last Vj past seqlens_k must be 0: Pij = 0 times NaN is NaN. Each warpgroup writes all of these zeros.
    const auto clear_rows_past = [&](int end, int j0) {
        if (end - j0 >= Bc || end == a.Nk) return;
        for (int at = (end - j0) * 128 + threadIdx.x % 128 * 16; at < Bc * 128; at += 128 * 16)
            for (int box = 0; box < Tile::Boxes; ++box) *(uint4 *)(shared.Vj[V.at()] + box * Bc * 128 + at) = uint4{};
        fence_async();
        sync(1 + Consumers + warpgroup, 128);
    };
    // 9. for j: the mask, and, if the state is wanted, whose m is exact, the largest score. Most tiles skip both by one
    // branch.
    float most[2];  // of a thread's scores
    const auto mask_and_note_most = [&](const Work &work, int j0, Keys unmasked) {
        const bool is_cut = j0 < unmasked.begin || j0 + Bc > unmasked.end;
        if (!is_cut && !a.l) return;
        if (is_cut) {
            if (negated) negate(Sij);
            mask(Sij, work.band, work.i0 + row, j0);
        }
        if (!a.l) return;
#pragma unroll
        for (int x = 0; x < Bc / 2; x += 2) most[x / 2 % 2] = fmaxf(most[x / 2 % 2], fmaxf(Sij[x], Sij[x + 1]));
    };
    bool needs_max;  // the next tile's exponentials can't do without: in the warp m is subtracted first, or -inf
    // 10. - 11.
    const auto move_m_and_find_Pij = [&] {
        needs_max = move_max<false>(Sij, rows, c);
        exponentiate<false>(Sij, rows, c);
        pack<T>(Pij, Sij);
    };

    // 9. The first Sij of the next work
    bool more;
    const auto begin_work = [&] {
        works.wait_full();
        more = shared.work[works.at()].b >= 0;
        if (more) {  // else it multiplies stale tiles, for nothing: under an if ptxas would wait for it at once (C7517)
            Q.wait_full();
            K.wait_full();
        }
        begin_QK<T, Tile>(Sij, shared.Qi[warpgroup][Q.at()], shared.Kj[K.at()]);
    };
    begin_work();
    wait_for<0>(Sij);
    while (more) {
        const Work &work = shared.work[works.at()];
        // The keys that this warpgroup's rows see may end before those of the block; at least one tile is computed.
        const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, work.i1), end = work.seen.end;
        const int my_end = i0 < i1 ? min(keys_of_any(work.band, i0, i1).end, end) : 0;
        const Keys unmasked = unmasked_of(p, work, i0);
        int j0 = work.seen.begin;
        K.release();
        rows = Rows();
        most[0] = most[1] = -INFINITY;
        mask_and_note_most(work, j0, unmasked);
        move_m_and_find_Pij();
#pragma unroll
        for (int x = 0; x < D / 2; ++x) Oi[x] = 0.f;

        // 5. for j
        for (; j0 + Bc < my_end; j0 += Bc) {
            // 9. the next Sij = Qi Kj+1^T; 12. Oi += Pij Vj
            K.wait_full();
            ping_pong.wait_turn();
            begin_QK<T, Tile>(Sij, shared.Qi[warpgroup][Q.at()], shared.Kj[K.at()]);
            V.wait_full();
            begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.at()]);
            ping_pong.pass_turn();
            wait_for<1>(Sij);
            mask_and_note_most(work, j0 + Bc, unmasked);
            // 10. - 11. by the m that is there: most tiles move no row's far enough to matter, and without a maximum
            // there is nothing to wait for, and nothing to rescale. Sij is kept for move_m_and_find_Pij.
            float P[Bc / 2], sum[2] = {0.f, 0.f};  // of this tile alone, as in exponentiate
            const auto exponentiate_by_old_m = [&](int begin, int end) {
#pragma unroll
                for (int x = begin; x < end; ++x)
                    sum[x / 2 % 2] += P[x] = exp2_fast(fmaf(Sij[x], c, -rows.cm[x / 2 % 2]));
            };
            if (!needs_max) exponentiate_by_old_m(0, Early);
            K.release(sum[0] + sum[1]);  // or else ptxas would move the wait up
            wait_for<0>(Oi);
            V.release();
            if (!needs_max) {
                exponentiate_by_old_m(Early, Bc / 2);
                pack<T>(Pij, P);
            }
            const bool fits = !needs_max && sum[0] + sum[1] <= kMostByOldM;  // no if one is NaN
            if (__all_sync(~0u, fits)) {
                for (int r = 0; r < 2; ++r) rows.l[r] += sum[r];
            } else {
                move_m_and_find_Pij();
                rescale(Oi, rows);  // 12. Oi = diag(alpha) Oi
            }
        }
        Ring<kWorks> ending = works;   // released when O is stored, or left
        Ring<Tile::QStages> of_O = Q;  // likewise, where O takes the place of Qi
        if constexpr (Tile::OTakesQ)
            Q.advance();
        else
            Q.release();
        works.advance();
        ping_pong.wait_turn();  // besides, all of the warpgroup have used Qi then: OTakesQ relies on it
        V.wait_full();
        clear_rows_past(work.band.keys.end, j0);
        begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.at()]);  // 12. for the last time
        ping_pong.pass_turn();
        const bool is_last = j0 + Bc >= end;
        if (!is_last) {  // the other warpgroups need more tiles, and they this one's place: let them pass
            wait_for<0>(Oi);
            V.release();
            for (j0 += Bc; j0 < end; j0 += Bc) {
                K.pass();
                ping_pong.wait_turn();
                ping_pong.pass_turn();
                V.pass();
            }
        }
        // With room for two Qi the next work begins beside the end of this one.
        if constexpr (Tile::QStages > 1) begin_work();
        wait_for<Tile::QStages - 1>(Oi);
        if (is_last) V.release();
        if (a.l) {
            // m may be short of the largest score. It moves there, as by a tile of these.
            float two_of_each_row[4] = {most[0], most[0], most[1], most[1]};
            move_max<false>(two_of_each_row, rows, c);
            for (int r = 0; r < 2; ++r) rows.l[r] *= rows.alpha[r];
            rescale(Oi, rows);
            store_state<false>(p, work, work.i0 + row, Oi, rows, c);
        } else if (leaves_O<Tile>(p, work, warpgroup)) {
            if constexpr (Tile::OTakesV) {
                Ring<Tile::Stages> next = V;  // each consumer's O goes where another of the next Vj will
                for (int n = 0; n < warpgroup; ++n) next.advance();
                next.wait_empty();  // this work's own tile there (leaves_O) is used by all
                leave_o<T>(work, work.i0 + row, Oi, rows, shared.Vj[next.at()]);
                __syncwarp();
                if (lane == 0) arrive(shared.O_there[warpgroup]);
            } else {
                leave_o<T>(work, work.i0 + row, Oi, rows, shared.Qi[warpgroup][of_O.at()]);
            }
        } else {
            store_o<T>(p, work, work.i0 + row, Oi, rows);
        }
        __syncwarp();  // all lanes have read the work, and left O
        if constexpr (Tile::OTakesQ) of_O.release();
        ending.release();
        if constexpr (Tile::QStages == 1) begin_work();
        wait_for<0>(Sij);
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    hopper_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    SharedOfHalves<Tile> &shared = *(SharedOfHalves<Tile> *)memory;
    if (threadIdx.x == 0) {
        const auto init_ring = [](auto &ring, int readers) {
            for (Stage &stage : ring) init(stage.full, 1), init(stage.empty, readers);
        };
        constexpr int warps = 4 * Tile::Consumers;
        init_ring(shared.works, warps + 2);
        for (auto &ring : shared.Q) init_ring(ring, 4);
        init_ring(shared.K, warps), init_ring(shared.V, warps);
        if constexpr (Tile::OTakesV)
            for (Barrier &there : shared.O_there) init(there, 4);
        fence_async();
    }
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<Tile::ProducerRegisters>();
        if (threadIdx.x == 0) produce<Tile>(p, shared);
        if (threadIdx.x == 32) produce_Q_and_store_O<Tile>(p, shared);
        if (threadIdx.x == 64) produce_V_and_store_O<Tile>(p, shared);
    } else {
        take_registers<Tile::ConsumerRegisters>();
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
        case TileOf::few_queries: return use(Tile<64, 64, 64, 2, 2, 3>());
        // 176 KB. With three consumers 7 % faster than with two (an earlier loop): exponentials are half the work.
        case TileOf::d64: return use(Tile<64, 192, 128, 2, 4>());
        // 192 KB, a quarter fewer products than 128. 128 x 128 was 5 to 12 % faster at N 512, 4 to 12 % slower from
        // 2048.
        case TileOf::d96: return use(Tile<96, 192, 96, 2, 2>());
        // 192 KB. Bc 144, 160 or 176, with one Qi, lost 9 to 21 % at N 512 and gained at most 2 % at N 8192.
        case TileOf::d128: return use(Tile<128, 128, 128, 2, 2>());
        // 216 KB, a quarter fewer products than 256. Bc 80 with two Qi was 8 % slower at N 8192.
        case TileOf::d192: return use(Tile<192, 128, 112, 1, 2>());
        // 224 KB. Bc 64 was up to 8 % slower, in an earlier loop.
        default: return use(Tile<256, 128, 80, 1, 2>());
    }
}

template <class Tile>
Order order_of_halves(const Attention &a, int multiprocessors) {
    return order_of<Tile>(a, multiprocessors, 2, true);
}

template <class T, class Tile>
const char *launch(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    Parameters p{a};
    if (!describe_inputs<Tile>(p, a)) return "cuTensorMapEncodeTiled refused q, k or v";
    p.aligned = is_aligned(a.o, a.o_stride, a.l ? sizeof(float) : sizeof(T), a.d);
    p.tma_stores_O = (Tile::OTakesQ || Tile::OTakesV) && !a.l && p.aligned &&
                     describe(p.O, a.dtype, a.o, a.o_stride, a.B, a.Hq, a.Nq, a.d, 64);
    const auto kernel = hopper_kernel<T, Tile>;
    constexpr int bytes = sizeof(SharedOfHalves<Tile>);
    static_assert(bytes * Tile::BlocksPerSM <= 227 * 1024);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return why_not(error);
    schedule<Tile>(p, a, plan, order_of_halves<Tile>(a, plan.multiprocessors), (int *)workspace);
    if (p.next) error = cudaMemsetAsync(p.next, 0, sizeof(int), stream);
    cudaLaunchAttribute overlaps{cudaLaunchAttributeProgrammaticStreamSerialization};
    overlaps.val.programmaticStreamSerializationAllowed = !p.next;
    const cudaLaunchConfig_t config{dim3(plan.grid), dim3(Tile::Threads), bytes, stream, &overlaps, 1};
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
    return why_not(error);
}

}  // namespace

namespace hopper {

Plan plan_half(const Attention &a, const Device &device) {
    const TileOf choice = tile_of(a);
    return with_tile(choice, [&](auto tile) {
        using Tile = decltype(tile);
        const Order order = order_of_halves<Tile>(a, device.multiprocessors);
        Plan plan{"half", (int)choice, Tile::Br, Tile::Bc, Tile::D};
        plan.grid = order.grid, plan.threads = Tile::Threads, plan.shared_memory = sizeof(SharedOfHalves<Tile>);
        plan.workspace = order.counts ? sizeof(int) : 0;
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

}  // namespace hopper
}  // namespace minimal_attn
