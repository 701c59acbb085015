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
// What overlaps what, per consumer: the next Sij = Qi Kj+1^T is started before Oi += Pij Vj, so that the row maxima and a
// third of the exponentials of the one run beside the other; where there is room for two Qi, a work ends and is stored
// beside the first Sij of the next. Consumers take turns: the tensor cores have work while others do their softmax.
//
// Which barrier orders what:
//     works, Q, K, V: full   the producer's: the work is described, the tile has arrived (TMA counts its bytes)
//     works, Q, K, V: empty  the readers', one arrival a warp: it may be overwritten
//     named 1, 2, ..         whose turn it is to start products (my_turn, next_turn); 0 is __syncthreads
//     named, one a consumer  its threads have cleared the rows of Vj that no query may see
//
// Steps that differ from flash.cu's: Oi isn't rescaled before but among the exponentials; a work that sees no key
// gets a tile all the same, which is masked.
#include <algorithm>
#include <type_traits>

#include "device.h"
#include "flash.h"
#include "hopper.h"

namespace minimal_attn {
namespace {

using namespace hopper;

constexpr int kBox = 64;   // columns of a box of TMA: 128 bytes, the width of the swizzle
constexpr int kWorks = 2;  // one ends, the next is loaded and begun

// Under a mask so many of the last heads are worked on together that a block gets 4 of their tiles (2 and 3 are up to 3 %
// slower, 8 is the same), but no more than have their K and V in 32 MB of the L2 cache.
constexpr int64_t kTogether = 4;
constexpr int64_t kL2Bytes = 32 << 20;

// D, Br, Bc; stages of the rings of Q tiles and of K and V tiles; blocks on a multiprocessor
template <int D_, int Br_, int Bc_, int QStages_, int Stages_, int BlocksPerSM_ = 1>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, QStages = QStages_, Stages = Stages_, BlocksPerSM = BlocksPerSM_;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);  // a consumer warpgroup has 64 rows
    // What a thread gets at launch; then the producer's warpgroup gives its own to the consumers.
    static constexpr int LaunchRegisters = 65536 / (Threads * BlocksPerSM) / 8 * 8, ProducerRegisters = 32;
    static constexpr int ConsumerRegisters =
        (LaunchRegisters * (1 + Consumers) - ProducerRegisters) / Consumers / 8 * 8;
    static constexpr int Boxes = (D + kBox - 1) / kBox, QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128;
    static_assert(Bc % 16 == 0 && D % 32 == 0 && QStages <= 2);
};

// The barriers of one place in a ring.
struct Stage {
    Barrier full, empty;
};

// A walk around a ring, whose n-th lap ends phase n of every barrier in it. The producer waits for the phase before, which
// on the first lap passes at once: a new barrier takes parity 1 for over.
template <int Stages>
struct Ring {
    Stage *stages;
    int place = 0;  // 0 to Stages - 1 on even laps, Stages to 2 Stages - 1 on odd ones

    __device__ int at() const { return place < Stages ? place : place - Stages; }
    __device__ int parity() const { return place >= Stages; }
    __device__ void advance() { place = place == 2 * Stages - 1 ? 0 : place + 1; }
    __device__ void wait_full() const { wait(stages[at()].full, parity()); }
    __device__ void wait_empty() const { wait(stages[at()].empty, parity() ^ 1); }
    // By all lanes of a warp, or by one thread that is its first lane; not before x is computed, which also keeps ptxas from
    // moving the next wait for wgmma above that. x is a result of exp2, so never -0, but ptxas can't know.
    __device__ void release(float x = 0.f) {
        if (threadIdx.x % 32 == 0 && __float_as_int(x) != __float_as_int(-0.f)) arrive(stages[at()].empty);
        advance();
    }
};

// A tile of queries i0 <= i < i1 of head h in batch b, and the keys that some of its rows see.
struct Work {
    int b, h, i0, i1;  // b < 0: there is no more work
    Keys seen;
    BandOf<int> band;
};

template <class Tile>
struct Shared {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char Kj[Tile::Stages][Tile::KBytes], Vj[Tile::Stages][Tile::KBytes];
    Work work[kWorks];
    Stage works[kWorks], Q[Tile::Consumers][Tile::QStages], K[Tile::Stages], V[Tile::Stages];
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
    int together;   // so many of the heads, the last ones, are worked on together
    int *next;      // counts the tiles taken after each block's first; null: their order is fixed (produce_Q)
    bool aligned;   // rows of O begin and end at multiples of 16 bytes
};

// ------------------------------------------------------------------------------ the producer

// The n-th tile. Head by head, since a head's tiles share K and V in the L2 cache, the last rows first, which have most to
// do under a causal mask; but the last heads together, so that the last tiles of all are short and no block is left with
// a long one. Tiles are counted from the last row: under a causal mask the one that isn't full is then the shortest.
template <class Tile>
__device__ Work work_of(const Parameters &p, int n) {
    if (n >= p.tiles) return {-1};
    const int alone = p.tiles / p.Tr - p.together, rest = n - alone * p.Tr;
    const int head = rest < 0 ? n / p.Tr : alone + rest % p.together, Hq = (int)p.a.Hq, b = head / Hq;
    const int i1 = p.a.Nq - (rest < 0 ? n % p.Tr : rest / p.together) * Tile::Br, i0 = max(i1 - Tile::Br, 0);
    const BandOf<int> band = narrow(band_of(p.a, b));
    const Keys seen = keys_of_any(band, i0, i1);
    return {b, head % Hq, i0, i1, empty(seen) ? Keys{0, 1} : seen, band};  // if need be, a tile that nobody sees
}

template <class Tile, int Rows>
__device__ void load(unsigned char *tile, const TensorMap &tensor, int row, int h, int b, Barrier &full) {
    arrive_expecting(full, Rows * Tile::Boxes * 128);
    for (int box = 0; box < Tile::Boxes; ++box)
        load_box(tile + box * Rows * 128, tensor.map, box * kBox, row, h * tensor.head, b * tensor.batch, full);
}

// 7. - 8. for i: Qi
template <class Tile>
__device__ void produce_Q(const Parameters &p, Shared<Tile> &shared) {
    Ring<Tile::QStages> Q{};
    Ring<kWorks> works{shared.works};
    const int grid = gridDim.x;
    for (int n = blockIdx.x;;) {
        const Work work = shared.work[works.at()] = work_of<Tile>(p, n);
        arrive(shared.works[works.at()].full);
        works.advance();
        if (work.b < 0) return;
        for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
            Q.stages = shared.Q[warpgroup];
            Q.wait_empty();
            load<Tile, 64>(shared.Qi[warpgroup][Q.at()], p.Q, work.i0 + 64 * warpgroup, work.h, work.b,
                           Q.stages[Q.at()].full);
        }
        Q.advance();
        works.wait_empty();  // also so that no tile is taken long before its time: another block may be free sooner
        // Without a counter there and back: who had the longest tile gets the shortest.
        n = p.next ? grid + atomicAdd(p.next, 1) : n < grid ? 2 * grid - 1 - n : n + grid;
    }
}

// 5. - 6. for j: Kj, or Vj
template <class Tile>
__device__ void produce_K_or_V(const Parameters &p, Shared<Tile> &shared, const TensorMap &tensor, Stage *stages,
                               unsigned char (*tiles)[Tile::KBytes]) {
    Ring<kWorks> works{shared.works};
    Ring<Tile::Stages> ring{stages};
    for (;;) {
        works.wait_full();
        const Work work = shared.work[works.at()];
        works.release();
        if (work.b < 0) return;
        const int h = work.h / ((int)p.a.Hq / (int)p.a.Hkv);
        for (int j0 = work.seen.begin; j0 < work.seen.end; j0 += Tile::Bc) {
            ring.wait_empty();
            load<Tile, Tile::Bc>(tiles[ring.at()], tensor, j0, h, work.b, stages[ring.at()].full);
            ring.advance();
        }
    }
}

// ------------------------------------------------------------------------------ what a consumer does with a tile

template <class T>
__device__ uint32_t pack(float x, float y) {
    uint32_t two;
    if constexpr (std::is_same_v<T, __half>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
}

// exp(softmax_scale (s - m)) is one FFMA and one ex2: exp2(c s - cm), c = |softmax_scale| log2(e), scores of a negative
// scale being negated first. cm is c m rounded: the error is one factor for a whole row, which O / l cancels. But for
// scores in the thousands the difference would count, and for huge ones overflow: then m itself is subtracted first, or,
// as long as a row has seen nothing but -inf, 0. For D > 128, where exponentials are few beside the products, it always is;
// then c may be so small that a difference of scores overflows where it matters, so that s and m are halved.
template <int D>
__device__ bool subtracts_m(float cm) {
    return D > 128 || fabsf(cm) > 1024.f;
}
template <int D>
constexpr float kHalf = D > 128 ? 0.5f : 1.f;

// The two rows of a thread, lane / 4 and lane / 4 + 8 of its warp's 16. m is of scores that aren't scaled yet.
struct Rows {
    float m[2] = {-INFINITY, -INFINITY}, cm[2] = {-INFINITY, -INFINITY};
    float l[2] = {0.f, 0.f};      // of this thread's columns
    float alpha[2], subtract[2];  // of the tile at hand: Pij = exp2(c Sij - subtract)
};

// 10. - 11. m, and alpha, what its move is for l and Oi
template <int D, int Count>
__device__ void move_max(float (&Sij)[Count], Rows &rows, float c) {
    float m[2][2] = {{rows.m[0], rows.m[0]}, {rows.m[1], rows.m[1]}};  // of even and of odd columns: shorter chains
    const float m_old[2] = {rows.m[0], rows.m[1]};
#pragma unroll
    for (int x = 0; x < Count; ++x) m[x / 2 % 2][x % 2] = fmaxf(m[x / 2 % 2][x % 2], Sij[x]);
    const float m_lane[2] = {fmaxf(m[0][0], m[0][1]), fmaxf(m[1][0], m[1][1])};
    // Asked of the lanes, so that the answer is there when the rows' maxima are. A lane that is far while its row isn't
    // costs time, no more: below each row asks again.
    const bool any = __any_sync(~0u, subtracts_m<D>(m_lane[0] * c) || subtracts_m<D>(m_lane[1] * c));
    for (int r = 0; r < 2; ++r) {
        rows.m[r] = row_max<4>(m_lane[r]);
        rows.subtract[r] = __fmul_rn(rows.m[r], c);
        rows.alpha[r] = exp2_fast(rows.cm[r] - rows.subtract[r]);
        rows.cm[r] = rows.subtract[r];
    }
    if (D <= 128 && !any) return;  // D: or else the vote and the branch stay for D > 128, too
    for (int r = 0; r < 2; ++r) {
        if (!subtracts_m<D>(rows.cm[r])) continue;
        const float m_safe = rows.m[r] == -INFINITY ? 0.f : rows.m[r];
        const auto minus_m = [&](float x) { return fmaf(x, kHalf<D>, -kHalf<D> * m_safe); };
        rows.alpha[r] = exp2_fast(minus_m(m_old[r]) * (c / kHalf<D>)), rows.subtract[r] = 0.f;
#pragma unroll
        for (int x = 2 * r; x < Count; x += 4) Sij[x] = minus_m(Sij[x]), Sij[x + 1] = minus_m(Sij[x + 1]);
    }
}

// 10. - 11. Pij, in place of Sij, and l
template <int D, int Count>
__device__ void exponentiate(float (&Sij)[Count], Rows &rows, float c) {
    for (int r = 0; r < 2; ++r) {
        float sum = 0.f;  // of this tile alone: in a sum over all keys the small terms would be lost
#pragma unroll
        for (int x = 2 * r; x < Count; x += x % 2 ? 3 : 1)
            sum += Sij[x] = exp2_fast(fmaf(Sij[x], c / kHalf<D>, -rows.subtract[r]));
        rows.l[r] = fmaf(rows.l[r], rows.alpha[r], sum);
    }
}

// Pij as the A of Pij Vj: a thread's places in the accumulator Sij, in pairs, are its places in A
template <class T, int Count>
__device__ void pack(uint32_t (&Pij)[Count], const float (&Sij)[2 * Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) Pij[x] = pack<T>(Sij[2 * x], Sij[2 * x + 1]);
}

// 9. -inf for the keys of this tile that a row doesn't see
template <int Count>
__device__ void mask(float (&Sij)[Count], const BandOf<int> &band, int i, int j0) {
    const Keys keys[2] = {keys_of_row(band, i), keys_of_row(band, i + 8)};
    const int j_lane = j0 + threadIdx.x % 4 * 2;
    const auto hide = [&](auto hidden) {
#pragma unroll
        for (int x = 0; x < Count; ++x)
            if (hidden(x / 4 * 8 + x % 2, keys[x / 2 % 2])) Sij[x] = -INFINITY;
    };
    hide([&](int j, Keys row) { return j >= row.end - j_lane; });
    if (__any_sync(~0u, j0 < max(keys[0].begin, keys[1].begin)))
        hide([&](int j, Keys row) { return j < row.begin - j_lane; });
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

// Where row i of the work's head begins, in O or a state's o.
__device__ int64_t row_at(const Strides &stride, const Work &work, int i) {
    return work.b * stride.batch + work.h * stride.head + i * stride.row;
}

// 12. - 13. O = Oi / li to HBM as T, rows i and i + 8. All shuffles come before the first branch, so that they overlap.
template <class T, int Count>
__device__ void store_o(const Parameters &p, const Work &work, int i, const float (&Oi)[Count], const Rows &rows) {
    const int quad = threadIdx.x % 4;
    uint32_t eight[2][Count / 16][4];  // of row r the columns 32 n + 8 quad + 0..7
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool sees_key = !empty(keys_of_row(work.band, i + 8 * r));
        const float weight = __fdividef(1.f, row_sum<4>(rows.l[r]));
#pragma unroll
        for (int n = 0; n < Count / 16; ++n) {
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                const float *two = &Oi[16 * n + 4 * y + 2 * r];
                eight[r][n][y] = sees_key ? pack<T>(weight * two[0], weight * two[1]) : 0;
            }
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
#pragma unroll
                for (int y = 0; y < 8; ++y)
                    if (32 * n + y < columns) o[32 * n + y] = ((const T *)eight[r][n])[y];
        }
    }
}

// 12. - 13. The same in float32, with l and m, joined with the earlier state if there is one
template <int D, int Count>
__device__ void store_state(const Attention &a, const Work &work, int i, const float (&Oi)[Count], const Rows &rows,
                            float c) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        // What l and Oi, relative to the rounded cm, are to be multiplied by to be relative to c m.
        const float unrounded = subtracts_m<D>(rows.cm[r]) ? 1.f : exp2_fast(-fmaf(rows.m[r], c, -rows.cm[r]));
        const float l = unrounded * row_sum<4>(rows.l[r]), m = rows.m[r] * fabsf(a.softmax_scale);
        if (i >= work.i1) continue;
        const int64_t at = ((int64_t)work.b * a.Hq + work.h) * a.Nq + i;
        const bool sees_key = !empty(keys_of_row(work.band, i));
        const RowEnd end = end_of_row(sees_key, l, m, a.l_in ? a.l_in[at] : 0.f, a.l_in ? a.m_in[at] : -INFINITY);
        if (quad == 0) a.l[at] = end.l, a.m[at] = end.m;
        float *o = (float *)a.o + row_at(a.o_stride, work, i);
        const float *o_in = a.o_in && end.reads_o_in ? a.o_in + row_at(a.o_in_stride, work, i) : nullptr;
#pragma unroll
        for (int y = 0; y < Count / 2; ++y) {
            const int x = y / 2 * 8 + y % 2 + 2 * quad;
            if (x >= a.d) continue;
            const float sum = end.reads_Oi ? unrounded * end.weight_Oi * Oi[y / 2 * 4 + y % 2 + 2 * r] : 0.f;
            o[x] = o_in ? sum + end.weight_o_in * o_in[x] : sum;
        }
    }
}

// ------------------------------------------------------------------------------ the consumers

template <class T, class Tile>
__device__ void consume(const Parameters &p, Shared<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc, Consumers = Tile::Consumers;
    const Attention &a = p.a;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // shuffled: now nvcc knows that a warp has one
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // and row + 8
    // Neither 0 nor inf, nor is 2 c, which would make NaN of a hidden -inf or of a 0.
    const float c = fminf(fmaxf(fabsf(a.softmax_scale) * kLog2e, 1e-45f), 1.5e38f);
    const bool negated = a.softmax_scale < 0.f;

    // Warpgroups take turns in starting products, but for a work's first: one's softmax runs beside another's products.
    const auto my_turn = [&] {
        if constexpr (Consumers > 1) sync(1 + warpgroup, 256);
    };
    const auto next_turn = [&] {
        if constexpr (Consumers > 1) arrive(1 + (warpgroup + 1) % Consumers, 256);
    };
    if (warpgroup == Consumers - 1) next_turn();  // the first turn is warpgroup 0's

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
    // 9. - 11. for j
    const auto find_max = [&](const Work &work, int j0, Keys unmasked) {
        if (j0 < unmasked.begin || j0 + Bc > unmasked.end) {
            if (negated) {
#pragma unroll
                for (int x = 0; x < Bc / 2; ++x) Sij[x] = -Sij[x];
            }
            mask(Sij, work.band, work.i0 + row, j0);
        }
        move_max<D>(Sij, rows, c);
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
        Keys unmasked = keys_of_all(work.band, i0, i0 + 64);
        if (negated) unmasked.end = 0;  // every tile goes the longer way
        int j0 = work.seen.begin;
        K.release();
        rows = Rows();
        find_max(work, j0, unmasked);
        exponentiate<D>(Sij, rows, c);
        pack<T>(Pij, Sij);
#pragma unroll
        for (int x = 0; x < D / 2; ++x) Oi[x] = 0.f;

        // 5. for j
        for (; j0 + Bc < my_end; j0 += Bc) {
            // 9. the next Sij = Qi Kj+1^T; 12. Oi += Pij Vj
            K.wait_full();
            my_turn();
            begin_QK<T, Tile>(Sij, shared.Qi[warpgroup][Q.at()], shared.Kj[K.at()]);
            V.wait_full();
            begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.at()]);
            next_turn();
            wait_for<1>(Sij);
            find_max(work, j0 + Bc, unmasked);  // 10. - 11.
            exponentiate<D>(Sij, rows, c);
            K.release(Sij[Bc / 8 - 1]);  // tuned: about a third of the exponentials before the wait (NOTES.md)
            wait_for<0>(Oi);
            V.release();
            // 12. Oi = diag(alpha) Oi, among the other exponentials, which leave the FMA units free
#pragma unroll
            for (int x = 0; x < D / 2; ++x) Oi[x] *= rows.alpha[x / 2 % 2];
            pack<T>(Pij, Sij);
        }
        Q.release();
        Ring<kWorks> ending = works;  // released when O is stored
        works.advance();
        my_turn();
        V.wait_full();
        clear_rows_past(work.band.keys.end, j0);
        begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.at()]);  // 12. for the last time
        next_turn();
        const bool is_last = j0 + Bc >= end;
        if (!is_last) {  // the other warpgroups need more tiles, and they this one's place: let them pass
            wait_for<0>(Oi);
            V.release();
            for (j0 += Bc; j0 < end; j0 += Bc) {
                K.wait_full();
                K.release();
                my_turn();
                next_turn();
                V.wait_full();
                V.release();
            }
        }
        // With room for two Qi the next work begins beside the end of this one.
        if constexpr (Tile::QStages > 1) begin_work();
        wait_for<Tile::QStages - 1>(Oi);
        if (is_last) V.release();
        if (a.l)
            store_state<D>(a, work, work.i0 + row, Oi, rows, c);
        else
            store_o<T>(p, work, work.i0 + row, Oi, rows);
        __syncwarp();  // all lanes have read the work
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
    Shared<Tile> &shared = *(Shared<Tile> *)memory;
    if (threadIdx.x == 0) {
        const auto init_ring = [](auto &ring, int readers) {
            for (Stage &stage : ring) init(stage.full, 1), init(stage.empty, readers);
        };
        constexpr int warps = 4 * Tile::Consumers;
        init_ring(shared.works, warps + 2);  // the consumers, and who loads K and V
        for (auto &ring : shared.Q) init_ring(ring, 4);
        init_ring(shared.K, warps), init_ring(shared.V, warps);
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<Tile::ProducerRegisters>();
        if (threadIdx.x == 0) produce_Q<Tile>(p, shared);
        if (threadIdx.x == 32) produce_K_or_V<Tile>(p, shared, p.K, shared.K, shared.Kj);
        if (threadIdx.x == 64) produce_K_or_V<Tile>(p, shared, p.V, shared.V, shared.Vj);
    } else {
        take_registers<Tile::ConsumerRegisters>();
        consume<T, Tile>(p, shared);
    }
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for something else than sm_90a, which no launch should come to
#endif
}

// ------------------------------------------------------------------------------ the launch

// The driver's encoder, found at run time, so that nothing has to be linked with the driver.
auto encoder() {
    static const auto encode = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return (decltype(&cuTensorMapEncodeTiled))function;
    }();
    return encode;
}

// A (B, H, N, d) tensor, of which a box has `rows` rows.
bool describe(TensorMap &tensor, Dtype dtype, const void *data, const Strides &stride, uint64_t B, uint64_t H,
              uint64_t N, uint64_t d, uint32_t rows) {
    tensor.batch = stride.batch != 0 && B > 1, tensor.head = stride.head != 0 && H > 1;
    const cuuint64_t size[4] = {d, N, tensor.head ? H : 1, tensor.batch ? B : 1};
    // The stride of a dimension of size 1 doesn't matter, but must look like one.
    const auto bytes = [](bool matters, uint64_t elements) { return matters ? elements * 2 : 16; };
    const cuuint64_t strides[3] = {bytes(N > 1, stride.row), bytes(tensor.head, stride.head),
                                   bytes(tensor.batch, stride.batch)};
    const cuuint32_t box[4] = {kBox, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    return encoder()(&tensor.map,
                     dtype == Dtype::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                     (void *)data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, class Tile>
const char *launch(const Attention &a, CUstream_st *stream) {
    Parameters p{a};
    // Without keys a tile of something is loaded, too, and nobody sees it.
    const void *k = a.Nk > 0 ? a.k : a.q, *v = a.Nk > 0 ? a.v : a.q;
    const int64_t B = a.Nk > 0 ? a.B : 1, Hkv = a.Nk > 0 ? a.Hkv : 1;
    if (!(describe(p.Q, a.dtype, a.q, a.q_stride, a.B, a.Hq, a.Nq, a.d, 64) &&
          describe(p.K, a.dtype, k, a.k_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc) &&
          describe(p.V, a.dtype, v, a.v_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc)))
        return "cuTensorMapEncodeTiled refused q, k or v";
    p.aligned = is_aligned(a.o, a.o_stride, sizeof(T), a.d);
    const auto kernel = hopper_kernel<T, Tile>;
    constexpr int bytes = sizeof(Shared<Tile>);
    int multiprocessors = 0;
    cudaError_t error = get_attribute(multiprocessors, cudaDevAttrMultiProcessorCount);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    p.Tr = (a.Nq + Tile::Br - 1) / Tile::Br, p.tiles = a.B * a.Hq * p.Tr;
    const int grid = std::min(p.tiles, multiprocessors * Tile::BlocksPerSM);
    // Under a mask tiles differ, and whoever is free takes the next. Two a block are but put in order: the counter has to
    // be set to 0, which is a launch of its own.
    p.next = p.tiles > 2 * grid ? a.scratch : nullptr;
    const int64_t heads = a.B * a.Hq, in_L2 = kL2Bytes / (std::max<int64_t>(a.Nk, 1) * a.d * 2 * sizeof(T));  // of Hkv
    p.together = p.tiles <= 2 * grid ? heads : 1;
    if (p.next) p.together = clamp(std::min(kTogether * grid / p.Tr, in_L2 * (a.Hq / a.Hkv)), int64_t(1), heads);
    if (error == cudaSuccess && p.next) error = cudaMemsetAsync(p.next, 0, sizeof(int), stream);
    if (error == cudaSuccess) kernel<<<grid, Tile::Threads, bytes, stream>>>(p), error = cudaGetLastError();
    return why_not(error);
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

template <class T>
const char *launch_for_d(const Attention &a, CUstream_st *stream) {
    // D, Br, Bc, stages of Q, of K and V, blocks on a multiprocessor; NOTES.md has what others gave.
    // Few queries: 48 KB, so that three blocks hide one another's latencies.
    if (a.d <= 64 && a.Nq <= 64) return launch<T, Tile<64, 64, 64, 2, 2, 3>>(a, stream);
    // 176 KB. With three consumers 7 % faster than with two: exponentials are half the work.
    if (a.d <= 64) return launch<T, Tile<64, 192, 128, 2, 4>>(a, stream);
    if (a.d <= 96) return launch<T, Tile<96, 128, 128, 2, 2>>(a, stream);  // 192 KB, a quarter fewer products than 128
    // 224 KB. A third stage gains up to 3 % over a second Qi; Bc 176, in two stages, loses 6 % at N 512.
    if (a.d <= 128) return launch<T, Tile<128, 128, 128, 1, 3>>(a, stream);
    if (a.d <= 192) return launch<T, Tile<192, 128, 80, 2, 2>>(a, stream);  // 216 KB, a quarter fewer than 256
    return launch<T, Tile<256, 128, 80, 1, 2>>(a, stream);                  // 224 KB; Bc 64 is up to 8 % slower
}

}  // namespace

const char *forward_sm90(const Attention &a, CUstream_st *stream) {
    if (!encoder()) return "the driver has no cuTensorMapEncodeTiled";
    return a.dtype == Dtype::float16 ? launch_for_d<__half>(a, stream) : launch_for_d<__nv_bfloat16>(a, stream);
}

}  // namespace minimal_attn
