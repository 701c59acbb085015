// decode_chunks.cuh: how decode.cu cuts the keys into chunks, and which chunks a block takes.
#pragma once
#include "portable/common.cuh"

namespace minimal_attn {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// Keys of a chunk. The key heads of a batch have about kChunks chunks together, which keep a GPU busy. At least
// kLeastChunk: a step of 16 keys for each warp. At most kMostChunk: blocks end together, and the partial results of 4
// rows are only 0.4 % of K and V (bfloat16, d 128).
constexpr int kLeastChunk = 64, kMostChunk = 1024, kChunks = 128;

// The keys that an item covers, for one tile of rows: one chunk, or all chunks. A whole row has no partial results in
// the workspace.
enum Share { kOneChunk, kWholeRow };

// Four consecutive chunks are a "four": their sums are joined first, then those of the fours. A whole row has at most
// kMostOfRow chunks. Its block keeps in shared memory the sums of all warps for the chunks of one four.
constexpr int kFour = 4, kMostOfRow = kFour * kFour;
constexpr int chunks_at_once(Share share) { return share == kWholeRow ? kFour : 1; }

// The chunks of the keys that a batch's queries see.
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
    chunks.count = n > 0 ? (n + chunks.size - 1) / chunks.size : 1;  // without a key: an empty one, since O is written
    return chunks;
}

// What the kernels need beside flash.h's struct.
struct Decode {
    int group;         // Hq / Hkv
    int rows, tiles;   // queries of a key head, group * Nq; tiles of them
    int most_chunks;   // of any batch
    bool same_chunks;  // whether all batches have the same chunks: then the host has computed `chunks`
    Chunks chunks;
    int stages;  // of a warp
    bool aligned_o;
    // Partial results, in the workspace: by (b, key head, tile), chunk, row of the tile
    float2 *lm;
    float *Oi;
    Chunks chunks_of_row;  // for kWholeRow: the chunks of each row; `chunks` is then one chunk of all their keys
};

__device__ Chunks chunks_of(const Attention &a, const Decode &p, int b) {
    return p.same_chunks ? p.chunks : chunks_of(a, b);
}

// One chunk of keys, or all keys as one chunk, for one tile of rows. Items are numbered by b, key head, chunk, tile.
// Block x takes item x and each gridDim.x-th after it: blocks that run at the same time read neighbouring keys, and
// tiles share a chunk in L2.
struct WorkItem {
    int b = 0, h_kv, chunk, tile = 0;
    Chunks chunks;
    unsigned index, before = 0;  // this item's number; how many items the batches before b have
    bool exists;

    __device__ WorkItem(const Attention &a, const Decode &p) : index(blockIdx.x) { find(a, p); }
    __device__ void advance(const Attention &a, const Decode &p) { index += gridDim.x, find(a, p); }
    __device__ int64_t output_tile(const Attention &a, const Decode &p) const {
        return ((int64_t)b * a.Hkv + h_kv) * p.tiles + tile;
    }
    __device__ int begin() const { return chunks.begin + chunk * chunks.size; }
    __device__ int end() const { return min(begin() + chunks.size, chunks.seen.end); }

    // Finds item `index`, which isn't in a batch before b. Where only the device knows the lengths, a warp adds up how
    // many items the batches have, 32 batches at a time.
    __device__ void find(const Attention &a, const Decode &p) {
        const int lane = threadIdx.x % 32, B = (int)a.B;
        const auto items_of = [&](int b) { return (unsigned)(chunks_of(a, p, b).count * a.Hkv * p.tiles); };
        if (p.same_chunks) {
            const unsigned items = items_of(0);
            b = index / items, before = b * items;
        } else {
            for (; b < B; b += 32) {
                const unsigned own = b + lane < B ? items_of(b + lane) : 0;
                unsigned sum = own;
#pragma unroll
                for (int n = 1; n < 32; n *= 2) {
                    const unsigned lower = __shfl_up_sync(~0u, sum, n);
                    if (lane >= n) sum += lower;
                }
                const unsigned past = __ballot_sync(~0u, before + sum > index);
                if (past) {
                    const int found = __ffs(past) - 1;
                    before += __shfl_sync(~0u, sum - own, found), b += found;
                    break;
                }
                before += __shfl_sync(~0u, sum, 31);
            }
        }
        exists = b < B;
        if (!exists) return;
        chunks = chunks_of(a, p, b);
        unsigned n = index - before;
        if (p.tiles > 1) tile = n % p.tiles, n /= p.tiles;
        h_kv = n / chunks.count, chunk = n - h_kv * chunks.count;
    }
};

// Row r of a tile: query i of head h.
struct Row {
    int i;
    int64_t h;
    bool exists;
};

__device__ Row row_of(const Decode &p, int h_kv, int row) {
    return {row / p.group, (int64_t)h_kv * p.group + row % p.group, row < p.rows};
}

}  // namespace
}  // namespace minimal_attn
