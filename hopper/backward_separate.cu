// backward_separate.cu: dQ alone, dK and dV alone, for float16 and bfloat16 on Hopper, d above 128. One block computes
// each sum: the same bits on every run. docs/backward.md has budgets and measurements. Read half.cu first: it has the
// same form.
//
// A block owns a tile X of queries or of keys, which stays in shared memory. It walks the tiles Y of the other side.
// With S^T instead of S the products that give dQ give dK:
//
//     kernel    X1, X2     Y1, Y2     S = X1 Y1^T    dP = X2 Y2^T    sum += dS Y1         dV += P Y2
//     dQ        Qi, dOi    Kj, Vj     Sij            dPij            dQi += dSij Kj
//     dK, dV    Kj, Vj     Qi, dOi    Sij^T          dPij^T          dKj += dSij^T Qi     dVj += Pij^T dOi
//
//     thread 0          thread 32         thread 64
//     work tile, Y1     X1, X2            Y2               shared memory       each consumer warpgroup, in registers
//         |                |                 |
//         +----------------|-----------------|--> tile_queue, 2 stages ------> which rows of which head
//         |                +-----------------|--> X1, X2 --------------+
//         +----------------------------------|--> Y1, Stages1 --+------+-----> S = X1 Y1^T              (wgmma)
//                                            |                  |      |       P = exp(S - lse)
//                                            +--> Y2, Stages2 --|--+---+-----> dP = X2 Y2^T             (wgmma)
//                                                               |  |           dS = P o (dP - D)
//                                                               +--|---------> sum += dS Y1             (wgmma)
//                                                                  +---------> dV += P Y2               (wgmma)
//     dQ, or dK and dV in HBM <----------------------------------------------- softmax_scale sum, dV
//
// For dQ a block computes one work tile after another, 64 queries for each consumer. For dK and dV it has one work tile
// of 64 keys. A warpgroup's registers have room for one sum there: one consumer computes dV, the other one dK.
//
// lse and D are numbers of queries. Where queries are Y, lse arrives with Y1 and D with Y2. For dQ each thread reads
// those of its rows.
//
// | role                | warps           | registers a thread | does                                                   |
// |---------------------|-----------------|--------------------|--------------------------------------------------------|
// | scheduler, Y1       | 0 (thread 0)    | 32                 | takes work tiles, publishes them, loads Y1             |
// | X                   | 1 (thread 32)   | 32                 | loads X1 and X2                                        |
// | Y2                  | 2 (thread 64)   | 32                 | loads Y2                                               |
// | end (dQ)            | 3 (thread 96)   | 32                 | waits for the kernel before, which computes dK and dV  |
// |                     |                 |                    | meanwhile                                              |
// | consumer warpgroups | 4 to 7, 8 to 11 | 232                | S, dP and the sums; writes the sums                    |
//
// | barrier                 | arrives                   | waits                         | then                      |
// |-------------------------|---------------------------|-------------------------------|---------------------------|
// | tile_queue full         | thread 0                  | threads 32, 64; consumers     | work tile is published    |
// | tile_queue empty        | threads 32, 64; consumers | thread 0                      | its slot is free          |
// | X full (a tile of X)    | thread 32; TMA            | its consumers                 | X1 and X2 have arrived    |
// | X empty (a tile of X)   | its consumer              | thread 32                     | X1 and X2 are read        |
// | Y1 full, Y2 full        | thread 0 or 64; TMA       | consumers                     | Y1 or Y2 has arrived      |
// | Y1 empty, Y2 empty      | consumers                 | thread 0 or 64                | all products have read it |
// | P full, P empty (dK_dV) | consumer 0; consumer 1    | consumer 1; consumer 0        | P^T is stored; is read    |
// | named kTurn + index     | the consumer before it    | that consumer                 | it may issue products     |
// | named kZeroed + index   | that consumer             | that consumer                 | hidden rows of Y are 0    |
//
// full and empty are mbarriers, on which a consumer warp arrives once. A loading thread arrives once for each copy, so
// twice for X, and for Y with lse or D. index is the consumer's. For dK and dV the consumers read neither the tile queue
// nor X again, so they release neither.
#include "hopper/key_tiles.h"

namespace minimal_attn::hopper {
namespace {

enum class Kernel { dQ, dK_dV };  // of this file

template <Kernel kernel, int D_, int Stages1_, int Stages2_>
struct Tile {
    static constexpr bool owns_queries = kernel == Kernel::dQ;
    static constexpr int D = D_, Stages1 = Stages1_, Stages2 = Stages2_, BlocksPerSM = 1;
    static constexpr int Owned = owns_queries ? 128 : 64, Walked = 64;  // rows of X, of Y
    static constexpr int Br = owns_queries ? Owned : Walked, Bc = owns_queries ? Walked : Owned;
    static constexpr bool TakesTurns = owns_queries, AlignKeys = false;
    static constexpr int XTiles = Owned / 64, Consumers = 2, Threads = 128 * (1 + Consumers), ProducerRegisters = 32;
    static constexpr int Boxes = D / kBoxColumns, TileBytes = 64 * Boxes * 128;  // of 64 rows
    enum NamedBarrier { kTurn = 1, kZeroed = kTurn + Consumers };                // + the consumer; 0 is __syncthreads
    static_assert(D % kBoxColumns == 0 && Stages1 > 1);
};

// A work tile: rows of X from x0 on, below x1, of one head. It walks rows y0 <= y < y1 of Y, of `heads` heads from
// y_head on.
struct alignas(16) Work {
    int b, head, x0, x1;  // b < 0: no more work tiles
    int y_head, heads, y0, y1;
    BandOf<int> band;
};

template <class Tile>
struct SharedStorage {
    alignas(1024) unsigned char X[2][Tile::XTiles][Tile::TileBytes];
    unsigned char Y1[Tile::Stages1][Tile::TileBytes], Y2[Tile::Stages2][Tile::TileBytes];
    float lse[Tile::Stages1][Tile::Walked], D[Tile::Stages2][Tile::Walked];  // where Y are queries
    float4 P[Tile::owns_queries ? 1 : Tile::Walked / 8][128];                // P^T as the threads have it
    Work work[kQueueStages];
    StageBarriers P_ready[1], tile_queue[kQueueStages], X_ready[Tile::XTiles][1], Y1_ready[Tile::Stages1],
        Y2_ready[Tile::Stages2];
};

// ------------------------------------------------------------------------------ producer threads

// Work tile n.
template <class Tile>
__device__ Work describe(const GradientParameters &p, const TileScheduler<Tile> &scheduler, int n) {
    if (n >= p.work_tiles) return {-1};
    if constexpr (Tile::owns_queries) {
        const WorkTile work = scheduler.tile(n);
        return {work.b, work.h, work.i0, work.i1, work.key_head, 1, work.visible.begin, work.visible.end, work.band};
    } else {
        const KeyTile<Tile> keys(p, n);
        return {keys.b,  keys.key_head, keys.j0,  p.a.Nk, keys.h0, keys.unseen ? 1 : (int)p.group,
                keys.i0, keys.i1,       keys.band};
    }
}

// Loads the tiles of Y1 or Y2 that a work tile walks; queries with lse or D.
template <class Tile, int Stages>
__device__ void load_Y(const GradientParameters &p, const Work &work, const TensorMap &tensor, const float *lse_or_D,
                       Pipeline<Stages> &Y, unsigned char (&tiles)[Stages][Tile::TileBytes],
                       float (&numbers)[Stages][Tile::Walked]) {
    for (int h = work.y_head; h < work.y_head + work.heads; ++h)
        for (int y = work.y0; y < work.y1; y += Tile::Walked) {
            if constexpr (!Tile::owns_queries) {
                load_query_tile<Tile>(p, work.b, h, y, tensor, lse_or_D, Y, tiles, numbers);
            } else {
                Y.producer_acquire();
                load_tile<Tile::Walked, Tile::Boxes>(tiles[Y.stage()], tensor, y, h, work.b, Y.full());
                Y.advance();
            }
        }
}

template <class Tile>
__device__ void schedule_and_load_Y1(const GradientParameters &p, SharedStorage<Tile> &shared) {
    Pipeline tile_queue{shared.tile_queue};
    Pipeline Y1{shared.Y1_ready};
    const TileScheduler<Tile> scheduler{p};
    for (int n = -1;; tile_queue.advance()) {
        tile_queue.producer_acquire();
        n = scheduler.next(n);
        const Work work = shared.work[tile_queue.stage()] = describe(p, scheduler, n);
        arrive(tile_queue.full());
        if (work.b < 0) return;
        load_Y<Tile>(p, work, Tile::owns_queries ? p.K : p.Q, p.rows.lse, Y1, shared.Y1, shared.lse);
    }
}

template <class Tile>
__device__ void load_X(const GradientParameters &p, SharedStorage<Tile> &shared) {
    Pipeline<1> X{};
    for_each_work_tile(shared, [&](const Work &work, const Work &) {
        for (int n = 0; work.b >= 0 && n < Tile::XTiles; ++n) {
            X.barriers = shared.X_ready[n];
            X.producer_acquire();
            const auto load = [&](unsigned char *tile, const TensorMap &tensor) {
                load_tile<64, Tile::Boxes>(tile, tensor, work.x0 + 64 * n, work.head, work.b, X.full());
            };
            load(shared.X[0][n], Tile::owns_queries ? p.Q : p.K);
            load(shared.X[1][n], Tile::owns_queries ? p.dO : p.V);
        }
        X.advance();
    });
}

template <class Tile>
__device__ void load_Y2(const GradientParameters &p, SharedStorage<Tile> &shared) {
    Pipeline Y2{shared.Y2_ready};
    for_each_work_tile(shared, [&](const Work &work, const Work &) {
        if (work.b >= 0) load_Y<Tile>(p, work, Tile::owns_queries ? p.V : p.dO, p.rows.D, Y2, shared.Y2, shared.D);
    });
}

// ------------------------------------------------------------------------------ consumer warpgroups

// Which rows of Y row x of X sees.
template <class Tile>
__device__ Keys seen_by(const GradientParameters &p, const Work &work, int x) {
    if constexpr (Tile::owns_queries) return keys_of_row(work.band, x);
    const bool exists = work.band.keys.begin <= x && x < work.band.keys.end;
    return exists ? queries_of_key(work.band, p.a.Nq, x) : Keys{0, 0};
}

// Whether the 64 rows of X from x on don't see all rows of the tile of Y from y on.
template <class Tile>
__device__ bool is_cut(const Work &work, int x, int y) {
    constexpr int Queries = Tile::owns_queries ? 64 : Tile::Walked, Columns = 64 + Tile::Walked - Queries;
    const int i = Tile::owns_queries ? x : y, j = Tile::owns_queries ? y : x;
    const Keys all_see = keys_of_all(work.band, i, i + Queries);
    return j < all_see.begin || j + Columns > all_see.end;
}

// How many of the tiles of Y that the block walks are needed for the 64 rows of X from x on; at least one.
template <class Tile>
__device__ int tiles_of(const Work &work, int x) {
    const auto count = [&](int end) { return max((end - work.y0 + Tile::Walked - 1) / Tile::Walked, 1); };
    const int x1 = min(x + 64, work.x1);
    if (!Tile::owns_queries) return count(work.y1) * work.heads;
    return x < x1 ? count(min(keys_of_any(work.band, x, x1).end, work.y1)) : 1;
}

// Stores factor times a sum to rows `row` and row + 8 of X.
template <class Tile, class T, int Count>
__device__ void store(T, const GradientTensor &to, const GradientParameters &p, const Work &work, int row, float factor,
                      const float (&sum)[Count]) {
    store_gradient<T>(to, work.b, work.head, work.x0 + row, work.x1, p.a.d, factor, sum,
                      [&](int x) { return !empty(seen_by<Tile>(p, work, x)); });
}

// dPij is issued when dQi has been added to, so that it can take the registers of dSij.
template <class T, class Tile>
__device__ void consume_dQ(const GradientParameters &p, SharedStorage<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc;
    const int warpgroup = consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // a thread's rows of the work tile: this one and row + 8
    const PingPong<Tile> ping_pong{warpgroup};
    if (warpgroup == Tile::Consumers - 1) ping_pong.pass_turn();  // the first turn is warpgroup 0's
    Pipeline tile_queue{shared.tile_queue};
    Pipeline X{shared.X_ready[warpgroup]};
    Pipeline K{shared.Y1_ready}, K_of_dQ{shared.Y1_ready};  // of the next Sij; of the next dSij Kj
    Pipeline V{shared.Y2_ready};
    float dQ[D / 2], S[Bc / 2], dP[Bc / 2];
    uint32_t dS[Bc / 4];

    const Descriptor tiles = descriptor(&shared), Qi = tiles + warpgroup * Tile::TileBytes;
    const Descriptor Kj = tiles + 2 * Tile::XTiles * Tile::TileBytes;
    // Unless addresses are opaque, ptxas computes all descriptors once and spills them.
    const auto Y = [&](int stage) { return Descriptor{opaque(Kj.low)} + stage * Tile::TileBytes; };
    const auto issue_S = [&] {  // of the next tile of keys
        issue_ABt<T, D>(S, {opaque(Qi.low)}, Y(K.stage()));
        K.advance();
    };
    const auto issue_dP = [&] {
        const Descriptor dOi = Descriptor{opaque(Qi.low)} + Tile::XTiles * Tile::TileBytes;
        issue_ABt<T, D>(dP, dOi, Y(Tile::Stages1 + V.stage()));
    };
    const auto issue_dQ = [&] { issue_AB<T>(dQ, dS, Kj + K_of_dQ.stage() * Tile::TileBytes); };
    for (;; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const Work &work = shared.work[tile_queue.stage()];
        if (work.b < 0) return;
        float lse_of_rows[2], D_of_rows[2];
        for (int r = 0; r < 2; ++r) {
            const int i = work.x0 + row + 8 * r;
            const int64_t at = (int64_t)(work.b * p.Hq + work.head) * p.rows.head_stride + i;
            lse_of_rows[r] = i < work.x1 ? p.rows.lse[at] : INFINITY;
            D_of_rows[r] = i < work.x1 ? p.rows.D[at] : 0.f;
        }
        X.consumer_wait(), K.consumer_wait(), V.consumer_wait();
        ping_pong.wait_turn();
        issue_S();
        issue_dP();
        ping_pong.pass_turn();
#pragma unroll
        for (float &x : dQ) x = 0.f;

        const int needed = broadcast_lane0(tiles_of<Tile>(work, work.x0 + 64 * warpgroup));
        for (int n = 1, j0 = broadcast_lane0(work.y0);; ++n) {
            // `work` is read again in each step: registers are short.
            const int i = work.x0 + row;
            const bool masked = is_cut<Tile>(work, work.x0 + 64 * warpgroup, j0);
            wgmma_wait<1>(S);
#pragma unroll
            for (int x = 0; x < Bc / 2; ++x) S[x] = exp2_fast(fmaf(S[x], p.c, -lse_of_rows[x / 2 % 2]));  // P
            wgmma_wait<0>(dP);
            V.consumer_release();
#pragma unroll
            for (int x = 0; x < Bc / 2; ++x) dP[x] = S[x] * (dP[x] - D_of_rows[x / 2 % 2]);  // dS
            if (masked) mask_columns(dP, {seen_by<Tile>(p, work, i), seen_by<Tile>(p, work, i + 8)}, j0, 0.f);
            pack_operand<T>(dS, dP);
            if (n == needed && work.band.keys.end < p.a.Nk)  // TMA has set rows from Nk on to 0
                zero_rows_outside<Bc, Tile::Boxes>(shared.Y1[K_of_dQ.stage()], 0, work.band.keys.end - j0,
                                                   Tile::kZeroed + warpgroup);
            if (n == needed) break;  // the product of the last tile stands behind the loop
            ping_pong.wait_turn();
            issue_dQ();
            K.consumer_wait();
            issue_S();
            wgmma_wait<1>(dQ);
            K_of_dQ.consumer_release();
            V.consumer_wait();
            issue_dP();
            ping_pong.pass_turn();
            j0 += Bc;
        }
        X.consumer_release();
        ping_pong.wait_turn();
        issue_dQ();
        ping_pong.pass_turn();
        wgmma_wait<0>(dQ);
        K_of_dQ.consumer_release();
        // Tiles that only the other warpgroup needs. Stages are released before the wait for the turn: the warpgroup
        // that has it may wait for the next Vj.
        const int all = broadcast_lane0((work.y1 - work.y0 + Bc - 1) / Bc);
        for (int n = needed; n < all; ++n) {
            K_of_dQ.skip_stage(), K.advance();
            V.skip_stage();
            ping_pong.wait_turn();
            ping_pong.pass_turn();
        }
        store<Tile>(T(), p.dq, p, work, row, p.a.softmax_scale, dQ);
        __syncwarp();  // all lanes have read `work`
    }
}

// Which of the two sums a consumer warpgroup computes in consume_dK_dV.
enum class Role { dV, dK };

// dV:  S^T = Kj Qi^T,  P^T from it,  dVj += P^T dOi.      dK:  dP^T = Vj dOi^T,  dS^T from it,  dKj += dS^T Qi.
template <class T, class Tile, Role role>
__device__ void consume_dK_dV(const GradientParameters &p, SharedStorage<Tile> &shared) {
    constexpr bool is_dV = role == Role::dV;
    constexpr int D = Tile::D, Walked = Tile::Walked;
    const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    const Work work = describe(p, TileScheduler<Tile>{p}, blockIdx.x);  // the block's only one, in registers
    Pipeline<Tile::Stages1> first{is_dV ? shared.Y1_ready : shared.Y2_ready};
    Pipeline<Tile::Stages1> second{is_dV ? shared.Y2_ready : shared.Y1_ready};
    Pipeline P_ready{shared.P_ready};
    float S[Walked / 2], sum[D / 2];  // S^T, then P^T; or dP^T, then dS^T.   dVj or dKj
    uint32_t A[Walked / 4];           // S as an operand
    const Descriptor tiles = descriptor(&shared);
    constexpr int kY1 = 2 * Tile::TileBytes, kY2 = kY1 + Tile::Stages1 * Tile::TileBytes;

    const auto issue_S = [&] {  // of the next tile of queries
        const Descriptor all = {opaque(tiles.low)}, X = all + (is_dV ? 0 : Tile::TileBytes);
        first.consumer_wait();
        issue_ABt<T, D>(S, X, all + (is_dV ? kY1 : kY2) + first.stage() * Tile::TileBytes);
    };
    wait(shared.X_ready[0][0].full, 0);
    issue_S();
#pragma unroll
    for (float &x : sum) x = 0.f;
    const int needed = tiles_of<Tile>(work, work.x0);
    for (int n = 1, y = work.y0;; ++n) {
        const bool masked = is_cut<Tile>(work, work.x0, y);
        const auto mask = [&] {
            const int x = work.x0 + row;
            if (masked) mask_columns(S, {seen_by<Tile>(p, work, x), seen_by<Tile>(p, work, x + 8)}, y, 0.f);
        };
        wgmma_wait<0>(S);
        if constexpr (is_dV) {
            compute_P(S, shared.lse[first.stage()] + thread % 4 * 2, p.c);
            mask();
            P_ready.producer_acquire();
#pragma unroll
            for (int x = 0; x < Walked / 2; x += 4) shared.P[x / 4][thread] = *(const float4 *)&S[x];
            producer_commit(P_ready);
        } else {
            P_ready.consumer_wait();
            float P[Walked / 2];
#pragma unroll
            for (int x = 0; x < Walked / 2; x += 4) *(float4 *)&P[x] = shared.P[x / 4][thread];
            compute_dS(S, P, shared.D[first.stage()] + thread % 4 * 2);
            mask();
        }
        pack_operand<T>(A, S);
        second.consumer_wait();
        if (masked)
            zero_blind_rows<Tile>((is_dV ? shared.Y2 : shared.Y1)[second.stage()], work.band, y, p.a.Nq,
                                  Tile::kZeroed + !is_dV);
        issue_AB<T>(sum, A, Descriptor{opaque(tiles.low)} + (is_dV ? kY2 : kY1) + second.stage() * Tile::TileBytes);
        // Each lane has read lse, or D and P: the operand of the issued product depends on them.
        first.consumer_release();
        if constexpr (!is_dV) P_ready.consumer_release();
        if (n == needed) break;
        y += Walked;
        if (y >= work.y1) y = work.y0;
        issue_S();
        wgmma_wait<1>(sum);
        second.consumer_release();
    }
    wgmma_wait<0>(sum);
    store<Tile>(T(), is_dV ? p.dv : p.dk, p, work, row, is_dV ? 1.f : p.a.softmax_scale, sum);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    separate_backward_kernel(const __grid_constant__ GradientParameters p) {
    auto &shared = shared_storage<SharedStorage<Tile>>();
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers, arrivals = Tile::owns_queries ? 1 : 2;
        init_pipeline(shared.tile_queue, warps + 2);
        for (auto &X : shared.X_ready) init_pipeline(X, 4, 2);
        init_pipeline(shared.P_ready, 4, 4);
        init_pipeline(shared.Y1_ready, warps, arrivals), init_pipeline(shared.Y2_ready, warps, arrivals);
    };
    const auto produce = [&] {
        if (threadIdx.x == 0) schedule_and_load_Y1(p, shared);
        if (threadIdx.x == 32) load_X(p, shared);
        if (threadIdx.x == 64) load_Y2(p, shared);
        if (Tile::owns_queries && threadIdx.x == 96) cudaGridDependencySynchronize();
    };
    // dQ is launched behind dK and dV. What it reads was written before these began.
    run_roles<Tile, Tile::owns_queries ? WaitsAt::end : WaitsAt::begin>(init_barriers, produce, [&] {
        if constexpr (Tile::owns_queries)
            consume_dQ<T, Tile>(p, shared);
        else if (consumer_index() == 0)
            consume_dK_dV<T, Tile, Role::dV>(p, shared);
        else
            consume_dK_dV<T, Tile, Role::dK>(p, shared);
    });
}

// ------------------------------------------------------------------------------ the sizes of the tiles

// Kernel, D, stages of Y1, of Y2. Registers of a consumer's thread in accumulators and operands: for dQ 80 + D / 2, at
// most 208 of 232. Bytes of shared memory: 128 D (2 XTiles + Stages1 + Stages2); of dK and dV also 16 KB of P^T.
using Tiles = TileList<
    // Two stages of K and 80 keys were 8 to 15 % slower
    Tile<Kernel::dQ, 192, 3, 2>,
    // All that fits. V has one stage: so the wait for Vj stands behind Sij, which was worth 13 to 19 %
    Tile<Kernel::dQ, 256, 2, 1>,
    // 128 queries at d 192: 2 % faster, causal 6 % slower
    Tile<Kernel::dK_dV, 192, 3, 3>, Tile<Kernel::dK_dV, 256, 2, 2>>;

// Its place in Tiles
int tile_of(const Attention &a, Kernel kernel) { return (a.d > 192) + 2 * (kernel == Kernel::dK_dV); }

Plan plan_of(const Gradient &g, const Device &device, Kernel kernel) {
    return with_tile(tile_of(g.a, kernel), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        Plan plan =
            make_plan<Tile, SharedStorage<Tile>>(g.a, device, "half backward, two kernels", tile_of(g.a, kernel));
        if (!Tile::owns_queries) plan.grid = key_tiles_of(g.a, Tile::Bc);
        plan.workspace = 0;
        return plan;
    });
}

const char *launch(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream) {
    return with_tile(plan.tile, Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        const Attention &a = g.a;
        GradientParameters p = gradient_parameters(g, rows, Tile::Bc);
        if (Tile::owns_queries) p.tile_counter = rows.tile_counter;
        if (!make_tensor_map(p.dO, a.dtype, g.do_, g.do_stride, a.B, a.Hq, a.Nq, a.d, 64))
            return "cuTensorMapEncodeTiled refused do";
        const auto kernel = a.dtype == Dtype::float16 ? separate_backward_kernel<__half, Tile>
                                                      : separate_backward_kernel<__nv_bfloat16, Tile>;
        return launch_kernel<Tile>(kernel, p, plan, Zeros(nullptr, 0, stream), stream, Tile::Bc,
                                   Tile::owns_queries ? 0 : key_tiles_of(a, Tile::Bc));
    });
}

}  // namespace

Plan plan_separate(const Gradient &g, const Device &device) { return plan_of(g, device, Kernel::dK_dV); }

const char *launch_separate(const Gradient &g, const GradientRows &rows, const Plan &plan, CUstream_st *stream) {
    const char *why = launch_gradient_rows(g, rows, stream);
    if (!why) why = launch(g, rows, plan, stream);
    // Right behind, since it runs beside the end of the first kernel.
    return why ? why : launch(g, rows, plan_of(g, {plan.multiprocessors, 0}, Kernel::dQ), stream);
}

}  // namespace minimal_attn::hopper
