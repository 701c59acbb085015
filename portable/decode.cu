// decode.cu: attention of few queries over many keys, as in decoding. K and V are read once; that is what takes the
// time. docs/decode.md has the budget, a drawing and what was tried.
//
// The queries of the Hq / Hkv heads that share a key head are the rows of one tile. The keys are cut into chunks, a
// block each. The chunk's size depends on the number of keys and of key heads alone: a row's bits are the same in every
// batch and on every GPU.
//
//     role        | warps | registers            | does
//     every warp  | 4     | Qi, Oi, li, mi: up   | loads steps of Bc keys through stages of its own in shared memory and
//                 |       | to 255               | adds them to its Oi, li, mi: every fourth step of the chunk
//     the block   |       |                      | joins the warps' Oi, li, mi; the last block of a tile to arrive joins
//                 |       |                      | the chunks' and ends the rows (steps 12. - 13.)
//
//     barrier                   | arrives and waits | then
//     wait_for_step, __syncwarp | one warp          | Kj and Vj of the oldest step have arrived in the warp's stage
//     __syncwarp, after step 12 | one warp          | all lanes have read the stage: the next step may overwrite it
//     __syncthreads             | the block         | Qi is in shared memory; Oi, li, mi of the warps are; the stages,
//                               |                   | where these were, may be overwritten
//     arrived[] in the workspace| blocks of a tile  | the Oi, li, mi of all chunks are in the workspace
#include "portable/common.cuh"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kMostStages = 4;

// Keys of a chunk. At least kLeastChunk, so that each warp has a step of 16 keys. At most kMostChunk, so that the last
// blocks end together; there the partial results are 1 % of K and V. Between these, kChunks chunks of all key heads of
// a batch keep a GPU busy.
constexpr int kLeastChunk = 64, kMostChunk = 512, kChunks = 128;

template <int D_, bool OnTensorCores_>
struct DecodeTile {
    static constexpr int D = D_;
    static constexpr bool OnTensorCores = OnTensorCores_;
    static constexpr int Rows = OnTensorCores ? 16 : D <= 128 ? 8 : 4;  // queries
    static constexpr int Bc = OnTensorCores ? 16 : 8;                   // keys of a step
    static constexpr bool QInRegisters = D <= 128;
    template <class T>
    static constexpr int StageBytes = 2 * Bc *D *(int)sizeof(T);  // of a warp: Kj, Vj
    template <class T>
    static constexpr int FixedBytes = OnTensorCores ? Rows *D *(int)sizeof(T) : 0;  // Qi
    template <class T>
    static int shared_bytes(int stages) {
        return kWarps * stages * StageBytes<T> + FixedBytes<T>;
    }
};

// ------------------------------------------------------------------------------ chunks

// How the keys are cut that the queries of one batch see.
struct Chunks {
    Keys seen;
    int begin, size, count;  // the first chunk's first key, a multiple of 16; keys of a chunk; chunks
};

MINIMAL_ATTN_HOST_DEVICE inline Chunks chunks_of(const Attention &a, int64_t b) {
    Chunks chunks;
    chunks.seen = keys_of_any(band_of(a, b), 0, a.Nq);
    chunks.begin = chunks.seen.begin / 16 * 16;
    const int64_t n = empty(chunks.seen) ? 0 : chunks.seen.end - chunks.begin;
    const int64_t size = (n * a.Hkv + kChunks * kLeastChunk - 1) / (kChunks * kLeastChunk) * kLeastChunk;
    chunks.size = (int)clamp(size, (int64_t)kLeastChunk, (int64_t)kMostChunk);
    chunks.count = n > 0 ? (int)((n + chunks.size - 1) / chunks.size) : 1;  // without a key the rows end all the same
    return chunks;
}

// What the kernel needs beside flash.h's struct.
struct Decode {
    int rows, tiles;   // queries of a key head, (Hq / Hkv) * Nq; tiles of them
    int most_chunks;   // of any batch
    bool same_chunks;  // all batches have as many
    int stages;        // of a warp
    bool aligned_o;
    // In the workspace, by (b, key head, tile); null if one chunk is all. Oi and (li, mi) also by chunk and row.
    unsigned *arrived, *ticket;  // chunks that have arrived; the next work item, or null: one a block
    float2 *lm;
    float *Oi;
};

// A block's work: one chunk of keys for one tile of queries.
struct WorkItem {
    int64_t b;
    int h_kv, tile, chunk;
    Chunks chunks;
};

// The index-th work item, or false past the last one. Every warp finds it, 32 batches at a time.
__device__ bool work_item(const Attention &a, const Decode &p, unsigned index, WorkItem &item) {
    const unsigned lane = threadIdx.x % 32, repeats = (unsigned)a.Hkv * p.tiles;
    if (p.same_chunks) {
        item.b = index / (repeats * p.most_chunks);
        index %= repeats * p.most_chunks;
    } else {
        for (item.b = 0;; item.b += 32) {
            if (item.b >= a.B) return false;
            const unsigned own = item.b + lane < a.B ? chunks_of(a, item.b + lane).count * repeats : 0;
            unsigned sum = own;
#pragma unroll
            for (int n = 1; n < 32; n *= 2) {
                const unsigned before = __shfl_up_sync(~0u, sum, n);
                if (lane >= n) sum += before;
            }
            const unsigned past = __ballot_sync(~0u, sum > index);
            if (past) {
                const int first = __ffs(past) - 1;
                index -= __shfl_sync(~0u, sum - own, first);
                item.b += first;
                break;
            }
            index -= __shfl_sync(~0u, sum, 31);
        }
    }
    if (item.b >= a.B) return false;
    item.chunks = chunks_of(a, item.b);
    item.tile = index % p.tiles;
    item.chunk = index / p.tiles % item.chunks.count;
    item.h_kv = index / p.tiles / item.chunks.count;
    return true;
}

// Row r of a tile: query i of head h.
struct Row {
    int i;
    int64_t h;
    bool exists;
};

template <class Tile>
__device__ Row row_of(const Attention &a, const Decode &p, const WorkItem &item, int r) {
    const int group = (int)(a.Hq / a.Hkv), row = item.tile * Tile::Rows + r;
    return {row / group, (int64_t)item.h_kv * group + row % group, row < p.rows};
}

template <class T>
__device__ const T *query(const Attention &a, const WorkItem &item, const Row &row) {
    return (const T *)a.q + item.b * a.q_stride.batch + row.h * a.q_stride.head + row.i * a.q_stride.row;
}

// ------------------------------------------------------------------------------ step 6: a warp's steps

// Where the rows of a step that begins at key j are, j a multiple of Bc.
template <class T>
__device__ const T *step_rows(const void *tensor, const Strides &stride, const WorkItem &item, int j) {
    return (const T *)tensor + item.b * stride.batch + item.h_kv * stride.head + j * stride.row;
}

// Kj or Vj of a step, whole rows, 512 bytes an instruction. Rows outside [begin, end) become zeros, as columns past d.
template <class Tile, class T>
__device__ void load_rows(unsigned to, const T *from, int64_t stride, int begin, int end, int d) {
    constexpr int Element = 16 / sizeof(T), PerRow = Tile::D / Element;
#pragma unroll
    for (int n = 0; n < Tile::Bc * PerRow; n += 32) {
        const int row = (n + threadIdx.x % 32) / PerRow, x = (n + threadIdx.x % 32) % PerRow;
        const bool exists = row >= begin && row < end && x * Element < d;
        copy16(to + 2 * swizzle<8 * PerRow>(row, x), from + row * stride + x * Element, exists);
    }
}

// Waits until all but the last stages - 1 loads of this warp have arrived.
__device__ void wait_for_step(int stages) {
    if (stages == 4)
        __pipeline_wait_prior(3);
    else if (stages == 3)
        __pipeline_wait_prior(2);
    else if (stages == 2)
        __pipeline_wait_prior(1);
    else
        __pipeline_wait_prior(0);
    __syncwarp();
}

// ------------------------------------------------------------------------------ steps 8 - 12 of a warp

// Half types. A lane has rows lane / 4 and lane / 4 + 8 of the tile, in fragments as mma.cuh describes them.
template <class T, class Tile>
struct MmaRows {
    static constexpr int D = Tile::D;
    unsigned q[Tile::QInRegisters ? D / 16 : 1][4], Qi;
    float Oi[D / 8][4] = {}, li[2] = {}, mi[2] = {-INFINITY, -INFINITY};
    Keys keys[2];

    // 8.
    __device__ MmaRows(const Attention &a, const Decode &p, const WorkItem &item, T *Q_tile) {
        constexpr int PerRow = D / 8;
        const int lane = threadIdx.x % 32;
        for (int n = threadIdx.x; n < Tile::Rows * PerRow; n += kThreads) {
            const int x = n % PerRow;
            const Row row = row_of<Tile>(a, p, item, n / PerRow);
            const bool exists = row.exists && 8 * x < a.d;
            *(uint4 *)(Q_tile + swizzle<D>(n / PerRow, x)) =
                exists ? *(const uint4 *)(query<T>(a, item, row) + 8 * x) : uint4{};
        }
        const BandOf<int> band = narrow(band_of(a, item.b));
        for (int r = 0; r < 2; ++r) keys[r] = keys_of_row(band, row_of<Tile>(a, p, item, lane / 4 + 8 * r).i);
        __syncthreads();
        Qi = lane_address<D>(Q_tile, lane % 16, lane / 16);
        if constexpr (Tile::QInRegisters)
#pragma unroll
            for (int x = 0; x < D / 16; ++x) load_matrices(q[x], (Qi ^ x % 4 * 32) + x / 4 * 128);
    }

    // 9. - 12. of the step that begins at key j
    __device__ void add_step(const Attention &a, const T *Kj, const T *Vj, int j) {
        const int lane = threadIdx.x % 32;
        const unsigned K = lane_address<D>(Kj, lane / 16 * 8 + lane % 8, lane / 8 % 2);
        const unsigned V = lane_address<D>(Vj, lane % 16, lane / 16);
        float Sij[2][4] = {};
#pragma unroll
        for (int x = 0; x < D / 16; ++x) {
            unsigned k[4];
            load_matrices(k, (K ^ x % 4 * 32) + x / 4 * 128);
            if constexpr (!Tile::QInRegisters) load_matrices(q[0], (Qi ^ x % 4 * 32) + x / 4 * 128);
            mma<T>(Sij[0], q[Tile::QInRegisters ? x : 0], k[0], k[1]);
            mma<T>(Sij[1], q[Tile::QInRegisters ? x : 0], k[2], k[3]);
        }
        float alpha[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int begin = keys[r].begin - j - lane % 4 * 2, end = keys[r].end - j - lane % 4 * 2;
            float m_new = mi[r], m_safe, l = 0.f;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float &s = Sij[n / 2][2 * r + n % 2];
                const int key = n / 2 * 8 + n % 2;
                s = key >= begin && key < end ? s * a.softmax_scale : -INFINITY;
                m_new = fmaxf(m_new, s);
            }
            alpha[r] = update_row_max(mi[r], row_max<4>(m_new), m_safe);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float &s = Sij[n / 2][2 * r + n % 2];
                s = exp_fast(s - m_safe);
                l += s;
            }
            li[r] = alpha[r] * li[r] + l;
        }
        if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
            for (int x = 0; x < D / 8; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) Oi[x][e] *= alpha[e / 2];
        }
        unsigned p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = pack<T>(Sij[e / 2][e % 2 * 2], Sij[e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int x = 0; x < D / 16; ++x) {
            unsigned v[4];
            load_matrices_transposed(v, (V ^ x % 4 * 32) + x / 4 * 128);
            mma<T>(Oi[2 * x], p, v[0], v[1]);
            mma<T>(Oi[2 * x + 1], p, v[2], v[3]);
        }
    }

    // Leaves `rows` rows of Oi, Rows x D, and of (li, mi) in shared memory.
    __device__ void store(float *O, float2 *lm, int rows) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane / 4 + 8 * r;
            const float l = row_sum<4>(li[r]);
            if (row >= rows) continue;
            if (lane % 4 == 0) lm[row] = {l, mi[r]};
#pragma unroll
            for (int x = 0; x < D / 8; ++x)
                *(float2 *)(O + row * D + 8 * x + lane % 4 * 2) = {Oi[x][2 * r], Oi[x][2 * r + 1]};
        }
    }
};

// x[n], summed over Lanes neighbours, in the lanes n * Lanes / N and next: each exchange halves what a lane has.
template <int Lanes, int N>
__device__ float sum_and_spread(float (&x)[N]) {
    int offset = Lanes / 2;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, offset /= 2) {
        const bool upper = threadIdx.x & offset;
#pragma unroll
        for (int y = 0; y < n; ++y) {
            const float received = __shfl_xor_sync(~0u, upper ? x[y] : x[y + n], offset);
            x[y] = (upper ? x[y + n] : x[y]) + received;
        }
    }
    return row_sum<Lanes / N>(x[0]);
}

// float32, and bfloat16 without tensor cores. A lane has columns 4 * (lane + Lanes * c) + 0..3 of all rows; for D = 64
// the halves of the warp have every other key.
template <class T, class Tile>
struct FmaRows {
    static constexpr int D = Tile::D, Rows = Tile::Rows, Lanes = D / 4 < 32 ? D / 4 : 32, C = D / 4 / Lanes;
    static constexpr int Groups = 32 / Lanes, N = Tile::Bc / Groups, R = 4;  // N: keys of a lane; R: rows at a time
    float q[Rows][C][4], Oi[Rows][C][4] = {}, li[Rows] = {}, mi[Rows];
    Keys keys[Rows];
    int rows;

    __device__ static int column(int c) { return 4 * (threadIdx.x % Lanes + Lanes * c); }
    __device__ static int group() { return threadIdx.x % 32 / Lanes; }

    __device__ static void load4(float (&x)[4], const T *from) {
        if constexpr (sizeof(T) == 4) {
            const float4 four = *(const float4 *)from;
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        } else {
            const uint2 four = *(const uint2 *)from;  // a bfloat16 is the upper half of a float
            x[0] = __uint_as_float(four.x << 16), x[1] = __uint_as_float(four.x & 0xffff0000);
            x[2] = __uint_as_float(four.y << 16), x[3] = __uint_as_float(four.y & 0xffff0000);
        }
    }

    // Of a row of a step in shared memory
    __device__ static void load_column(float (&x)[4], const T *tile, int row, int c) {
        constexpr int Element = 16 / sizeof(T);
        load4(x, tile + swizzle<D * sizeof(T) / 2>(row, column(c) / Element) * 2 / sizeof(T) + column(c) % Element);
    }

    // 8.
    __device__ FmaRows(const Attention &a, const Decode &p, const WorkItem &item, T *) {
        const BandOf<int> band = narrow(band_of(a, item.b));
        rows = min(Rows, p.rows - item.tile * Rows);
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            const Row row = row_of<Tile>(a, p, item, r);
            keys[r] = keys_of_row(band, row.i);
            mi[r] = -INFINITY;
#pragma unroll
            for (int c = 0; c < C; ++c) {
                q[r][c][0] = q[r][c][1] = q[r][c][2] = q[r][c][3] = 0.f;
                if (row.exists && column(c) < a.d) load4(q[r][c], query<T>(a, item, row) + column(c));
            }
        }
    }

    // 9. - 12. of the step that begins at key j
    __device__ void add_step(const Attention &a, const T *Kj, const T *Vj, int j) {
        const int key = threadIdx.x % Lanes / (Lanes / N) * Groups + group();  // whose scores this lane gets
#pragma unroll
        for (int r0 = 0; r0 < Rows; r0 += R) {
            if (r0 > 0 && r0 >= rows) break;
            float s[R][N] = {}, Pij[R];
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int c = 0; c < C; ++c) {
                    float k[4];
                    load_column(k, Kj, n * Groups + group(), c);
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) s[r][n] = fmaf(q[r0 + r][c][x], k[x], s[r][n]);
                }
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float score = sum_and_spread<Lanes>(s[r]) * a.softmax_scale, m_safe;
                if (j + key < keys[r0 + r].begin || j + key >= keys[r0 + r].end) score = -INFINITY;
                const float m_new = fmaxf(mi[r0 + r], row_max<32>(score));
                const float alpha = update_row_max(mi[r0 + r], m_new, m_safe);
                Pij[r] = exp_fast(score - m_safe);
                li[r0 + r] = alpha * li[r0 + r] + Pij[r];
#pragma unroll
                for (int c = 0; c < C; ++c)
#pragma unroll
                    for (int x = 0; x < 4; ++x) Oi[r0 + r][c][x] *= alpha;
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float P[R];
#pragma unroll
                for (int r = 0; r < R; ++r) P[r] = __shfl_sync(~0u, Pij[r], group() * Lanes + n * (Lanes / N));
#pragma unroll
                for (int c = 0; c < C; ++c) {
                    float v[4];
                    load_column(v, Vj, n * Groups + group(), c);
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int x = 0; x < 4; ++x) Oi[r0 + r][c][x] = fmaf(P[r], v[x], Oi[r0 + r][c][x]);
                }
            }
        }
    }

    // Leaves `rows` rows of Oi, Rows x D, and of (li, mi) in shared memory.
    __device__ void store(float *O, float2 *lm, int) {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            if (r >= rows) break;
            const float l = row_sum<32>(li[r]) / (Lanes / N);  // so many lanes have the same key
            if (threadIdx.x % 32 == 0) lm[r] = {l, mi[r]};
#pragma unroll
            for (int c = 0; c < C; ++c) {
#pragma unroll
                for (int x = 0; x < 4; ++x)
                    if constexpr (Groups == 2) Oi[r][c][x] += __shfl_xor_sync(~0u, Oi[r][c][x], Lanes);
                if (group() == 0)
                    *(float4 *)(O + r * D + column(c)) = {Oi[r][c][0], Oi[r][c][1], Oi[r][c][2], Oi[r][c][3]};
            }
        }
    }
};

// ------------------------------------------------------------------------------ joining

// Of one row: l, m, and 4 columns of the undivided O.
struct Part {
    float l, m;
    float o[4];
};

struct Sum {
    float sum = 0.f, lost = 0.f;
    __device__ void add(float x) {  // Kahan: a row may have thousands of chunks
        const float y = x - lost, next = sum + y;
        lost = fabsf(next) < INFINITY ? (next - sum) - y : 0.f;
        sum = next;
    }
};

// Steps 11. and 12. for parts 0 to count - 1, in this order. lm(n) and o(n) read a part's (l, m) and o.
template <class LM, class O>
__device__ Part join(int count, const LM &lm, const O &o) {
    float m = -INFINITY;
#pragma unroll 8
    for (int n = 0; n < count; ++n) m = fmaxf(m, lm(n).y);
    const float m_safe = m == -INFINITY ? 0.f : m;
    Sum l, x[4];
#pragma unroll 8
    for (int n = 0; n < count; ++n) {
        const float2 part = lm(n);
        const float4 four = o(n);
        const float weight = exp_fast(part.y - m_safe);
        l.add(weight * part.x);
        x[0].add(weight * four.x), x[1].add(weight * four.y), x[2].add(weight * four.z), x[3].add(weight * four.w);
    }
    return {l.sum, m, {x[0].sum, x[1].sum, x[2].sum, x[3].sum}};
}

// 12. - 13. Columns x to x + 3 of row r of the tile
template <class T, class Tile>
__device__ void end_row(const Attention &a, const Decode &p, const WorkItem &item, int r, int x, const Part &part) {
    const Row row = row_of<Tile>(a, p, item, r);
    Block<T> block;
    block.b = item.b, block.h = row.h, block.band = band_of(a, item.b);
    const RowEnd end = end_row(a, block, row.i, part.l, part.m);
    if (x == 0) store_state(a, block, row.i, end);
    store_o<4>(a, block, row.i, x, end, part.o, p.aligned_o);
}

__device__ void wait_for_zeros() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Joins the parts that the warps have left in shared memory. If the tile has several chunks, the result goes to the
// workspace, and the block that arrives last joins the chunks.
template <class T, class Tile>
__device__ void end_chunk(const Attention &a, const Decode &p, const WorkItem &item, const unsigned char *O, int stride,
                          const float2 *lm) {
    constexpr int D = Tile::D;
    const int rows = min(Tile::Rows, p.rows - item.tile * Tile::Rows), count = item.chunks.count;
    const int64_t tile = (item.b * a.Hkv + item.h_kv) * p.tiles + item.tile;
    const int64_t first = tile * p.most_chunks * Tile::Rows;  // row of the workspace
    for (int n = threadIdx.x; n < rows * (D / 4); n += kThreads) {
        const int r = n / (D / 4), x = n % (D / 4) * 4;
        const Part part = join(
            kWarps, [&](int warp) { return lm[warp * Tile::Rows + r]; },
            [&](int warp) { return *(const float4 *)((const float *)(O + warp * stride) + r * D + x); });
        if (count == 1) {
            end_row<T, Tile>(a, p, item, r, x, part);
        } else {
            const int64_t at = first + item.chunk * Tile::Rows + r;
            if (x == 0) p.lm[at] = {part.l, part.m};
            *(float4 *)(p.Oi + at * D + x) = {part.o[0], part.o[1], part.o[2], part.o[3]};
        }
    }
    if (p.arrived) wait_for_zeros();  // also so that this kernel doesn't end before those are written
    if (count == 1) return;
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&p.arrived[tile], 1) == count - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int n = threadIdx.x; n < rows * (D / 4); n += kThreads) {
        const int r = n / (D / 4), x = n % (D / 4) * 4;
        const Part part = join(
            count, [&](int chunk) { return __ldcg(&p.lm[first + chunk * Tile::Rows + r]); },
            [&](int chunk) { return __ldcg((const float4 *)(p.Oi + (first + chunk * Tile::Rows + r) * D + x)); });
        end_row<T, Tile>(a, p, item, r, x, part);
    }
}

// ------------------------------------------------------------------------------ the kernel

template <class T, class Tile>
__device__ void decode_chunk(const Attention &a, const Decode &p, const WorkItem &item) {
    constexpr int Bc = Tile::Bc, StageBytes = Tile::template StageBytes<T>;
    using Rows = std::conditional_t<Tile::OnTensorCores, MmaRows<T, Tile>, FmaRows<T, Tile>>;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float2 lm[kWarps * Tile::Rows];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    unsigned char *const stages = shared + warp * p.stages * StageBytes;

    const Keys seen = item.chunks.seen;
    const int first = item.chunks.begin + item.chunk * item.chunks.size + warp * Bc;
    const int end = min(item.chunks.begin + (item.chunk + 1) * item.chunks.size, seen.end);
    const auto load = [&](int j, int stage) {
        if (j < end) {
            const unsigned to = (unsigned)__cvta_generic_to_shared(stages + stage * StageBytes);
            load_rows<Tile>(to, step_rows<T>(a.k, a.k_stride, item, j), a.k_stride.row, seen.begin - j, seen.end - j,
                            a.d);
            load_rows<Tile>(to + StageBytes / 2, step_rows<T>(a.v, a.v_stride, item, j), a.v_stride.row, seen.begin - j,
                            seen.end - j, a.d);
        }
        __pipeline_commit();
    };
    for (int stage = 0; stage < p.stages; ++stage) load(first + stage * kWarps * Bc, stage);
    Rows rows(a, p, item, (T *)(shared + kWarps * p.stages * StageBytes));
    for (int j = first, stage = 0; j < end; j += kWarps * Bc) {
        wait_for_step(p.stages);
        const T *const Kj = (const T *)(stages + stage * StageBytes), *const Vj = Kj + StageBytes / 2 / sizeof(T);
        rows.add_step(a, Kj, Vj, j);
        __syncwarp();
        load(j + p.stages * kWarps * Bc, stage);
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }
    rows.store((float *)stages, lm + warp * Tile::Rows, p.rows - item.tile * Tile::Rows);
    __syncthreads();
    end_chunk<T, Tile>(a, p, item, shared, p.stages * StageBytes, lm);
}

template <class T, class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    decode_kernel(const __grid_constant__ Attention a, const __grid_constant__ Decode p) {
    if constexpr (Tile::OnTensorCores == on_tensor_cores<T>()) {
        __shared__ unsigned next;
        WorkItem item;
        for (unsigned index = blockIdx.x; work_item(a, p, index, item); index = next) {
            unsigned ticket = 0;
            if (p.ticket && threadIdx.x == 0) {
                wait_for_zeros();
                ticket = atomicAdd(p.ticket, 1);
            }
            decode_chunk<T, Tile>(a, p, item);
            if (!p.ticket) break;
            if (threadIdx.x == 0) next = gridDim.x + ticket;
            __syncthreads();
        }
    }
}

// Zeros for the counters. The next kernel may begin at once: it waits before it counts.
__global__ void zero_kernel(unsigned *counters, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    for (int n = threadIdx.x; n < count; n += blockDim.x) counters[n] = 0;
}

// ------------------------------------------------------------------------------ on the host: plan and launch

template <bool OnTensorCores, class Use>
auto with_tile_for(int d, const Use &use) {
    if (d <= 64) return use(DecodeTile<64, OnTensorCores>());
    if (d <= 128) return use(DecodeTile<128, OnTensorCores>());
    return use(DecodeTile<256, OnTensorCores>());
}

// use(Tile(), T()) for the dtype.
template <class Use>
auto with_kernel(const Attention &a, bool on_tensor_cores, const Use &use) {
    if (a.dtype == Dtype::float32) return with_tile_for<false>(a.d, [&](auto tile) { return use(tile, 0.f); });
    if (a.dtype == Dtype::float16) return with_tile_for<true>(a.d, [&](auto tile) { return use(tile, __half()); });
    if (on_tensor_cores) return with_tile_for<true>(a.d, [&](auto tile) { return use(tile, __nv_bfloat16()); });
    return with_tile_for<false>(a.d, [&](auto tile) { return use(tile, __nv_bfloat16()); });
}

// The parameters, with addresses that count from `workspace`, and the number of work items, or more.
template <class Tile>
int64_t describe(const Attention &a, char *workspace, Decode &p, int64_t &bytes) {
    p.rows = (int)(a.Hq / a.Hkv) * a.Nq, p.tiles = (p.rows + Tile::Rows - 1) / Tile::Rows;
    p.same_chunks = !a.seqlens_k && !a.leftpad_k && !a.offset;
    if (p.same_chunks) {
        p.most_chunks = chunks_of(a, 0).count;
    } else {
        const auto chunks = [&](int64_t size) { return (a.Nk + 15 + size - 1) / size; };
        p.most_chunks = (int)std::max(chunks(kMostChunk), std::min(chunks(kLeastChunk), kChunks / a.Hkv + 1));
    }
    const int64_t tiles = a.B * a.Hkv * p.tiles, items = tiles * p.most_chunks;
    bytes = 0;
    const auto take = [&](int64_t size) {
        char *const at = workspace + bytes;
        bytes += (size + 255) / 256 * 256;
        return at;
    };
    p.ticket = (unsigned *)take((tiles + 1) * sizeof(unsigned)), p.arrived = p.ticket + 1;
    p.lm = (float2 *)take(items * Tile::Rows * sizeof(float2));
    p.Oi = (float *)take(items * Tile::Rows * Tile::D * sizeof(float));
    return items;
}

// Two blocks on a multiprocessor if they have two stages or more; else as many stages as fit.
template <class Tile, class T>
int stages_for(const Device &device) {
    const int half = (device.shared_memory + 1024) / 2 - 1024;
    for (int stages = kMostStages; stages > 0; --stages)
        if (Tile::template shared_bytes<T>(stages) <= (stages > 1 ? half : device.shared_memory)) {
            if (stages > 1) return stages;
            while (stages < kMostStages && Tile::template shared_bytes<T>(stages + 1) <= device.shared_memory) ++stages;
            return stages;
        }
    return 0;
}

}  // namespace

namespace portable {

bool takes_decode(const Attention &a, const Device &device, bool on_tensor_cores) {
    const int64_t element = a.dtype == Dtype::float32 ? 4 : 2, rows = a.Hq / a.Hkv * a.Nq;
    if (!is_aligned(a.q, a.q_stride, element, a.d) || !is_aligned(a.k, a.k_stride, element, a.d) ||
        !is_aligned(a.v, a.v_stride, element, a.d))
        return false;
    return rows <= (on_tensor_cores ? 64 : 16) && a.Nk >= 128 &&
           with_kernel(a, on_tensor_cores, [&](auto tile, auto element) {
               using Tile = decltype(tile);
               Decode p;
               int64_t bytes;
               return stages_for<Tile, decltype(element)>(device) > 0 &&
                      describe<Tile>(a, nullptr, p, bytes) <= int64_t(1) << 30;
           });
}

Plan plan_decode(const Attention &a, const Device &device, bool on_tensor_cores) {
    return with_kernel(a, on_tensor_cores, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        Decode p;
        int64_t bytes;
        const int64_t items = describe<Tile>(a, nullptr, p, bytes);
        const int stages = stages_for<Tile, decltype(element)>(device);
        const int shared = Tile::template shared_bytes<decltype(element)>(stages);
        const int blocks = std::min((device.shared_memory + 1024) / (shared + 1024), 4);
        return Plan{kDecode,
                    stages,
                    Tile::Rows,
                    Tile::Bc,
                    Tile::D,
                    std::min<int64_t>(items, blocks * device.multiprocessors),
                    kThreads,
                    shared,
                    p.same_chunks && p.most_chunks == 1 ? 0 : bytes,
                    device.multiprocessors};
    });
}

const char *launch_decode(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return why_not(with_kernel(a, plan.Br == 16, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        using T = decltype(element);
        Decode p;
        int64_t bytes;
        const int64_t items = describe<Tile>(a, (char *)workspace, p, bytes);
        p.stages = plan.tile;
        p.aligned_o = is_aligned(a.o, a.o_stride, a.l ? 4 : sizeof(T), a.d);
        if (items <= plan.grid) p.ticket = nullptr;
        int device = 0, major = 0;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        const auto kernel = decode_kernel<T, Tile>;
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_memory);
        if (error != cudaSuccess) return error;
        if (plan.workspace > 0) {
            const int counters = (int)(a.B * a.Hkv) * p.tiles + 1;
            zero_kernel<<<1, 256, 0, stream>>>(p.arrived - 1, counters);
            error = cudaGetLastError();
        } else {
            p.arrived = p.ticket = nullptr;
        }
        if (error != cudaSuccess) return error;
        cudaLaunchAttribute overlap{cudaLaunchAttributeProgrammaticStreamSerialization};
        overlap.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{dim3(plan.grid), dim3(kThreads), (size_t)plan.shared_memory, stream, &overlap, 1};
        config.numAttrs = plan.workspace > 0 && major >= 9;
        return cudaLaunchKernelEx(&config, kernel, a, p);
    }));
}

}  // namespace portable
}  // namespace minimal_attn
