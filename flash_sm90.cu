// flash_sm90.cu: Algorithm 1 on Hopper, for float16 and bfloat16. Read flash.cu first: the steps and the names are the
// same, and what is new is who does them, and when.
//
// Who runs it. A block stays on its multiprocessor and takes one work after the other, a work being a tile of Br queries
// of one head. Its first warpgroup, the producer, loads tiles by TMA: one thread Qi (and says what the next work is), one
// Kj, one Vj. The other warpgroups, the consumers, have 64 of the rows each: they multiply by wgmma and do the softmax.
//
// What is where. In shared memory are rings of tiles Qi, Kj and Vj, swizzled as TMA writes and wgmma reads them. Sij, Pij
// (which is the A of Pij Vj) and Oi are in the registers of the consumers. The table of tiles, at the end, has the bytes.
//
// What overlaps what, per consumer: the next Sij = Qi Kj+1^T is started before Oi += Pij Vj, so that the softmax of the
// one runs beside the other; at the end of a work the next Sij is that of the next work, and O is stored beside it.
// Consumers take turns in starting products: the tensor cores have work while the others do their softmax.
//
// Which barrier orders what:
//     Q, K, V, work _full    the producer's: the tile has arrived (TMA counts its bytes), the work is described
//     Q, K, V, work _empty   the consumers', one arrival a warp: it may be overwritten
//     named 1, 2, ..         whose turn it is to start products (my_turn, next_turn)
//     named, one a consumer  wait_V: its threads have overwritten what no query may see
//
// Steps that differ from flash.cu's: Oi isn't rescaled before but beside the exponentials; a work that sees no key gets a
// tile all the same, which is masked.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "flash.h"
#include "hopper.h"

namespace minimal_attn {
namespace {

using namespace hopper;

constexpr int kBox = 64;   // columns of a box of TMA: 128 bytes, the width of the swizzle
constexpr int kWorks = 2;  // one ends, the next is loaded and begun

// D, Br, Bc; stages of the rings of Q tiles and of K and V tiles; blocks on a multiprocessor
template <int D_, int Br_, int Bc_, int QStages_, int Stages_, int BlocksPerSM_ = 1>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, QStages = QStages_, Stages = Stages_, BlocksPerSM = BlocksPerSM_;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);  // a consumer warpgroup has 64 rows
    // What a thread gets at launch; then the producer's warpgroup gives its own to the consumers.
    static constexpr int LaunchRegisters = 65536 / (Threads * BlocksPerSM) / 8 * 8, ProducerRegisters = 32;
    static constexpr int ConsumerRegisters =
        std::min(240, (LaunchRegisters * (1 + Consumers) - ProducerRegisters) / Consumers / 8 * 8);
    static constexpr int Boxes = (D + kBox - 1) / kBox, QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128;
    static_assert(Bc % 16 == 0 && D % 32 == 0);
};

// A tile of queries i0 <= i < i0 + Br of head h in batch b, and the keys that some of its rows see.
struct Work {
    int b, h, i0;  // b < 0: there is no more work
    Keys seen;
    Band band;
};

template <class Tile>
struct Shared {
    alignas(1024) unsigned char Qi[Tile::QStages][Tile::Consumers][Tile::QBytes];
    unsigned char Kj[Tile::Stages][Tile::KBytes], Vj[Tile::Stages][Tile::KBytes];
    Work work[kWorks];
    Barrier work_full[kWorks], work_empty[kWorks];
    Barrier Q_full[Tile::QStages][Tile::Consumers], Q_empty[Tile::QStages][Tile::Consumers];
    Barrier K_full[Tile::Stages], K_empty[Tile::Stages], V_full[Tile::Stages], V_empty[Tile::Stages];
};

// What TMA must know of a tensor, and whether its heads and batches are one and the same (stride 0).
struct TensorMap {
    CUtensorMap map;
    int head, batch;  // 1, or 0: what the indices are multiplied by
};

struct Parameters {
    Attention a;
    TensorMap Q, K, V;
    int Tr, tiles;  // tiles of queries of a head, and of all heads
    int *next;      // which tile a block takes after its first; null: they take turns
    bool aligned;   // rows of O begin and end at multiples of 16 bytes
};

// A position in a ring of stages, and the parity of the phases that end there.
template <int Stages>
struct Ring {
    unsigned count = 0;

    __device__ int stage() const { return count % Stages; }
    __device__ int parity() const { return count / Stages % 2; }
    __device__ void advance() { ++count; }
};

// ------------------------------------------------------------------------------ the producer

// Head by head, since its tiles share K and V in the L2 cache; in a head the last rows first, which have most to do under
// a causal mask, so that the shortest tiles of all come last.
template <class Tile>
__device__ void describe_work(const Parameters &p, int tile, Work &work) {
    const int head = tile / p.Tr, i0 = (p.Tr - 1 - tile % p.Tr) * Tile::Br, b = head / (int)p.a.Hq;
    work.b = b, work.h = head % (int)p.a.Hq, work.i0 = i0;
    const Band band = band_of(p.a, b);
    work.band = band;
    const Keys seen = keys_of_any(band, i0, min(i0 + Tile::Br, p.a.Nq));
    work.seen = empty(seen) ? Keys{0, 1} : seen;  // if need be, a tile that nobody sees
}

template <class Tile, int Rows>
__device__ void load(unsigned char *tile, const TensorMap &tensor, int row, int h, int b, Barrier &full) {
    arrive_expecting(full, Rows * Tile::Boxes * 128);
#pragma unroll
    for (int box = 0; box < Tile::Boxes; ++box)
        load_box(tile + box * Rows * 128, tensor.map, box * kBox, row, h * tensor.head, b * tensor.batch, full);
}

// 7. - 8. for i: Qi
template <class Tile>
__device__ void produce_Q(const Parameters &p, Shared<Tile> &shared) {
    Ring<Tile::QStages> Q;
    Ring<kWorks> works;
    for (int tile = blockIdx.x;; tile = p.next ? gridDim.x + atomicAdd(p.next, 1) : tile + gridDim.x) {
        Work &work = shared.work[works.stage()];
        const bool is_work = tile < p.tiles;
        if (is_work)
            describe_work<Tile>(p, tile, work);
        else
            work.b = -1;
        arrive(shared.work_full[works.stage()]);
        works.advance();
        if (!is_work) return;
#pragma unroll
        for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
            wait(shared.Q_empty[Q.stage()][warpgroup], Q.parity() ^ 1);
            load<Tile, 64>(shared.Qi[Q.stage()][warpgroup], p.Q, work.i0 + 64 * warpgroup, work.h, work.b,
                           shared.Q_full[Q.stage()][warpgroup]);
        }
        Q.advance();
        wait(shared.work_empty[works.stage()],
             works.parity() ^ 1);  // not to take too early what others could do sooner
    }
}

// 5. - 6. for j: Kj, or Vj
template <class Tile>
__device__ void produce_K_or_V(const Parameters &p, Shared<Tile> &shared, const TensorMap &tensor,
                               unsigned char (&tiles)[Tile::Stages][Tile::KBytes], Barrier (&full)[Tile::Stages],
                               Barrier (&empty)[Tile::Stages]) {
    Ring<kWorks> works;
    Ring<Tile::Stages> ring;
    for (;;) {
        wait(shared.work_full[works.stage()], works.parity());
        const Work &work = shared.work[works.stage()];
        const int b = work.b, h = work.h / ((int)p.a.Hq / (int)p.a.Hkv);
        const Keys seen = work.seen;
        arrive(shared.work_empty[works.stage()]);
        works.advance();
        if (b < 0) return;
        for (int j0 = seen.begin; j0 < seen.end; j0 += Tile::Bc) {
            wait(empty[ring.stage()], ring.parity() ^ 1);
            load<Tile, Tile::Bc>(tiles[ring.stage()], tensor, j0, h, b, full[ring.stage()]);
            ring.advance();
        }
    }
}

// ------------------------------------------------------------------------------ what a consumer does with a tile

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <class T>
__device__ uint32_t pack(float x, float y) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 two = __floats2half2_rn(x, y);
        return *(const uint32_t *)&two;
    } else {
        const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
        return *(const uint32_t *)&two;
    }
}

// Over the 4 neighbours that share a row.
__device__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The two rows of a thread, lane / 4 and lane / 4 + 8 of its warp's 16.
struct Rows {
    float m[2] = {-INFINITY, -INFINITY};   // of scores before c
    float cm[2] = {-INFINITY, -INFINITY};  // c m, rounded
    float l[2] = {0.f, 0.f};               // of this thread's columns
};

// exp(softmax_scale s - m) is one FFMA and one ex2: exp2(c s - c m), c = |softmax_scale| log2(e), scores of a negative
// scale being negated first. c m is rounded, which is the same for a whole row and goes away where O is divided by l.
// But for scores in the thousands the difference would count, and for huge ones overflow: then m is subtracted first.
__device__ bool is_far(float cm) { return fabsf(cm) > 1024.f; }

// 10. - 11. m, and what its move is for l and Oi; Sij's exponentials will be exp2(c Sij - reference).
template <int Count>
__device__ void move_max(float (&Sij)[Count], Rows &rows, float c, float (&alpha)[2], float (&reference)[2]) {
    float m[2][2] = {{rows.m[0], rows.m[0]}, {rows.m[1], rows.m[1]}};
#pragma unroll
    for (int x = 0; x < Count; ++x) m[x / 2 % 2][x % 2] = fmaxf(m[x / 2 % 2][x % 2], Sij[x]);
    const float m_old[2] = {rows.m[0], rows.m[1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.m[r] = row_max(fmaxf(m[r][0], m[r][1]));
        const float cm = __fmul_rn(rows.m[r], c);
        reference[r] = cm == -INFINITY ? 0.f : cm;  // as long as a row has seen nothing but -inf
        alpha[r] = exp2_fast(rows.cm[r] - reference[r]);
        rows.cm[r] = cm;
    }
    if (__any_sync(~0u, is_far(rows.cm[0]) || is_far(rows.cm[1]))) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!is_far(rows.cm[r])) continue;
            const float m = rows.m[r] == -INFINITY ? 0.f : rows.m[r];
            alpha[r] = exp2_fast((m_old[r] - m) * c);
            reference[r] = 0.f;
#pragma unroll
            for (int x = 2 * r; x < Count; x += 4) Sij[x] -= m, Sij[x + 1] -= m;
        }
    }
}

// 10. - 11. Sij -> Pij in its place, l
template <int Count>
__device__ void exponentiate(float (&Sij)[Count], Rows &rows, float c, const float (&alpha)[2],
                             const float (&reference)[2]) {
    rows.l[0] *= alpha[0], rows.l[1] *= alpha[1];
#pragma unroll
    for (int x = 0; x < Count; ++x) {
        Sij[x] = exp2_fast(fmaf(Sij[x], c, -reference[x / 2 % 2]));
        rows.l[x / 2 % 2] += Sij[x];
    }
}

// 9. -inf for the keys of this tile that a row doesn't see
template <int Count>
__device__ void mask(float (&Sij)[Count], const Band &band, int i, int j0) {
    const int j_lane = j0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Keys keys = keys_of_row(band, i + 8 * r);
        const int begin = keys.begin - j_lane, end = keys.end - j_lane;
#pragma unroll
        for (int x = 0; x < Count; ++x) {
            const int j = x / 4 * 8 + x % 2;
            if (x / 2 % 2 == r && (j < begin || j >= end)) Sij[x] = -INFINITY;
        }
    }
}

// Sij = Qi Kj^T, begun
template <class T, class Tile, int Count>
__device__ void begin_QK(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj) {
    const Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    fence();
#pragma unroll
    for (int x = 0; x < Tile::D; x += 16)
        multiply_transposed(T(), Sij, Q + x / kBox * (64 * 128) + x % kBox * 2,
                            K + x / kBox * (Tile::Bc * 128) + x % kBox * 2, x > 0);
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

template <class T, int Count>
__device__ void round_P(const float (&Sij)[2 * Count], uint32_t (&Pij)[Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) Pij[x] = pack<T>(Sij[2 * x], Sij[2 * x + 1]);
}

// Of the 4 neighbours that share a row each has x[n] of 4 groups of columns n; afterwards each has a whole group, its
// own number, in the order of lanes.
__device__ void transpose_quad(uint32_t (&x)[4]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n & step) continue;
            const bool upper = lane & step;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? x[n] : x[n + step], step);
            if (upper)
                x[n] = received;
            else
                x[n + step] = received;
        }
}

// Where row i of the work begins, in O or a state's o.
__device__ int64_t row_at(const Strides &stride, const Work &work, int i) {
    return work.b * stride.batch + work.h * stride.head + i * stride.row;
}

// 13. O to HBM as T, rows i and i + 8; what Oi is to be multiplied by is in weight.
template <class T, int Count>
__device__ void store_o(const Parameters &p, const Work &work, int i, const float (&Oi)[Count],
                        const float (&weight)[2]) {
    const int lane = threadIdx.x % 4;
    uint32_t eight[2][Count / 16][4];  // of row r the columns 32 n + 8 lane + 0..7
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < Count / 16; ++n) {
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                const float *two = &Oi[16 * n + 4 * y + 2 * r];
                eight[r][n][y] = pack<T>(weight[r] * two[0], weight[r] * two[1]);
            }
            transpose_quad(eight[r][n]);
        }
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        T *const o = (T *)p.a.o + row_at(p.a.o_stride, work, i) + 8 * lane;
        const int columns = i < p.a.Nq ? p.a.d - 8 * lane : 0;
        if (p.aligned) {
#pragma unroll
            for (int n = 0; n < Count / 16; ++n)
                if (32 * n < columns) *(uint4 *)(o + 32 * n) = *(const uint4 *)eight[r][n];
        } else {
#pragma unroll
            for (int n = 0; n < Count / 16; ++n)
#pragma unroll
                for (int y = 0; y < 8; ++y)
                    if (32 * n + y < columns) o[32 * n + y] = ((const T *)eight[r][n])[y];
        }
    }
}

// 12. - 13. o in float32, l and m, with the earlier state if there is one.
template <int Count>
__device__ void store_state(const Parameters &p, const Work &work, int i, const float (&Oi)[Count], const float (&l)[2],
                            const float (&m)[2]) {
    const Attention &a = p.a;
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        if (i >= a.Nq) return;
        const int64_t at = ((int64_t)work.b * a.Hq + work.h) * a.Nq + i;
        const bool sees_key = !empty(keys_of_row(work.band, i));
        const RowEnd end = end_of_row(sees_key, l[r], m[r], a.o_in ? a.l_in[at] : 0.f, a.o_in ? a.m_in[at] : -INFINITY);
        if (lane == 0) a.l[at] = end.l, a.m[at] = end.m;
        float *o = (float *)a.o + row_at(a.o_stride, work, i);
        const float *o_in = a.o_in && end.reads_o_in ? a.o_in + row_at(a.o_in_stride, work, i) : nullptr;
#pragma unroll
        for (int c = 0; c < Count / 2; ++c) {
            const int x = c / 2 * 8 + c % 2 + 2 * lane;
            if (x >= a.d) continue;
            const float sum = end.reads_Oi ? end.weight_Oi * Oi[c / 2 * 4 + c % 2 + 2 * r] : 0.f;
            o[x] = o_in ? sum + end.weight_o_in * o_in[x] : sum;
        }
    }
}

// ------------------------------------------------------------------------------ the consumers

template <class T, class Tile>
__device__ void consume(const Parameters &p, Shared<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc, Consumers = Tile::Consumers;
    const Attention &a = p.a;
    const int warpgroup =
        __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // the same for a warp, as the compiler then knows
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // and row + 8
    const float scale = fabsf(a.softmax_scale);
    const float c = scale == 0.f ? 1e-45f : scale * 1.44269504f;  // never 0, which would make NaN of a hidden -inf
    const bool negated = a.softmax_scale < 0.f;

    // Warpgroups take turns in starting products: one's softmax runs beside the other's products.
    const auto my_turn = [&] {
        if constexpr (Consumers > 1) sync(1 + warpgroup, 256);
    };
    const auto next_turn = [&] {
        if constexpr (Consumers > 1) arrive(1 + (warpgroup + 1) % Consumers, 256);
    };
    const auto release = [&](Barrier &barrier) {
        if (lane == 0) arrive(barrier);
    };
    if (warpgroup == Consumers - 1) next_turn();

    Ring<Tile::QStages> Q;
    Ring<kWorks> works;
    Ring<Tile::Stages> K, V;
    float Oi[D / 2], Sij[Bc / 2], alpha[2], reference[2];
    uint32_t Pij[Bc / 4];
    Rows rows;

    // 12. - 13. Oi / li to HBM, l and m
    const auto store = [&](const Work &work) {
        const int i = work.i0 + row;
        float l[2], m[2], weight[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] = row_sum(rows.l[r]);
            weight[r] = __fdividef(1.f, l[r]);
            if (empty(keys_of_row(work.band, i + 8 * r))) {
                weight[r] = 0.f;
#pragma unroll
                for (int x = 2 * r; x < D / 2; x += 4) Oi[x] = Oi[x + 1] = 0.f;
            }
        }
        if (!a.l) return store_o<T>(p, work, i, Oi, weight);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!is_far(rows.cm[r]))
                l[r] *= exp2_fast(-fmaf(rows.m[r], c, -rows.cm[r]));  // what rounding c m did to it
            m[r] = rows.m[r] * scale;
        }
        store_state(p, work, i, Oi, l, m);
    };
    const auto wait_V = [&](const Work &work, int j0) {
        wait(shared.V_full[V.stage()], V.parity());
        // Rows past seqlens_k must be 0: Pij = 0 times NaN is NaN. Each warpgroup writes all of these zeros.
        const int rows_left = work.band.keys.end - j0;
        if (rows_left < Bc && work.band.keys.end < a.Nk) {
            for (int at = rows_left * 128 + threadIdx.x % 128 * 16; at < Bc * 128; at += 128 * 16)
#pragma unroll
                for (int box = 0; box < Tile::Boxes; ++box)
                    *(uint4 *)(shared.Vj[V.stage()] + box * Bc * 128 + at) = uint4{};
            fence_async();
            sync(1 + Consumers + warpgroup, 128);
        }
    };
    const auto release_K = [&] {
        release(shared.K_empty[K.stage()]);
        K.advance();
    };
    const auto release_V = [&] {
        release(shared.V_empty[V.stage()]);
        V.advance();
    };
    // 9. - 11. for j
    const auto find_max = [&](const Work &work, int j0, Keys unmasked) {
        if (j0 < unmasked.begin || j0 + Bc > unmasked.end) {
            if (negated) {
#pragma unroll
                for (int x = 0; x < Bc / 2; ++x) Sij[x] = -Sij[x];
            }
            mask(Sij, work.band, work.i0 + row, j0);
        }
        move_max(Sij, rows, c, alpha, reference);
    };

    // The first Sij of the next work
    bool more;
    const auto begin_work = [&] {
        wait(shared.work_full[works.stage()], works.parity());
        more = shared.work[works.stage()].b >= 0;
        if (more) {  // else it multiplies what is there, for nothing
            wait(shared.Q_full[Q.stage()][warpgroup], Q.parity());
            wait(shared.K_full[K.stage()], K.parity());
        }
        begin_QK<T, Tile>(Sij, shared.Qi[Q.stage()][warpgroup], shared.Kj[K.stage()]);
    };
    begin_work();
    wait_for<0>(Sij);
    while (more) {
        const Work &work = shared.work[works.stage()];
        // The keys that this warpgroup's rows see may end before those of the block; at least one tile is computed.
        const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, a.Nq), end = work.seen.end;
        const int my_end = i0 < i1 ? min(keys_of_any(work.band, i0, i1).end, end) : 0;
        Keys unmasked = keys_of_all(work.band, i0, i0 + 64);
        if (negated) unmasked.end = 0;  // every tile goes the longer way
        int j0 = work.seen.begin;
        release_K();
        rows = Rows();
        find_max(work, j0, unmasked);
        exponentiate(Sij, rows, c, alpha, reference);
        round_P<T>(Sij, Pij);
#pragma unroll
        for (int x = 0; x < D / 2; ++x) Oi[x] = 0.f;

        // 5. for j
        for (; j0 + Bc < my_end; j0 += Bc) {
            // 9. the next Sij = Qi Kj+1^T; 12. Oi += Pij Vj
            wait(shared.K_full[K.stage()], K.parity());
            my_turn();
            begin_QK<T, Tile>(Sij, shared.Qi[Q.stage()][warpgroup], shared.Kj[K.stage()]);
            wait_V(work, j0);
            begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.stage()]);
            next_turn();
            wait_for<1>(Sij);
            release_K();
            find_max(work, j0 + Bc, unmasked);  // 10. - 11.
            wait_for<0>(Oi);
            release_V();
            // 12. Oi = diag(alpha) Oi, among the exponentials, which leave the FMA units free
#pragma unroll
            for (int x = 0; x < D / 2; ++x) Oi[x] *= alpha[x / 2 % 2];
            exponentiate(Sij, rows, c, alpha, reference);
            round_P<T>(Sij, Pij);
        }
        release(shared.Q_empty[Q.stage()][warpgroup]);
        Q.advance();
        Barrier &work_empty = shared.work_empty[works.stage()];
        works.advance();
        my_turn();
        wait_V(work, j0);
        begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.stage()]);
        next_turn();
        const bool is_last = j0 + Bc >= end;
        if (!is_last) {  // the other warpgroups need more tiles: let them pass
            wait_for<0>(Oi);
            release_V();
            for (j0 += Bc; j0 < end; j0 += Bc) {
                wait(shared.K_full[K.stage()], K.parity());
                release_K();
                my_turn();
                next_turn();
                wait(shared.V_full[V.stage()], V.parity());
                release_V();
            }
        }
        // With room for two Qi the next work begins beside the end of this one.
        if constexpr (Tile::QStages > 1) begin_work();
        wait_for<Tile::QStages - 1>(Oi);
        if (is_last) release_V();
        store(work);
        release(work_empty);
        if constexpr (Tile::QStages == 1) begin_work();
        wait_for<0>(Sij);
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    hopper_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared<Tile> &shared = *(Shared<Tile> *)memory;
    if (threadIdx.x == 0) {
        constexpr int warps = 4 * Tile::Consumers;
        for (int work = 0; work < kWorks; ++work)
            init(shared.work_full[work], 1), init(shared.work_empty[work], warps + 2);
        for (int stage = 0; stage < Tile::QStages; ++stage)
            for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup)
                init(shared.Q_full[stage][warpgroup], 1), init(shared.Q_empty[stage][warpgroup], 4);
        for (int stage = 0; stage < Tile::Stages; ++stage) {
            init(shared.K_full[stage], 1), init(shared.K_empty[stage], warps);
            init(shared.V_full[stage], 1), init(shared.V_empty[stage], warps);
        }
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<Tile::ProducerRegisters>();
        if (threadIdx.x == 0) produce_Q<Tile>(p, shared);
        if (threadIdx.x == 32) produce_K_or_V<Tile>(p, shared, p.K, shared.Kj, shared.K_full, shared.K_empty);
        if (threadIdx.x == 64) produce_K_or_V<Tile>(p, shared, p.V, shared.Vj, shared.V_full, shared.V_empty);
    } else {
        take_registers<Tile::ConsumerRegisters>();
        consume<T, Tile>(p, shared);
    }
#endif
}

// ------------------------------------------------------------------------------ the launch

// The driver's encoder, found at run time, so that nothing has to be linked with the driver.
using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
    static const Encode encode = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return result == cudaDriverEntryPointSuccess ? (Encode)function : nullptr;
    }();
    return encode;
}

// A (B, H, N, d) tensor, of which a box has `rows` rows.
bool describe(TensorMap &tensor, Dtype dtype, const void *data, const Strides &stride, int64_t B, int64_t H, int N,
              int d, int rows) {
    tensor.batch = stride.batch != 0 && B > 1, tensor.head = stride.head != 0 && H > 1;
    const cuuint64_t size[4] = {(cuuint64_t)d, (cuuint64_t)N, tensor.head ? (cuuint64_t)H : 1,
                                tensor.batch ? (cuuint64_t)B : 1};
    // The stride of a dimension of size 1 doesn't matter, but must look like one.
    const auto bytes = [](bool matters, int64_t elements) { return matters ? (cuuint64_t)elements * 2 : 16; };
    const cuuint64_t strides[3] = {bytes(N > 1, stride.row), bytes(tensor.head, stride.head),
                                   bytes(tensor.batch, stride.batch)};
    const cuuint32_t box[4] = {kBox, (cuuint32_t)rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return encoder()(&tensor.map,
                     dtype == Dtype::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                     (void *)data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, class Tile>
const char *launch(const Attention &a, CUstream_st *stream) {
    Parameters p{};
    p.a = a;
    // Without keys a tile of something is loaded, too, and nobody sees it.
    const void *k = a.Nk > 0 ? a.k : a.q, *v = a.Nk > 0 ? a.v : a.q;
    const int64_t B = a.Nk > 0 ? a.B : 1, Hkv = a.Nk > 0 ? a.Hkv : 1;
    if (!(describe(p.Q, a.dtype, a.q, a.q_stride, a.B, a.Hq, a.Nq, a.d, 64) &&
          describe(p.K, a.dtype, k, a.k_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc) &&
          describe(p.V, a.dtype, v, a.v_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc)))
        return "cuTensorMapEncodeTiled refused q, k or v";
    const auto is_aligned = [](int64_t elements) { return elements % 8 == 0; };
    p.aligned = (uintptr_t)a.o % 16 == 0 && is_aligned(a.o_stride.batch) && is_aligned(a.o_stride.head) &&
                is_aligned(a.o_stride.row) && is_aligned(a.d);

    int device, multiprocessors;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const auto kernel = hopper_kernel<T, Tile>;
    constexpr int shared_bytes = sizeof(Shared<Tile>);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess) {
        p.Tr = (a.Nq + Tile::Br - 1) / Tile::Br, p.tiles = a.B * a.Hq * p.Tr;
        const int grid = std::min(p.tiles, multiprocessors * Tile::BlocksPerSM);
        if (a.scratch && p.tiles > grid) {  // tiles differ: whoever is free takes the next
            p.next = a.scratch;
            error = cudaMemsetAsync(p.next, 0, sizeof(int), stream);
        }
        if (error == cudaSuccess) kernel<<<grid, Tile::Threads, shared_bytes, stream>>>(p);
        if (error == cudaSuccess) error = cudaGetLastError();
    }
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError();  // take it back, or the next launch of somebody else is blamed for it
    return cudaGetErrorString(error);
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

template <class T>
const char *launch_for_d(const Attention &a, CUstream_st *stream) {
    // D, Br, Bc, stages of Q, of K and V, blocks on a multiprocessor
    if (a.d <= 64 && a.Nq <= 64) return launch<T, Tile<64, 64, 64, 2, 2, 3>>(a, stream);  // 48 KB
    if (a.d <= 64) return launch<T, Tile<64, 192, 128, 2, 4>>(a, stream);                 // 176 KB
    if (a.d <= 96) return launch<T, Tile<96, 128, 128, 2, 2>>(a, stream);                 // 192 KB
    if (a.d <= 128) return launch<T, Tile<128, 128, 128, 1, 3>>(a, stream);               // 224 KB
    if (a.d <= 192) return launch<T, Tile<192, 128, 80, 2, 2>>(a, stream);                // 216 KB
    return launch<T, Tile<256, 128, 80, 1, 2>>(a, stream);                                // 224 KB
}

}  // namespace

const char *forward_sm90(const Attention &a, CUstream_st *stream) {
    if (!encoder()) return "the driver has no cuTensorMapEncodeTiled";
    return a.dtype == Dtype::float16 ? launch_for_d<__half>(a, stream) : launch_for_d<__nv_bfloat16>(a, stream);
}

}  // namespace minimal_attn
