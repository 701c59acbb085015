// half.h: what the kernels of half types have in common: tiles are loaded by TMA, one after the other, and multiplied
// by wgmma, in turns. A tile in shared memory is boxes of 64 columns, one behind the other.
#pragma once
#include "hopper/scheduler.h"
#include "hopper/tma.h"

namespace minimal_attn::hopper {

// A tile of keys in pages: pieces of p.rows_of_piece rows, each within a page.
template <int Rows, int Boxes>
struct PagedTile {
    static constexpr int Pieces = Rows / 16;  // or fewer
    int page[Pieces];

    __device__ PagedTile(const Parameters &p, int b, int j0) {
        const int *const table = p.a.block_table + b * p.a.block_table_stride;
#pragma unroll
        for (int n = 0; n < Pieces; ++n)
            page[n] = n * p.rows_of_piece < Rows ? table[min(j0 + n * p.rows_of_piece, p.a.Nk - 1) / p.page_size] : 0;
    }
    __device__ void load(const Parameters &p, unsigned char *tile, const TensorMap &tensor, int j0, int h,
                         Barrier &full) const {
        arrive_expect_tx(full, Rows * Boxes * 128);
#pragma unroll
        for (int n = 0; n < Pieces; ++n) {
            const int row = n * p.rows_of_piece;
            if (row >= Rows) break;
            for (int box = 0; box < Boxes; ++box)
                tma_load(tile + box * Rows * 128 + row * 128, tensor.map, box * kBoxColumns, (j0 + row) % p.page_size,
                         h * tensor.head, clamp(page[n], 0, p.last_page) * tensor.batch, full);
        }
    }
};

// Loads the tiles of a work tile's visible keys, Bc rows each. Calls before_load() before each load. With terms
// `behind` gets the tile that follows, for consumers, unless it is null.
template <class Tile, class Mask, int Stages, int Bytes, class BeforeLoad>
__device__ void load_tiles(const Parameters &p, const TensorMap &tensor, const WorkTileOf<Mask> &work,
                           Pipeline<Stages> &pipeline, unsigned char (&tiles)[Stages][Bytes],
                           const BeforeLoad &before_load, ShownTile *behind = nullptr) {
    constexpr int Rows = Tile::Bc, Boxes = Bytes / (Rows * 128);
    if constexpr (kIsPaged<Mask>)
        if (p.rows_of_piece) {
            for (int j0 = work.visible.begin; j0 < work.visible.end; j0 += Rows, pipeline.advance()) {
                const PagedTile<Rows, Boxes> paged(p, work.b, j0);  // the table is read while a stage gets free
                before_load();
                pipeline.producer_acquire();
                paged.load(p, tiles[pipeline.stage()], tensor, j0, work.key_head, pipeline.full());
            }
            return;
        }
    ShownTile next;
    for (int j0 = work.visible.begin; j0 < work.visible.end; j0 = kHasTerms<Mask> ? next.j0() : j0 + Rows) {
        before_load();
        if constexpr (kHasTerms<Mask>) next = next_tile<Tile>(p.a, work, j0);
        pipeline.producer_acquire();
        if (kHasTerms<Mask> && behind) behind[pipeline.stage()] = next;
        load_tile<Rows, Boxes>(tiles[pipeline.stage()], tensor, j0, work.key_head, work.b, pipeline.full());
        pipeline.advance();
    }
}

// A producer thread calls use(work, previous) for each work tile and the one before it, then once with work.b < 0.
template <class SharedStorage, class Use>
__device__ void for_each_work_tile(SharedStorage &shared, const Use &use) {
    using Work = std::remove_reference_t<decltype(shared.work[0])>;
    Pipeline tile_queue{shared.tile_queue};
    for (Work previous{-1};; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const Work work = shared.work[tile_queue.stage()];
        use(work, previous);
        if (work.b < 0) return;
        previous = work;
    }
}

// What RangesOfTile points to.
template <class Tile>
struct RangeEntries {
    TileKeys tiles[Tile::Br / kRangeTile];
    Keys rows[Tile::Br];
};

// With ranges thread 96 is the scheduler: the reads of tables would delay thread 0's loads of Kj. Thread 96 takes a
// work tile as soon as the queue has a place. TMA copies the tile's entries to shared memory.
template <class Tile, class Mask, class SharedStorage>
__device__ void schedule(const Parameters &p, SharedStorage &shared) {
    Pipeline tile_queue{shared.tile_queue};
    const TileScheduler<Tile, Mask> scheduler{p};
    for (int n = -1;; tile_queue.advance()) {
        tile_queue.producer_acquire();
        n = scheduler.next(n);
        const auto work = scheduler.tile(n);
        auto &published = shared.work[tile_queue.stage()];
        published = work;
        if (work.b < 0) return arrive(tile_queue.full());
        RangeEntries<Tile> &to = shared.ranges[tile_queue.stage()];
        published.mask.tiles = to.tiles, published.mask.rows = to.rows;
        arrive_expect_tx(tile_queue.full(), sizeof to);
        bulk_load(to.tiles, work.mask.tiles, sizeof to.tiles, tile_queue.full());
        bulk_load(to.rows, work.mask.rows, sizeof to.rows, tile_queue.full());
    }
}

// With a band thread 0 is the scheduler, too. It takes a work tile after the last load of Kj of the one before. That is
// as late as possible: blocks end together (d 256, N 8192 causal: 5 %).
template <class Tile, class Mask, class SharedStorage>
__device__ void load_K(const Parameters &p, SharedStorage &shared, ShownTile *behind = nullptr) {
    Pipeline tile_queue{shared.tile_queue};
    Pipeline K{shared.K};
    if constexpr (kIsRanges<Mask>)
        return for_each_work_tile(shared, [&](const auto &work, const auto &) {
            if (work.b >= 0) load_tiles<Tile>(p, p.K, work, K, shared.Kj, [] {}, behind);
        });
    const TileScheduler<Tile, Mask> scheduler{p};
    for (int n = -1;; tile_queue.advance()) {
        tile_queue.producer_acquire();
        n = scheduler.next(n);
        const WorkTileOf<Mask> work = scheduler.tile(n);
        shared.work[tile_queue.stage()] = work;
        arrive(tile_queue.full());
        if (work.b < 0) return;
        load_tiles<Tile>(p, p.K, work, K, shared.Kj, [] {});
    }
}

// Consumers issue their products in turns, so that the exponentials of one run beside the products of another.
template <class Tile>
struct PingPong {
    int warpgroup;
    __device__ void wait_turn() const {
        if constexpr (Tile::TakesTurns) named_barrier_sync(Tile::kTurn + warpgroup, 256);
    }
    __device__ void pass_turn() const {
        if constexpr (Tile::TakesTurns) named_barrier_arrive(Tile::kTurn + (warpgroup + 1) % Tile::Consumers, 256);
    }
};

// Starts C = A B^T. A has 64 rows, B has 2 Count, both D columns.
template <class T, int D, int Count>
__device__ void issue_ABt(float (&C)[Count], Descriptor A, Descriptor B) {
    constexpr int ABox = 64 * 128, BBox = 2 * Count * 128;
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D; x += 16)
        wgmma_shared<Product::ABt>(T(), C, A + x / kBoxColumns * ABox + x % kBoxColumns * 2,
                                   B + x / kBoxColumns * BBox + x % kBoxColumns * 2, x > 0);
    wgmma_commit();
}

// Starts C += A B. A, 64 x 4 CountA, is in registers; B has 4 CountA rows.
template <class T, int CountC, int CountA>
__device__ void issue_AB(float (&C)[CountC], const uint32_t (&A)[CountA], Descriptor B) {
    B.low |= 4 * CountA * 128 / 16 << 16;  // from one box to the next
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4 * CountA; j += 16) wgmma_AB(T(), C, &A[j / 4], B + j * 128);
    wgmma_commit();
}

// A thread's numbers of an accumulator, in pairs, are its registers of the operand A.
template <class T, int Count>
__device__ void pack_operand(uint32_t (&A)[Count], const float (&C)[2 * Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) A[x] = pack<T>(C[2 * x], C[2 * x + 1]);
}

}  // namespace minimal_attn::hopper
