// sequences.h: packed documents (cu_seqlens) that are computed one by one, each as a batch of its own. A tile of
// queries of several documents meets all keys between their first and last one (ranges.h). Where documents have few
// queries over many keys, as in serving, that is too many.
//
//     few      documents with few queries, for decode.cu. `first_item`: how many work items the entries before have, if
//              items are chunks. If each query is an entry, a document has several, `entries`
//     tiles    the other queries, and those of no document, in tiles of at most Br, for a kernel of bands
//     counts   the lengths of both; whether decode.cu's items are whole rows; how many tiles hopper's blocks have taken
//
// If there are as many queries as documents, most of these have one. Then each query is an entry of `few`, and there
// are no tiles. fill_sequences_cuda (sequences.cu) fills the tables once a call, for all heads. The host knows no
// lengths, so that one CUDA graph serves any. docs/sequences.md has more.
#pragma once

#include "flash.h"

namespace minimal_attn {

MINIMAL_ATTN_HOST_DEVICE inline Band band_of(const Attention &a, const Sequence &sequence) {
    return {sequence.keys, sequence.position + a.first, sequence.position + a.last};
}

inline bool each_query_is_few(const Attention &a) { return a.Nq == a.documents; }

// How many entries there may be. Before the first document and behind the last one are tiles, too.
inline int64_t most_few(const Attention &a) { return a.documents; }
inline int64_t most_sequence_tiles(const Attention &a, int Br) { return a.Nq / Br + a.documents + 2; }

// How documents are shared out.
struct SequencePlan {
    int Br = 0;            // queries of an entry of `tiles`
    int most_queries = 0;  // of a document that is an entry of `few`; 0: decode.cu takes none
    int rows = 0;          // most rows of an entry for one key head: its queries of all heads that share it
    int row_tiles = 0;     // tiles of these rows, each of which is a work item for each chunk
    int resident = 0;      // blocks of decode.cu that run at once if items are whole rows; 0: items are chunks
    bool each_query = false;
};

// The bytes of the tables. With `memory`, not null, it also sets where in it they are.
inline int64_t place_sequences(Attention &a, int Br, char *memory) {
    const int64_t few = 256, tiles = few + most_few(a) * sizeof(Sequence);
    if (memory) {
        a.sequences.counts = (SequenceCounts *)memory;
        a.sequences.few = (Sequence *)(memory + few), a.sequences.tiles = (Sequence *)(memory + tiles);
    }
    return tiles + most_sequence_tiles(a, Br) * sizeof(Sequence);
}

// Returns null, or why it hasn't launched.
const char *fill_sequences_cuda(const Attention &a, const SequencePlan &plan, CUstream_st *stream);

}  // namespace minimal_attn
