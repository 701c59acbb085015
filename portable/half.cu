// half.cu: attention in float16 and bfloat16 on the tensor cores, by mma.sync. Sums, li and mi are float32.
// common.cuh has the steps. docs/portable.md has the budget and what was tried.
//
//     role        | warps              | registers             | does
//     every warp  | Tile::Threads / 32 | Oi, Sij or Pij, and   | loads a part of each tile; computes WarpRows rows of
//                 |                    | operands: up to 255   | Sij, Pij and Oi
//
//     shared memory | size, in T     | written                     | read
//     Qi            | Br x D         | once                        | step 9, by the warp of its rows
//     Oi            | Qi's place     | after the last tile         | likewise, on the way to HBM
//     Kj, Vj        | 2 x Bc x D     | while tile j-1 is computed  | steps 9 and 12, by all
//     Kj+1, Vj+1    | 2 x Bc x D     | while tile j is computed    | likewise, one tile later; with two Stages alone
//
// At wait_for_tiles (common.cuh) each thread waits for its own copies, then arrives and waits for the other threads.
// At __syncwarp the lanes of a warp arrive and wait.
//
//     barrier                                | what is done behind it
//     wait_for_tiles, before the loop, if    | Qi has arrived: it may be read into registers, or O may overwrite it
//     QInRegisters or no key is seen         |
//     wait_for_tiles, before step 9,         | Kj and Vj (and the first time Qi) have arrived; all warps have read Kj-1
//     two Stages                             | and Vj-1, so Kj+1 and Vj+1 may overwrite them
//     wait_for_tiles, before step 9,         | Kj (and the first time Qi) has arrived; all warps have read Vj-1, so Vj
//     one Stage                              | may overwrite it: it loads during step 9
//     wait_for_tiles, after step 9,          | Vj has arrived; all warps have read Kj, so Kj+1 may overwrite it: it
//     one Stage                              | loads during steps 10 to 12
//     __syncwarp, in store_rows              | the warp's rows of O are staged, and other lanes read them
//
// Softmax. A row of Sij lies in four lanes. update_rows finds its maximum mi and alpha, and scales li. Then multiply_PV
// computes Pij = exp2(c Sij - subtract) and adds it to li; subtract is c mi (update_rows says where it isn't).
//
// Names from other files:
//     accumulators.cuh  ThreadRows: Oi, li, mi of a thread; change_scores: step 9; update_rows, scale_Oi; scaled_max
//     mma.cuh           mma; load_matrices, lane_address, swizzle: operands in shared memory; load_swizzled: a tile
//     common.cuh        Block, block_of, end_of_queries; wait_for_tiles; end_row, store_o; is_needed; plan_kernel, launch_kernel
//     flash.h           end_of_row: how a row ends; store_l_m_lse
//     ranges.h          keys_of_row, keys_of_any, keys_of_all (of a band: flash.h); Narrow: the mask in registers
//     device.h          scale_of: c; exp2_fast, pack, row_sum, opaque, broadcast_lane0, pad_lse
#include "portable/accumulators.cuh"
#include "portable/common.cuh"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

// A warp has WarpRows queries of the tile: the more, the more often an operand from shared memory is used. Stages is
// the number of tiles of K in shared memory, and of tiles of V. A block computes D_v columns of O.
template <int D_, int Br_, int Bc_, int WarpRows_, int BlocksPerSM_, int Stages_, int D_v_ = D_>
struct HalfTile {
    static constexpr int D = D_, D_v = D_v_, Br = Br_, Bc = Bc_, WarpRows = WarpRows_;
    static constexpr int Threads = Br / WarpRows * 32, BlocksPerSM = BlocksPerSM_, Stages = Stages_;
    static constexpr int M = WarpRows / 16, N = Bc / 8, X = D_v / 8;  // a warp's accumulators, 16 x 8 each
    static constexpr int SharedBytes = (Br * D + Stages * Bc * (D + D_v)) * 2;
    static constexpr int NeededBytes = BlocksPerSM * (SharedBytes + 1024) - 1024;  // that a GPU must let a block have
    static constexpr bool QInRegisters = D == 64;
    // Only here the looped store_rows_with_state makes ptxas spill 24 registers: 3.5 % slower.
    static constexpr bool StoresFromRegisters = D == 128 && Bc == 64;
    static constexpr int SumFloats = 0;  // no sums in the workspace (flush_sums in float32_block.cuh)
    static_assert(WarpRows % 16 == 0 && Bc % 16 == 0 && D % 64 == 0 && D_v <= D);
};

// 9. Sij = Qi Kj^T. Columns past d are zeros.
template <class T, class Tile>
__device__ void multiply_QK(float (&Sij)[Tile::M][Tile::N][4], const unsigned (&q)[Tile::M][4][4], unsigned Qi,
                            unsigned Kj) {
    constexpr int D = Tile::D;
#pragma unroll
    for (int x0 = 0; x0 < D; x0 += 64) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            unsigned a[Tile::M][4];
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
                if constexpr (Tile::QInRegisters)
                    for (int e = 0; e < 4; ++e) a[m][e] = q[m][x][e];
                else
                    load_matrices(a[m], (Qi ^ 32 * x) + 2 * (x0 + 16 * m * D));
            }
#pragma unroll
            for (int n = 0; n < Tile::N; n += 2) {
                unsigned k[4];
                load_matrices(k, (Kj ^ 32 * x) + 2 * (x0 + 8 * n * D));
#pragma unroll
                for (int m = 0; m < Tile::M; ++m) {
                    mma<T>(Sij[m][n], a[m], k[0], k[1]);
                    mma<T>(Sij[m][n + 1], a[m], k[2], k[3]);
                }
            }
        }
    }
}

// In a kernel or call without dropout.
struct NoDrop {
    __device__ void operator()(int, int, float2 (&)[4]) const {}
};

// 11. - 12. li += rowsum(Pij), Oi += Pij Vj, 16 keys at a time, so that exponentials and products overlap. Two
// accumulators of Sij side by side become an operand of the product.
// drop(m, n, P) is dropout of the numbers P[e], left and right, of keys 8 n and 8 n + 8; or there is NoDrop.
template <class T, class Tile, class Drop>
__device__ void multiply_PV(ThreadRows<Tile> &rows, float (&Sij)[Tile::M][Tile::N][4],
                            const float (&subtract)[ThreadRows<Tile>::R], float c, unsigned Vj, const Drop &drop) {
    constexpr int D_v = Tile::D_v, R = ThreadRows<Tile>::R;
    float l[R] = {};  // of this tile: one sum over all keys would lose small terms
#pragma unroll
    for (int n = 0; n < Tile::N; n += 2) {
        unsigned p[Tile::M][4];
#pragma unroll
        for (int m = 0; m < Tile::M; ++m) {
            float2 P[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 2 * m + e % 2;
                const float *s = &Sij[m][n + e / 2][e % 2 * 2];
                const float left = exp2_fast(fmaf(s[0], c, -subtract[r]));
                const float right = exp2_fast(fmaf(s[1], c, -subtract[r]));
                l[r] += left + right;
                if constexpr (std::is_same_v<Drop, NoDrop>)
                    p[m][e] = pack<T>(left, right);
                else
                    P[e] = {left, right};
            }
            if constexpr (std::is_same_v<Drop, NoDrop>) continue;
            drop(m, n, P);
#pragma unroll
            for (int e = 0; e < 4; ++e) p[m][e] = pack<T>(P[e].x, P[e].y);
        }
#pragma unroll
        for (int x = 0; x < D_v / 16; ++x) {
            unsigned v[4];
            load_matrices_transposed(v, (Vj ^ x % 4 * 32) + 2 * (x / 4 * 64 + 8 * n * D_v));
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
                mma<T>(rows.Oi[m][2 * x], p[m], v[0], v[1]);
                mma<T>(rows.Oi[m][2 * x + 1], p[m], v[2], v[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) rows.li[r] += l[r];
}

// Pij = Pij o Zij (dropout.h) for queries i, i + 8 (e % 2) and keys j, j + 1, j + 8, j + 9 (e / 2). Tiles begin at
// multiples of 16.
__device__ inline void drop_16_keys(const DropoutOfHead &dropout, int i, int j, float2 (&P)[4]) {
    const Words left = dropout.group(i, j), right = dropout.group(i, j + 1);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const uint32_t of_left = e % 2 ? left.y : left.x, of_right = e % 2 ? right.y : right.x;
        P[e].x *= dropout.Z_of(e / 2 ? of_left >> 16 : of_left & 0xffff);
        P[e].y *= dropout.Z_of(e / 2 ? of_right >> 16 : of_right & 0xffff);
    }
}

// 12. - 13. O = Oi / li, and the log-sum-exp, to HBM: the usual case, without l, m and an earlier state. Each warp
// stages its rows of O in the place of its rows of Qi: then a thread writes 16 bytes at once, and neighbouring threads
// write side by side.
template <class Tile, class T, class Mask>
__device__ void store_rows(const Attention &a, const Block<T, Mask> &block, const ThreadRows<Tile> &rows, T *tile,
                           int warp_row, int lane) {
    constexpr int D = Tile::D, Chunks = Tile::D_v / 8, RowsAtOnce = 32 / Chunks;
    const Narrow<Mask> mask = narrow(block.mask);
#pragma unroll
    for (int r = 0; r < ThreadRows<Tile>::R; ++r) {
        const int row = warp_row + lane / 4 + 8 * r, i = block.i0 + row;
        const float li = row_sum<4>(rows.li[r]);
        const RowEnd end = end_of_row(sees_key(a, mask, i, li), li, scaled_max(a, rows.mi[r]), 0.f, -INFINITY);
        if (a.lse && lane % 4 == 0 && row < block.rows) store_l_m_lse(a, block.b, block.h, i, end.l, end.m);
#pragma unroll
        for (int x = 0; x < Tile::X; ++x) {
            const float *Oi = &rows.Oi[r / 2][x][r % 2 * 2];
            const unsigned pair = end.reads_Oi ? pack<T>(end.weight_Oi * Oi[0], end.weight_Oi * Oi[1]) : 0;
            *(unsigned *)(tile + swizzle<D, T>(row, x) + lane % 4 * 2) = pair;
        }
    }
    __syncwarp();
    const int row0 = warp_row + lane / Chunks, chunk = lane % Chunks;
    T *const o = (T *)a.o + block.b * a.o_stride.batch + block.h * a.o_stride.head +
                 (block.i0 + row0) * a.o_stride.row + 8 * chunk;
    const int count = 8 * chunk < a.d_v ? block.rows - row0 : 0;
#pragma unroll
    for (int row = 0; row < Tile::WarpRows; row += RowsAtOnce)
        if (row < count)
            *(uint4 *)(o + row * a.o_stride.row) = *(const uint4 *)(tile + swizzle<D, T>(row0 + row, chunk));
}

// Likewise in all other cases, two columns at a time. A thread stages its part of a row in the place of its warp's rows
// of Qi, and one loop stores it from there. From registers the loop is unrolled, which takes two thirds of the compile
// time.
template <class Tile, class T, class Mask>
__device__ void store_rows_with_state(const Attention &a, const Block<T, Mask> &block, const ThreadRows<Tile> &rows,
                                      T *tile, int warp_row, int lane, bool aligned) {
    float2 *const staged = (float2 *)(tile + warp_row * Tile::D) + lane;
#pragma unroll
    for (int r = 0; r < ThreadRows<Tile>::R; ++r) {
        const int i = block.i0 + warp_row + lane / 4 + 8 * r;
        const float li = row_sum<4>(rows.li[r]);
        if (i >= end_of_queries(a, block)) continue;
        const RowEnd end = end_row(a, block, i, li, scaled_max(a, rows.mi[r]));
        if (lane % 4 == 0) store_l_m_lse(a, block.b, block.h, i, end.l, end.m);
        const auto store = [&](int x, const float *Oi) {
            store_o<2>(a, block, i, 8 * x + lane % 4 * 2, end, Oi, aligned);
        };
        if constexpr (Tile::StoresFromRegisters) {
#pragma unroll
            for (int x = 0; x < Tile::X; ++x) store(x, &rows.Oi[r / 2][x][r % 2 * 2]);
        } else {
#pragma unroll
            for (int x = 0; x < Tile::X; ++x)
                staged[32 * x] = {rows.Oi[r / 2][x][r % 2 * 2], rows.Oi[r / 2][x][r % 2 * 2 + 1]};
#pragma unroll 1
            for (int x = 0; x < Tile::X; ++x) store(x, &staged[32 * x].x);
        }
    }
}

template <class T, class Tile, class Mask>
__device__ void half_block(const Attention &a, int64_t index, bool aligned) {
    constexpr int D = Tile::D, D_v = Tile::D_v, Br = Tile::Br, Bc = Tile::Bc, Threads = Tile::Threads, M = Tile::M;
    constexpr int Stages = Tile::Stages;
    extern __shared__ __align__(128) unsigned char shared[];
    T *const Q_tile = (T *)shared, *const K_tiles = Q_tile + Br * D, *const V_tiles = K_tiles + Stages * Bc * D;
    const int warp_row = broadcast_lane0(threadIdx.x / 32) * Tile::WarpRows, lane = threadIdx.x % 32;

    const Block<T, Mask> block = block_of<T, Mask>(a, index, Br);
    // Dropout wants tiles that begin at multiples of 16. What lies before the batch's first key is then read as zeros.
    const auto first_key = [&] {
        return kIsGeneral<Mask> && has_dropout(a) ? block.seen.begin & ~15 : block.seen.begin;
    };
    const T *K = block.K + first_key() * a.k_stride.row;
    const T *V = block.V + first_key() * a.v_stride.row;
    // K and V point to the first row of the next tile to load.
    const auto load_K = [&](int j0, int stage) {
        const int keys = block.mask.keys.end - j0;
        const int hidden = kIsGeneral<Mask> ? block.mask.keys.begin - j0 : 0;
        load_swizzled<Bc, D, Threads>(K_tiles + stage * Bc * D, K, a.k_stride.row, keys, a.d, aligned, hidden);
        K += Bc * a.k_stride.row;
    };
    const auto load_V = [&](int j0, int stage) {
        const int keys = block.mask.keys.end - j0;
        const int hidden = kIsGeneral<Mask> ? block.mask.keys.begin - j0 : 0;
        load_swizzled<Bc, D_v, Threads>(V_tiles + stage * Bc * D_v, V, a.v_stride.row, keys, a.d_v, aligned, hidden);
        V += Bc * a.v_stride.row;
    };
    // A and transposed B: matrices 1 and 3 lie 8 rows below. B: matrices 2 and 3 do.
    const unsigned Qi = lane_address<D>(Q_tile, warp_row + lane % 16, lane / 16);
    const unsigned K0 = lane_address<D>(K_tiles, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned V0 = lane_address<D_v>(V_tiles, lane % 16, lane / 16);
    // Which keys the warp's rows see
    const Narrow<Mask> mask = narrow(block.mask);
    const int i_warp = block.i0 + warp_row, i_lane = i_warp + lane / 4;
    const Keys seen = keys_of_any(mask, i_warp, i_warp + Tile::WarpRows);
    const Keys seen_by_all = keys_of_all(mask, i_warp, i_warp + Tile::WarpRows);

    // 8. Qi from HBM; Oi, li, mi begin empty (an earlier state joins at the end, by step 12)
    load_swizzled<Br, D, Threads>(Q_tile, block.Q, a.q_stride.row, block.rows, a.d, aligned);
    if (!empty(block.seen)) {
        load_K(first_key(), 0);
        if (Stages == 2) load_V(first_key(), 0);
    }
    ThreadRows<Tile> rows;
    unsigned q[M][4][4];
    if (Tile::QInRegisters || empty(block.seen)) wait_for_tiles();  // store_rows overwrites Qi
    if constexpr (Tile::QInRegisters) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int x = 0; x < 4; ++x) load_matrices(q[m][x], (Qi ^ 32 * x) + 32 * m * D);
    }

    // 5. for j: the tiles of keys that some query of this tile sees, counted from the first such key. No tile holds a
    // key before leftpad_k, or with dropout as zeros; keys past the last one seen are loaded, too, and masked.
    for (int j0 = first_key(), stage = 0; j0 < block.seen.end; j0 += Bc, stage ^= Stages - 1) {
        const bool warp_sees = j0 < seen.end && j0 + Bc > seen.begin, is_last = j0 + Bc >= block.seen.end;
        const unsigned bytes = stage * Bc * D * 2;
        // 6. Kj, Vj from HBM
        wait_for_tiles();
        if (Stages == 1) load_V(j0, 0);
        if (Stages == 2 && !is_last) load_K(j0 + Bc, stage ^ 1), load_V(j0 + Bc, stage ^ 1);
        // 9.
        float Sij[M][Tile::N][4] = {};
        if (warp_sees) multiply_QK<T, Tile>(Sij, q, Qi, K0 + bytes);
        if (Stages == 1) wait_for_tiles();
        if (Stages == 1 && !is_last) load_K(j0 + Bc, 0);
        if (!warp_sees) continue;
        const bool masked = j0 < seen_by_all.begin || j0 + Bc > seen_by_all.end;
        change_scores<T, Tile>(Sij, a, mask, block.b, block.h, i_lane, j0 + lane % 4 * 2, masked);
        // 10. - 12. c is computed for each tile: kept, it would take a register.
        const float c = scale_of(a);
        float subtract[ThreadRows<Tile>::R], alpha[ThreadRows<Tile>::R];
        update_rows<Tile>(Sij, rows, subtract, alpha, c);
        scale_Oi<Tile>(rows, alpha);
        const unsigned Vj = V0 + stage * Bc * D_v * 2;
        if (kIsGeneral<Mask> && has_dropout(a)) {
            const DropoutOfHead dropout(a, block.b, block.h);
            multiply_PV<T, Tile>(rows, Sij, subtract, c, Vj, [&](int m, int n, float2(&P)[4]) {
                drop_16_keys(dropout, i_lane + 16 * m, j0 + lane % 4 * 2 + 8 * n, P);
            });
        } else {
            multiply_PV<T, Tile>(rows, Sij, subtract, c, Vj, NoDrop());
        }
    }
    // These numbers are computed anew: kept, they would take registers from the loop.
    const unsigned thread = opaque(threadIdx.x);
    const Block<T, Mask> same_block = block_of<T, Mask>(a, opaque(index), Br);
    const int first_row = thread / 32 * Tile::WarpRows;
    pad_lse(a, same_block.b, same_block.h, same_block.i0 + same_block.rows, thread);
    if (aligned && a.o_dtype != Dtype::float32 && !a.o_in)
        store_rows<Tile>(a, same_block, rows, Q_tile, first_row, thread % 32);
    else
        store_rows_with_state<Tile>(a, same_block, rows, Q_tile, first_row, thread % 32, aligned);
}

struct HalfKernels;

template <class T, class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    half_kernel(const __grid_constant__ Attention a, int64_t first_block, bool aligned, float *) {
    if constexpr (on_tensor_cores<T>() && is_needed<HalfKernels, Tile>()) {
        constexpr bool is_part = Tile::D_v < Tile::D;  // of O: the next kernel computes the rest
        if constexpr (is_part) let_next_kernel_start();
        half_block<T, Tile, Mask>(a, first_block + blockIdx.x, aligned);
        if constexpr (is_part) wait_for_kernel_before();  // what comes after the call must find both parts done
    } else {
        __trap();
    }
}

// Tiles in order of preference: D, Br, Bc, rows of a warp, blocks on a multiprocessor, stages. Beside each: shared
// memory, and why it is in the list.
struct HalfKernels {
    static constexpr int TilesOfSum = 0;
    static constexpr bool LastForFewQueries = true;
    template <class T, class Tile, class Mask>
    static auto kernel() {
        return half_kernel<T, Tile, Mask>;
    }
    using D64 = TileList<HalfTile<64, 128, 64, 32, 2, 2>,    // 48 KB
                         HalfTile<64, 64, 64, 16, 2, 2>>;    // 40 KB; few queries
    using D128 = TileList<HalfTile<128, 128, 64, 32, 2, 2>,  // 96 KB
                          HalfTile<128, 128, 32, 32, 2, 2>,  // 64 KB; two fit an A100
                          HalfTile<128, 64, 32, 16, 2, 2>>;  // 48 KB; fits a T4, two fit 99 KB; few queries
    using D256 = TileList<HalfTile<256, 64, 64, 16, 2, 1>,   // 96 KB; two blocks, since one waits at each barrier
                          HalfTile<256, 128, 32, 16, 1, 2>,  // 128 KB; fits an A100
                          HalfTile<256, 64, 32, 16, 1, 2>,   // 96 KB; fits 99 KB
                          HalfTile<256, 64, 16, 16, 1, 2>>;  // 64 KB; fits a T4; few queries
    // O has twice as many columns as registers have room for: launch_half launches a kernel for each half.
    using D512 = TileList<HalfTile<512, 128, 32, 16, 1, 2, 256>,  // 224 KB
                          HalfTile<512, 128, 16, 16, 1, 1, 256>,  // 152 KB; fits an A100
                          HalfTile<512, 32, 16, 16, 1, 1, 256>>;  // 56 KB; fits a T4; few queries
};

}  // namespace

namespace portable {

// Columns of V and O for each launch: registers have room for so many.
constexpr int kColumns = 256;

Plan plan_half(const Attention &a, const Device &device) {
    Attention part = a;
    part.d_v = std::min(a.d_v, kColumns);
    return plan_kernel<HalfKernels>(part, device, kHalf);
}

const char *launch_half(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    Attention part = a;
    const int64_t column_bytes = element_size(a.dtype), o_bytes = element_size(a.o_dtype);
    for (int column = 0; column < a.d_v; column += kColumns) {
        part.v = (const char *)a.v + column * column_bytes, part.o = (char *)a.o + column * o_bytes;
        part.o_in = a.o_in ? a.o_in + column : nullptr, part.d_v = std::min(a.d_v - column, kColumns);
        // A tile of D512 waits for the launch before at its end.
        const bool overlaps = column > 0 && plan.D > kColumns;
        const char *const error =
            a.dtype == Dtype::float16
                ? launch_kernel<HalfKernels, __half>(part, plan, workspace, stream, overlaps)
                : launch_kernel<HalfKernels, __nv_bfloat16>(part, plan, workspace, stream, overlaps);
        if (error) return error;
    }
    return nullptr;
}

// A newer GPU may run PTX for sm_75, so this looks at the loaded code and not at the device.
const char *is_code_since_ampere(bool &yes) {
    cudaFuncAttributes attributes;
    const auto kernel = with_tile(0, HalfKernels::D64(),
                                  [](auto tile) { return HalfKernels::kernel<__nv_bfloat16, decltype(tile), Band>(); });
    const char *error = why_not(cudaFuncGetAttributes(&attributes, kernel));
    if (!error) yes = attributes.ptxVersion >= 80;
    return error;
}

}  // namespace portable
}  // namespace minimal_attn
