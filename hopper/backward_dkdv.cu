// backward_dkdv.cu: dK and dV of wide heads (d from 129 to 256) for float16 and bfloat16 on Hopper, without atomics.
// docs/backward.md has its budget and measurements. Read half.cu first.
//
// dK and dV of 64 keys are half of a multiprocessor's registers at d 256. So one consumer warpgroup keeps dV, the other
// one dK, of the same keys. A block owns Kj and Vj, and walks the queries that see them, in each query head of the group.
//
//     thread 0             thread 32           shared memory       consumer warpgroup, in registers
//     Kj; Qi, lse_i        Vj; dOi, Di
//         +--------------------|-------------> Kj, Qi -----------> dV: S^T = Kj Qi^T               (wgmma)
//                              |                                       P^T = exp(S^T - lse_i)
//                              |               P^T <------------------ of 64 keys x Br queries, float32
//                              +-------------> dOi --------------->    dVj += P^T dOi              (wgmma)
//                              +-------------> Vj, dOi, P^T ------> dK: dP^T = Vj dOi^T            (wgmma)
//                                                                      dS^T = P^T o (dP^T - Di)
//                                              Qi ---------------->    dKj += dS^T Qi              (wgmma)
//
// | role          | warps         | registers a thread | does                                                |
// |---------------|---------------|--------------------|-----------------------------------------------------|
// | K, Q          | 0 (thread 0)  | 32                 | loads Kj once, all Qi and lse_i                     |
// | V, dO         | 1 (thread 32) | 32                 | loads Vj once, all dOi and Di                       |
// | none          | 2, 3          | 32                 | ends                                                |
// | dV            | 4 to 7        | 232                | S^T, P^T, dVj; writes dV                            |
// | dK            | 8 to 11       | 232                | dP^T, dS^T, dKj; writes dK                          |
//
// dV and dK are the two consumer warpgroups:
//
// | barrier               | arrives              | waits          | then                                       |
// |-----------------------|----------------------|----------------|--------------------------------------------|
// | K, V                  | thread 0 or 32; TMA  | dV or dK       | Kj or Vj has arrived in shared memory      |
// | Q, dO full            | thread 0 or 32; TMA  | dV and dK      | Qi and lse_i, or dOi and Di, have arrived  |
// | Q, dO empty           | dV and dK            | thread 0 or 32 | both have read Qi or dOi                   |
// | P full                | dV                   | dK             | P^T is in shared memory                    |
// | P empty               | dK                   | dV             | dK has read P^T                            |
// | named kZeroed + index | a consumer           | that consumer  | rows that see no key are 0                 |
//
// full and empty are mbarriers, on which a consumer warp arrives once. index is the consumer's.
#include "hopper/key_tiles.h"
#include "hopper/launch.h"

namespace minimal_attn::hopper {
namespace {

template <int D_, int Stages_>
struct Tile {
    static constexpr int D = D_, Br = 64, Bc = 64, Stages = Stages_;  // Stages of Q and of dO
    static constexpr int Consumers = 2, Threads = 128 * (1 + Consumers), BlocksPerSM = 1;
    static constexpr int ProducerRegisters = 32;
    static constexpr int Boxes = D / kBoxColumns, Bytes = 64 * Boxes * 128;  // of each tile
    static constexpr bool kStartsApart = false;
    enum NamedBarrier { kZeroed = 1 };  // + the consumer; 0 is __syncthreads
    static_assert(kGradientRows % Br == 0 && D % kBoxColumns == 0 && Stages > 1);
};

template <class Tile>
struct SharedStorage {
    alignas(1024) unsigned char Kj[Tile::Bytes], Vj[Tile::Bytes];
    unsigned char Qi[Tile::Stages][Tile::Bytes], dOi[Tile::Stages][Tile::Bytes];
    float4 P[Tile::Br / 8][128];  // P^T as the threads have it, four numbers of each
    float lse[Tile::Stages][Tile::Br], Di[Tile::Stages][Tile::Br];
    Barrier K, V;
    StageBarriers Q[Tile::Stages], dO[Tile::Stages], P_ready[1];
};

// ------------------------------------------------------------------------------ consumer warpgroups

// dS^T = P^T o (dP^T - D) in place of dP^T.
template <int Count>
__device__ void compute_dS(float (&dP)[Count], const float4 (*P)[128], const float2 *D) {
#pragma unroll
    for (int x = 0; x < Count; x += 4) {
        const float2 two = D[x + threadIdx.x % 4];
        const float4 four = P[x / 4][threadIdx.x % 128];
        dP[x] = four.x * (dP[x] - two.x), dP[x + 1] = four.y * (dP[x + 1] - two.y);
        dP[x + 2] = four.z * (dP[x + 2] - two.x), dP[x + 3] = four.w * (dP[x + 3] - two.y);
    }
}

// What a consumer warpgroup computes.
enum class Part { dV, dK };

// dV:  S^T = Kj Qi^T,  P^T from it,  dVj += P^T dOi.      dK:  dP^T = Vj dOi^T,  dS^T from it,  dKj += dS^T Qi.
template <class T, class Tile, Part part>
__device__ void consume(const KeyParameters &p, SharedStorage<Tile> &shared) {
    constexpr bool is_dV = part == Part::dV;
    constexpr int D = Tile::D, Br = Tile::Br, kQ = 2 * Tile::Bytes, kdO = kQ + Tile::Stages * Tile::Bytes;
    const KeyTile<Tile> keys(p, blockIdx.x);
    const int thread = threadIdx.x % 128, j = keys.j0 + thread / 32 * 16 + thread % 32 / 4;  // its rows: j and j + 8
    Pipeline<Tile::Stages> first{is_dV ? shared.Q : shared.dO}, second{is_dV ? shared.dO : shared.Q};
    Pipeline P{shared.P_ready};
    float X[Br / 2], sum[D / 2];  // S^T, then P^T; or dP^T, then dS^T.   dVj or dKj
    uint32_t A[Br / 4];           // X as an operand
    const Descriptor tiles = descriptor(&shared);

    const auto issue_X = [&] {  // of the next tile of queries
        const Descriptor all = {opaque(tiles.low)}, K_or_V = all + (is_dV ? 0 : Tile::Bytes);
        first.consumer_wait();
        issue_ABt<T, D>(X, K_or_V, all + (is_dV ? kQ : kdO) + first.stage() * Tile::Bytes);
    };
    wait(is_dV ? shared.K : shared.V, 0);
    issue_X();
#pragma unroll
    for (int x = 0; x < D / 2; ++x) sum[x] = 0.f;
    for (int n = 0, i0 = keys.i0;;) {
        const Keys fully_visible = keys_of_all(keys.band, i0, i0 + Br);
        const bool is_cut = keys.j0 < fully_visible.begin || keys.j0 + Tile::Bc > fully_visible.end;
        const auto mask = [&] {
            if (is_cut) mask_columns(X, {keys.queries(j), keys.queries(j + 8)}, i0, 0.f);
        };
        wgmma_wait<0>(X);
        if constexpr (is_dV) {
            compute_P(X, shared.lse[first.stage()] + thread % 4 * 2, p.c);
            mask();
            P.producer_acquire();
#pragma unroll
            for (int x = 0; x < Br / 2; x += 4) shared.P[x / 4][thread] = float4{X[x], X[x + 1], X[x + 2], X[x + 3]};
            __syncwarp();
            if (thread % 32 == 0) arrive(P.full());
            P.advance();
        } else {
            P.consumer_wait();
            compute_dS(X, shared.P, (const float2 *)shared.Di[first.stage()]);
            mask();
        }
        pack_operand<T>(A, X);
        second.consumer_wait();
        zero_blind_rows((is_dV ? shared.dOi : shared.Qi)[second.stage()], keys, i0, p.a.Nq, Tile::kZeroed + !is_dV);
        issue_AB<T>(sum, A, Descriptor{opaque(tiles.low)} + (is_dV ? kdO : kQ) + second.stage() * Tile::Bytes);
        // Each lane has read lse, or D and P: the operand of the issued product depends on them.
        first.consumer_release();
        if constexpr (!is_dV) P.consumer_release();
        i0 += Br;
        if (i0 >= keys.i1) i0 = keys.i0;
        if (++n == keys.tiles) break;
        issue_X();
        wgmma_wait<1>(sum);
        second.consumer_release();
    }
    wgmma_wait<0>(sum);
    store_gradient<T>(is_dV ? p.dv : p.dk, keys.b, keys.key_head, j, p.a.Nk, p.a.d, is_dV ? 1.f : p.a.softmax_scale,
                      sum, [&](int key) { return keys.is_seen(key, p.a.Nq); });
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, 1) dkdv_wide_kernel(const __grid_constant__ KeyParameters p) {
    auto &shared = shared_storage<SharedStorage<Tile>>();
    const auto init_barriers = [&] {
        init(shared.K, 1), init(shared.V, 1);
        init_pipeline(shared.Q, 8, 2), init_pipeline(shared.dO, 8, 2), init_pipeline(shared.P_ready, 4, 4);
    };
    const auto produce = [&] {
        if (threadIdx.x != 0 && threadIdx.x != 32) return;
        const KeyTile<Tile> keys(p, blockIdx.x);
        Pipeline Q{shared.Q}, dO{shared.dO};
        if (threadIdx.x == 0) {
            load_tile<Tile::Bc, Tile::Boxes>(shared.Kj, p.K, keys.j0, keys.key_head, keys.b, shared.K);
            load_queries(p, keys, p.Q, p.rows.lse, Q, shared.Qi, shared.lse);
        } else {
            load_tile<Tile::Bc, Tile::Boxes>(shared.Vj, p.V, keys.j0, keys.key_head, keys.b, shared.V);
            load_queries(p, keys, p.dO, p.rows.D, dO, shared.dOi, shared.Di);
        }
    };
    run_roles<Tile>(init_barriers, produce, [&] {
        if (consumer_index() == 0)
            consume<T, Tile, Part::dV>(p, shared);
        else
            consume<T, Tile, Part::dK>(p, shared);
    });
}

// D, stages of Q and of dO. Shared memory in bytes: 256 D (1 + stages), and 16 KB of P^T.
using Tiles = TileList<Tile<192, 3>, Tile<256, 2>>;

int tile_of(const Attention &a) { return a.d <= 192 ? 0 : 1; }

}  // namespace

Plan plan_dkdv(const Gradient &g, const Device &device) {
    const Attention &a = g.a;
    return with_tile(tile_of(a), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        Plan plan = make_plan<Tile, SharedStorage<Tile>>(a, device, "dK, dV", tile_of(a));
        plan.grid = a.B * a.Hkv * ((a.Nk + Tile::Bc - 1) / Tile::Bc);
        plan.workspace = 0;
        return plan;
    });
}

const char *launch_dkdv(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream) {
    const Attention &a = g.a;
    return with_tile(plan.tile, Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        KeyParameters p{a};
        p.dk = gradient_tensor(g, g.dk, g.dk_stride), p.dv = gradient_tensor(g, g.dv, g.dv_stride);
        p.rows = rows, p.c = a.softmax_scale * kLog2e;
        p.Tc = (a.Nk + Tile::Bc - 1) / Tile::Bc;
        if (!make_tensor_map(p.dO, a.dtype, g.do_, g.do_stride, a.B, a.Hq, a.Nq, a.d, Tile::Br))
            return "cuTensorMapEncodeTiled refused do";
        const auto kernel =
            a.dtype == Dtype::float16 ? dkdv_wide_kernel<__half, Tile> : dkdv_wide_kernel<__nv_bfloat16, Tile>;
        return launch_kernel<Tile>(kernel, p, plan, Zeros(nullptr, 0, stream), stream);
    });
}

}  // namespace minimal_attn::hopper
