// flash.cu: Algorithm 1 (Dao et al. 2022, FlashAttention) on any NVIDIA GPU since Turing. Read this file
// first.
//
//     O = softmax(softmax_scale * Q K^T + mask) V, a tile of Br queries x Bc keys at a time
//
// Who runs it. Grid: one block for each (batch b, query head h, tile of queries i). The block walks the tiles
// of keys j. Algorithm 1 has the loop over j outside and writes O, l and m to HBM after every tile; here, as
// in FlashAttention-2, the loops are swapped: the blocks are then independent and fill the GPU, Oi, li and mi
// stay in registers while j advances, and (O, l, m) go to HBM once, at the end.
//
// Two kernels, the same steps. float_kernel multiplies on the FMA units, in float32 (bfloat16 too, on Turing);
// half_kernel on the tensor cores, through WMMA. In shared memory are the tiles Qi (Br x d), Kj and Vj (Bc x d) and
// Pij (Br x Bc). float_kernel computes Sij in registers and stores only Pij; half_kernel stores Sij there and
// overwrites it by Pij. Rows are padded where the threads of a warp would else hit the same banks. In registers are a
// thread's part of Oi, and li and mi of its rows. The table of tiles, at the end of this file, has the bytes.
//
// Which barrier orders what, in both, for each j:
//     wait, __syncthreads   Kj has arrived (and, the first time, Qi); nobody reads Vj-1 any more -> load Vj
//     9.                    Sij = Qi Kj^T, while Vj arrives
//     wait, __syncthreads   Vj has arrived; nobody reads Kj any more -> load Kj+1
//     10. - 12.             while Kj+1 arrives; a row of Sij and Pij belongs to one warp, so __syncwarp is enough
//
// Where this differs from the paper's steps, here and on the CPU:
//     1. - 4.    Tr = ceil(Nq / Br), Tc = ceil(keys / Bc); li, mi, Oi begin as 0, -inf, 0
//     7.         the loop over i is the grid
//     10. - 11.  first mi = max(mi, rowmax(Sij)), then Pij = exp(Sij - mi): the paper's factor exp(mij - mi) is 1, and
//                what remains is alpha = exp(old mi - mi), for li and Oi
//     12.        Oi is divided by li once, after the last tile
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

#include <algorithm>
#include <type_traits>

#include "device.h"
#include "flash.h"

namespace minimal_attn {
namespace {

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void convert(float x, float &y) { y = x; }
__device__ void convert(float x, __half &y) { y = __float2half(x); }
__device__ void convert(float x, __nv_bfloat16 &y) { y = __float2bfloat16(x); }

// Which kernel computes T: bfloat16 has tensor cores from sm_80 on, before that the FMA units do it. For each T and
// target the other kernel is empty, so that one list of instantiations does for all targets.
template <class T>
__device__ constexpr bool on_tensor_cores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return std::is_same_v<T, __half>;
#else
    return !std::is_same_v<T, float>;
#endif
}

__device__ float exp_fast(float x) { return exp2_fast(x * kLog2e); }

// ------------------------------------------------------------------------------ shared by both kernels

// The work of one block: queries i0 <= i < i0 + Br of head h in batch b.
template <class T>
struct Block {
    int64_t b, h;
    int i0, rows;       // the last tile has fewer rows than Br
    Band band;          // see flash.h
    Keys seen, by_all;  // keys that some row sees, and that every row sees
    const T *Q, *K, *V;
};

template <class T>
__device__ Block<T> block_of(const Attention &a, int64_t index, int Br) {
    const int Tr = (a.Nq + Br - 1) / Br;
    const int64_t head = index / Tr;
    Block<T> block;
    block.b = head / a.Hq, block.h = head % a.Hq;
    block.i0 = (Tr - 1 - (int)(index % Tr)) * Br;  // under a causal mask the last rows have most to do: start there
    block.rows = min(Br, a.Nq - block.i0);
    block.band = band_of(a, block.b);
    block.seen = keys_of_any(block.band, block.i0, block.i0 + block.rows);
    block.by_all = keys_of_all(block.band, block.i0, block.i0 + block.rows);
    const int64_t h_kv = block.h / (a.Hq / a.Hkv);
    block.Q = (const T *)a.q + block.b * a.q_stride.batch + block.h * a.q_stride.head + block.i0 * a.q_stride.row;
    block.K = (const T *)a.k + block.b * a.k_stride.batch + h_kv * a.k_stride.head;
    block.V = (const T *)a.v + block.b * a.v_stride.batch + h_kv * a.v_stride.head;
    return block;
}

// Loads a tile of Rows x D into shared memory, zeros where row >= rows or x >= d: past the last key of seqlens_k rows
// of Vj must be 0, since Pij = 0 times NaN is NaN. Asynchronous (from sm_80) where 16 bytes at a time can be copied as
// they are, which takes Q, K, V and O all aligned.
template <int Rows, int D, int Stride, int Threads, class T, class S>
__device__ void load_tile(S *tile, const T *source, int64_t stride, int rows, int d, bool aligned) {
    if constexpr (sizeof(T) == sizeof(S)) {
        constexpr int Chunk = 16 / sizeof(T);
        if (aligned) {
#pragma unroll 4
            for (int chunk = threadIdx.x; chunk < Rows * (D / Chunk); chunk += Threads) {
                const int row = chunk / (D / Chunk), x = chunk % (D / Chunk) * Chunk;
                const bool is_there = row < rows && x < d;
                __pipeline_memcpy_async(&tile[row * Stride + x], is_there ? &source[row * stride + x] : source, 16,
                                        is_there ? 0 : 16);
            }
            return;
        }
    }
#pragma unroll 4
    for (int element = threadIdx.x; element < Rows * D; element += Threads) {
        const int row = element / D, x = element % D;
        float value = row < rows && x < d ? to_float(source[row * stride + x]) : 0.f;
        convert(value, tile[row * Stride + x]);
    }
}

// Waits for all loads issued so far, of every thread; also the barrier after which tiles may be overwritten.
__device__ void wait_for_tiles() {
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
}

// Count numbers to shared memory or HBM, rounded to T: as vectors of up to 16 bytes if aligned, else one by one.
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

// Step 12 for the columns x, .., x + Count - 1 of row i, and O to HBM.
template <int Count, class T>
__device__ void store_o(const Attention &a, const Block<T> &block, int i, int x, const RowEnd &end, const float *Oi,
                        bool aligned) {
    if (x >= a.d) return;
    const int count = min(Count, a.d - x);
    float o[Count];
#pragma unroll
    for (int c = 0; c < Count; ++c) o[c] = end.reads_Oi ? end.weight_Oi * Oi[c] : 0.f;
    if (a.o_in && end.reads_o_in) {
        const float *o_in =
            a.o_in + block.b * a.o_in_stride.batch + block.h * a.o_in_stride.head + i * a.o_in_stride.row;
        for (int c = 0; c < count; ++c) o[c] += end.weight_o_in * o_in[x + c];
    }
    const int64_t at = block.b * a.o_stride.batch + block.h * a.o_stride.head + i * a.o_stride.row + x;
    if (a.l)
        store<Count>((float *)a.o + at, o, aligned, count);
    else
        store<Count>((T *)a.o + at, o, aligned, count);
}

// 11. mi becomes m_new; returns alpha. As long as a row has seen nothing but -inf, exponentials are taken relative to
// m_safe = 0, and so are 0.
__device__ float move_max(float &mi, float m_new, float &m_safe) {
    m_safe = m_new == -INFINITY ? 0.f : m_new;
    const float alpha = exp_fast(mi - m_safe);
    mi = m_new;
    return alpha;
}

// The row's sums of this call -> how it ends, with the earlier state if there is one.
template <class T>
__device__ RowEnd end_row(const Attention &a, const Block<T> &block, int i, float li, float mi) {
    const int64_t at = (block.b * a.Hq + block.h) * a.Nq + i;
    const bool sees_key = !empty(keys_of_row(block.band, i));
    return end_of_row(sees_key, li, mi, a.l_in ? a.l_in[at] : 0.f, a.m_in ? a.m_in[at] : -INFINITY);
}

__device__ RowEnd shuffle(const RowEnd &end, int lane) {
    return {0.f,
            0.f,
            __shfl_sync(~0u, end.weight_Oi, lane),
            __shfl_sync(~0u, end.weight_o_in, lane),
            (bool)__shfl_sync(~0u, end.reads_Oi, lane),
            (bool)__shfl_sync(~0u, end.reads_o_in, lane)};
}

template <class T>
__device__ void store_state(const Attention &a, const Block<T> &block, int i, const RowEnd &end) {
    if (!a.l) return;
    const int64_t at = (block.b * a.Hq + block.h) * a.Nq + i;
    a.l[at] = end.l;
    a.m[at] = end.m;
}

// ------------------------------------------------------------------------------ float32, on the FMA units

__device__ void load4(float (&x)[4], const float *from) {
    const float4 four = *(const float4 *)from;
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

// TX x TY threads. Thread (tx, ty) has rows i = ty + TY r of the tile; of Sij the keys j = tx + TX c, of Oi
// the columns x = 4 (tx + TX c) + 0..3: 8 x 8 numbers of each where registers allow, since every number read
// from shared memory is then used 8 times. The TX threads that share a row are neighbours in one warp.
template <int D_, int Br_, int Bc_, int TX_, int TY_, int BlocksPerSM_>
struct FloatTile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, TX = TX_, TY = TY_;
    static constexpr int Threads = TX * TY, BlocksPerSM = BlocksPerSM_;
    // Of a thread: rows, keys of Sij, groups of 4 columns of Oi
    static constexpr int R = Br / TY, CS = Bc / TX, CO = D / (4 * TX);
    // Padded so that the rows that a warp reads or writes at once lie in different banks; of Vj it reads one row
    static constexpr int QStride = D + 4, KStride = D + 4, VStride = D, PStride = Bc + TX;
    static constexpr int Floats = Br * QStride + Bc * KStride + Bc * VStride + Br * PStride;
    static constexpr int SharedBytes = Floats * 4;
    static_assert(32 % TX == 0, "a row of threads must not leave its warp");
};

template <class T, class Tile>
__device__ void float_block(const Attention &a, int64_t index, bool aligned) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc, TX = Tile::TX, TY = Tile::TY, Threads = Tile::Threads;
    constexpr int QStride = Tile::QStride, KStride = Tile::KStride, VStride = Tile::VStride, PStride = Tile::PStride;
    constexpr int R = Tile::R, CS = Tile::CS, CO = Tile::CO;
    extern __shared__ __align__(16) float shared[];
    float *Qi = shared, *Kj = Qi + Br * QStride, *Vj = Kj + Bc * KStride, *Pij = Vj + Bc * VStride;

    const Block<T> block = block_of<T>(a, index, Br);
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const auto load_K = [&](int j0) {
        load_tile<Bc, D, KStride, Threads>(Kj, block.K + j0 * a.k_stride.row, a.k_stride.row, block.band.keys.end - j0,
                                           a.d, aligned);
    };

    // 8. Qi from HBM; Oi, li, mi begin empty (an earlier state joins at the end, by step 12)
    load_tile<Br, D, QStride, Threads>(Qi, block.Q, a.q_stride.row, block.rows, a.d, aligned);
    float Oi[R][CO][4] = {}, li[R] = {}, mi[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mi[r] = -INFINITY;

    // 5. for j: the tiles of keys that some query of this tile sees, counted from the first such key. No tile holds a
    // key before leftpad_k; keys past the last one seen are loaded, too, and masked.
    if (!empty(block.seen)) load_K(block.seen.begin);
    for (int j0 = block.seen.begin; j0 < block.seen.end; j0 += Bc) {
        // 6. Kj, Vj from HBM
        wait_for_tiles();
        load_tile<Bc, D, VStride, Threads>(Vj, block.V + j0 * a.v_stride.row, a.v_stride.row, block.band.keys.end - j0,
                                           a.d, aligned);

        // 9. Sij = Qi Kj^T. Here and in step 12 the next numbers are read while these are multiplied; else the FMA
        // units wait for shared memory (on an H200, d 64: 36 TFLOP/s instead of 38).
        float Sij[R][CS] = {}, q[2][R][4], k[2][CS][4];
        const auto load_qk = [&](int buffer, int x) {
#pragma unroll
            for (int r = 0; r < R; ++r) load4(q[buffer][r], &Qi[(ty + TY * r) * QStride + x]);
#pragma unroll
            for (int c = 0; c < CS; ++c) load4(k[buffer][c], &Kj[(tx + TX * c) * KStride + x]);
        };
        load_qk(0, 0);
#pragma unroll 1
        for (int x0 = 0; x0 < a.d; x0 += 8) {
#pragma unroll
            for (int now = 0; now < 2; ++now) {
                load_qk(1 - now, x0 + 4 * now + 4);  // the last one reads the padding, for nothing
#pragma unroll
                for (int c = 0; c < CS; ++c)
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) Sij[r][c] = fmaf(q[now][r][x], k[now][c][x], Sij[r][c]);
            }
        }
        wait_for_tiles();
        if (j0 + Bc < block.seen.end) load_K(j0 + Bc);

        const bool masked = j0 < block.by_all.begin || j0 + Bc > block.by_all.end;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const int i = block.i0 + ty + TY * r;
            const Keys keys = masked ? keys_of_row(block.band, i) : Keys{};
            // 9. softmax_scale, and -inf where hidden; 10. - 11. mi, and what its move is for li and Oi
            float m_new = mi[r];
#pragma unroll
            for (int c = 0; c < CS; ++c) {
                const int j = j0 + tx + TX * c;
                Sij[r][c] *= a.softmax_scale;
                if (masked && (j < keys.begin || j >= keys.end)) Sij[r][c] = -INFINITY;
                m_new = fmaxf(m_new, Sij[r][c]);
            }
            float m_safe;
            const float alpha = move_max(mi[r], row_max<TX>(m_new), m_safe);
#pragma unroll
            for (int c = 0; c < CO; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) Oi[r][c][x] *= alpha;
            // 10. - 11. Pij = exp(Sij - mi), li += rowsum(Pij), of this thread's keys; the others join at the end
            float l = 0.f;
#pragma unroll
            for (int c = 0; c < CS; ++c) {
                const float p = exp_fast(Sij[r][c] - m_safe);
                l += p;
                Pij[(ty + TY * r) * PStride + tx + TX * c] = p;
            }
            li[r] = alpha * li[r] + l;
        }
        __syncwarp();

        // 12. Oi = diag(alpha) Oi + Pij Vj, where Pij Vj is summed on its own first: over thousands of keys one
        // running sum would lose several times as much to rounding (8192 keys: 1.6e-6 instead of 4e-7).
        float PV[R][CO][4] = {}, p[2][R][4], v[2][CO][4];
        const auto load_p = [&](int buffer, int j) {
#pragma unroll
            for (int r = 0; r < R; ++r) load4(p[buffer][r], &Pij[(ty + TY * r) * PStride + j]);
        };
        const auto load_v = [&](int buffer, int j) {
#pragma unroll
            for (int c = 0; c < CO; ++c) load4(v[buffer][c], &Vj[j * VStride + 4 * (tx + TX * c)]);
        };
        load_p(0, 0);
        load_v(0, 0);
#pragma unroll 1
        for (int j = 0; j < Bc; j += 8) {
#pragma unroll
            for (int y = 0; y < 8; ++y) {
                const int now = y / 4;
                if (y % 4 == 0) load_p(1 - now, j + y + 4);  // the last one reads the padding, too
                load_v((y + 1) % 2, min(j + y + 1, Bc - 1));
#pragma unroll
                for (int c = 0; c < CO; ++c)
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) PV[r][c][x] = fmaf(p[now][r][y % 4], v[y % 2][c][x], PV[r][c][x]);
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < CO; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) Oi[r][c][x] += PV[r][c][x];
    }

    // 12. - 13. O = Oi / li, l and m to HBM
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const float l = row_sum<TX>(li[r]);
        const int row = ty + TY * r, i = block.i0 + row;
        if (row >= block.rows) continue;
        const RowEnd end = end_row(a, block, i, l, mi[r]);
        if (tx == 0) store_state(a, block, i, end);
#pragma unroll
        for (int c = 0; c < CO; ++c) store_o<4>(a, block, i, 4 * (tx + TX * c), end, Oi[r][c], aligned);
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    float_kernel(const __grid_constant__ Attention a, int64_t first_block, bool aligned) {
    if constexpr (!on_tensor_cores<T>()) float_block<T, Tile>(a, first_block + blockIdx.x, aligned);
}

// ------------------------------------------------------------------------------ half types, on the tensor cores

// Each warp has WarpRows queries of the tile. WMMA doesn't say which element of a fragment a thread holds, so
// what goes by rows goes through Sij in shared memory, where 32 / WarpRows neighbouring lanes share a row.
template <int D_, int Br_, int Bc_, int WarpRows_, int BlocksPerSM_>
struct HalfTile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, WarpRows = WarpRows_;
    static constexpr int Threads = Br / WarpRows * 32, BlocksPerSM = BlocksPerSM_;
    static constexpr int Stride = D + 8, SStride = Bc + 4;
    static constexpr int PStride = 2 * SStride;  // Pij, in T, begins where the row of Sij, in float32, began
    static constexpr int SharedBytes = (Br + 2 * Bc) * Stride * 2 + Br * (SStride + 1) * 4;
    static_assert(Bc == 32 || Bc == 64, "D is a multiple of Bc, and Bc / 8 lanes store a row");
};

// A fragment of T from shared memory. nvcc compiles load_matrix_sync of bfloat16 to 4-byte loads, a fifth
// slower for the whole kernel; the same PTX instruction told that the address is in shared memory becomes
// ldmatrix, as with half.
template <class Fragment, class T>
__device__ void load_fragment(Fragment &fragment, const T *tile, int stride) {
    namespace wmma = nvcuda::wmma;
    if constexpr (std::is_same_v<T, __half>) {
        wmma::load_matrix_sync(fragment, tile, stride);
    } else {
        using RowMajorA = wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major>;
        using RowMajorB = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major>;
        unsigned *const x = (unsigned *)fragment.x, shared = (unsigned)__cvta_generic_to_shared(tile);
        if constexpr (std::is_same_v<Fragment, RowMajorA>)
            asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(shared), "r"(stride)
                         : "memory");
        else if constexpr (std::is_same_v<Fragment, RowMajorB>)
            asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(shared), "r"(stride)
                         : "memory");
        else
            asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(shared), "r"(stride)
                         : "memory");
    }
}

template <class T, class Tile>
__device__ void half_block(const Attention &a, int64_t index, bool aligned) {
    namespace wmma = nvcuda::wmma;
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc, Threads = Tile::Threads, WarpRows = Tile::WarpRows;
    constexpr int Stride = Tile::Stride, SStride = Tile::SStride, PStride = Tile::PStride;
    constexpr int M = WarpRows / 16, N = Bc / 16, X = D / 16;          // fragments of 16 x 16
    constexpr int RowLanes = 32 / WarpRows, LaneKeys = Bc / RowLanes;  // a lane's share of a row of Sij
    using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
    using RowMajorA = wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major>;
    using RowMajorB = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major>;
    using TransposedB = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major>;

    extern __shared__ __align__(16) float shared[];
    const int warp_row = threadIdx.x / 32 * WarpRows, lane = threadIdx.x % 32;
    T *const Q_tile = (T *)shared, *const Kj = Q_tile + Br * Stride, *const Vj = Kj + Bc * Stride;
    float *const S_tile = (float *)(Vj + Bc * Stride);
    // This warp's rows, and this lane's row and part of it.
    const T *const Qi = Q_tile + warp_row * Stride;
    float *const Sij = S_tile + warp_row * SStride, *const alphas = S_tile + Br * SStride + warp_row;
    const T *const Pij = (const T *)Sij;
    const int row = lane / RowLanes, j_lane = lane % RowLanes * LaneKeys;

    const Block<T> block = block_of<T>(a, index, Br);
    const int i = block.i0 + warp_row + row;
    const auto load_K = [&](int j0) {
        load_tile<Bc, D, Stride, Threads>(Kj, block.K + j0 * a.k_stride.row, a.k_stride.row, block.band.keys.end - j0,
                                          a.d, aligned);
    };

    // 8. Qi from HBM; Oi, li, mi begin empty (an earlier state joins at the end, by step 12)
    load_tile<Br, D, Stride, Threads>(Q_tile, block.Q, a.q_stride.row, block.rows, a.d, aligned);
    Accumulator Oi[M][X];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int x = 0; x < X; ++x) wmma::fill_fragment(Oi[m][x], 0.f);
    float li = 0.f, mi = -INFINITY;

    // 5. for j: the tiles of keys that some query of this tile sees, counted from the first such key. No tile holds a
    // key before leftpad_k; keys past the last one seen are loaded, too, and masked.
    if (!empty(block.seen)) load_K(block.seen.begin);
    for (int j0 = block.seen.begin; j0 < block.seen.end; j0 += Bc) {
        // 6. Kj, Vj from HBM
        wait_for_tiles();
        load_tile<Bc, D, Stride, Threads>(Vj, block.V + j0 * a.v_stride.row, a.v_stride.row, block.band.keys.end - j0,
                                          a.d, aligned);

        // 9. Sij = Qi Kj^T
        // Two columns of fragments at a time: with all four, registers run out.
#pragma unroll
        for (int n0 = 0; n0 < N; n0 += 2) {
            Accumulator S[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n) wmma::fill_fragment(S[m][n], 0.f);
#pragma unroll 2
            for (int x = 0; x < a.d; x += 16) {
                RowMajorA q[M];
#pragma unroll
                for (int m = 0; m < M; ++m) load_fragment(q[m], Qi + 16 * m * Stride + x, Stride);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    TransposedB k;
                    load_fragment(k, Kj + 16 * (n0 + n) * Stride + x, Stride);
#pragma unroll
                    for (int m = 0; m < M; ++m) wmma::mma_sync(S[m][n], q[m], k, S[m][n]);
                }
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    wmma::store_matrix_sync(Sij + 16 * m * SStride + 16 * (n0 + n), S[m][n], SStride,
                                            wmma::mem_row_major);
        }
        wait_for_tiles();
        if (j0 + Bc < block.seen.end) load_K(j0 + Bc);

        // 9. softmax_scale, and -inf where hidden; 10. - 11. mi, and what its move is for li and Oi
        float s[LaneKeys];
#pragma unroll
        for (int c = 0; c < LaneKeys; c += 4) *(float4 *)&s[c] = *(const float4 *)&Sij[row * SStride + j_lane + c];
        const bool masked = j0 < block.by_all.begin || j0 + Bc > block.by_all.end;
        const Keys keys = masked ? keys_of_row(block.band, i) : Keys{};
        float m_new = mi;
#pragma unroll
        for (int c = 0; c < LaneKeys; ++c) {
            const int j = j0 + j_lane + c;
            s[c] *= a.softmax_scale;
            if (masked && (j < keys.begin || j >= keys.end)) s[c] = -INFINITY;
            m_new = fmaxf(m_new, s[c]);
        }
        float m_safe;
        const float alpha = move_max(mi, row_max<RowLanes>(m_new), m_safe);
        // 10. - 11. Pij = exp(Sij - mi), li += rowsum(Pij), of this lane's keys; the others join at the end
        float l = 0.f;
#pragma unroll
        for (int c = 0; c < LaneKeys; ++c) {
            s[c] = exp_fast(s[c] - m_safe);
            l += s[c];
        }
        li = alpha * li + l;
        __syncwarp();  // all lanes of a row have read their part of Sij: Pij may take its place
#pragma unroll
        for (int c = 0; c < LaneKeys; c += 8) store<8>((T *)Sij + row * PStride + j_lane + c, s + c);
        if (lane % RowLanes == 0) alphas[row] = alpha;
        __syncwarp();

        // 12. Oi = diag(alpha) Oi + Pij Vj. WMMA hides which row an element of Oi has; so alpha is loaded as a fragment
        // like it, whose columns are all the 16 alphas of these rows: a matrix by columns, with a stride of 0.
        if (__any_sync(~0u, alpha != 1.f)) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                Accumulator diag;
                wmma::load_matrix_sync(diag, alphas + 16 * m, 0, wmma::mem_col_major);
#pragma unroll
                for (int x = 0; x < X; ++x)
#pragma unroll
                    for (int e = 0; e < diag.num_elements; ++e) Oi[m][x].x[e] *= diag.x[e];
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            RowMajorA p[M];
#pragma unroll
            for (int m = 0; m < M; ++m) load_fragment(p[m], Pij + 16 * m * PStride + 16 * n, PStride);
#pragma unroll
            for (int x = 0; x < X; ++x) {
                RowMajorB v;
                load_fragment(v, Vj + 16 * n * Stride + 16 * x, Stride);
#pragma unroll
                for (int m = 0; m < M; ++m) wmma::mma_sync(Oi[m][x], p[m], v, Oi[m][x]);
            }
        }
        __syncwarp();  // Pij is read: the next Sij may take its place
    }

    // 12. - 13. O = Oi / li, l and m to HBM; Oi leaves through Sij, Bc columns at a time
    li = row_sum<RowLanes>(li);
    RowEnd end{};
    if (i < a.Nq) {
        end = end_row(a, block, i, li, mi);
        if (lane % RowLanes == 0) store_state(a, block, i, end);
    }
#pragma unroll
    for (int x0 = 0; x0 < D; x0 += Bc) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
                wmma::store_matrix_sync(Sij + 16 * m * SStride + 16 * n, Oi[m][x0 / 16 + n], SStride,
                                        wmma::mem_row_major);
        __syncwarp();
        // Now neighbouring lanes take neighbouring columns, 8 each, so that HBM gets whole rows.
        constexpr int LanesARow = Bc / 8, RowsAtOnce = 32 / LanesARow;
#pragma unroll
        for (int r = 0; r < WarpRows; r += RowsAtOnce) {
            const int row = r + lane / LanesARow, x = lane % LanesARow * 8;
            const RowEnd row_end = shuffle(end, row * RowLanes);
            if (warp_row + row < block.rows)
                store_o<8>(a, block, block.i0 + warp_row + row, x0 + x, row_end, Sij + row * SStride + x, aligned);
        }
        __syncwarp();
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    half_kernel(const __grid_constant__ Attention a, int64_t first_block, bool aligned) {
    if constexpr (on_tensor_cores<T>()) half_block<T, Tile>(a, first_block + blockIdx.x, aligned);
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

// Br x Bc are chosen by the plan: the first of a list that fits the shared memory a block may have (64 KB
// on a T4, 99 on sm_86, 89 and 120, 163 on an A100, 227 on Hopper) and of whose rows more than half are queries. The
// last is taken without asking: it needs at most 55 KB.
struct FloatKernels {
    template <class T, class Tile>
    static auto kernel() {
        return float_kernel<T, Tile>;
    }
    // D, Br, Bc, TX, TY, blocks on a multiprocessor; TFLOP/s on an H200 at 16k tokens, N 2048
    using D64 = TileList<FloatTile<64, 128, 64, 8, 16, 2>,     // 103 KB: 38
                     FloatTile<64, 64, 64, 8, 16, 3>,      // 68 KB: 36; N 64: 19 us instead of 25
                     FloatTile<64, 32, 64, 16, 8, 3>>;     // 52 KB, for a T4: 29
    using D128 = TileList<FloatTile<128, 128, 64, 16, 16, 1>,  // 171 KB: 37
                      FloatTile<128, 64, 48, 16, 8, 2>,    // 98 KB: 35
                      FloatTile<128, 32, 32, 16, 8, 2>>;   // 55 KB: 28
    using D256 = TileList<FloatTile<256, 64, 64, 16, 16, 1>,   // 214 KB: 34
                      FloatTile<256, 64, 32, 16, 16, 1>,   // 141 KB, for an A100: 26
                      FloatTile<256, 32, 16, 16, 8, 1>,    // 69 KB, for 99 KB
                      FloatTile<256, 16, 16, 16, 4, 1>>;   // 51 KB
};

struct HalfKernels {
    template <class T, class Tile>
    static auto kernel() {
        return half_kernel<T, Tile>;
    }
    // D, Br, Bc, rows a warp, blocks on a multiprocessor; TFLOP/s as above
    using D64 = TileList<HalfTile<64, 128, 64, 32, 3>,    // 71 KB: 165
                     HalfTile<64, 64, 64, 32, 4>>;    // 44 KB: 141
    using D128 = TileList<HalfTile<128, 128, 64, 32, 2>,  // 103 KB: 211
                      HalfTile<128, 64, 32, 32, 2>>;  // 43 KB: 152
    using D256 = TileList<HalfTile<256, 128, 64, 16, 1>,  // 167 KB: 181
                      HalfTile<256, 64, 32, 16, 2>,   // 75 KB: 173
                      HalfTile<256, 32, 32, 16, 2>>;  // 54 KB
};

template <class Kernels, class T, class Tile, class... Smaller>
Plan plan_tile(const Attention &a, const Device &device, const char *kernel, TileList<Tile, Smaller...>, int index = 0) {
    if constexpr (sizeof...(Smaller) > 0)
        if (Tile::SharedBytes > device.shared_memory || a.Nq <= Tile::Br / 2)
            return plan_tile<Kernels, T>(a, device, kernel, TileList<Smaller...>(), index + 1);
    const int64_t blocks = a.B * a.Hq * ((a.Nq + Tile::Br - 1) / Tile::Br);
    return {kernel, index, Tile::Br, Tile::Bc, Tile::D, blocks, Tile::Threads, Tile::SharedBytes, 0};
}

// use(the list of tiles for d)
template <class Kernels, class Use>
auto with_tiles_for(int d, const Use &use) {
    if (d <= 64) return use(typename Kernels::D64());
    if (d <= 128) return use(typename Kernels::D128());
    return use(typename Kernels::D256());
}

template <class Kernels, class T>
Plan plan_kernel(const Attention &a, const Device &device, const char *name) {
    return with_tiles_for<Kernels>(a.d, [&](auto tiles) { return plan_tile<Kernels, T>(a, device, name, tiles); });
}

template <class Kernels, class T, class Tile>
cudaError_t launch_tile(const Attention &a, const Plan &plan, bool aligned, CUstream_st *stream) {
    const auto kernel = Kernels::template kernel<T, Tile>();
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SharedBytes);
    const int64_t most = (int64_t(1) << 31) - 1;
    for (int64_t first = 0; first < plan.grid && error == cudaSuccess; first += most) {
        const int grid = (int)std::min(plan.grid - first, most);
        kernel<<<grid, Tile::Threads, Tile::SharedBytes, stream>>>(a, first, aligned);
        error = cudaGetLastError();
    }
    return error;
}

template <class Kernels, class T>
cudaError_t launch_kernel(const Attention &a, const Plan &plan, CUstream_st *stream) {
    const int64_t element = sizeof(T);
    const bool aligned = is_aligned(a.q, a.q_stride, element, a.d) && is_aligned(a.k, a.k_stride, element, a.d) &&
                         is_aligned(a.v, a.v_stride, element, a.d) &&
                         is_aligned(a.o, a.o_stride, a.l ? 4 : element, a.d);
    return with_tiles_for<Kernels>(a.d, [&](auto tiles) {
        return with_tile(plan.tile, tiles, [&](auto tile) {
            return launch_tile<Kernels, T, decltype(tile)>(a, plan, aligned, stream);
        });
    });
}

// bfloat16 by the code that this device really got: PTX for sm_75 may be what runs on a newer GPU.
const char *bfloat16_on_tensor_cores(bool &yes) {
    cudaFuncAttributes attributes;
    const auto kernel = with_tile(0, HalfKernels::D64(),
                                  [](auto tile) { return HalfKernels::kernel<__nv_bfloat16, decltype(tile)>(); });
    const char *error = why_not(cudaFuncGetAttributes(&attributes, kernel));
    if (!error) yes = attributes.ptxVersion >= 80;
    return error;
}

constexpr const char *kFloatKernel = "float32", *kHalfKernel = "half", *kBfloat16OnFmaUnits = "bfloat16 on FMA units";

}  // namespace

Plan plan_portable(const Attention &a, const Device &device) {
    if (a.dtype == Dtype::float32) return plan_kernel<FloatKernels, float>(a, device, kFloatKernel);
    if (a.dtype == Dtype::float16) return plan_kernel<HalfKernels, __half>(a, device, kHalfKernel);
    bool on_tensor_cores = true;
    const char *error = bfloat16_on_tensor_cores(on_tensor_cores);
    Plan plan = on_tensor_cores ? plan_kernel<HalfKernels, __nv_bfloat16>(a, device, kHalfKernel)
                                : plan_kernel<FloatKernels, __nv_bfloat16>(a, device, kBfloat16OnFmaUnits);
    plan.error = error;
    return plan;
}

const char *launch_portable(const Attention &a, const Plan &plan, void *, CUstream_st *stream) {
    if (a.dtype == Dtype::float32) return why_not(launch_kernel<FloatKernels, float>(a, plan, stream));
    if (a.dtype == Dtype::float16) return why_not(launch_kernel<HalfKernels, __half>(a, plan, stream));
    return why_not(plan.kernel == kHalfKernel ? launch_kernel<HalfKernels, __nv_bfloat16>(a, plan, stream)
                                              : launch_kernel<FloatKernels, __nv_bfloat16>(a, plan, stream));
}

}  // namespace minimal_attn
