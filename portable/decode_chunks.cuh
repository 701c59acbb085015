// decode_chunks.cuh: which chunks of keys (chunks.h) a block of decode.cu takes, and where their results are.
#pragma once
#include "portable/chunks.h"
#include "portable/common.cuh"
#include "sequences.h"

namespace minimal_attn {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// The keys that an item covers, for one tile of rows: one chunk, or all chunks. A whole row has no partial results in
// the workspace.
enum Share { kOneChunk, kWholeRow };

// For whole rows a block keeps in shared memory the sums of all warps for the chunks of one four.
constexpr int chunks_at_once(Share share) { return share == kWholeRow ? kFour : 1; }

// Items are numbered by batch, or with BySequence by entry of `few` (sequences.h). All of these lie in batch 0.
template <bool BySequence>
MINIMAL_ATTN_HOST_DEVICE Interval queries_of(const Attention &a, int b) {
    return BySequence ? a.sequences.few[b].queries : Interval{0, a.Nq};
}
template <bool BySequence>
MINIMAL_ATTN_HOST_DEVICE Band band_of_item(const Attention &a, int b) {
    if constexpr (BySequence)
        return band_of(a, a.sequences.few[b]);
    else
        return band_of(a, b);
}

template <bool BySequence>
MINIMAL_ATTN_HOST_DEVICE Chunks chunks_of(const Attention &a, int b) {
    const Interval queries = queries_of<BySequence>(a, b);
    const Keys seen = keys_of_any(band_of_item<BySequence>(a, b), queries.begin, queries.end);
    return chunks_of(a, seen, BySequence ? a.sequences.few[b].entries : 1);
}

// What the kernels need beside flash.h's struct.
struct Decode {
    int group;         // Hq / Hkv
    int rows, tiles;   // of a key head, group * Nq; tiles of them. By sequence: of SequencePlan
    int most_chunks;   // of any batch; not by sequence
    bool same_chunks;  // whether all batches have the same chunks: then the host has computed `chunks`
    Chunks chunks;
    int stages;  // of a warp
    bool aligned_o;
    // Partial results, in the workspace. slots_of says where an item's are.
    float2 *lm;
    float *Oi;
};

template <bool BySequence>
__device__ Chunks chunks_of(const Attention &a, const Decode &p, int b) {
    if constexpr (!BySequence)
        if (p.same_chunks) return p.chunks;
    return chunks_of<BySequence>(a, b);
}

// Where the partial results of a tile's chunk 0 are, and how far apart are those of its chunks. By batch, key head,
// tile, chunk; by sequence in the order of the items.
struct Slots {
    int64_t first, step;  // in rows
    __device__ int64_t operator[](int chunk) const { return first + chunk * step; }
};
template <class Tile, bool BySequence>
__device__ Slots slots_of(const Attention &a, const Decode &p, int b, int h_kv, int tile, int chunks) {
    if constexpr (BySequence) {
        const int rows = min(p.rows, Tile::Rows);
        const int64_t item = a.sequences.few[b].first_item + (int64_t)h_kv * chunks * p.tiles + tile;
        return {item * rows, (int64_t)p.tiles * rows};
    } else {
        const int64_t output_tile = ((int64_t)b * a.Hkv + h_kv) * p.tiles + tile;
        return {output_tile * p.most_chunks * Tile::Rows, Tile::Rows};
    }
}

// A row of a tile: query i of head h.
struct Row {
    int i;
    int64_t h;
    bool exists;
};

// One chunk of keys, or all keys as one chunk, for one tile of rows. Items are numbered by b, key head, chunk, tile.
// Block x takes item x and each gridDim.x-th after it: blocks that run at the same time read neighbouring keys, and
// tiles share a chunk in L2.
template <Share share, bool BySequence>
struct WorkItem {
    int b = 0, h_kv, chunk, tile = 0;
    Interval queries;  // by sequence: the entry's
    Chunks chunks;
    unsigned index, before = 0;  // this item's number; how many items the batches before b have
    bool exists;

    __device__ WorkItem(const Attention &a, const Decode &p) : index(blockIdx.x) { find(a, p); }
    __device__ void advance(const Attention &a, const Decode &p) { index += gridDim.x, find(a, p); }
    __device__ int begin() const { return share == kWholeRow ? chunks.begin : chunks.begin + chunk * chunks.size; }
    __device__ int end() const {
        return share == kWholeRow ? chunks.seen.end : min(begin() + chunks.size, chunks.seen.end);
    }
    __device__ static int items_of_row(const Chunks &chunks) { return share == kWholeRow ? 1 : chunks.count; }
    __device__ int rows(const Decode &p) const { return BySequence ? p.group * (queries.end - queries.begin) : p.rows; }
    // Row r of the key head
    __device__ Row row(const Decode &p, int r) const {
        return {(BySequence ? queries.begin : 0) + r / p.group, (int64_t)h_kv * p.group + r % p.group, r < rows(p)};
    }
    __device__ int batch() const { return BySequence ? 0 : b; }
    __device__ Band band(const Attention &a) const { return band_of_item<BySequence>(a, b); }

    // Finds item `index`, which isn't in a batch before b. Where only the device knows the lengths, a warp adds up how
    // many items the batches have, 32 batches at a time.
    __device__ void find(const Attention &a, const Decode &p) {
        const int lane = threadIdx.x % 32, B = BySequence ? a.sequences.counts->few : (int)a.B;
        const auto items_of_batch = [&](int b) {
            return (unsigned)minimal_attn::items_of(a, items_of_row(chunks_of<BySequence>(a, p, b)), p.tiles);
        };
        if (!BySequence && p.same_chunks) {
            const unsigned items = items_of_batch(0);
            b = index / items, before = b * items;
        } else {
            for (; b < B; b += 32) {
                const unsigned own = b + lane < B ? items_of_batch(b + lane) : 0;
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
        chunks = chunks_of<BySequence>(a, p, b);
        if (BySequence) queries = queries_of<BySequence>(a, b);
        unsigned n = index - before;
        if (p.tiles > 1) tile = n % p.tiles, n /= p.tiles;
        const int items = items_of_row(chunks);
        h_kv = n / items, chunk = n - h_kv * items;
    }
};

}  // namespace
}  // namespace minimal_attn
