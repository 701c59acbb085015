// chunks.h: how the keys of few queries are cut into chunks, for decode.cu and for the tables that it reads
// (sequences.cu).
#pragma once
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

// Chunks of one of several pieces of a document are larger: all pieces have about as many as one would.
MINIMAL_ATTN_HOST_DEVICE inline Chunks chunks_of(const Attention &a, Keys seen, int pieces = 1) {
    Chunks chunks;
    chunks.seen = seen;
    chunks.begin = seen.begin / 16 * 16;
    const int n = empty(seen) ? 0 : seen.end - chunks.begin;
    const int64_t size = (n * a.Hkv + kChunks * kLeastChunk - 1) / (kChunks * kLeastChunk) * kLeastChunk;
    chunks.size = (int)clamp(size, (int64_t)kLeastChunk, (int64_t)kMostChunk) * pieces;
    chunks.count = n > 0 ? (n + chunks.size - 1) / chunks.size : 1;  // without a key: an empty one, since O is written
    return chunks;
}

// The most chunks of all documents together: of one, kChunks / Hkv, or n / kMostChunk of its n keys, and 3 for ends. If
// it has several pieces, one more each: there are no more pieces than documents.
inline int64_t most_chunks_of_documents(const Attention &a) {
    return a.documents * (kChunks / a.Hkv + 4) + a.Nk / kMostChunk;
}

}  // namespace minimal_attn
