// backward_dkdv.cu: dK and dV of wide heads (d from 129 to 256) for float16 and bfloat16 on Hopper, without atomics.
// docs/backward.md has its budget and measurements. Read half.cu first.
//
// dK and dV of 64 keys are half of a multiprocessor's registers at d 256. So one consumer warpgroup keeps dV, the other
// one dK, of the same keys. A block owns Kj and Vj, and walks the queries that see them, in each query head of the group.
//
//     thread 0             thread 32           shared memory       consumer warpgroup, in registers
//     Kj, Vj; Qi, lse_i    dOi, Di
//         +--------------------|-------------> Kj, Qi -----------> dV: S^T = Kj Qi^T               (wgmma)
//                              |                                       P^T = exp(S^T - lse_i)
//                              |               P^T <------------------ of 64 keys x Br queries, float32
//                              +-------------> dOi --------------->    dVj += P^T dOi              (wgmma)
//                                              Vj, dOi, P^T ------> dK: dP^T = Vj dOi^T            (wgmma)
//                                                                      dS^T = P^T o (dP^T - Di)
//                                              Qi ---------------->    dKj += dS^T Qi              (wgmma)
//
// | role          | warps         | registers a thread | does                                                |
// |---------------|---------------|--------------------|-----------------------------------------------------|
// | K, V, Q       | 0 (thread 0)  | 32                 | loads Kj and Vj once, Qi and lse_i                  |
// | dO            | 1 (thread 32) | 32                 | loads dOi and Di                                    |
// | none          | 2, 3          | 32                 | ends                                                |
// | dV            | 4 to 7        | 232                | S^T, P^T, dVj; writes dV                            |
// | dK            | 8 to 11       | 232                | dP^T, dS^T, dKj; writes dK                          |
//
// | barrier               | arrives         | waits     | then                                    |
// |-----------------------|-----------------|-----------|-----------------------------------------|
// | K, V                  | thread 0; TMA   | dV or dK  | Kj or Vj is there                       |
// | Q, dO full            | thread 0 or 32  | dV and dK | the tile is there, with lse_i or Di     |
// | Q, dO empty           | dV and dK       | 0 or 32   | both have read it                       |
// | P full                | dV              | dK        | P^T is there                            |
// | P empty               | dK              | dV        | P^T is read                             |
// | named kZeroed + index | a consumer      | itself    | rows that see no key are 0              |
#include "hopper/gradient.h"
#include "hopper/launch.h"

namespace minimal_attn::hopper {
namespace {

template <int D_, int Br_, int QStages_, int dOStages_, int PStages_>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = 64, QStages = QStages_, dOStages = dOStages_, PStages = PStages_;
    static constexpr int Consumers = 2, Threads = 128 * (1 + Consumers), BlocksPerSM = 1;
    static constexpr int ProducerRegisters = 32;
    static constexpr int Boxes = D / kBoxColumns, QBytes = Br * Boxes * 128, KBytes = Bc * Boxes * 128;
    enum NamedBarrier { kZeroed = 1 };  // + the consumer; 0 is __syncthreads
    static_assert(kGradientRows % Br == 0);
};

template <class Tile>
struct SharedStorage {
    alignas(1024) unsigned char Kj[Tile::KBytes], Vj[Tile::KBytes];
    unsigned char Qi[Tile::QStages][Tile::QBytes], dOi[Tile::dOStages][Tile::QBytes];
    float4 P[Tile::PStages][Tile::Br / 8][128];  // four numbers of each thread
    float lse[Tile::QStages][Tile::Br], Di[Tile::dOStages][Tile::Br];
    StageBarriers K[1], V[1], Q[Tile::QStages], dO[Tile::dOStages], P_ready[Tile::PStages];
};

struct DkDvParameters {
    Attention a;
    TensorMap Q, K, V, dO;
    GradientRows rows;
    GradientTensor dk, dv;
    float c;        // softmax_scale log2(e)
    int Tc, tiles;  // tiles of keys of a head; of all heads
};

// What a block computes: the keys from j0 on, by the queries i0 <= i < i1 that see one of them, which are neighbours.
template <class Tile>
struct KeyTile {
    int b, key_head, j0, i0, i1, group;
    BandOf<int> band;

    __device__ KeyTile(const DkDvParameters &p, int n) {
        const int head = n / p.Tc;
        b = head / (int)p.a.Hkv, key_head = head % (int)p.a.Hkv, group = (int)(p.a.Hq / p.a.Hkv);
        j0 = n % p.Tc * Tile::Bc;
        band = narrow(band_of(p.a, b));
        const int first = max(j0, band.keys.begin), end = min(j0 + Tile::Bc, band.keys.end);
        i0 = max(first - band.last, 0) / Tile::Br * Tile::Br;
        i1 = first < end ? min(end - band.first, p.a.Nq) : 0;
        // Without a query one tile is computed all the same, and masked.
        if (i0 >= i1) i0 = 0, i1 = 1, group = 1;
    }
    // Which queries see key j.
    __device__ Keys queries(int j) const {
        if (j < band.keys.begin || j >= band.keys.end) return {0, 0};
        return {j - band.last, j - band.first + 1};
    }
};

// use(keys) for each tile of keys of this block. Their order is to and fro: under a causal mask the first have the most
// queries, so the block with the longest tile of one round gets the shortest of the next.
template <class Tile, class Use>
__device__ void for_each_key_tile(const DkDvParameters &p, const Use &use) {
    for (int n = blockIdx.x; n < p.tiles;) {
        use(KeyTile<Tile>(p, n));
        const int next_round = (n / (int)gridDim.x + 1) * gridDim.x;
        n = next_round + (next_round - 1 - n);
    }
}

// use(h, i0) for each tile of queries.
template <class Tile, class Use>
__device__ void for_each_query_tile(const KeyTile<Tile> &keys, const Use &use) {
    for (int h = keys.key_head * keys.group; h < (keys.key_head + 1) * keys.group; ++h)
        for (int i0 = keys.i0; i0 < keys.i1; i0 += Tile::Br) use(h, i0);
}

// ------------------------------------------------------------------------------ producer threads

// Loads Kj, then the tiles of Q with lse; or Vj, then the tiles of dO with D.
template <class Tile, int Stages>
__device__ void load(const DkDvParameters &p, const TensorMap &K_or_V, StageBarriers (&K_barriers)[1],
                     unsigned char *Kj, const TensorMap &Q_or_dO, const float *rows,
                     StageBarriers (&Q_barriers)[Stages], unsigned char (&Qi)[Stages][Tile::QBytes],
                     float (&numbers)[Stages][Tile::Br]) {
    Pipeline<1> K{K_barriers};
    Pipeline<Stages> Q{Q_barriers};
    for_each_key_tile<Tile>(p, [&](const KeyTile<Tile> &keys) {
        K.producer_acquire();
        load_tile<Tile::Bc, Tile::Boxes>(Kj, K_or_V, keys.j0, keys.key_head, keys.b, K.full());
        K.advance();
        for_each_query_tile(keys, [&](int h, int i0) {
            Q.producer_acquire();
            arrive_expect_tx(Q.full(), Tile::Br * 4);
            bulk_load(numbers[Q.stage()], rows + (keys.b * p.a.Hq + h) * p.rows.head_stride + i0, Tile::Br * 4,
                      Q.full());
            load_tile<Tile::Br, Tile::Boxes>(Qi[Q.stage()], Q_or_dO, i0, h, keys.b, Q.full());
            Q.advance();
        });
    });
}

// ------------------------------------------------------------------------------ consumer warpgroups

// Rows of a tile of queries that see no key, in any tile, may hold NaN: sets them to 0. Each warpgroup sets all of them.
template <class Tile>
__device__ void zero_blind_rows(unsigned char *tile, const KeyTile<Tile> &keys, int i0, int Nq, int barrier) {
    const int begin = keys.band.keys.begin - keys.band.last, end = min(keys.band.keys.end - keys.band.first, Nq);
    if (i0 >= begin && i0 + Tile::Br <= end) return;
    for (int at = threadIdx.x % 128; at < Tile::Br * 8; at += 128) {
        if (i0 + at / 8 >= begin && i0 + at / 8 < end) continue;
        for (int box = 0; box < Tile::Boxes; ++box) *(uint4 *)(tile + box * Tile::Br * 128 + at * 16) = uint4{};
    }
    fence_async();
    named_barrier_sync(barrier, 128);
}

// What a consumer warpgroup computes.
enum class Part { dV, dK };

template <class T, class Tile, Part part>
__device__ void consume(const DkDvParameters &p, SharedStorage<Tile> &shared) {
    constexpr int D = Tile::D, Br = Tile::Br, Count = Br / 2;
    constexpr bool is_dV = part == Part::dV;
    const int thread = threadIdx.x % 128;
    Pipeline<1> K{is_dV ? shared.K : shared.V};
    Pipeline<Tile::QStages> Q{shared.Q};
    Pipeline<Tile::dOStages> dO{shared.dO};
    Pipeline<Tile::PStages> P{shared.P_ready};
    float X[Count], sum[D / 2];  // S^T, then P^T; or dP^T, then dS^T.   dVj or dKj
    uint32_t A[Count / 2];       // X as an operand
    const Descriptor tiles = descriptor(&shared);
    constexpr int kQ = 2 * Tile::KBytes, kdO = kQ + Tile::QStages * Tile::QBytes;

    // S^T = Kj Qi^T, or dP^T = Vj dOi^T, of the next tile of queries
    const auto issue_X = [&] {
        const Descriptor all = {opaque(tiles.low)};
        if constexpr (is_dV) {
            Q.consumer_wait();
            issue_ABt<T, D>(X, all, all + kQ + Q.stage() * Tile::QBytes);
        } else {
            dO.consumer_wait();
            issue_ABt<T, D>(X, all + Tile::KBytes, all + kdO + dO.stage() * Tile::QBytes);
        }
    };
    for_each_key_tile<Tile>(p, [&](const KeyTile<Tile> &keys) {
        const int j = keys.j0 + thread / 32 * 16 + thread % 32 / 4;  // and j + 8
        K.consumer_wait();
        issue_X();
#pragma unroll
        for (int x = 0; x < D / 2; ++x) sum[x] = 0.f;
        for (int h = 0, i0 = keys.i0;;) {
            const bool is_cut = [&] {
                const Keys seen = keys_of_all(keys.band, i0, i0 + Br);
                return keys.j0 < seen.begin || keys.j0 + Tile::Bc > seen.end;
            }();
            const float2 *const numbers = (const float2 *)(is_dV ? shared.lse[Q.stage()] : shared.Di[dO.stage()]);
            wgmma_wait<0>(X);
            if constexpr (is_dV) {
#pragma unroll
                for (int x = 0; x < Count; x += 4) {
                    const float2 lse = numbers[x + thread % 4];
                    for (int r = 0; r < 4; r += 2) {
                        X[x + r] = exp2_fast(fmaf(X[x + r], p.c, -lse.x));
                        X[x + r + 1] = exp2_fast(fmaf(X[x + r + 1], p.c, -lse.y));
                    }
                }
                if (is_cut) mask_columns(X, {keys.queries(j), keys.queries(j + 8)}, i0, 0.f);
                P.producer_acquire();
#pragma unroll
                for (int x = 0; x < Count; x += 4)
                    shared.P[P.stage()][x / 4][thread] = float4{X[x], X[x + 1], X[x + 2], X[x + 3]};
                __syncwarp();
                if (thread % 32 == 0) arrive(P.full());
                P.advance();
            } else {
                P.consumer_wait();
#pragma unroll
                for (int x = 0; x < Count; x += 4) {
                    const float2 Di = numbers[x + thread % 4];
                    const float4 four = shared.P[P.stage()][x / 4][thread];
                    X[x] = four.x * (X[x] - Di.x), X[x + 1] = four.y * (X[x + 1] - Di.y);
                    X[x + 2] = four.z * (X[x + 2] - Di.x), X[x + 3] = four.w * (X[x + 3] - Di.y);
                }
                if (is_cut) mask_columns(X, {keys.queries(j), keys.queries(j + 8)}, i0, 0.f);
            }
            pack_operand<T>(A, X);
            // dVj += P^T dOi, or dKj += dS^T Qi
            if constexpr (is_dV) dO.consumer_wait();
            if constexpr (!is_dV) Q.consumer_wait();
            unsigned char *const tile = is_dV ? shared.dOi[dO.stage()] : shared.Qi[Q.stage()];
            zero_blind_rows<Tile>(tile, keys, i0, p.a.Nq, Tile::kZeroed + !is_dV);
            const Descriptor all = {opaque(tiles.low)};
            issue_AB<T>(sum, A, is_dV ? all + kdO + dO.stage() * Tile::QBytes : all + kQ + Q.stage() * Tile::QBytes);
            // A lane has read its numbers, since the operand depends on them.
            if constexpr (is_dV) Q.consumer_release();
            if constexpr (!is_dV) P.consumer_release(), dO.consumer_release();
            i0 += Br;
            if (i0 >= keys.i1) i0 = keys.i0, ++h;
            if (h == keys.group) break;
            issue_X();
            wgmma_wait<1>(sum);
            if constexpr (is_dV) dO.consumer_release();
            if constexpr (!is_dV) Q.consumer_release();
        }
        K.consumer_release();
        wgmma_wait<0>(sum);
        if constexpr (is_dV) dO.consumer_release();
        if constexpr (!is_dV) Q.consumer_release();
        store_gradient<T>(is_dV ? p.dv : p.dk, keys.b, keys.key_head, j, p.a.Nk, p.a.d, is_dV ? 1.f : p.a.softmax_scale,
                          sum, [&](int key) {
                              const Keys queries = keys.queries(key);
                              return max(queries.begin, 0) < min(queries.end, p.a.Nq);
                          });
    });
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, 1) dkdv_wide_kernel(const __grid_constant__ DkDvParameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    SharedStorage<Tile> &shared = *(SharedStorage<Tile> *)memory;
    const auto init_barriers = [&] {
        init_pipeline(shared.K, 4), init_pipeline(shared.V, 4);
        for (StageBarriers &Q : shared.Q) init(Q.full, 2), init(Q.empty, 8);
        for (StageBarriers &dO : shared.dO) init(dO.full, 2), init(dO.empty, 8);
        for (StageBarriers &P : shared.P_ready) init(P.full, 4), init(P.empty, 4);
    };
    const auto produce = [&] {
        if (threadIdx.x == 0) load<Tile>(p, p.K, shared.K, shared.Kj, p.Q, p.rows.lse, shared.Q, shared.Qi, shared.lse);
        if (threadIdx.x == 32)
            load<Tile>(p, p.V, shared.V, shared.Vj, p.dO, p.rows.D, shared.dO, shared.dOi, shared.Di);
    };
    run_roles<Tile>(init_barriers, produce, [&] {
        if (consumer_index() == 0)
            consume<T, Tile, Part::dV>(p, shared);
        else
            consume<T, Tile, Part::dK>(p, shared);
    });
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for another architecture than sm_90a; no launch gets here
#endif
}

#ifdef WIDE
using Tiles = TileList<WIDE>;
#else
// D, stages of Q, dO and P. Shared memory in bytes: 128 D (2 + stages of Q and dO) + 16384 stages of P.
using Tiles = TileList<Tile<192, 64, 3, 3, 1>, Tile<256, 64, 2, 2, 1>, Tile<192, 128, 2, 1, 1>, Tile<192, 64, 4, 2, 1>,
                       Tile<192, 64, 3, 3, 2>>;
#endif

int tile_of(const Attention &a) {
    if (const char *tile = getenv("HDQ_WIDE")) return atoi(tile);
    return a.d <= 192 ? 0 : 1;
}

}  // namespace

Plan plan_dkdv(const Gradient &g, const Device &device) {
    const Attention &a = g.a;
    return with_tile(tile_of(a), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        static_assert(sizeof(SharedStorage<Tile>) <= 227 * 1024);
        const int64_t tiles = a.B * a.Hkv * ((a.Nk + Tile::Bc - 1) / Tile::Bc);
        const int64_t grid = getenv("HDQ_FLAT") ? tiles : std::min<int64_t>(tiles, device.multiprocessors);
        Plan plan{"dK, dV", tile_of(a), Tile::Br, Tile::Bc, Tile::D, grid, Tile::Threads, sizeof(SharedStorage<Tile>)};
        plan.multiprocessors = device.multiprocessors;
        plan.error = tensor_map_encoder() ? nullptr : "the driver has no cuTensorMapEncodeTiled";
        return plan;
    });
}

const char *launch_dkdv(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream) {
    const Attention &a = g.a;
    return with_tile(plan.tile, Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        const auto kernel =
            a.dtype == Dtype::float16 ? dkdv_wide_kernel<__half, Tile> : dkdv_wide_kernel<__nv_bfloat16, Tile>;
        const cudaError_t error = allow_shared_memory(kernel, plan.shared_memory);
        if (error != cudaSuccess) return why_not(error);
        DkDvParameters p{a};
        p.dk = gradient_tensor(g, g.dk, g.dk_stride), p.dv = gradient_tensor(g, g.dv, g.dv_stride);
        p.rows = rows, p.c = a.softmax_scale * kLog2e, p.Tc = (a.Nk + Tile::Bc - 1) / Tile::Bc;
        p.tiles = (int)(a.B * a.Hkv * p.Tc);
        if (!make_tensor_map(p.Q, a.dtype, a.q, a.q_stride, a.B, a.Hq, a.Nq, a.d, Tile::Br) ||
            !make_tensor_map(p.dO, a.dtype, g.do_, g.do_stride, a.B, a.Hq, a.Nq, a.d, Tile::Br) ||
            !make_tensor_map(p.K, a.dtype, a.k, a.k_stride, a.B, a.Hkv, a.Nk, a.d, Tile::Bc) ||
            !make_tensor_map(p.V, a.dtype, a.v, a.v_stride, a.B, a.Hkv, a.Nk, a.d, Tile::Bc))
            return "cuTensorMapEncodeTiled refused q, k, v or do";
        kernel<<<(unsigned)plan.grid, Tile::Threads, plan.shared_memory, stream>>>(p);
        return why_not(cudaGetLastError());
    });
}

// The workspace: lse and D of all rows, then what plan_dq asks for.
Plan plan_wide_backward(const Gradient &g, const Device &device) {
    Plan plan = plan_dkdv(g, device);
    plan.kernel = "half backward, two kernels";
    plan.workspace = gradient_rows_bytes(g) + plan_dq(g, device).workspace;
    return plan;
}

const char *launch_wide_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const GradientRows rows = gradient_rows_in(g, workspace);
    const Plan dq = plan_dq(g, {plan.multiprocessors, 0});
    const char *why = launch_gradient_rows(g, rows, stream);
    if (!why) why = launch_dkdv(g, rows, plan, stream);
    if (!why) why = launch_dq(g, rows, dq, (char *)workspace + gradient_rows_bytes(g), stream);
    return why;
}

}  // namespace minimal_attn::hopper
