// tile.h: the sizes of a float32 kernel, and what producer, splitters and consumers share.
#pragma once
#include "hopper/float32/split.h"
#include "hopper/scheduler.h"
#include "portable/float32_block.cuh"

namespace minimal_attn::hopper {

// D, Br, Bc; stages of the pipeline of Kj and Vj; splitter groups of the producer warpgroup; blocks on a
// multiprocessor.
template <int D_, int Br_, int Bc_, int Stages_, int Splitters_, int BlocksPerSM_ = 1>
struct Float32Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, Stages = Stages_, BlocksPerSM = BlocksPerSM_;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);  // a consumer warpgroup has 64 rows
    // Registers of a thread. The producer warpgroup keeps what the consumers can spare, for more loads under way. Its
    // code has no float division: that would call a subroutine, which doesn't know of setmaxnreg.
    static constexpr int ProducerRegisters = Consumers == 1 ? 96 : Consumers == 4 ? 32 : D > 128 ? 40 : 56;
    // A tile has as many bytes in hi and lo as in float32s: boxes of 128 bytes a row.
    static constexpr int Boxes = D / 32, QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128;
    // Groups of one warp are faster than one of two: one group loads and publishes while another splits. But each group
    // takes a float32 tile of shared memory. Where there is room for one tile only, two warps share it.
    static constexpr int Splitters = Splitters_, SplitterWarps = Splitters > 1 ? 1 : 2;
    // One tile of keys and of queries: single.h
    static constexpr bool IsSingle = Consumers == 1;
    static constexpr bool AlignKeys = true;
    // One tile for each D, since each takes long to compile: d64, d128_few (d128 has no shared memory left), d256.
    static constexpr bool ServesRanges = Br == (D == 64 ? 256 : 128);
    using Fallback = FloatTile<D, 32, D <= 128 ? 32 : 16, 16, 8, 1>;  // fallback.h: 128 threads, 31, 55 or 69 KB
    static_assert(Bc % 16 == 0 && D % 64 == 0 && Consumers <= 4);
    static_assert(Splitters * SplitterWarps <= 3);  // the producer's first warp has other things to do
};

// A work tile, and what the producer has worked out about it for the consumers.
template <class Mask>
struct Float32Work : WorkTileOf<Mask> {
    int n;          // its number, TileScheduler's
    int position;   // in the tile queue, so that a consumer needn't keep it in a register
    bool fallback;  // hi and lo can't represent K or V, or there is no key: the fallback computes all rows
    // The largest inverse scales of the head's Kj and Vj (with ranges: of those that it sees). V's is 0 if all are
    // zeros. With the single tile they are inf if hi and lo can't represent the numbers; `fallback` is false there.
    float inverse_scale_K, inverse_scale_V;
    int ends[4];                          // of the keys that each consumer's rows see
    alignas(8) Keys fully_visible[4];     // of each consumer's rows; aligned, so that one instruction reads it
    int begins[kIsRanges<Mask> ? 4 : 1];  // of the tiles of keys that each consumer's rows see
};

// Where a consumer begins. Under a band all begin together.
template <class Mask>
__device__ const int &begin_of(const Float32Work<Mask> &work, int warpgroup) {
    return kIsRanges<Mask> ? work.begins[warpgroup] : work.visible.begin;
}

// Tiles n to end of a key head: tile 2 j is Kj, 2 j + 1 is Vj.
struct SplitJob {
    int head;  // its index in Workspace::heads; below 0: there are no more jobs
    int n, end;
    Keys keys;       // the valid ones; other rows become 0
    int not_before;  // a splitter waits until so many work tiles are taken

    __device__ bool is_V() const { return n % 2; }
    __device__ int j() const { return n / 2; }
    template <class Tile>
    __device__ ValidRows valid_rows() const {
        return {{keys.begin - j() * Tile::Bc, keys.end - j() * Tile::Bc}, is_V()};
    }
};

// All tiles begin at multiples of 1024 bytes, since TMA swizzles them by address.
template <class Tile, class Mask>
struct SharedStorage {
    static_assert(Tile::QBytes % 1024 == 0 && Tile::KBytes % 1024 == 0);
    alignas(1024) unsigned char Qi[Tile::Consumers][1][Tile::QBytes];
    unsigned char tiles[Tile::Stages][Tile::KBytes];  // Kj and Vj in turn, as they are used
    unsigned char float32_tiles[Tile::Splitters][Tile::IsSingle ? 1 : Tile::KBytes];  // what each splitter splits
    Float32Work<Mask> work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], Q[Tile::Consumers][1], KV[Tile::Stages];
    float4 inverse_scale[Tile::Stages];  // in x: a bulk copy has at least 16 bytes
    float inverse_scale_Q[Tile::Consumers];
    int deferred[Tile::Consumers];  // of each consumer (fallback.h): the work tile deferred most recently, or -1
    // Where a splitter group exchanges numbers. Aligned, so that a 16-byte read takes no other group's words along.
    alignas(16) int2 groups[Tile::Consumers + Tile::Splitters][4];
    double flushed_l[Tile::Br];  // see flush_row_sum
    float m_of_O[Tile::Br];      // see flush_O
    // Of splitters.h
    Barrier tile_loaded[Tile::IsSingle ? 2 : Tile::Splitters];  // each splitter's tile; in single.h Kj and Vj
    SplitJob current_job[Tile::Splitters];                      // what each splitter splits now
    SplitJob next_job[Tile::Consumers + Tile::Splitters];       // a group's next one; behind the last job head < 0
};

// For both producers, `produce` (forward.cu) and `produce_and_split` (single.h): writes the n-th work tile, or that
// there is none, to the tile queue. The caller then arrives at its `full`.
template <class Tile, class Mask>
__device__ WorkTileOf<Mask> describe_work(const Parameters &p, SharedStorage<Tile, Mask> &shared,
                                          const Pipeline<kQueueStages> &tile_queue, int n) {
    const WorkTileOf<Mask> tile = TileScheduler<Tile, Mask>{p}.tile(n);
    Float32Work<Mask> &work = shared.work[tile_queue.stage()];
    static_cast<WorkTileOf<Mask> &>(work) = tile;
    work.n = n, work.position = tile_queue.position, work.fallback = false;
    if (tile.b < 0) return tile;
    for (int i0 = tile.i0, warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup, i0 += 64) {
        work.ends[warpgroup] = end_of_keys(tile, i0);
        work.fully_visible[warpgroup] = fully_visible_keys(p, tile, i0);
        if constexpr (kIsRanges<Mask>) {
            const Keys any = keys_of_any(tile.mask, i0, i0 + 64);
            work.begins[warpgroup] = empty(any) ? tile.visible.begin : any.begin / Tile::Bc * Tile::Bc;
        }
    }
    return tile;
}

}  // namespace minimal_attn::hopper
