// half_backward.cu: the backward pass in float16 and bfloat16 on the tensor cores, by mma.sync (mma.cuh). Sums are
// float32. Numbers are the steps of flash_backward.cu. docs/backward.md has the budget.
//
//     pass   | a block owns | and walks                            | 11., 17.              | 16., 21., 22.
//     dK_dV  | Kj, Vj       | Qi, dOi of all query heads that      | Sij^T  = Kj Qi^T      | dVj += Pij^T dOi
//            |              | share the key head                   | dPij^T = Vj dOi^T     | dKj += dSij^T Qi
//     dQ     | Qi, dOi      | Kj, Vj                               | Sij = Qi Kj^T         | dQi += dSij Kj
//            |              |                                      | dPij = dOi Vj^T       |
//
// The same code computes both passes: a block owns rows of the scores S, and walks their columns. No two blocks share a
// result: no atomics, and the same bits on every run. Two passes take 7 products; one pass with atomics would take 5.
//
//     role        | warps              | registers              | does
//     every warp  | Tile::Threads / 32 | sums, S, dP, operands: | loads a part of each tile; computes S and dP of WarpRows rows
//                 |                    | up to 255              | and Columns columns, and 1 / Group of the rows' sums
//
//     shared memory    | size              | written                             | read
//     owned tiles      | 2 x Own x D       | once; the results in the end        | steps 11 and 17, by the warps of the rows
//     walked tiles     | 2 x Walk x D each | while the ones before are in use    | steps 11 to 22, by all
//     log2_l, D, dK_dV | 2 x Walk floats   | likewise                            | steps 13 and 20
//     operands P, dS   | of each warp      | after step 20, where Group > 1      | steps 16, 21, 22, by the rest of the group
//
//     barrier                       | arrives and waits | then
//     wait_for_tiles                | the block         | the next walked tiles have arrived; all warps have read the ones
//                                   |                   | before and the operands, so these may be overwritten
//     __syncthreads, one Stage      | the block         | all warps have read the walked tiles, so the next ones may load
//     wait_for_group, Group > 1     | a group of warps  | the operands of the whole group are there
//
// General kernels: half_gradient.cuh has change_S_dP (scores.h) and Kept, the weights that dropout keeps.
#include "portable/gradient_rows.h"
#include "portable/half_gradient.cuh"

namespace minimal_attn {
namespace {

// ------------------------------------------------------------------------------ a block

// A (B, H, N, d) or (B, H, N, d_v) tensor in HBM.
struct Tensor {
    const void *first;
    Strides stride;
    int columns;
    template <class T>
    __device__ T *row(int64_t b, int64_t h, int64_t row) const {
        return (T *)first + b * stride.batch + h * stride.head + row * stride.row;
    }
};

// 24. factor * sums to HBM: this warp's part of rows from row0 on of head h. The usual case stages it in `tile`, which
// no warp reads any more: then a thread writes 16 bytes. Other cases stage a row in float32, so that a loop stores it:
// unrolled stores take a third of the compile time.
template <class T, class Tile>
__device__ void store_sums(const Gradient &g, const float (&sums)[Tile::M][Tile::X][4], float factor,
                           const Tensor &result, int64_t b, int64_t h, int row0, int N, T *tile, int warp_row, int part,
                           bool aligned) {
    constexpr int Chunks = Tile::X, RowsAtOnce = 32 / Chunks;
    const bool is_staged = aligned && g.out_dtype != Dtype::float32;
    const int lane = threadIdx.x % 32;
    float2 *const of_thread = (float2 *)(tile + (warp_row + part * Tile::WarpRows / Tile::Group) * Tile::D) + lane;
#pragma unroll
    for (int r = 0; r < 2 * Tile::M; ++r) {
        const int row = warp_row + lane / 4 + 8 * r;
#pragma unroll
        for (int x = 0; x < Tile::X; ++x) {
            const float *sum = &sums[r / 2][x][r % 2 * 2];
            const float2 two = {factor * sum[0], factor * sum[1]};
            if (is_staged)
                *(unsigned *)(tile + swizzle<Tile::D, T>(row, part * Chunks + x) + lane % 4 * 2) =
                    pack<T>(two.x, two.y);
            else
                of_thread[32 * x] = two;
        }
        if (is_staged || row0 + row >= N) continue;
#pragma unroll 1
        for (int x = 0; x < Tile::X; ++x) {
            const int column = 8 * (part * Chunks + x) + lane % 4 * 2, count = result.columns - column;
            const float *two = &of_thread[32 * x].x;
            if (count > 0 && g.out_dtype == Dtype::float32)
                store<2>(result.row<float>(b, h, row0 + row) + column, two, aligned, count);
            else if (count > 0)
                store<2>(result.row<T>(b, h, row0 + row) + column, two, aligned, count);
        }
    }
    if (!is_staged) return;
    __syncwarp();
    const int first = warp_row + lane / Chunks, chunk = part * Chunks + lane % Chunks;
    T *const to = result.row<T>(b, h, row0 + first) + 8 * chunk;
    const int rows = 8 * chunk < result.columns ? N - row0 - first : 0;
#pragma unroll
    for (int row = 0; row < Tile::WarpRows; row += RowsAtOnce)
        if (row < rows)
            *(uint4 *)(to + row * result.stride.row) = *(const uint4 *)(tile + swizzle<Tile::D, T>(first + row, chunk));
}

// 7., 10. Two tiles of `Rows` rows, Qi and dOi or Kj and Vj. Rows outside `rows` are zeros: memory may hold anything.
template <int Rows, class Tile, class T, class IsRead = EachRow>
__device__ void load_tiles(T *to, const Tensor &x, const Tensor &y, int64_t b, int64_t h, int row0, Interval rows,
                           bool aligned, const IsRead &is_read = IsRead()) {
    const int first = rows.begin - row0, end = rows.end - row0;
    load_swizzled<Rows, Tile::D, Tile::Threads>(to, x.row<const T>(b, h, row0), x.stride.row, end, x.columns, aligned,
                                                first, is_read);
    load_swizzled<Rows, Tile::D, Tile::Threads>(to + Rows * Tile::D, y.row<const T>(b, h, row0), y.stride.row, end,
                                                y.columns, aligned, first, is_read);
}

// Which rows a block owns. Those that see most, if causal, start first: the first keys, the last queries.
template <class Tile>
struct Owned {
    int64_t b;
    int h, N, row0;
    __device__ Owned(const Attention &a, int64_t index) : N(Tile::walks_queries ? a.Nk : a.Nq) {
        const int tiles = (N + Tile::Own - 1) / Tile::Own, tile = (int)(index % tiles);
        const int64_t heads = Tile::walks_queries ? a.Hkv : a.Hq, head = index / tiles;
        b = head / heads, h = (int)(head % heads), row0 = (Tile::walks_queries ? tile : tiles - 1 - tile) * Tile::Own;
    }
};

template <class T, class Tile, class Mask>
__device__ void gradient_block(const Gradient &g, const GradientRows &rows, int64_t index, bool aligned) {
    constexpr int D = Tile::D, Own = Tile::Own, Walk = Tile::Walk, WarpRows = Tile::WarpRows, Group = Tile::Group;
    constexpr int R = 2 * Tile::M;
    constexpr bool walks_queries = Tile::walks_queries;
    if constexpr (walks_queries) wait_for_kernel_before();
    let_next_kernel_start();
    const Attention &a = g.a;
    const Tensor Q = {a.q, a.q_stride, a.d}, K = {a.k, a.k_stride, a.d};
    const Tensor dO = {g.do_, g.do_stride, a.d_v}, V = {a.v, a.v_stride, a.d_v};
    extern __shared__ __align__(128) unsigned char shared[];
    T *const own = (T *)shared;
    unsigned char *const stages = shared + 2 * Tile::OwnBytes;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int group = warp / Group, part = warp % Group, warp_row = group * WarpRows;
    uint4 *const operands = (uint4 *)(stages + Tile::Stages * Tile::StageBytes + group * Group * Tile::OperandBytes);

    const Owned<Tile> owned(a, index);
    const View<Tile::pass, Mask> view(a, owned.b);
    const Interval seen = view.of_any(owned.row0, owned.row0 + Own);
    const int first = seen.begin / Walk * Walk, row_warp = owned.row0 + warp_row;
    const int heads = (int)(a.Hq / a.Hkv);

    // The walked tiles from row `column0` on, of the n-th head that the block walks; log2_l and D follow them.
    const auto load_walked = [&](int n, int column0, int stage) {
        T *const to = (T *)(stages + stage * Tile::StageBytes);
        if constexpr (walks_queries) {
            const int64_t h = owned.h * heads + n, row = (owned.b * a.Hq + h) * rows.head_stride + column0;
            load_tiles<Walk, Tile>(to, Q, dO, owned.b, h, column0, view.columns, aligned,
                                   read_by_terms<Mask>(a, rows.log2_l + row, view.is_read(column0)));
            if (threadIdx.x < Walk / 2)
                copy16((unsigned)__cvta_generic_to_shared(to + 2 * Walk * D) + 16 * threadIdx.x,
                       (threadIdx.x < Walk / 4 ? rows.log2_l : rows.D) + row + threadIdx.x % (Walk / 4) * 4, true);
        } else {
            load_tiles<Walk, Tile>(to, K, V, owned.b, owned.h / heads, column0, view.columns, aligned);
        }
    };
    load_tiles<Own, Tile>(own, walks_queries ? K : Q, walks_queries ? V : dO, owned.b, owned.h, owned.row0, view.rows,
                          aligned);
    if (Tile::Stages == 2 && !empty(seen)) load_walked(0, first, 0);
    float row_log2_l[R], row_D[R];
    if constexpr (!walks_queries) {
        const int64_t row = (owned.b * a.Hq + owned.h) * rows.head_stride + row_warp + lane / 4;
#pragma unroll
        for (int r = 0; r < R; ++r)
            row_log2_l[r] = __ldcg(rows.log2_l + row + 8 * r), row_D[r] = __ldcg(rows.D + row + 8 * r);
    }

    // A and transposed B: matrices 1 and 3 lie 8 rows below. B: matrices 2 and 3 do.
    const unsigned A = lane_address<D>(own, warp_row + lane % 16, lane / 16);
    const unsigned B0 = lane_address<D>((T *)stages, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned transposed0 = lane_address<D>((T *)stages, lane % 16, lane / 16) + 16 * part * Tile::X;
    const int walked_heads = walks_queries ? heads : 1;
    const bool may_be_large = __ldcg(rows.any_large);
    Sums<Tile> sums;
    // 6., 9. For each head that the block walks, for each tile that its rows see
    int n = 0, column0 = empty(seen) ? INT_MAX : first;
    for (int stage = 0; n < walked_heads && column0 < seen.end; stage ^= Tile::Stages - 1) {
        const bool is_last = column0 + Walk >= seen.end;
        const int next_n = n + is_last, next = is_last ? first : column0 + Walk;
        if (Tile::Stages == 1) {
            __syncthreads();
            load_walked(n, column0, 0);
        }
        wait_for_tiles();
        if (Tile::Stages == 2 && next_n < walked_heads) load_walked(next_n, next, stage ^ 1);
        const unsigned bytes = stage * Tile::StageBytes;
        // What the warp's rows see is computed anew for each tile: kept, it would take registers.
        const int row = opaque(row_warp);
        const auto of_warp = view.of_rows(row, row + WarpRows);
        const bool warp_sees = of_warp.see({column0, column0 + Walk});
#pragma unroll 1
        for (int group0 = 0; group0 < Walk && warp_sees; group0 += Group * Tile::Columns) {
            const int c0 = group0 + part * Tile::Columns, column = column0 + c0;
            float S[Tile::M][Tile::N][4] = {}, dP[Tile::M][Tile::N][4] = {};
            multiply<T, Tile>(S, A, B0 + bytes + 2 * D * c0);
            multiply<T, Tile>(dP, A + Tile::OwnBytes, B0 + bytes + Tile::WalkBytes + 2 * D * c0);
            const float *const of_columns = (float *)(stages + bytes + 2 * Tile::WalkBytes) + c0 + lane % 4 * 2;
            const float *const log2_l = walks_queries ? of_columns : row_log2_l;
            const float *const D_i = walks_queries ? of_columns + Walk : row_D;
            const float c = a.softmax_scale * kLog2e;
            Kept<Tile> kept;
            if constexpr (kIsGeneral<Mask>)
                change_S_dP<T, Tile>(S, dP, kept, a, owned.b, walks_queries ? owned.h * heads + n : owned.h,
                                     row + lane / 4, column + lane % 4 * 2, D_i);
            if (__builtin_expect(may_be_large, false)) {
                const int64_t head = owned.b * a.Hq + (walks_queries ? owned.h * heads + n : owned.h);
                const int first = walks_queries ? column + lane % 4 * 2 : row_warp + lane / 4;
                compute_P_dS<T, Tile, true, kIsGeneral<Mask>>(S, dP, c, log2_l, D_i,
                                                              rows.m + head * rows.head_stride + first);
            } else {
                compute_P_dS<T, Tile, false, kIsGeneral<Mask>>(S, dP, c, log2_l, D_i, nullptr);
            }
            if (!of_warp.all_see({column, column + Tile::Columns}))
                hide<Tile>(S, dP, view, row + lane / 4, column + lane % 4 * 2);
            if (kIsGeneral<Mask> && walks_queries && has_dropout(a)) kept.drop(S);
            add_products<T, Tile>(sums, S, dP, transposed0 + bytes + 2 * D * group0, operands, group, part);
        }
        n = next_n, column0 = next;
    }
    wait_for_tiles();  // the owned tiles are overwritten
    const auto store = [&](const auto &sums, float factor, const Tensor &result, T *tile) {
        store_sums<T, Tile>(g, sums, factor, result, owned.b, owned.h, owned.row0, owned.N, tile, warp_row, part,
                            aligned);
    };
    if constexpr (walks_queries) {
        const float of_kept = kIsGeneral<Mask> ? factor_of_kept(a) : 1.f;
        store(sums.of_P, of_kept / kPScale<T>, {g.dv, g.dv_stride, a.d_v}, own + Own * D);
        store(sums.of_dS, a.scores.scale, {g.dk, g.dk_stride, a.d}, own);
    } else {
        store(sums.of_dS, a.scores.scale, {g.dq, g.dq_stride, a.d}, own);
        wait_for_kernel_before();  // for the next kernel, which waits for this one alone: dQ needs nothing of dK and dV
    }
}

struct GradientKernels;

// Tile is one of Tiles, for one pass.
template <class T, class Tiles, class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    gradient_kernel(const __grid_constant__ Gradient g, const __grid_constant__ GradientRows rows, int64_t first_block,
                    bool aligned) {
    if constexpr (on_tensor_cores<T>() && is_needed<GradientKernels, Tiles>())
        gradient_block<T, Tile, Mask>(g, rows, first_block + blockIdx.x, aligned);
    else
        __trap();
}

// ------------------------------------------------------------------------------ tiles, plan and launch

template <int Own, int Walk, int WarpRows, int Group, int Columns, int BlocksPerSM, int Stages>
struct Shape {
    template <Pass pass, int D>
    using Tile = GradientTile<pass, D, Own, Walk, WarpRows, Group, Columns, BlocksPerSM, Stages>;
};

// A tile for each pass.
template <int D_, class OfKeys, class OfQueries>
struct Tiles {
    static constexpr int D = D_;
    using Keys = typename OfKeys::template Tile<Pass::dK_dV, D>;
    using Queries = typename OfQueries::template Tile<Pass::dQ, D>;
    static constexpr int NeededBytes = std::max(Keys::NeededBytes, Queries::NeededBytes);
};

// In order of preference: rows that a block owns, rows that it walks at once; rows of a warp, warps of a group, columns
// of a warp; blocks on a multiprocessor, stages. First for dK_dV, then for dQ. Beside them: KB of shared memory, and
// why they are in the list.
struct GradientKernels {
    static constexpr bool LastForFewQueries = false;
    using D64 =
        TileList<Tiles<64, Shape<128, 64, 32, 1, 32, 2, 2>, Shape<128, 64, 32, 1, 32, 2, 2>>,   // 65, 64
                 Tiles<64, Shape<128, 32, 32, 1, 32, 2, 2>, Shape<128, 32, 32, 1, 32, 2, 2>>>;  // 49, 48; two fit 99 KB
    using D128 =
        TileList<Tiles<128, Shape<64, 64, 32, 2, 32, 2, 2>, Shape<128, 32, 32, 1, 32, 2, 2>>,   // 113, 96
                 Tiles<128, Shape<128, 64, 32, 2, 32, 1, 2>, Shape<128, 64, 32, 2, 32, 1, 2>>,  // 161, 144; fit an A100
                 Tiles<128, Shape<32, 32, 16, 2, 16, 1, 2>, Shape<64, 32, 16, 1, 32, 1, 2>>>;   // 53, 64; fit a T4
    using D256 =
        TileList<Tiles<256, Shape<64, 64, 32, 4, 16, 1, 2>, Shape<128, 32, 32, 2, 16, 1, 2>>,  // 209, 200
                 Tiles<256, Shape<32, 32, 16, 2, 16, 1, 1>, Shape<32, 32, 16, 2, 16, 1, 2>>,   // 68, 98; fit 99 KB
                 Tiles<256, Shape<16, 32, 16, 2, 16, 1, 1>, Shape<16, 32, 16, 2, 16, 1, 1>>>;  // 50, 49; fit a T4
    using Wide = Tiles<512, Shape<32, 64, 16, 4, 16, 1, 1>, Shape<64, 32, 16, 2, 16, 1, 1>>;   // 201, 196
    using D512 = TileList<Wide>;
    static_assert(Wide::NeededBytes <= portable::kSharedMemoryOfWideBackward);
};

template <class Tiles, class... Smaller>
Plan plan_tiles(const Gradient &g, const Device &device, TileList<Tiles, Smaller...>, int index = 0) {
    if constexpr (sizeof...(Smaller) > 0)
        if (Tiles::NeededBytes > device.shared_memory) return plan_tiles(g, device, TileList<Smaller...>(), index + 1);
    using Tile = typename Tiles::Keys;
    const int64_t blocks = g.a.B * g.a.Hkv * ((g.a.Nk + Tile::Own - 1) / Tile::Own);
    return {portable::kHalfBackward, index, Tile::Walk, Tile::Own, Tile::D, blocks, Tile::Threads, Tile::SharedBytes,
            gradient_rows_bytes(g)};
}

template <class T, class Tiles, class Tile>
cudaError_t launch_pass(const Gradient &g, const GradientRows &rows, int64_t heads, int64_t N, bool aligned,
                        CUstream_st *stream) {
    const int64_t blocks = g.a.B * heads * ((N + Tile::Own - 1) / Tile::Own);
    return launch_all(blocks, kMostBlocks, [&](int64_t first, int grid) {
        return with_mask_and_scores(g.a, [&](auto mask) {
            return launch_overlapping(gradient_kernel<T, Tiles, Tile, decltype(mask)>, grid, Tile::Threads,
                                      Tile::SharedBytes, stream, g, rows, first, aligned);
        });
    });
}

template <class T>
const char *launch_passes(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Attention &a = g.a;
    const GradientRows rows = gradient_rows_in(g, workspace);
    if (const char *error = launch_gradient_rows(g, rows, stream)) return error;
    if (const char *error = launch_large_rows(g, rows, stream)) return error;
    const int64_t out = element_size(g.out_dtype);
    const bool aligned = has_aligned_inputs(a) && is_aligned(g.do_, g.do_stride, 2, a.d_v) &&
                         is_aligned(g.dq, g.dq_stride, out, a.d) && is_aligned(g.dk, g.dk_stride, out, a.d) &&
                         is_aligned(g.dv, g.dv_stride, out, a.d_v);
    return why_not(with_tiles_for<GradientKernels>(most_columns(a), [&](auto list) {
        return with_tile(plan.tile, list, [&](auto tiles) {
            using Tiles = decltype(tiles);
            const cudaError_t error =
                launch_pass<T, Tiles, typename Tiles::Keys>(g, rows, a.Hkv, a.Nk, aligned, stream);
            return error ? error : launch_pass<T, Tiles, typename Tiles::Queries>(g, rows, a.Hq, a.Nq, aligned, stream);
        });
    }));
}

}  // namespace

namespace portable {

Plan plan_half_backward(const Gradient &g, const Device &device) {
    return with_tiles_for<GradientKernels>(most_columns(g.a), [&](auto list) { return plan_tiles(g, device, list); });
}

const char *launch_half_backward(const Gradient &g, const Plan &plan, void *workspace, CUstream_st *stream) {
    return g.a.dtype == Dtype::float16 ? launch_passes<__half>(g, plan, workspace, stream)
                                       : launch_passes<__nv_bfloat16>(g, plan, workspace, stream);
}

}  // namespace portable
}  // namespace minimal_attn
