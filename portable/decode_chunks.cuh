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
    bool same_chunks;  // whether each batch has the chunks of batch 0; then the host fills the next three:
    Chunks chunks;
    unsigned share, rest;  // items of a block; the first `rest` blocks take one more
    int stages;            // of a warp
    bool aligned_o;
    // Partial results, in the workspace: by (b, key head, tile), chunk, row of the tile
    float2 *lm;
    float *Oi;
};

__device__ Chunks chunks_of(const Attention &a, const Decode &p, int b) {
    return p.same_chunks ? p.chunks : chunks_of(a, b);
}

// The time of one chunk, in any unit. Its end takes half as long as kLeastChunk keys.
__device__ unsigned weight_of(const Decode &p, const Chunks &chunks) {
    return p.same_chunks ? 1 : 2 * chunks.size / kLeastChunk + 1;
}

// One chunk of keys for one tile of queries. Items are ordered by b, key head, chunk, tile. position is the weight of
// all items before this one.
struct WorkItem {
    int b, h_kv, chunk, tile;
    Chunks chunks;
    unsigned position;

    __device__ int64_t output_tile(const Attention &a, const Decode &p) const {
        return ((int64_t)b * a.Hkv + h_kv) * p.tiles + tile;
    }
    __device__ int begin() const { return chunks.begin + chunk * chunks.size; }
    __device__ int end() const { return min(begin() + chunks.size, chunks.seen.end); }
};

__device__ void advance(const Attention &a, const Decode &p, WorkItem &item) {
    item.position += weight_of(p, item.chunks);
    if (++item.tile < p.tiles) return;
    item.tile = 0;
    if (++item.chunk < item.chunks.count) return;
    item.chunk = 0;
    if (++item.h_kv < a.Hkv) return;
    item.h_kv = 0;
    if (++item.b < a.B) item.chunks = chunks_of(a, p, item.b);
}

// This block's first item, and the position where its share of the work ends. Only the device knows the lengths, so
// every warp adds up the batches' weights, 32 batches at a time.
__device__ WorkItem first_item(const Attention &a, const Decode &p, unsigned &end) {
    const int lane = threadIdx.x % 32, B = (int)a.B;
    const unsigned repeats = (unsigned)a.Hkv * p.tiles;
    const auto weight_of_batch = [&](int b) {
        const Chunks chunks = chunks_of(a, p, b);
        return chunks.count * weight_of(p, chunks) * repeats;
    };
    unsigned share = p.share, rest = p.rest;
    if (!p.same_chunks) {
        unsigned total = 0;
        for (int b = lane; b < B; b += 32) total += weight_of_batch(b);
        for (int n = 1; n < 32; n *= 2) total += __shfl_xor_sync(~0u, total, n);
        share = total / gridDim.x, rest = total - share * gridDim.x;
    }
    const unsigned begin = blockIdx.x * share + min(blockIdx.x, rest);
    end = begin + share + (blockIdx.x < rest);

    WorkItem item{};
    unsigned before = 0;  // the weight of the batches before b
    if (p.same_chunks) {
        item.b = begin / weight_of_batch(0), before = item.b * weight_of_batch(0);
    } else {
        for (; item.b < B; item.b += 32) {
            const unsigned own = item.b + lane < B ? weight_of_batch(item.b + lane) : 0;
            unsigned sum = own;
#pragma unroll
            for (int n = 1; n < 32; n *= 2) {
                const unsigned lower = __shfl_up_sync(~0u, sum, n);
                if (lane >= n) sum += lower;
            }
            const unsigned past = __ballot_sync(~0u, before + sum > begin);
            if (past) {
                const int found = __ffs(past) - 1;
                before += __shfl_sync(~0u, sum - own, found), item.b += found;
                break;
            }
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    item.position = end;
    if (item.b >= B) return item;
    item.chunks = chunks_of(a, p, item.b);
    const unsigned weight = weight_of(p, item.chunks);
    unsigned n = begin - before;
    if (!p.same_chunks) n = (n + weight - 1) / weight;
    item.position = before + n * weight;
    if (p.tiles > 1) item.tile = n % p.tiles, n /= p.tiles;
    item.h_kv = n / item.chunks.count, item.chunk = n - item.h_kv * item.chunks.count;
    if (item.h_kv == a.Hkv) {
        item.h_kv = 0;
        if (++item.b < B) item.chunks = chunks_of(a, p, item.b);
    }
    return item;
}

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
