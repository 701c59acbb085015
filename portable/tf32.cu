// tf32.cu: attention in float32 on the tensor cores, by mma.sync, as three products of TF32s (tf32.cuh).
// docs/portable.md has the budget and what was tried.
//
//     role        | warps              | registers             | does
//     every warp  | Tile::Threads / 32 | Oi, Sij or Pij, and   | loads a part of each tile; computes WarpRows rows of
//                 |                    | operands: up to 255   | Sij, Pij and Oi
//
//     shared memory | size       | written                    | read
//     Qi            | Br x D     | once                       | step 9, by the warp of its rows
//     Kj            | Bc x D     | in steps 10 to 12          | step 9, by all
//     Vj            | Bc x D     | in step 9                  | step 12, by all
//     Oi            | Qi's place | after the last tile, where | on the way to HBM, by the warp of its rows
//                   |            | store_rows stages it       |
//     block         | 1          | once                       | for each tile of keys, since registers are scarce
//
// The table of common.cuh has the barriers of the loop. At the others all threads arrive and wait, too:
//
//     barrier                        | what is done behind it
//     __syncthreads, first           | thread 0 has written `block`, and all read it
//     __syncthreads_or, in end_block | all have read Qi, Kj and Vj, which O or the fallback may overwrite. It also says
//                                    | whether any number isn't finite: then the FMA units compute the block again
//     __syncthreads, in end_block    | the fallback has read shared memory, which its next rows overwrite
//
// Names from other files:
//     accumulators.cuh               ThreadRows: Oi, li, mi of a thread; change_scores: step 9; update_rows
//     tf32.cuh                       multiply_rows: A B^T; multiply_columns: A B; both split numbers into hi and lo
//     float32_block.cuh              start_sums, flush_sums: sums of long calls; float_block: the fallback
//     mma.cuh, common.cuh            load_swizzled, lane_address; Block, wait_for_tiles, end_row, store_o, plan_kernel
#include "portable/accumulators.cuh"
#include "portable/float32_block.cuh"
#include "portable/tf32.cuh"

namespace minimal_attn {
namespace {

// A warp has WarpRows queries of the tile: the more, the more often an operand from shared memory is used.
template <int D_, int Br_, int Bc_, int WarpRows_, int BlocksPerSM_>
struct Tf32Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, WarpRows = WarpRows_;
    static constexpr int Threads = Br / WarpRows * 32, BlocksPerSM = BlocksPerSM_;
    static constexpr int M = WarpRows / 16, N = Bc / 8, X = D / 8;  // a warp's accumulators, 16 x 8 each
    static constexpr int XAtOnce = 4 / M;                           // of Oi, summed side by side
    static constexpr int SharedBytes = (Br + 2 * Bc) * D * 4 + sizeof(Block<float, Ranges>);
    static constexpr int NeededBytes = BlocksPerSM * (SharedBytes + 1024) - 1024;  // that a GPU must let a block have
    static constexpr int Sums = 1 + D / 4;                                         // of a row of a thread: li and Oi
    static constexpr int SumFloats = Threads * 2 * M * (1 + 2 * Sums);  // of a block in the workspace (flush_sums)
    // The tile on FMA units that computes the block again if a number isn't finite, Threads / 4 rows at a time
    using Fallback = FloatTile<D, Threads / 4, D <= 128 ? 32 : 16, 16, Threads / 16, 1>;
    static_assert(WarpRows % 16 == 0 && Bc % 16 == 0 && D % 64 == 0);
    static_assert(Fallback::SharedBytes <= SharedBytes && Fallback::SumFloats <= SumFloats);
};

// A weight, cut to 22 bits, so that hi + lo is Pij exactly.
__device__ inline float cut(float p, unsigned &lo) {
    const unsigned bits = __float_as_uint(p) & ~3u;
    lo = __float_as_uint(__uint_as_float(bits) - __uint_as_float(bits & 0xffffe000));
    return __uint_as_float(bits);
}

// 10. - 11. Pij and li += rowsum(Pij). li sums the numbers that are multiplied.
template <class Tile>
__device__ void exponentials(ThreadRows<Tile> &rows, float (&Sij)[Tile::M][Tile::N][4],
                             unsigned (&lo)[Tile::M][Tile::N][4], const float (&subtract)[ThreadRows<Tile>::R],
                             float c) {
    float l[ThreadRows<Tile>::R] = {};  // of this tile: one sum over all keys would lose small terms
#pragma unroll
    for (int m = 0; m < Tile::M; ++m)
#pragma unroll
        for (int n = 0; n < Tile::N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 2 * m + e / 2;
                l[r] += Sij[m][n][e] = cut(exp2_fast(fmaf(Sij[m][n][e], c, -subtract[r])), lo[m][n][e]);
            }
#pragma unroll
    for (int r = 0; r < ThreadRows<Tile>::R; ++r) rows.li[r] += l[r];
}

// 12. Oi = diag(alpha) Oi + Pij Vj
template <class Tile>
__device__ void multiply_PV(ThreadRows<Tile> &rows, const float (&Pij)[Tile::M][Tile::N][4],
                            const unsigned (&P_lo)[Tile::M][Tile::N][4], const float (&alpha)[ThreadRows<Tile>::R],
                            const unsigned (&Vj)[2], int d) {
#pragma unroll
    for (int x0 = 0; x0 < Tile::X; x0 += Tile::XAtOnce) {
        if (8 * x0 >= d) break;
        multiply_columns<Tile::D, Tile::M, Tile::N, Tile::XAtOnce, 1, true>(
            Vj, x0,
            [&](int n, int m, unsigned (&hi)[4], unsigned (&lo)[4]) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    hi[e] = __float_as_uint(Pij[m][n][e % 2 * 2 + e / 2]);
                    lo[e] = P_lo[m][n][e % 2 * 2 + e / 2];
                }
            },
            [&](int m, int x, int e, float PV) {
                float &o = rows.Oi[m][x0 + x][e];
                o = fmaf(o, alpha[2 * m + e / 2], PV);
            });
    }
}

// Whether all numbers of this thread are finite
template <class Tile>
__device__ bool all_finite(const ThreadRows<Tile> &rows) {
    float zero = 0.f;
#pragma unroll
    for (int r = 0; r < ThreadRows<Tile>::R; ++r) zero = fmaf(rows.li[r], 0.f, zero);
#pragma unroll
    for (int m = 0; m < Tile::M; ++m)
#pragma unroll
        for (int x = 0; x < Tile::X; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e) zero = fmaf(rows.Oi[m][x][e], 0.f, zero);
    return zero == 0.f;
}

// 12. - 13. O = Oi / li, l and m to HBM. A group of accumulators has `Columns` neighbouring columns of a row. A thread
// stages its part of Oi in Qi's place, so that one loop stores it. Unrolled, it takes a quarter of the compile time.
template <class Tile, class Mask>
__device__ void store_rows(const Attention &a, const Block<float, Mask> &block, const ThreadRows<Tile> &rows,
                           float *Q_tile, int warp_row, bool aligned) {
    constexpr int R = ThreadRows<Tile>::R, XAtOnce = Tile::XAtOnce, Columns = 2 * XAtOnce;
    const int lane = threadIdx.x % 32, i = block.i0 + warp_row + lane / 4;
    float4 *const staged = (float4 *)Q_tile + threadIdx.x;
    RowEnd end[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int x = 0; x < Tile::X; x += XAtOnce) {
            float o[Columns];
#pragma unroll
            for (int y = 0; y < Columns; ++y) o[y] = rows.Oi[r / 2][x + y % XAtOnce][r % 2 * 2 + y / XAtOnce];
#pragma unroll
            for (int y = 0; y < Columns; y += 4)
                staged[((2 * x + y) / 4 * R + r) * Tile::Threads] = {o[y], o[y + 1], o[y + 2], o[y + 3]};
        }
        const float li = row_sum<4>(rows.li[r]);
        if (i + 8 * r >= end_of_queries(a, block)) continue;
        end[r] = end_row(a, block, i + 8 * r, li, scaled_max(a, rows.mi[r]));
        if (lane % 4 == 0) store_l_m_lse(a, block.b, block.h, i + 8 * r, end[r].l, end[r].m);
    }
#pragma unroll 1
    for (int x = 0; x < 2 * Tile::X; x += 4)
#pragma unroll
        for (int r = 0; r < R; ++r)
            if (i + 8 * r < end_of_queries(a, block))
                store_o<4>(a, block, i + 8 * r, x / Columns * 4 * Columns + lane % 4 * Columns + x % Columns, end[r],
                           &staged[(x / 4 * R + r) * Tile::Threads].x, aligned);
}

// The block's threads, for the fallback. `sums` already points to this block's place in the workspace, so block() is 0.
struct OneBlock : WholeBlock {
    __device__ unsigned block() const { return 0; }
};

// The end of a block. An inf becomes a NaN where it meets a hi or lo that is 0 or of the other sign. So if a number
// isn't finite, the FMA units compute all rows again.
template <class Tile, class Mask>
__device__ void end_block(const Attention &a, const Block<float, Mask> block, const ThreadRows<Tile> &rows,
                          int warp_row, bool aligned, float *shared, float *sums) {
    using Fallback = typename Tile::Fallback;
    if (!__syncthreads_or(!all_finite(rows))) {
        store_rows<Tile>(a, block, rows, shared, warp_row, aligned);
        return pad_lse(a, block.b, block.h, block.i0 + block.rows, threadIdx.x);
    }
#pragma unroll 1
    for (int row = 0; row < block.rows; row += Fallback::Br) {
        const int count = min(Fallback::Br, block.rows - row);
        float_block<Fallback>(a, block_at<float, Mask>(a, block.b, block.h, block.i0 + row, count, block.mask), aligned,
                              shared, sums, OneBlock());
        __syncthreads();  // shared memory has been read
    }
}

template <class Tile, class Mask>
__device__ void tf32_block(const Attention &a, int64_t index, bool aligned, float *sums) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc, Threads = Tile::Threads, M = Tile::M, N = Tile::N;
    extern __shared__ __align__(128) float shared[];
    float *const Q_tile = shared, *const K_tile = Q_tile + Br * D, *const V_tile = K_tile + Bc * D;
    Block<float, Mask> &block = *(Block<float, Mask> *)(V_tile + Bc * D);
    if (threadIdx.x == 0) block = block_of<float, Mask>(a, index, Br);
    __syncthreads();
    const int warp_row = broadcast_lane0(threadIdx.x / 32) * Tile::WarpRows, lane = threadIdx.x % 32;
    const auto load = [&](float *tile, const float *source, int64_t stride, int j0, int columns) {
        load_swizzled<Bc, D, Threads>(tile, source + j0 * stride, stride, block.mask.keys.end - j0, columns, aligned);
    };
    const unsigned Qi = lane_address<D>(Q_tile, warp_row + lane % 16, lane / 16);
    const unsigned Kj = lane_address<D>(K_tile, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned Vj[2] = {lane_address_columns<D, Tile::XAtOnce>(V_tile, lane, 0),
                            lane_address_columns<D, Tile::XAtOnce>(V_tile, lane, 1)};
    const float c = scale_of(a);

    // 8. Qi from HBM, unless no query sees a key: nothing would wait for it. Oi, li, mi begin empty
    ThreadRows<Tile> rows;
    if (!empty(block.seen)) {
        load_swizzled<Br, D, Threads>(Q_tile, block.Q, a.q_stride.row, block.rows, a.d, aligned);
        load(K_tile, block.K, a.k_stride.row, block.seen.begin, a.d);
    }
    if (sums) sums += (int64_t)blockIdx.x * Tile::SumFloats;
    const bool is_long = sums && block.seen.end - block.seen.begin > kTilesOfSum * Bc;
    if (is_long) start_sums<Tile::Sums, Threads, ThreadRows<Tile>::R>(sums + threadIdx.x);

    // 5. for j: the tiles of keys that some query of this tile sees, counted from the first such key. No tile holds a
    // key before leftpad_k; keys past the last one seen are loaded, too, and masked. A long call has a loop for each
    // sum.
    for (int j0 = block.seen.begin; j0 < block.seen.end;) {
        const int end = is_long ? min(j0 + kTilesOfSum * Bc, block.seen.end) : block.seen.end;
#pragma unroll 1
        for (; j0 < end; j0 += Bc) {
            // 6. Kj, Vj from HBM
            wait_for_tiles();
            load(V_tile, block.V, a.v_stride.row, j0, a.d_v);
            // Which keys the warp's rows see
            const int i_warp = block.i0 + warp_row;
            const Keys seen = keys_of_any(narrow(block.mask), i_warp, i_warp + Tile::WarpRows);
            const bool is_seen = warp_row < block.rows && j0 < seen.end && j0 + Bc > seen.begin;
            // 9.
            float Sij[M][N][4] = {};
            if (is_seen) multiply_rows<D>(Sij, Qi, Kj, a.d);
            wait_for_tiles();
            if (j0 + Bc < block.seen.end) load(K_tile, block.K, a.k_stride.row, j0 + Bc, a.d);
            if (!is_seen) continue;
            const Narrow<Mask> mask = narrow(block.mask);
            const Keys seen_by_all = keys_of_all(mask, i_warp, i_warp + Tile::WarpRows);
            const bool masked = j0 < seen_by_all.begin || j0 + Bc > seen_by_all.end;
            change_scores<float, Tile>(Sij, a, mask, block.b, block.h, i_warp + lane / 4, j0 + lane % 4 * 2, masked);
            // 10. - 12.
            float subtract[ThreadRows<Tile>::R], alpha[ThreadRows<Tile>::R];
            update_rows<Tile>(Sij, rows, subtract, alpha, c);
            unsigned P_lo[M][N][4];
            exponentials<Tile>(rows, Sij, P_lo, subtract, c);
            if (kIsGeneral<Mask> && has_dropout(a))
                for_each_Z<false, M, N>(
                    {a, block.b, block.h}, i_warp + lane / 4, j0 + lane % 4 * 2,
                    [&](int m, int n, int e, float Z) { Sij[m][n][e] = cut(Z * Sij[m][n][e], P_lo[m][n][e]); });
            multiply_PV<Tile>(rows, Sij, P_lo, alpha, Vj, a.d_v);
        }
        if (is_long)
            flush_sums<Tile::Sums, Threads>(
                sums + threadIdx.x, rows.mi, c, j0 >= block.seen.end, [&](int r, int n) -> float & {
                    return n == 0 ? rows.li[r] : rows.Oi[r / 2][(n - 1) / 2][r % 2 * 2 + (n - 1) % 2];
                });
    }
    end_block<Tile>(a, block, rows, warp_row, aligned, shared, sums);
}

template <class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    tf32_kernel(const __grid_constant__ Attention a, int64_t first_block, bool aligned, float *sums) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    tf32_block<Tile, Mask>(a, first_block + blockIdx.x, aligned, sums);
#endif
}

// Tiles in order of preference: D, Br, Bc, rows of a warp, blocks on a multiprocessor. Beside each: shared memory,
// TFLOP/s on an H100 at 16k tokens and N 2048, and why it is in the list. An A100 has 163 KB.
struct Tf32Kernels {
    static constexpr int TilesOfSum = kTilesOfSum;
    template <class T, class Tile, class Mask>
    static auto kernel() {
        return tf32_kernel<Tile, Mask>;
    }
    using D64 = TileList<Tf32Tile<64, 128, 32, 32, 2>,    // 48 KB: 60
                         Tf32Tile<64, 64, 64, 16, 2>>;    // 48 KB; few queries
    using D128 = TileList<Tf32Tile<128, 64, 32, 16, 2>>;  // 64 KB: 57
    using D256 = TileList<Tf32Tile<256, 128, 32, 16, 1>,  // 192 KB: 57
                          Tf32Tile<256, 64, 32, 16, 1>>;  // 128 KB: 37; fits an A100; few queries
    using D512 = D256;                                    // never taken (portable.h)
};

}  // namespace

namespace portable {

Plan plan_tf32(const Attention &a, const Device &device) { return plan_kernel<Tf32Kernels>(a, device, kTf32); }

const char *launch_tf32(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return launch_kernel<Tf32Kernels, float>(a, plan, workspace, stream);
}

}  // namespace portable
}  // namespace minimal_attn
