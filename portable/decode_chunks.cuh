// decode_chunks.cuh: how decode.cu cuts the keys into chunks, and which of them a block takes.
#pragma once
#include "portable/common.cuh"

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
    const int n = empty(chunks.seen) ? 0 : chunks.seen.end - chunks.begin;
    const int64_t size = (n * a.Hkv + kChunks * kLeastChunk - 1) / (kChunks * kLeastChunk) * kLeastChunk;
    chunks.size = (int)clamp(size, (int64_t)kLeastChunk, (int64_t)kMostChunk);
    chunks.count = n > 0 ? (n + chunks.size - 1) / chunks.size : 1;  // without a key the rows end all the same
    return chunks;
}

// What the kernel needs beside flash.h's struct.
struct Decode {
    int group;         // Hq / Hkv
    int rows, tiles;   // queries of a key head, group * Nq; tiles of them
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
    int b, h_kv, tile, chunk;
    Chunks chunks;
};

// The index-th work item, or false past the last one. Every warp finds it, 32 batches at a time.
__device__ bool work_item(const Attention &a, const Decode &p, unsigned index, WorkItem &item) {
    const unsigned lane = threadIdx.x % 32, repeats = (unsigned)a.Hkv * p.tiles;
    const int B = (int)a.B;
    int b = 0;
    item = {};
    if (p.same_chunks) {
        b = index / (repeats * p.most_chunks);
        index %= repeats * p.most_chunks;
    } else {
        for (; b < B; b += 32) {
            const unsigned own = b + lane < B ? chunks_of(a, b + lane).count * repeats : 0;
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
                b += first;
                break;
            }
            index -= __shfl_sync(~0u, sum, 31);
        }
    }
    if (b >= B) return false;
    item.b = b;
    item.chunks = chunks_of(a, b);
    item.tile = index % p.tiles;
    index /= p.tiles;
    item.chunk = index % item.chunks.count;
    item.h_kv = index / item.chunks.count;
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
    const int row = item.tile * Tile::Rows + r;
    return {row / p.group, (int64_t)item.h_kv * p.group + row % p.group, row < p.rows};
}

template <class T>
__device__ const T *query(const Attention &a, const WorkItem &item, const Row &row) {
    return (const T *)a.q + item.b * a.q_stride.batch + row.h * a.q_stride.head + row.i * a.q_stride.row;
}

}  // namespace
}  // namespace minimal_attn
