// flash.h: the contract. What attention is computed, as one plain struct: binding/call.cpp fills it, the backends
// compute it. No torch.
//
//     O = softmax(softmax_scale * Q K^T + mask) V,   and the softmax state (l, m) of Algorithm 1
//
// Names are the paper's (Dao et al. 2022, Algorithm 1): Br x Bc is the size of a tile of scores. In Qi, Kj, Sij the
// letters name tiles; alone, i is a query and j a key, and i0 and j0 begin a tile. What every backend needs to know
// about the mask stands here, and in ranges.h.
#pragma once

#include <cmath>
#include <cstdint>

// The functions below run on both sides; a plain C++ compiler lacks these keywords.
#ifdef __CUDACC__
#define MINIMAL_ATTN_HOST_DEVICE __host__ __device__
#else
#define MINIMAL_ATTN_HOST_DEVICE
#endif

struct CUstream_st;  // cudaStream_t is a pointer to it; named here so that call.cpp needs no CUDA header

namespace minimal_attn {

// The largest head dimension, of d and d_v.
constexpr int kMostD = 576;

enum class Dtype { float32, float16, bfloat16 };

constexpr int64_t kNoBound = int64_t(1) << 40;  // further than any key from any query

// Of a (B, H, N, d) or (B, H, N, d_v) tensor, in elements; the last dimension is contiguous.
struct Strides {
    int64_t batch, head, row;
};

// Keys, queries or tiles of them: begin <= x < end.
struct Interval {
    int begin, end;
};
using Keys = Interval;

// The tables of ranges.h, which says what they hold, in memory of q's device.
struct alignas(16) TileKeys {
    Keys any, all;
    bool grows;
};
struct BatchFlags {
    bool grows, any_blind;
};
struct RangeTables {
    Keys *rows;       // of each query
    TileKeys *tiles;  // of each 64 queries
    // For the backward pass on a GPU:
    Interval *seeing;     // of each key
    Interval *meeting;    // of each 64 keys
    BatchFlags *batches;  // of each batch
};

// An entry of the tables of sequences.h: packed queries and the keys that they see, those of `keys` with
// i + position + first <= j <= i + position + last. i and j count from the first of all.
struct Sequence {
    Interval queries;
    Keys keys;
    int position, first_item, entries;
};
struct SequenceCounts {
    int few, tiles;
    bool whole_rows;
    int tiles_taken;
};
struct SequenceTables {  // in memory of q's device
    SequenceCounts *counts;
    Sequence *few, *tiles;
};

// What makes a score of a product Qi Kj^T: scores.h computes it.
struct Scores {
    float scale;    // the caller's softmax_scale
    float softcap;  // 0: there is none, and scores don't change
    float ratio;    // scale / softcap
};

// Of a tensor that is broadcast to (B, Hq, Nq, Nk), in elements: any numbers.
struct PairStrides {
    int64_t batch, head, row, key;
};

// What is added to a scaled score, by the pair of query i and key j: scores.h computes it.
struct Terms {
    // Multiplies the product, or with softcap its tanh, before terms are added. Attention::softmax_scale is 1.
    float unit;
    // ALiBi (else null): -slope |p_i - j|, with the slope alibi_slopes[b * slopes_stride + h * slope_stride].
    const float *alibi_slopes;
    int64_t slopes_stride, slope_stride;
    int64_t offset;  // an int offset, which p_i includes
    int *positions;  // in the tables' memory (ranges.h), of each query: p_i, the key that it is at
    // attn_mask and bias, or null. What is hidden has the term -inf.
    const unsigned char *mask;  // not 0: visible
    const void *bias;
    bool bias_is_float32;  // else it has q's dtype
    bool in_pairs;         // whether those of two neighbouring keys may be read at once, from an even key on
    PairStrides mask_stride, bias_stride;
};

// What a bool mask says of 128 queries and 64 tiles of 128 keys, a bit for each tile. In `shown` it is 1 where the mask
// shows a pair of the tile, in `partial` where it hides one. For backward passes ranges count, too (cut_shown).
struct ShownTiles {
    uint64_t shown, partial;
};

// Of a bool mask that heads share, on a GPU (ranges.h): tables in the memory of the others.
struct MaskTables {
    unsigned char *tiles;  // of each tile of 128 queries x 128 keys: a MaskTile
    ShownTiles *shown;     // words_of_shown(a) entries for each 128 queries, or null
    bool skips_tiles;      // whether the kernel that computes the call reads `shown`
};

// Which weights are dropped: dropout.h computes it.
struct Dropout {
    unsigned dropped;     // of 65536 weights, on average; 0: there is no dropout
    float kept;           // what the others are multiplied by
    const int64_t *seed;  // one, in memory of q's device
};

struct Attention {
    // q (B, Hq, Nq, d); k (B, Hkv, Nk, d); v (B, Hkv, Nk, d_v), where d_v stands below. Query head h reads key head
    // h / (Hq / Hkv).
    Dtype dtype;
    int64_t B, Hq, Hkv;
    int Nq, Nk, d;
    const void *q, *k, *v;
    Strides q_stride, k_stride, v_stride;
    float softmax_scale;  // of what kernels mask: a product, a tanh (then it is softcap) or a whole score (1): scores.h

    // With a block_table (else null) k and v are (pages, Hkv, page_size, d or d_v). Key j of batch b is row j %
    // page_size of the page block_table[b * block_table_stride + j / page_size], clamped to 0..pages - 1. Entries
    // behind a batch's last key may be anything. KeyRows, below, finds a row.
    const int *block_table;  // on the device of q
    int64_t block_table_stride, pages;
    int page_size;

    // The mask. Batch b has the keys leftpad_k[b] <= j < n with n = seqlens_k[b], both clamped; without them 0 and Nk.
    // Of these, query i sees i + p + first <= j <= i + p + last. The arrays are (B,) on the device of q, or null.

    // The position p is offset[b] if offset is given, else n - Nq if offset_from_end, else 0. An int offset is already
    // added to first and last. Without a bound these are -+kNoBound, so that sums can't overflow.
    const int *seqlens_k, *leftpad_k, *offset;
    bool offset_from_end;
    int64_t first, last;

    // The state so far, float32, or null: o_in (B, Hq, Nq, d_v); l_in, m_in (B, Hq, Nq), contiguous.
    const float *o_in, *l_in, *m_in;
    Strides o_in_stride;

    // The results. o is float32 with l and m, else it has q's dtype. l and m, the state, are (B, Hq, Nq), contiguous.
    // lse (B, Hq, Nq) is m + log(l). Null: not wanted.
    void *o;
    Dtype o_dtype;
    Strides o_stride;
    float *l, *m, *lse;
    Strides lse_stride;  // all three count
    int lse_rows;        // at least Nq; on a GPU those from Nq on become inf, as PyTorch's backward pass wants them

    // With key_ranges (else null) query i of batch b also sees only begin <= j < end: the two ints at key_ranges[b *
    // key_ranges_stride + 2 * i], of any value. From here on members stand last, so that those above keep their places
    // in a kernel's parameters.
    const int *key_ranges;
    int64_t key_ranges_stride;
    RangeTables ranges;  // the whole mask then: of a band kernels read only `keys`

    // With cu_seqlens_q and cu_seqlens_k (else null) B is 1. Document n has the queries cu_seqlens_q[n] <= i <
    // cu_seqlens_q[n + 1] and the keys likewise, clamped. The band holds within it, as in a batch of its own. Queries
    // of no document see nothing.
    const int *cu_seqlens_q, *cu_seqlens_k;
    int documents;

    // If given (documents,), only the first prefix_k[n] keys of document n count. Positions don't change.
    const int *prefix_k;
    // If given (documents,), document n has only its first seqused_k[n] keys, and its last query is at the last of
    // them.
    const int *seqused_k;

    // Whether documents are computed one by one, by the tables of sequences.h, and not by ranges.
    bool by_sequence;
    SequenceTables sequences;

    // How scores change before the mask, and whether the kernel that computes it is general: it reads tables of ranges.
    Scores scores;
    bool is_general;
    Terms terms;

    int d_v;  // the columns of v and o: d in most models. Behind the rest, so that members keep their places in parameters
    Dropout dropout;
    MaskTables mask_tables;
};

// The columns of a tile that has either's rows.
inline int most_columns(const Attention &a) { return a.d > a.d_v ? a.d : a.d_v; }

inline int element_size(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// The backward pass: the gradients of a loss in q, k and v, from those in o and in the log-sum-exp.
struct Gradient {
    // q, k, v and the mask of the forward pass; not its states and results. Then o, in q's dtype, and lse (B, Hq, Nq).
    // Both may cover more keys than k has: P = exp(S - lse) is the part of k's keys. If they cover k's keys alone, the
    // call `is_complete`: rows with a large lse (is_large, below) are then normalised again.
    Attention a;
    const void *o, *do_;  // `do` is a word of C++
    Strides o_stride, do_stride;
    const float *lse, *dlse;  // (B, Hq, Nq), contiguous; dlse may be null: 0
    bool is_complete;         // whether o and lse cover k's keys alone: no other chunk, no sinks

    // The results in q's dtype or float32, which cover k's keys alone.
    Dtype out_dtype;
    void *dq, *dk, *dv;
    Strides dq_stride, dk_stride, dv_stride;
    bool deterministic;  // the same bits on every run. Without it hopper may add dQ in any order

    // The gradient of a bias (Terms), or null. It is dense, in q's dtype or float32; its strides are 0 where the bias
    // is broadcast or has one number.
    void *dbias;
    Dtype dbias_dtype;
    PairStrides dbias_stride;
};

// Whether a row's lse is large: rounding it to float32 changes P too much. So do scores that are rounded otherwise than
// in the forward pass. Below 16 the error of P is less than 2e-6. With few keys there is hardly another error, so all
// rows count as large. With softmax_scale 0 no score is rounded, and none is large. docs/numerics.md has more.
MINIMAL_ATTN_HOST_DEVICE inline bool is_large(const Attention &a, float lse, float bound = 16.f) {
    return fabsf(lse) > (a.Nk <= 8 ? 0.f : bound) && fabsf(lse) < INFINITY && a.softmax_scale != 0.f;
}

// Whether there are many keys for each query: then a tile of queries of two documents would meet too many.
inline bool has_many_keys(int64_t Nq, int64_t Nk) { return Nk > 2 * Nq; }

// Whether causal or a window bounds what a query sees.
inline bool is_banded(const Attention &a) { return a.first > -kNoBound || a.last < kNoBound; }
// Whether the mask is in tables (ranges.h).
MINIMAL_ATTN_HOST_DEVICE inline bool has_ranges(const Attention &a) {
    return a.key_ranges || (a.cu_seqlens_q && !a.by_sequence) || a.is_general;
}
// Whether anything but the number of keys does.
inline bool is_masked(const Attention &a) {
    return is_banded(a) || a.seqlens_k || a.leftpad_k || a.key_ranges || a.cu_seqlens_q;
}
// Whether one band, the same for all batches, is the whole mask.
inline bool has_same_band(const Attention &a) {
    return !a.seqlens_k && !a.leftpad_k && !a.offset && !a.key_ranges && !a.cu_seqlens_q;
}

MINIMAL_ATTN_HOST_DEVICE inline bool empty(Interval x) { return x.begin >= x.end; }

// What the queries of one batch see: query i sees the keys of `keys` with i + first <= j <= i + last.
template <class Int>
struct BandOf {
    Keys keys;
    Int first, last;
};
using Band = BandOf<int64_t>;

MINIMAL_ATTN_HOST_DEVICE inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

MINIMAL_ATTN_HOST_DEVICE inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

MINIMAL_ATTN_HOST_DEVICE inline int end_of_keys(const Attention &a, int64_t b) {
    return a.seqlens_k ? clamp(a.seqlens_k[b], 0, a.Nk) : a.Nk;
}

// The position of query 0, less an int offset.
MINIMAL_ATTN_HOST_DEVICE inline int64_t position_of(const Attention &a, int64_t b, int end) {
    return a.offset ? a.offset[b] : a.offset_from_end ? (int64_t)end - a.Nq : 0;
}

MINIMAL_ATTN_HOST_DEVICE inline Band band_of(const Attention &a, int64_t b) {
    const int end = end_of_keys(a, b);
    const int begin = a.leftpad_k ? clamp(a.leftpad_k[b], 0, end) : 0;
    const int64_t position = position_of(a, b, end);
    return {{begin, end}, position + a.first, position + a.last};
}

// The same for a backend that is short of registers: i and j are below 2^28, so 2^29 is beyond all keys.
MINIMAL_ATTN_HOST_DEVICE inline BandOf<int> narrow(const Band &band) {
    const int64_t beyond = 1 << 29;
    return {band.keys, (int)clamp(band.first, -beyond, beyond), (int)clamp(band.last, -beyond, beyond)};
}

template <class Int>
MINIMAL_ATTN_HOST_DEVICE Keys keys_of_row(const BandOf<Int> &band, int i) {
    const int begin = (int)clamp(i + band.first, (Int)band.keys.begin, (Int)band.keys.end);
    return {begin, (int)clamp(i + band.last + 1, (Int)begin, (Int)band.keys.end)};
}

// The band's bounds only grow with i, so the keys of a tile of queries i0 <= i < i1 follow from its first and last row.
// Keys that any of them sees: no other tile of keys need be loaded.
template <class Int>
MINIMAL_ATTN_HOST_DEVICE Keys keys_of_any(const BandOf<Int> &band, int i0, int i1) {
    return {keys_of_row(band, i0).begin, keys_of_row(band, i1 - 1).end};
}

// Keys that all of them see: a tile of keys within needs no mask.
template <class Int>
MINIMAL_ATTN_HOST_DEVICE Keys keys_of_all(const BandOf<Int> &band, int i0, int i1) {
    return {keys_of_row(band, i1 - 1).begin, keys_of_row(band, i0).end};
}

// Likewise, which of Nq queries see key j of band.keys.
template <class Int>
MINIMAL_ATTN_HOST_DEVICE Interval queries_of_key(const BandOf<Int> &band, int Nq, int j) {
    const int begin = (int)clamp(j - band.last, (Int)0, (Int)Nq);
    return {begin, (int)clamp(j - band.first + 1, (Int)begin, (Int)Nq)};
}

// Queries that see any of `keys`, which are in band.keys.
template <class Int>
MINIMAL_ATTN_HOST_DEVICE Interval queries_of_any(const BandOf<Int> &band, int Nq, Keys keys) {
    if (empty(keys) || band.first > band.last) return {0, 0};
    return {queries_of_key(band, Nq, keys.begin).begin, queries_of_key(band, Nq, keys.end - 1).end};
}

// The rows of K or V, `x`, that belong to batch b and key head h, wherever its pages are.
template <class T>
struct KeyRows {
    const T *head;
    int64_t page_stride, row_stride;
    const int *block_table;  // the batch's
    int page_size, last_page;

    MINIMAL_ATTN_HOST_DEVICE KeyRows(const Attention &a, const void *x, const Strides &stride, int64_t b, int64_t h)
        : head((const T *)x + (a.block_table ? 0 : b * stride.batch) + h * stride.head),
          page_stride(stride.batch),
          row_stride(stride.row),
          block_table(a.block_table ? a.block_table + b * a.block_table_stride : nullptr),
          page_size(a.page_size),
          last_page((int)(a.pages - 1)) {}

    MINIMAL_ATTN_HOST_DEVICE const T *operator[](int j) const {
        if (!block_table) return head + j * row_stride;
        const int page = clamp(block_table[j / page_size], 0, last_page);
        return head + page * page_stride + j % page_size * row_stride;
    }

    // Then all of their rows are row_stride apart.
    MINIMAL_ATTN_HOST_DEVICE bool have_one_page(Keys keys) const {
        return !block_table || keys.begin / page_size == (keys.end - 1) / page_size;
    }
};

// How a row ends: o = weight_Oi * Oi + weight_o_in * o_in. If reads_Oi or reads_o_in is false, its term must not be
// computed: 0 times NaN is NaN. Without an earlier state there is no o_in, and reads_o_in has no meaning.
struct RowEnd {
    float l, m, weight_Oi, weight_o_in;
    bool reads_Oi, reads_o_in;
};

// The end of a row where Oi is divided by l once, as in FlashAttention-2. li, mi and the undivided Oi are joined with
// the earlier state, as if that were one more tile. Without a state l_in = 0 and m_in = -inf.
MINIMAL_ATTN_HOST_DEVICE inline RowEnd end_of_row(bool sees_key, float li, float mi, float l_in, float m_in) {
    if (!sees_key) return {l_in, m_in, 0.f, 1.f, false, true};
    // Nothing has counted yet. If every score was -inf, 0 / 0, as in softmax
    if (l_in == 0.f) return {li, mi, li == 0.f ? NAN : 1.f / li, 0.f, true, false};
    const float m = fmaxf(mi, m_in);
    const float alpha = l_in * expf(m_in - m);
    const float beta = li == 0.f ? 0.f : expf(mi - m);
    const float l = alpha + beta * li;
    return {l, m, beta / l, alpha / l, true, true};
}

MINIMAL_ATTN_HOST_DEVICE inline float &lse_of_row(const Attention &a, int64_t b, int64_t h, int i) {
    return a.lse[b * a.lse_stride.batch + h * a.lse_stride.head + i * a.lse_stride.row];
}

// Step 13 for query i of head h: l, m and lse, where they are wanted. lse is -inf in a row that sees no key.
MINIMAL_ATTN_HOST_DEVICE inline void store_l_m_lse(const Attention &a, int64_t b, int64_t h, int i, float l, float m) {
    const int64_t at = (b * a.Hq + h) * a.Nq + i;
    if (a.l) a.l[at] = l, a.m[at] = m;
    if (a.lse) lse_of_row(a, b, h, i) = m + logf(l);
}

// The GPU, as far as a plan depends on it.
struct Device {
    int multiprocessors;
    int shared_memory;  // bytes that a block may have
};

// How a backend computes one call. Made once a call, on the host, before anything is allocated or launched.
struct Plan {
    const char *kernel;           // as minimal_attn.explain names it
    int tile;                     // which of the kernel's tiles, in an order of its own; decode: the number of stages
    int Br, Bc, D;                // that tile: queries, keys, columns; d is rounded up to D
    int64_t grid;                 // blocks, or on the CPU tiles of queries
    int threads;                  // of a block
    int shared_memory;            // bytes of a block
    int64_t workspace;            // bytes in the device's memory
    int multiprocessors;          // the device's
    const char *error = nullptr;  // why this device can't run it
};

// The backends, which binding/backends.h lists. Each computes the whole contract on its device. A launch gets the
// plan's workspace, at a multiple of 256 bytes, and returns null, or why nothing was launched.
Plan plan_paper(const Attention &attention, const Device &device);
const char *launch_paper(const Attention &attention, const Plan &plan, void *workspace, CUstream_st *stream);
Plan plan_cpu(const Attention &attention, const Device &device);
const char *launch_cpu(const Attention &attention, const Plan &plan, void *workspace, CUstream_st *stream);
Plan plan_portable(const Attention &attention, const Device &device);
const char *launch_portable(const Attention &attention, const Plan &plan, void *workspace, CUstream_st *stream);
namespace hopper {
Plan plan_half(const Attention &attention, const Device &device);
const char *launch_half(const Attention &attention, const Plan &plan, void *workspace, CUstream_st *stream);
Plan plan_float32(const Attention &attention, const Device &device);
const char *launch_float32(const Attention &attention, const Plan &plan, void *workspace, CUstream_st *stream);
}  // namespace hopper

// Their backward passes. The name of paper's kernel:
constexpr const char *kPaperBackward = "Algorithm 4";
Plan plan_paper_backward(const Gradient &gradient, const Device &device);
const char *launch_paper_backward(const Gradient &gradient, const Plan &plan, void *workspace, CUstream_st *stream);
Plan plan_portable_backward(const Gradient &gradient, const Device &device);
const char *launch_portable_backward(const Gradient &gradient, const Plan &plan, void *workspace, CUstream_st *stream);
namespace hopper {
bool serves_backward(const Gradient &gradient);  // else portable does
bool sums_bias(const Gradient &gradient);        // whether it computes dbias, too
Plan plan_half_backward(const Gradient &gradient, const Device &device);
const char *launch_half_backward(const Gradient &gradient, const Plan &plan, void *workspace, CUstream_st *stream);
}  // namespace hopper
// The gradient of a bias alone, on all GPU backends (portable/bias_gradient.cu).
Plan plan_bias_cuda(const Gradient &gradient, const Device &device);
const char *launch_bias_cuda(const Gradient &gradient, const Plan &plan, void *workspace, CUstream_st *stream);
Plan plan_cpu_backward(const Gradient &gradient, const Device &device);
const char *launch_cpu_backward(const Gradient &gradient, const Plan &plan, void *workspace, CUstream_st *stream);

// For tests. The instruction sets that this CPU has, the best first, null at the end.
const char *const *cpu_instructions();
// Sets the best one that plan_cpu may choose. Returns the last setting, or null if this CPU has no `name`.
const char *limit_cpu_instructions(const char *name);

}  // namespace minimal_attn
