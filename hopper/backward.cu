// backward.cu: dK and dV, and dQ if wanted, for float16 and bfloat16 on Hopper. docs/backward.md has its budget and
// measurements. Read half.cu first.
//
//     S = Q K^T,  P = exp(S - lse),  dP = dO V^T,  dS = P o (dP - D)          dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// A block owns a tile of Bc keys of one head, 64 for each consumer warpgroup. It walks the tiles of Br queries that see
// one of them, in each query head that shares the key head, so no other block adds to its dK and dV.
//
//     thread 0            shared memory      each consumer warpgroup, in registers             threads 32, 64
//         +-- once ----> Kj, Vj ---------+
//         +------------> Qi, lse_i ------+-> S^T = Kj Qi^T       (wgmma)   P^T = exp(S^T - lse)
//         +------------> dOi, Di --------+-> dP^T = Vj dOi^T     (wgmma)   dS^T = P^T o (dP^T - D)
//                             |          +-> dV += P^T dOi       (wgmma, A = P^T in registers)
//                             +----------+-> dK += dS^T Qi       (wgmma, A = dS^T in registers)
//                        dS <------------+   dS^T of 64 keys
//                         +----------------> dQ^T = Kj^T dS^T    (wgmma, 64 x 64 of it)
//                        dQi <-----------+------------------------------------------------> TMA adds it to dQ in HBM
//
// S^T instead of S: so P^T and dS^T are accumulators whose registers are the operand A of the next product. The next
// tile's S^T and dP^T are issued before this tile's dK has ended, so the tensor cores have work during exponentials.
//
// | role                | warps             | registers a thread | does                                           |
// |---------------------|-------------------|--------------------|------------------------------------------------|
// | producer            | 0 (thread 0)      | 24                 | loads Kj, Vj; Qi and lse_i, dOi and Di         |
// | adders of dQ        | 1, 2 (lane 0)     | 24                 | TMA adds what a consumer has staged of dQi     |
// | none                | 3                 | 24                 | ends                                           |
// | consumer warpgroups | 4 to 11           | 240                | 64 keys each: S^T, P^T, dS^T, dK, dV; and dQ^T |
//
// | barrier                | arrives            | waits          | then                                               |
// |------------------------|--------------------|----------------|----------------------------------------------------|
// | K, V                   | thread 0; TMA      | consumers      | Kj or Vj is there                                  |
// | Q full, dO full        | thread 0; TMA      | consumers      | the tile is there, with lse_i or Di                |
// | Q empty, dO empty      | consumers          | thread 0       | dK or dV has read it                               |
// | dS full                | consumers          | consumers      | dS of all keys is there                            |
// | dS empty               | consumers          | consumers      | dQ has read it                                     |
// | dQ full (per consumer) | that consumer      | its adder      | its part of dQi is staged                          |
// | dQ empty (likewise)    | its adder          | that consumer  | TMA has read it                                    |
// | named kZeroed + index  | that consumer      | that consumer  | rows that count for nothing are 0                  |
//
// full and empty are mbarriers, on which a warp arrives once.
#include "hopper/epilogue.h"
#include "hopper/launch.h"
#include "portable/gradient_rows.h"

namespace minimal_attn::hopper {
namespace {

// Whether dQ is added here, in any order, or left to another kernel.
enum class ComputesdQ { no, yes };

// Stages of Q, of dO and of dS.
template <int D_, int Br_, int Bc_, int QStages_, int dOStages_, int dSStages_>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, QStages = QStages_, dOStages = dOStages_, dSStages = dSStages_;
    static constexpr int Consumers = Bc / 64, Threads = 128 * (1 + Consumers), BlocksPerSM = 1;
    static constexpr int ProducerRegisters = 24;
    static constexpr int Boxes = D / kBoxColumns, QueryBoxes = Br / 64;
    static constexpr int QBytes = Br * Boxes * 128, KBytes = Bc * Boxes * 128;
    enum NamedBarrier { kZeroed = 1 };  // + the consumer; 0 is __syncthreads
    static_assert(D % 64 == 0 && Br % 64 == 0 && kGradientRows % Br == 0);
    static_assert(Boxes * QueryBoxes == Consumers);  // each computes 64 x 64 of dQi
};

// KB            | d 64 | d 128
// Kj, Vj        | 32   | 64
// Qi, dOi       | 64   | 64
// dS, dQi       | 64   | 48
template <class Tile>
struct SharedStorage {
    alignas(1024) unsigned char Kj[Tile::KBytes], Vj[Tile::KBytes];
    unsigned char Qi[Tile::QStages][Tile::QBytes], dOi[Tile::dOStages][Tile::QBytes];
    unsigned char dS[Tile::dSStages][Tile::QueryBoxes * Tile::Bc * 128];  // a row for each key, boxes of 64 queries
    unsigned char dQi[Tile::Consumers][2][64 * 128];                      // 64 queries, boxes of 32 columns
    float lse[Tile::QStages][Tile::Br], Di[Tile::dOStages][Tile::Br];
    Barrier K, V;
    StageBarriers Q[Tile::QStages], dO[Tile::dOStages], dS_ready[Tile::dSStages], dQ[Tile::Consumers][1];
};

struct BackwardParameters {
    Gradient g;
    TensorMap Q, K, V, dO, dQ;
    GradientRows rows;
    int Tc;                       // tiles of keys of a head
    bool dk_aligned, dv_aligned;  // their rows begin and end at multiples of 16 bytes
};

// What a block computes: the keys from j0 on, and the tiles of queries from i0 on that see one of them.
template <class Tile>
struct KeyTile {
    int b, key_head, j0;
    BandOf<int> band;
    int h0, i0, i1;  // the first query head; the queries of a head
    int tiles;       // of queries, in all heads that share the key head

    // The band's bounds only grow with i, so the queries are neighbours.
    __device__ explicit KeyTile(const BackwardParameters &p) {
        const Attention &a = p.g.a;
        const int head = blockIdx.x / p.Tc, group = a.Hq / a.Hkv;
        b = head / (int)a.Hkv, key_head = head % (int)a.Hkv, h0 = key_head * group;
        j0 = blockIdx.x % p.Tc * Tile::Bc;
        band = narrow(band_of(a, b));
        const int first = max(j0, band.keys.begin), end = min(j0 + Tile::Bc, band.keys.end);
        i0 = max(first - band.last, 0) / Tile::Br * Tile::Br, i1 = min(end - band.first, a.Nq);
        tiles = first < end && i0 < i1 ? (i1 - i0 + Tile::Br - 1) / Tile::Br * group : 0;
    }
};

// Where a thread is in the walk over tiles of queries.
template <class Tile>
struct QueryTile {
    int h, i0;
    __device__ explicit QueryTile(const KeyTile<Tile> &keys) : h(keys.h0), i0(keys.i0) {}
    __device__ void advance(const KeyTile<Tile> &keys) {
        i0 += Tile::Br;
        if (i0 >= keys.i1) i0 = keys.i0, ++h;
    }
};

// ------------------------------------------------------------------------------ producer and adders

// Loads a tile of Q or dO, and the numbers of its rows.
template <class Tile>
__device__ void load_queries(unsigned char *tile, const TensorMap &tensor, float *numbers, const float *from, int b,
                             const QueryTile<Tile> &at, Barrier &full) {
    arrive_expect_tx(full, Tile::QBytes + Tile::Br * 4);
    for (int box = 0; box < Tile::Boxes; ++box)
        tma_load(tile + box * Tile::Br * 128, tensor.map, box * kBoxColumns, at.i0, at.h * tensor.head,
                 b * tensor.batch, full);
    bulk_load(numbers, from, Tile::Br * 4, full);
}

template <class Tile>
__device__ void load_all(const BackwardParameters &p, SharedStorage<Tile> &shared) {
    const KeyTile<Tile> keys(p);
    if (keys.tiles == 0) return;
    load_tile<Tile::Bc, Tile::Boxes>(shared.Kj, p.K, keys.j0, keys.key_head, keys.b, shared.K);
    Pipeline<Tile::QStages> Q{shared.Q};
    Pipeline<Tile::dOStages> dO{shared.dO};
    QueryTile<Tile> at(keys);
    for (int n = 0; n < keys.tiles; ++n, at.advance(keys)) {
        const int64_t row = (keys.b * p.g.a.Hq + at.h) * p.rows.head_stride + at.i0;
        Q.producer_acquire();
        load_queries<Tile>(shared.Qi[Q.stage()], p.Q, shared.lse[Q.stage()], p.rows.lse + row, keys.b, at, Q.full());
        Q.advance();
        if (n == 0) load_tile<Tile::Bc, Tile::Boxes>(shared.Vj, p.V, keys.j0, keys.key_head, keys.b, shared.V);
        dO.producer_acquire();
        load_queries<Tile>(shared.dOi[dO.stage()], p.dO, shared.Di[dO.stage()], p.rows.D + row, keys.b, at, dO.full());
        dO.advance();
    }
}

// Which 64 queries and 64 columns of dQi a consumer computes.
template <class Tile>
__device__ int query_box(int warpgroup) {
    return warpgroup % Tile::QueryBoxes;
}
template <class Tile>
__device__ int column_box(int warpgroup) {
    return warpgroup / Tile::QueryBoxes;
}

template <class Tile>
__device__ void add_dQ(const BackwardParameters &p, SharedStorage<Tile> &shared, int warpgroup) {
    const KeyTile<Tile> keys(p);
    Pipeline<1> dQ{shared.dQ[warpgroup]};
    QueryTile<Tile> at(keys);
    for (int n = 0; n < keys.tiles; ++n, at.advance(keys)) {
        dQ.consumer_wait();
        for (int box = 0; box < 2; ++box)
            tma_add(p.dQ.map, shared.dQi[warpgroup][box], 64 * column_box<Tile>(warpgroup) + 32 * box,
                    at.i0 + 64 * query_box<Tile>(warpgroup), at.h * p.dQ.head, keys.b * p.dQ.batch);
        tma_store_wait_read();
        dQ.consumer_release();
    }
}

// ------------------------------------------------------------------------------ consumer warpgroups

// Sets the rows of a tile before `begin` and from `end` on to 0: 0 times NaN is NaN. Each warpgroup sets all of them.
template <int Rows, int Boxes>
__device__ void zero_rows_outside(unsigned char *tile, int begin, int end, int barrier) {
    if (begin <= 0 && end >= Rows) return;
    for (int at = threadIdx.x % 128 * 16; at < Rows * 128; at += 128 * 16)
        if (at / 128 < begin || at / 128 >= end)
            for (int box = 0; box < Boxes; ++box) *(uint4 *)(tile + box * Rows * 128 + at) = uint4{};
    fence_async();
    named_barrier_sync(barrier, 128);
}

// Tells the compiler that nothing reads the old x: a product that overwrites x would seem to read it.
template <int Count>
__device__ void forget(float (&x)[Count]) {
    float undefined[Count];
#pragma unroll
    for (int n = 0; n < Count; ++n) x[n] = undefined[n];
}

// Starts C = A B^T of 64 rows of A, in a tile of ARows, and BRows rows of B.
template <class T, int D, int ARows, int BRows, int Count>
__device__ void issue_ABt(float (&C)[Count], const unsigned char *A, const unsigned char *B) {
    const Descriptor a = descriptor(A, 0), b = descriptor(B, 0);
    forget(C);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D; x += 16)
        wgmma_ABt(T(), C, a + x / kBoxColumns * ARows * 128 + x % kBoxColumns * 2,
                  b + x / kBoxColumns * BRows * 128 + x % kBoxColumns * 2, x > 0);
    wgmma_commit();
}

// Starts C += A B, or C = A B, with A in registers and Rows rows of B.
template <class T, int Rows, int CountC, int CountA>
__device__ void issue_AB(float (&C)[CountC], const uint32_t (&A)[CountA], const unsigned char *B, bool adds) {
    const Descriptor b = descriptor(B, Rows * 128);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < Rows; row += 16) wgmma_AB(T(), C, &A[row / 4], b + row * 128, adds || row > 0);
    wgmma_commit();
}

// Starts C = A^T B of 64 columns of each.
template <class T, int Rows, int Count>
__device__ void issue_AtB(float (&C)[Count], const unsigned char *A, const unsigned char *B) {
    const Descriptor a = descriptor(A, 0), b = descriptor(B, 0);
    forget(C);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < Rows; row += 16) wgmma_AtB(T(), C, a + row * 128, b + row * 128, row > 0);
    wgmma_commit();
}

template <class T, int Count>
__device__ void pack_operand(uint32_t (&A)[Count], const float (&C)[2 * Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) A[x] = pack<T>(C[2 * x], C[2 * x + 1]);
}

// P^T in place of S^T. lse is of the tile's queries, from this thread's first on.
template <int Count>
__device__ void exponentiate(float (&S)[Count], const float *lse, float c) {
#pragma unroll
    for (int n = 0; n < Count / 4; ++n) {
        const float2 two = *(const float2 *)(lse + 8 * n);
#pragma unroll
        for (int x = 4 * n; x < 4 * n + 4; ++x) S[x] = exp2_fast(fmaf(S[x], c, x % 2 ? -two.y : -two.x));
    }
}

// P^T = 0 where the band hides key j or j + 8 from a query. The thread's first query is i.
template <int Count>
__device__ void mask_P(float (&P)[Count], const BandOf<int> &band, int j, int i) {
    const int span = band.last - band.first;
#pragma unroll
    for (int r = 0; r < 2; ++r, j += 8) {
        const bool exists = band.keys.begin <= j && j < band.keys.end;
        const int first = exists ? j - band.last - i : 1 << 30;  // the first query that sees the key, from i on
#pragma unroll
        for (int x = 2 * r; x < Count; x += x % 2 ? 3 : 1)
            if ((unsigned)(x / 4 * 8 + x % 2 - first) > (unsigned)span) P[x] = 0.f;
    }
}

// dS^T in place of dP^T.
template <int Count>
__device__ void compute_dS(float (&dP)[Count], const float (&P)[Count], const float *Di) {
#pragma unroll
    for (int n = 0; n < Count / 4; ++n) {
        const float2 two = *(const float2 *)(Di + 8 * n);
#pragma unroll
        for (int x = 4 * n; x < 4 * n + 4; ++x) dP[x] = P[x] * (dP[x] - (x % 2 ? two.y : two.x));
    }
}

// dS^T of 64 keys to shared memory, with the swizzle that wgmma expects.
template <class Tile, int Count>
__device__ void stage_dS(unsigned char *tile, const uint32_t (&dS)[Count], int warpgroup, int warp, int lane) {
    const int row = 64 * warpgroup + 16 * warp + lane % 16;
    tile += row * 128;
#pragma unroll
    for (int n = 0; n < Count / 4; ++n)  // 16 queries each
        store_matrices(tile + n / 4 * Tile::Bc * 128 + ((n % 4 * 2 + lane / 16) ^ row % 8) * 16, &dS[4 * n]);
    fence_async();
}

// dQ^T, 64 columns x 64 queries, to two boxes of 32 columns, with the swizzle that TMA expects.
template <int Count>
__device__ void stage_dQ(unsigned char *boxes, const float (&dQ)[Count], int warp, int lane) {
    const int query = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
    unsigned char *const tile = boxes + warp / 2 * (64 * 128) + query * 128 + lane / 4 % 4 * 4;
#pragma unroll
    for (int x = 0; x < Count; ++x) {
        const int c = x % 2, r = x / 2 % 2;  // query + 8 (x / 4) + c, 8 r columns further on
        *(float *)(tile + (x / 4 * 8 + c) * 128 + ((chunk ^ query) ^ (2 * r ^ c)) * 16) = dQ[x];
    }
    fence_async();
}

// The rows j and j + 8 of scale * dK or dV to HBM; zeros for keys that don't count.
template <class T, int Count>
__device__ void store_rows(void *to, const Strides &stride, bool aligned, const Attention &a, Dtype dtype, int b, int h,
                           int j, const Keys &keys, const float (&x)[Count], float scale) {
    const int quad = threadIdx.x % 4;
    const bool odd = quad % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r, j += 8) {
        const bool counts = keys.begin <= j && j < keys.end;
        const int64_t row = b * stride.batch + h * stride.head + j * stride.row;
        if (dtype == Dtype::float32) {
            const int first = 2 * quad;
            store_row<Count / 2>((float *)to + row + first, j < a.Nk ? a.d - first : 0, aligned, [&](int n) {
                const float *const two = &x[4 * n + 2 * r];
                return counts ? float2{scale * two[0], scale * two[1]} : float2{};
            });
            continue;
        }
        // Neighbouring lanes exchange pairs, as in store_O
        const auto two = [&](int n) {
            return counts ? pack<T>(scale * x[4 * n + 2 * r], scale * x[4 * n + 2 * r + 1]) : 0;
        };
        const int first = quad % 2 * 8 + quad / 2 * 4;
        store_row<Count / 2>((T *)to + row + first, j < a.Nk ? a.d - first : 0, aligned, [&](int n) {
            const uint32_t even_block = two(2 * n), odd_block = two(2 * n + 1);
            const uint32_t received = __shfl_xor_sync(~0u, odd ? even_block : odd_block, 1);
            return odd ? uint2{received, odd_block} : uint2{even_block, received};
        });
    }
}

template <class T, class Tile, ComputesdQ kdQ>
__device__ void consume(const BackwardParameters &p, SharedStorage<Tile> &shared) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc;
    const Attention &a = p.g.a;
    const int warpgroup = consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const KeyTile<Tile> keys(p);
    const int j_warpgroup = keys.j0 + 64 * warpgroup, j = j_warpgroup + 16 * warp + lane / 4;  // keys j and j + 8
    const float c = a.softmax_scale * kLog2e;
    // Of the next S^T; of the next dS^T Qi; of the one before, to be released.
    Pipeline<Tile::QStages> Q{shared.Q}, Q_of_dK{shared.Q}, Q_done{shared.Q};
    Pipeline<Tile::dOStages> dO{shared.dO}, dO_of_dV{shared.dO};
    Pipeline<Tile::dSStages> dS_written{shared.dS_ready}, dS_read{shared.dS_ready};
    Pipeline<1> dQ_staged{shared.dQ[warpgroup]};
    QueryTile<Tile> at(keys), next(keys);  // of this tile; of the next S^T
    float dK[D / 2], dV[D / 2], S[Br / 2], dP[Br / 2];
    uint32_t P[Br / 4], dS[Br / 4];

    // Queries outside these see no key at all: TMA has set those from Nq on to 0.
    const int blind_before = keys.band.keys.begin - keys.band.last;
    const int blind_from = keys.band.keys.end - keys.band.first < a.Nq ? keys.band.keys.end - keys.band.first : 1 << 30;
    const auto zero_blind = [&](unsigned char *tile, int i0) {
        zero_rows_outside<Br, Tile::Boxes>(tile, blind_before - i0, blind_from - i0, Tile::kZeroed + warpgroup);
    };
    // After the last tile these multiply stale tiles, and nobody reads the products: under an if, ptxas would wait for
    // them at once (C7517, docs/ptxas.md).
    const auto issue_S = [&](bool exists) {
        if (exists) Q.consumer_wait(), zero_blind(shared.Qi[Q.stage()], next.i0);
        issue_ABt<T, D, Bc, Br>(S, shared.Kj + 64 * 128 * warpgroup, shared.Qi[Q.stage()]);
        Q.advance();
    };
    const auto issue_dP = [&](bool exists) {
        if (exists) dO.consumer_wait(), zero_blind(shared.dOi[dO.stage()], next.i0);
        issue_ABt<T, D, Bc, Br>(dP, shared.Vj + 64 * 128 * warpgroup, shared.dOi[dO.stage()]);
        dO.advance();
        next.advance(keys);
    };

    // dQ^T of a tile, Lag tiles behind dS: consumers then needn't wait for each other.
    constexpr int Lag = Tile::dSStages - 1;
    float dQ[32];
    const auto issue_dQ = [&](bool exists) {
        if (exists) dS_read.consumer_wait();
        issue_AtB<T, Bc>(dQ, shared.Kj + column_box<Tile>(warpgroup) * Bc * 128,
                         shared.dS[dS_read.stage()] + query_box<Tile>(warpgroup) * Bc * 128);
    };
    const auto store_dQ = [&](bool exists) {
        if (!exists) return;
        dS_read.consumer_release();
        dQ_staged.producer_acquire();
        stage_dQ(shared.dQi[warpgroup][0], dQ, warp, lane);
        __syncwarp();
        if (lane == 0) arrive(dQ_staged.full());
        dQ_staged.advance();
    };

    const auto store = [&](const Keys &counted) {
        store_rows<T>(p.g.dv, p.g.dv_stride, p.dv_aligned, a, p.g.out_dtype, keys.b, keys.key_head, j, counted, dV,
                      1.f);
        store_rows<T>(p.g.dk, p.g.dk_stride, p.dk_aligned, a, p.g.out_dtype, keys.b, keys.key_head, j, counted, dK,
                      a.softmax_scale);
    };
    if (keys.tiles == 0) return store({0, 0});

    // Tiles of queries from full_begin to full_end see all keys of this warpgroup.
    const bool all_exist = keys.band.keys.begin <= j_warpgroup && j_warpgroup + 64 <= keys.band.keys.end;
    const int full_begin = broadcast_lane0(all_exist ? j_warpgroup + 63 - keys.band.last : 1 << 30);
    const int full_end = broadcast_lane0(j_warpgroup - keys.band.first - Br + 1);

    // P^T of the next tile, in place of S^T
    const auto compute_P = [&] {
        exponentiate(S, shared.lse[Q_of_dK.stage()] + lane % 4 * 2, c);
        if (at.i0 < full_begin || at.i0 > full_end) mask_P(S, keys.band, j, at.i0 + lane % 4 * 2);
        at.advance(keys);
    };

    const auto zero_hidden = [&](unsigned char *tile) {
        const int end = keys.band.keys.end == a.Nk ? Bc : keys.band.keys.end - keys.j0;  // TMA has set the others
        zero_rows_outside<Bc, Tile::Boxes>(tile, keys.band.keys.begin - keys.j0, end, Tile::kZeroed + warpgroup);
    };
    wait(shared.K, 0);
    zero_hidden(shared.Kj);
    wait(shared.V, 0);
    zero_hidden(shared.Vj);
    for (int n = 0; n < keys.tiles; ++n) {
        issue_S(true);
        issue_dP(true);
        wgmma_wait<1>(S);
        compute_P();  // beside dP^T
        pack_operand<T>(P, S);
        wgmma_wait<0>(dP);
        issue_AB<T, Br>(dV, P, shared.dOi[dO_of_dV.stage()], n > 0);
        compute_dS(dP, S, shared.Di[dO_of_dV.stage()] + lane % 4 * 2);  // beside dV
        pack_operand<T>(dS, dP);
        if constexpr (kdQ == ComputesdQ::yes) {
            dS_written.producer_acquire();
            stage_dS<Tile>(shared.dS[dS_written.stage()], dS, warpgroup, warp, lane);
            __syncwarp();
            if (lane == 0) arrive(dS_written.full());
            dS_written.advance();
            issue_dQ(n >= Lag);
        }
        issue_AB<T, Br>(dK, dS, shared.Qi[Q_of_dK.stage()], n > 0);
        wgmma_wait<1>(dV);
        dO_of_dV.consumer_release();
        if constexpr (kdQ == ComputesdQ::yes) wgmma_wait<1>(dQ), store_dQ(n >= Lag);  // beside dK
        wgmma_wait<0>(dK);
        Q_of_dK.consumer_release();
    }
    if (kdQ == ComputesdQ::yes && Lag > 0) {
        issue_dQ(true);
        wgmma_wait<0>(dQ), store_dQ(true);
    }
    store(keys.band.keys);
}

template <class T, class Tile, ComputesdQ kdQ>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    backward_hopper_kernel(const __grid_constant__ BackwardParameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    SharedStorage<Tile> &shared = *(SharedStorage<Tile> *)memory;
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers;
        init(shared.K, 1), init(shared.V, 1);
        init_pipeline(shared.Q, warps), init_pipeline(shared.dO, warps);
        for (StageBarriers &dS : shared.dS_ready) init(dS.full, warps), init(dS.empty, warps);
        for (auto &dQ : shared.dQ) init(dQ[0].full, 4), init(dQ[0].empty, 1);
    };
    const auto produce = [&] {
        if (threadIdx.x == 0) load_all<Tile>(p, shared);
        const int adder = threadIdx.x / 32 - 1;
        if (kdQ == ComputesdQ::yes && threadIdx.x % 32 == 0 && adder >= 0 && adder < Tile::Consumers)
            add_dQ<Tile>(p, shared, adder);
    };
    run_roles<Tile>(init_barriers, produce, [&] { consume<T, Tile, kdQ>(p, shared); });
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for another architecture than sm_90a; no launch gets here
#endif
}

// ------------------------------------------------------------------------------ the launch

#ifndef TILE64
#define TILE64 64, 128, 128, 2, 2, 2
#endif
#ifndef TILE128
#define TILE128 128, 64, 128, 2, 2, 2
#endif
using Tiles = TileList<Tile<TILE64>, Tile<TILE128>>;

int tile_of(const Attention &a) { return a.d <= 64 ? 0 : 1; }

int64_t bytes_of_dQ(const Attention &a, int D) {
    const int64_t rows = (a.Nq + kGradientRows - 1) / kGradientRows * kGradientRows;
    return a.B * a.Hq * rows * D * 4;
}

}  // namespace

bool serves_half_backward(const Gradient &g) { return g.a.dtype != Dtype::float32 && g.a.d <= 128 && !g.deterministic; }

Plan plan_half_backward(const Gradient &g, const Device &device) {
    return with_tile(tile_of(g.a), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        using Shared = SharedStorage<Tile>;
        static_assert(sizeof(Shared) <= 227 * 1024);
        const int64_t grid = g.a.B * g.a.Hkv * ((g.a.Nk + Tile::Bc - 1) / Tile::Bc);
        Plan plan{"half backward", tile_of(g.a), Tile::Br, Tile::Bc, Tile::D, grid, Tile::Threads, sizeof(Shared)};
        plan.workspace = gradient_rows_bytes(g) + bytes_of_dQ(g.a, Tile::D);
        plan.multiprocessors = device.multiprocessors;
        plan.error = tensor_map_encoder() ? nullptr : "the driver has no cuTensorMapEncodeTiled";
        return plan;
    });
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    return with_tile(plan.tile, Tiles(), [&](auto tile) -> const char * {
        using Tile = decltype(tile);
        const Attention &a = g.a;
        const auto kernel = a.dtype == Dtype::float16
                                ? backward_hopper_kernel<__half, Tile, ComputesdQ::yes>
                                : backward_hopper_kernel<__nv_bfloat16, Tile, ComputesdQ::yes>;
        // First, since it gives this thread the context that cuTensorMapEncodeTiled needs.
        cudaError_t error = allow_shared_memory(kernel, plan.shared_memory);
        if (error != cudaSuccess) return why_not(error);
        BackwardParameters p{g};
        p.rows = gradient_rows_in(g, workspace);
        float *const dQ = (float *)((char *)workspace + gradient_rows_bytes(g));
        const int64_t head = p.rows.head_stride * Tile::D;
        const auto describe = [&](TensorMap &map, const void *data, const Strides &stride, int64_t H, int N, int rows) {
            return make_tensor_map(map, a.dtype, data, stride, a.B, H, N, a.d, rows);
        };
        if (!describe(p.Q, a.q, a.q_stride, a.Hq, a.Nq, Tile::Br) ||
            !describe(p.dO, g.do_, g.do_stride, a.Hq, a.Nq, Tile::Br) ||
            !describe(p.K, a.k, a.k_stride, a.Hkv, a.Nk, Tile::Bc) ||
            !describe(p.V, a.v, a.v_stride, a.Hkv, a.Nk, Tile::Bc) ||
            !make_tensor_map(p.dQ, Dtype::float32, dQ, {a.Hq * head, head, Tile::D}, a.B, a.Hq, p.rows.head_stride,
                             Tile::D, 64))
            return "cuTensorMapEncodeTiled refused q, k, v or do";
        p.Tc = (a.Nk + Tile::Bc - 1) / Tile::Bc;
        p.dk_aligned = is_aligned(g.dk, g.dk_stride, element_size(g.out_dtype), a.d);
        p.dv_aligned = is_aligned(g.dv, g.dv_stride, element_size(g.out_dtype), a.d);

        if (const char *why = launch_gradient_rows(g, p.rows, stream)) return why;
        error = cudaMemsetAsync(dQ, 0, bytes_of_dQ(a, Tile::D), stream);
        if (error != cudaSuccess) return why_not(error);
        kernel<<<(unsigned)plan.grid, Tile::Threads, plan.shared_memory, stream>>>(p);
        if (const char *why = why_not(cudaGetLastError())) return why;
        return launch_convert_dq(g, dQ, Tile::D, a.softmax_scale, stream);
    });
}

}  // namespace minimal_attn::hopper
