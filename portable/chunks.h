// chunks.h: how the keys of few queries are cut into chunks, for decode.cu and for the tables that it reads
// (sequences.cu).
#pragma once
#include <algorithm>

#include "flash.h"

namespace minimal_attn {

// Keys of a chunk. The key heads of a batch have about kChunks chunks together, which keep a GPU busy. At least
// kLeastChunk: a step of 16 keys for each warp. At most kMostChunk: blocks end together, and the partial results of 4
// rows are only 0.4 % of K and V (bfloat16, d 128).
constexpr int kLeastChunk = 64, kMostChunk = 1024, kChunks = 128;

// Four consecutive chunks are a "four": their sums are joined first, then those of the fours. A whole row has at most
// kMostOfRow chunks.
constexpr int kFour = 4, kMostOfRow = kFour * kFour;
// Whole rows are items where they fill at least this part of all waves of resident blocks. Below, too many
// multiprocessors are idle in the last wave.
constexpr double kLeastFull = 0.8;

// The chunks of the keys that some queries see.
struct Chunks {
    Keys seen;
    int begin, size, count;  // the first chunk's first key, a multiple of 16; keys of a chunk; chunks
};

// If a document has several entries (sequences.h), chunks are that much larger: all have about as many as one would.
MINIMAL_ATTN_HOST_DEVICE inline Chunks chunks_of(const Attention &a, Keys seen, int entries = 1) {
    Chunks chunks;
    chunks.seen = seen;
    chunks.begin = seen.begin / 16 * 16;
    const int n = empty(seen) ? 0 : seen.end - chunks.begin;
    const int64_t size = (n * a.Hkv + kChunks * kLeastChunk - 1) / (kChunks * kLeastChunk) * kLeastChunk;
    chunks.size = (int)clamp(size, (int64_t)kLeastChunk, (int64_t)kMostChunk) * entries;
    chunks.count = n > 0 ? (n + chunks.size - 1) / chunks.size : 1;  // without a key: an empty one, since O is written
    return chunks;
}

// Work items of a batch or entry: by key head, chunk, tile of rows.
MINIMAL_ATTN_HOST_DEVICE inline int items_of(const Attention &a, int chunks, int row_tiles) {
    return chunks * (int)a.Hkv * row_tiles;
}

// An upper bound. A document of n keys has at most kChunks / Hkv or n / kMostChunk chunks, whichever is more, and never
// more than n / kLeastChunk; 3 for rounding and ends. Each of several entries adds one, and there is one for each
// query.
inline int64_t most_chunks_of_documents(const Attention &a) {
    return std::min<int64_t>(a.documents * (kChunks / a.Hkv + 4) + a.Nk / kMostChunk,
                             a.documents * int64_t(4) + a.Nk / kLeastChunk);
}

}  // namespace minimal_attn
