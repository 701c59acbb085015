// common.cuh: what the kernels of the portable backend share.
//
//     O = softmax(softmax_scale * Q K^T + mask) V, a tile of Br queries x Bc keys at a time
//
// FlashAttention-2 (Dao 2023) changes Algorithm 1 (flash.cu computes it as printed) in three ways:
//
//     the loops are swapped       The loop over tiles of queries is the grid: one block for each (batch b, query head h,
//                                 tile of queries i). A block walks the tiles of keys j. Blocks are independent.
//     Oi, li, mi in registers     They stay there while j advances. Algorithm 1 reads and writes them in HBM for each
//                                 (i, j); here O, l and m are written once.
//     O is divided once           Oi is divided by li after the last tile, not after each one.
//
// The steps of all kernels. Numbers are Algorithm 1's:
//
//     8.         Qi from HBM to shared memory; Oi = 0, li = 0, mi = -inf
//     5.         for each tile of keys j that some query of the tile sees
//     6.             Kj and Vj from HBM to shared memory
//     9.             Sij = softmax_scale * Qi Kj^T, and -inf where the mask hides a key
//     10. - 11.      mi = max(mi, rowmax(Sij)), Pij = exp(Sij - mi), alpha = exp(old mi - mi),
//                    li = alpha * li + rowsum(Pij)
//     12.            Oi = diag(alpha) Oi + Pij Vj
//     12. - 13.  O = Oi / li, l and m to HBM; an earlier state joins here, as if it were one more tile
//
// Every warp has the same role: it loads a part of each tile and computes some rows of Sij and Oi.
//
// The barriers of float32.cu and tf32.cu. The other kernels have tables of their own:
//
//     barrier                         | arrives and waits     | then
//     wait_for_tiles, before step 9   | the block             | Kj (and the first time Qi) has arrived; all warps have
//                                     |                       | read Vj-1, so Vj may overwrite it
//     wait_for_tiles, after step 9    | the block             | Vj has arrived; all warps have read Kj, so Kj+1 may
//                                     |                       | overwrite it
//     __syncwarp (float32.cu)         | one warp              | a row of Pij in shared memory is written by some
//                                     |                       | lanes, and read by other lanes of the same warp
//
// Vj arrives while Sij is computed, and Kj+1 arrives while Pij and Oi are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <climits>
#include <type_traits>

#include "device.h"
#include "flash.h"
#include "portable/portable.h"
#include "ranges.h"
#include "scores.h"
#include "sequences.h"

namespace minimal_attn {
namespace {

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void convert(float x, float &y) { y = x; }
__device__ void convert(float x, __half &y) { y = __float2half(x); }
__device__ void convert(float x, __nv_bfloat16 &y) { y = __float2bfloat16(x); }

// Whether T is a half type that the tensor cores of this GPU multiply. All GPUs have one list of instantiations: where
// tensor cores multiply T, float32.cu's kernel has no code for it; elsewhere half.cu's kernel has none.
template <class T>
__device__ constexpr bool on_tensor_cores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return std::is_same_v<T, __half>;
#else
    return !std::is_same_v<T, float>;
#endif
}

// A file's Kernels lists its tiles for d and d_v up to 64, 128, 256 and 512 (D64, D128, D256, D512). For launch_kernel
// it has kernel<T, Tile, Mask>().
template <class Kernels, class Use>
constexpr auto with_tiles_for(int d, const Use &use) {
    if (d <= 64) return use(typename Kernels::D64());
    if (d <= 128) return use(typename Kernels::D128());
    if (d <= 256) return use(typename Kernels::D256());
    return use(typename Kernels::D512());
}

// Whether a plan may choose the tile here. On Hopper: the first, or for few queries the last (plan_tile).
template <class Kernels, class Tile>
constexpr bool is_needed() {
    return !kOnHopperAlone || with_tiles_for<Kernels>(Tile::D, [](auto tiles) {
        static_assert(!is_first<Tile>(decltype(tiles)()) || Tile::NeededBytes <= 227 << 10);
        return is_first<Tile>(tiles) || (Kernels::LastForFewQueries && is_last<Tile>(tiles));
    });
}

__device__ float exp_fast(float x) { return exp2_fast(x * kLog2e); }

// ------------------------------------------------------------------------------ a block and its tiles

// What one block computes: queries i0 <= i < i0 + rows of head h in batch b.
// Mask is Band (flash.h), Ranges or General (ranges.h).
template <class T, class Mask = Band>
struct Block {
    int64_t b, h;
    int i0, rows;            // rows = Br, or fewer in the last tile
    Mask mask;               // which keys each query sees
    Keys seen, seen_by_all;  // keys that some query of the tile sees; those that all of them see
    const T *Q, *K, *V;
};

// The mask type of kernels whose blocks compute tiles of sequences.h. It is a type of its own, since a branch made the
// kernels for a band 5 % slower (half types, d 128, H200).
struct SequenceBand : Band {};

// `band`: the block's own, if Mask is SequenceBand. Others are their batch's.
template <class T, class Mask = Band, class... Own>
__device__ Block<T, Mask> block_at(const Attention &a, int64_t b, int64_t h, int i0, int rows, const Own &...band) {
    Block<T, Mask> block;
    block.b = b, block.h = h, block.i0 = i0, block.rows = rows;
    if constexpr (std::is_same_v<Mask, SequenceBand>)
        block.mask = {band...};
    else
        block.mask = mask_of<Mask>(a, block.b);
    block.seen = keys_of_any(block.mask, block.i0, block.i0 + block.rows);
    block.seen_by_all = keys_of_all(block.mask, block.i0, block.i0 + block.rows);
    const int64_t h_kv = block.h / (a.Hq / a.Hkv);
    block.Q = (const T *)a.q + block.b * a.q_stride.batch + block.h * a.q_stride.head + block.i0 * a.q_stride.row;
    block.K = (const T *)a.k + block.b * a.k_stride.batch + h_kv * a.k_stride.head;
    block.V = (const T *)a.v + block.b * a.v_stride.batch + h_kv * a.v_stride.head;
    return block;
}

template <class T, class Mask>
__device__ Block<T, Mask> block_of(const Attention &a, int64_t index, int Br) {
    if constexpr (std::is_same_v<Mask, SequenceBand>) {  // all heads of a tile of queries, then the next tile
        const int64_t n = index / a.Hq;
        const bool exists = n < a.sequences.counts->tiles;
        const Sequence tile = exists ? a.sequences.tiles[n] : Sequence{};
        const int rows = tile.queries.end - tile.queries.begin;
        return block_at<T, Mask>(a, 0, index % a.Hq, tile.queries.begin, rows, band_of(a, tile));
    } else {
        const int Tr = (a.Nq + Br - 1) / Br;
        const int64_t head = index / Tr;
        // The last queries start first: if causal, they see the most keys.
        const int i0 = (Tr - 1 - (int)(index % Tr)) * Br;
        return block_at<T, Mask>(a, head / a.Hq, head % a.Hq, i0, min(Br, a.Nq - i0));
    }
}

// Where the queries end that a block may store. Those of other masks end with all.
template <class T, class Mask>
__device__ int end_of_queries(const Attention &a, const Block<T, Mask> &block) {
    return std::is_same_v<Mask, SequenceBand> ? block.i0 + block.rows : a.Nq;
}

// The threads that compute a block: all threads of the grid's block. In hopper/float32/fallback.h it is 128 of them.
struct WholeBlock {
    __device__ unsigned index() const { return threadIdx.x; }
    __device__ unsigned block() const { return blockIdx.x; }
    __device__ void sync() const { __syncthreads(); }
};

// Loads a tile of Rows x D into shared memory, with zeros where row >= rows or x >= d. Rows of Vj past seqlens_k must
// be zeros, since Pij = 0 times NaN is NaN. If aligned, copies are asynchronous (from sm_80 on), 16 bytes each. Else
// AtOnce numbers of a thread are under way together.
template <int Rows, int D, int Stride, int Threads, int AtOnce, class T, class S>
__device__ void load_tile(S *tile, const T *source, int64_t stride, int rows, int d, bool aligned,
                          int thread = threadIdx.x) {
    if constexpr (sizeof(T) == sizeof(S)) {
        constexpr int Chunk = 16 / sizeof(T);
        if (aligned) {
#pragma unroll 4
            for (int chunk = thread; chunk < Rows * (D / Chunk); chunk += Threads) {
                const int row = chunk / (D / Chunk), x = chunk % (D / Chunk) * Chunk;
                const bool exists = row < rows && x < d;
                __pipeline_memcpy_async(&tile[row * Stride + x], exists ? &source[row * stride + x] : source, 16,
                                        exists ? 0 : 16);
            }
            return;
        }
    }
#pragma unroll AtOnce
    for (int element = thread; element < Rows * D; element += Threads) {
        const int row = element / D, x = element % D;
        float value = row < rows && x < d ? to_float(source[row * stride + x]) : 0.f;
        convert(value, tile[row * Stride + x]);
    }
}

// Waits until every load that any of the threads has issued is in shared memory. It is also a barrier.
template <class Threads = WholeBlock>
__device__ void wait_for_tiles(const Threads &threads = Threads()) {
    __pipeline_commit();
    __pipeline_wait_prior(0);
    threads.sync();
}

// ------------------------------------------------------------------------------ rows

// 11. mi becomes m_new; returns alpha. While a row has seen only scores of -inf, m_safe = 0 is subtracted instead of
// mi, so that its exponentials are 0 and not NaN.
__device__ float update_row_max(float &mi, float m_new, float &m_safe) {
    m_safe = m_new == -INFINITY ? 0.f : m_new;
    const float alpha = exp_fast(mi - m_safe);
    mi = m_new;
    return alpha;
}

// Whether row i sees a key. li: of all keys.
template <class Mask, bool is_general = kIsGeneral<Mask>>
__device__ bool sees_key(const Attention &a, const Mask &mask, int i, float li) {
    const bool sees = !empty(keys_of_row(mask, i));
    return is_general ? sees_by_terms(a, sees, li) : sees;
}

// How row i ends: the sums of this call, joined with the earlier state if there is one.
template <class T, class Mask, bool is_general = kIsGeneral<Mask>>
__device__ RowEnd end_row(const Attention &a, const Block<T, Mask> &block, int i, float li, float mi) {
    const int64_t at = (block.b * a.Hq + block.h) * a.Nq + i;
    return end_of_row(sees_key<Mask, is_general>(a, block.mask, i, li), li, mi, a.l_in ? a.l_in[at] : 0.f,
                      a.m_in ? a.m_in[at] : -INFINITY);
}

// Stores Count numbers, rounded to T. If aligned, as vectors of up to 16 bytes; else the first `count`, one by one.
template <int Count, class T>
__device__ void store(T *at, const float *x, bool aligned = true, int count = Count) {
    constexpr int Align = Count * sizeof(T) < 16 ? Count * sizeof(T) : 16;
    struct alignas(Align) Vector {
        T x[Count];
    } vector;
#pragma unroll
    for (int c = 0; c < Count; ++c) convert(x[c], vector.x[c]);
    if (aligned) {
        *(Vector *)at = vector;
    } else {
#pragma unroll
        for (int c = 0; c < Count; ++c)
            if (c < count) at[c] = vector.x[c];
    }
}

// 12. - 13. O = Oi / li of row i, columns x to x + Count - 1, to HBM
template <int Count, class T, class Mask>
__device__ void store_o(const Attention &a, const Block<T, Mask> &block, int i, int x, const RowEnd &end,
                        const float *Oi, bool aligned) {
    if (x >= a.d_v) return;
    const int count = min(Count, a.d_v - x);
    float o[Count];
#pragma unroll
    for (int c = 0; c < Count; ++c) o[c] = end.reads_Oi ? end.weight_Oi * Oi[c] : 0.f;
    if (a.o_in && end.reads_o_in) {
        const float *o_in =
            a.o_in + block.b * a.o_in_stride.batch + block.h * a.o_in_stride.head + i * a.o_in_stride.row;
        for (int c = 0; c < count; ++c) o[c] += end.weight_o_in * o_in[x + c];
    }
    const int64_t at = block.b * a.o_stride.batch + block.h * a.o_stride.head + i * a.o_stride.row + x;
    if (a.o_dtype == Dtype::float32)
        store<Count>((float *)a.o + at, o, aligned, count);
    else
        store<Count>((T *)a.o + at, o, aligned, count);
}

// ------------------------------------------------------------------------------ step 1, plan and launch, on the host

// The most floats of partial sums in the workspace: 512 MB, enough for the thousands of blocks that keep a GPU busy. A
// call with more blocks takes several launches. Blocks keep such sums (flush_sums) if a call has
// more than 2 TilesOfSum tiles of keys.
constexpr int64_t kMostSums = 1 << 27;

// Takes the first tile of the list that fits the shared memory of a block, unless half of its rows or more would be
// empty. A block has 64 KB on a T4, 99 on sm_86, sm_89 and sm_120, 163 on an A100, 227 on Hopper. The last tile, of at
// most 64 KB, always fits.
template <class Kernels, class Tile, class... Smaller>
Plan plan_tile(const Attention &a, const Device &device, const char *name, TileList<Tile, Smaller...>, int index = 0) {
    if constexpr (sizeof...(Smaller) > 0)
        if (Tile::NeededBytes > device.shared_memory || a.Nq <= Tile::Br / 2)
            return plan_tile<Kernels>(a, device, name, TileList<Smaller...>(), index + 1);
    const int64_t Tr = a.by_sequence ? most_sequence_tiles(a, Tile::Br) : (a.Nq + Tile::Br - 1) / Tile::Br;
    const int64_t blocks = a.B * a.Hq * Tr;
    const bool is_long = a.Nk > 2 * Kernels::TilesOfSum * Tile::Bc;
    const int64_t workspace = is_long ? std::min(blocks * Tile::SumFloats, kMostSums) * sizeof(float) : 0;
    return {name, index, Tile::Br, Tile::Bc, Tile::D, blocks, Tile::Threads, Tile::SharedBytes, workspace};
}

template <class Kernels>
Plan plan_kernel(const Attention &a, const Device &device, const char *name) {
    return with_tiles_for<Kernels>(most_columns(a),
                                   [&](auto tiles) { return plan_tile<Kernels>(a, device, name, tiles); });
}

// Several launches take more blocks than a grid can have or the workspace has sums for. `overlaps`: a kernel may begin
// while that before it, of the same call, ends.
template <class Kernels, class T, class Tile, class Mask>
cudaError_t launch_tile(const Attention &a, const Plan &plan, bool aligned, float *sums, bool overlaps,
                        CUstream_st *stream) {
    const auto kernel = Kernels::template kernel<T, Tile, Mask>();
    const cudaError_t error = allow_shared_memory(kernel);
    if (error != cudaSuccess) return error;
    const int64_t most = sums ? kMostSums / std::max(Tile::SumFloats, 1) : kMostBlocks;
    return launch_all(plan.grid, most, [&](int64_t first, int grid) {
        if (overlaps)
            return launch_overlapping(kernel, grid, Tile::Threads, Tile::SharedBytes, stream, a, first, aligned, sums);
        kernel<<<grid, Tile::Threads, Tile::SharedBytes, stream>>>(a, first, aligned, sums);
        return cudaGetLastError();
    });
}

// use(a Mask) for one of four kernels.
template <class Use>
auto with_mask_of(const Attention &a, const Use &use) {
    return a.by_sequence ? use(SequenceBand()) : with_mask_and_scores(a, use);
}

template <class Kernels, class T>
const char *launch_kernel(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream,
                          bool overlaps = false) {
    const bool aligned = has_aligned_inputs(a) && is_aligned(a.o, a.o_stride, element_size(a.o_dtype), a.d_v);
    return why_not(with_tiles_for<Kernels>(plan.D, [&](auto tiles) {
        return with_tile(plan.tile, tiles, [&](auto tile) {
            return with_mask_of(a, [&](auto mask) {
                using Tile = decltype(tile);
                return launch_tile<Kernels, T, Tile, decltype(mask)>(a, plan, aligned, (float *)workspace, overlaps,
                                                                     stream);
            });
        });
    }));
}

}  // namespace
}  // namespace minimal_attn
