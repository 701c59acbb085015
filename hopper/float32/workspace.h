// workspace.h: tiles of K and V in hi and lo, which blocks split for one another, in the device's memory.
//
//     tiles_taken, jobs_taken    two counters: the next work tile and the next split job
//     heads          one HeadStatus a key head: how many of its tiles are split, with what scales
//     tiles          with ranges, of each tile: 0, or when it is split the bits of its inverse scale, plus 1
//     inverse_scale  of each tile: (heads, 2 Tc), Kj and Vj in turn
//     hi_lo          likewise, the tiles themselves, as they lie in shared memory
//
// A block that waits for a tile can't deadlock. Blocks that already run split the tiles, in the order of heads, which
// is also that of work tiles. Before a splitter waits, it has published all that it has split (docs/float32.md).
#pragma once
#include "hopper/float32/tile.h"

namespace minimal_attn::hopper {

// Splitters are at most so many work tiles a block ahead of the consumers. 1, 2 and 6 are up to 2 % slower at d 64,
// N 512. Without a bound K and V fall out of the L2 cache: d 64, N 2048 loses 7 %.
constexpr int kTilesAhead = 4;

// All begin as 0. Floats, which are not negative, are stored as their bits, so that atomicMax compares them.
struct HeadStatus {
    int tiles_split;                       // of K and of V
    int inverse_scale_K, inverse_scale_V;  // the largest of all tiles; inf if hi and lo can't represent one
    int scale_V;                           // the largest scale of tiles of V that aren't zeros
};

struct Workspace {
    HeadStatus *heads;  // null: no workspace, because there is no key or the tile is `single`
    int *tiles_taken, *jobs_taken;
    float4 *inverse_scale;  // in x; 0 of a tile of zeros
    unsigned char *hi_lo;
    int batches, Tc;  // batches (1 if all have the same K and V), tiles of keys
    Divisor jobs_per_head;
    int tiles_per_job;      // of K or of V: one, or more where there are many
    float *sums;            // of each consumer's fallback (float_block); null if there are few keys
    int64_t counter_bytes;  // tiles_taken, jobs_taken, heads and tiles
    int *tiles;             // with ranges
};

struct Float32Parameters : Parameters {
    Workspace workspace;
};

template <class Tile>
__host__ __device__ int tiles_before(int key) {
    return (key + Tile::Bc - 1) / Tile::Bc;
}

template <class Mask>
__device__ int workspace_head(const Float32Parameters &p, const WorkTileOf<Mask> &work) {
    return (p.workspace.batches > 1 ? work.b * p.Hkv : 0) + work.key_head;
}

__device__ inline int64_t tile_index(const Workspace &w, int head, int n) { return (int64_t)head * 2 * w.Tc + n; }

template <class Tile>
__device__ unsigned char *hi_lo_tile(const Workspace &w, int head, int n) {
    return opaque(w.hi_lo + tile_index(w, head, n) * Tile::KBytes);
}

// The next job with a tile in it. With ranges a head's last tiles come first, as its work tiles do.
template <class Tile, class Mask>
__device__ SplitJob take_split_job(const Float32Parameters &p) {
    const Workspace &w = p.workspace;
    for (;;) {
        const int job = atomicAdd(w.jobs_taken, 1), head = job / w.jobs_per_head, b = head / p.Hkv, h = head % p.Hkv;
        if (b >= w.batches) return {-1};
        const Keys keys = mask_of_batch<Mask>(p, b).keys;
        int job_of_head = job % w.jobs_per_head;
        if (kIsRanges<Mask>) job_of_head = w.jobs_per_head - 1 - job_of_head;
        const int first = job_of_head * w.tiles_per_job, n = max(first, 2 * (keys.begin / Tile::Bc));
        const int end = min(first + w.tiles_per_job, 2 * tiles_before<Tile>(keys.end));
        const int query_head = b * p.Hq + h * p.group;  // the head's first work tile, in the scheduler's order:
        const int first_work =
            query_head < p.sequential_heads ? query_head * p.Tr : p.sequential_heads * (p.Tr - 1) + query_head;
        if (n < end) return {head, n, end, keys, first_work - kTilesAhead * p.grid};
    }
}

// By one thread, after all threads of its group have written their part of tile n
template <class Mask>
__device__ void publish(const Workspace &w, const SplitJob &job, float inverse_scale) {
    w.inverse_scale[tile_index(w, job.head, job.n)].x = inverse_scale;
    if constexpr (kIsRanges<Mask>) {
        fence_async_global();
        return add_release(w.tiles[tile_index(w, job.head, job.n)], __float_as_int(inverse_scale) + 1);
    }
    HeadStatus &head = w.heads[job.head];
    atomicMax(job.is_V() ? &head.inverse_scale_V : &head.inverse_scale_K, __float_as_int(inverse_scale));
    if (job.is_V() && inverse_scale > 0.f) atomicMax(&head.scale_V, __float_as_int(inverse_of_power(inverse_scale)));
    fence_async_global();  // bulk copies will read the tile: the PTX manual asks for a fence here and where they begin
    add_release(head.tiles_split, 1);
}

// Waits until all tiles of the work tile's head are split. The fallback has to compute the work tile if hi and lo can't
// represent K or V, or if scales of V are 2^60 apart: Oi, in units of the last Vj, would overflow.
template <class Tile>
__device__ void wait_for_split(const Float32Parameters &p, Float32Work<BandOf<int>> &work) {
    const Keys keys = work.mask.keys;
    work.fallback = empty(keys);
    if (work.fallback) return;
    const HeadStatus &head = p.workspace.heads[workspace_head(p, work)];
    while (load_acquire(head.tiles_split) < 2 * (tiles_before<Tile>(keys.end) - keys.begin / Tile::Bc)) {
    }
    const float K = __int_as_float(head.inverse_scale_K), V = __int_as_float(head.inverse_scale_V);
    work.inverse_scale_K = nonzero_inverse_scale(K), work.inverse_scale_V = V;
    // | instead of ||: the three loads don't wait for one another.
    work.fallback = (fmaxf(K, V) == INFINITY) | (V * __int_as_float(head.scale_V) >= 0x1p60f);
}

// With ranges a work tile waits for the tiles that it sees, and their scales count. So a document that isn't split yet,
// or that hi and lo can't represent, concerns no work tile that sees none of its tiles. By a warp: even lanes have Kj.
template <class Tile>
__device__ void wait_for_split(const Float32Parameters &p, Float32Work<Ranges> &work) {
    const int lane = threadIdx.x, end = 2 * tiles_before<Tile>(work.visible.end);
    int largest = 0, negated = -INT_MAX;  // of the bits of its inverse scales that are not 0; of these, negated
    for (int n = 2 * (work.visible.begin / Tile::Bc) + lane; n < end && !empty(work.mask.keys); n += 32) {
        int x;
        while ((x = load_acquire(p.workspace.tiles[tile_index(p.workspace, workspace_head(p, work), n)])) == 0) {
        }
        if (x > 1) largest = max(largest, x - 1), negated = max(negated, 1 - x);
    }
    const int K = warp_max(lane % 2 == 0 ? largest : 0), V = warp_max(lane % 2 == 0 ? 0 : largest);
    const int least_V = -warp_max(lane % 2 == 0 ? -INT_MAX : negated);
    __syncwarp();  // what all lanes have waited for can be read
    if (lane != 0) return;
    work.inverse_scale_K = nonzero_inverse_scale(__int_as_float(K)), work.inverse_scale_V = __int_as_float(V);
    work.fallback = empty(work.mask.keys) || max(K, V) == __float_as_int(INFINITY) || V - least_V >= 60 << 23;
}

// Fills w with addresses in `memory`. Returns the bytes that it needs: 0 without keys and for the single tile, where
// w.heads stays null.
template <class Tile>
int64_t layout_workspace(const Attention &a, int multiprocessors, void *memory, Workspace &w) {
    if (Tile::IsSingle || a.Nk == 0) return 0;
    const bool same_batch = a.k_stride.batch == 0 && a.v_stride.batch == 0 && !a.seqlens_k && !a.leftpad_k;
    w.batches = same_batch ? 1 : a.B, w.Tc = tiles_before<Tile>(a.Nk);
    const int64_t heads = w.batches * a.Hkv, tiles = heads * 2 * w.Tc;
    w.tiles_per_job = clamp(tiles / (16 * multiprocessors), int64_t(1), std::max<int64_t>(1, w.Tc / 32));
    w.jobs_per_head = (2 * w.Tc + w.tiles_per_job - 1) / w.tiles_per_job;
    int64_t size = 0;
    const auto take = [&](auto *&part, int64_t bytes) {
        part = (std::remove_reference_t<decltype(part)>)((char *)memory + size), size += (bytes + 127) / 128 * 128;
    };
    take(w.tiles_taken, sizeof(int)), take(w.jobs_taken, sizeof(int));
    take(w.heads, heads * sizeof(HeadStatus)), take(w.tiles, has_ranges(a) ? tiles * sizeof(int) : 0);
    w.counter_bytes = size;
    take(w.inverse_scale, tiles * sizeof(float4)), take(w.hi_lo, tiles * Tile::KBytes);
    using Fallback = typename Tile::Fallback;
    if (a.Nk > 2 * kTilesOfSum * Fallback::Bc)
        take(w.sums, int64_t(multiprocessors) * Tile::Consumers * Fallback::SumFloats * sizeof(float));
    return size;
}

// Moves the counters, with which the workspace begins, to `counters`.
inline void move_counters(Workspace &w, const void *workspace, const Zeros &counters) {
    const auto move = [&](auto *&part) {
        part = (std::remove_reference_t<decltype(part)>)((char *)counters.memory + ((char *)part - (char *)workspace));
    };
    move(w.tiles_taken), move(w.jobs_taken), move(w.heads), move(w.tiles);
}

}  // namespace minimal_attn::hopper
