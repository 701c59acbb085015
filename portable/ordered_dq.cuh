// ordered_dq.cuh: the blocks of a backward kernel that own tiles of keys, and the order in which they add to dQ.
//
// A block walks the tiles of queries that see some of its keys (with ranges: meet them), and adds its part to dQ of
// each. Blocks add in the order of their keys: the same bits on every run. A warp waits until the same warp of the
// block before has added its part. A block takes the next tile when it starts, so the blocks that it waits for have
// started. All walk from the last query to the first: the blocks before come to each tile earlier or at once.
#pragma once
#include "portable/common.cuh"

namespace minimal_attn {
namespace {

// What a block computes (hopper has its own): dK, dV of keys j0 <= j < j1 of head h_kv. Tiles of keys count from the
// first key of the batch, so that none begins with padding, and tiles of queries from the first one that sees a key.
// With ranges `tiles` are from the first to the last one that meets this tile, and some between may not.
template <class Mask>
struct KeyBlock {
    int64_t b, h_kv;
    int index, j0, j1;
    Narrow<Mask> mask;
    Interval queries, tiles;  // queries of the batch that see a key, and tiles of them that see a key of this tile
};

template <class Mask>
__device__ KeyBlock<Mask> key_block_of(const Attention &a, int64_t index, int Br, int Bc) {
    const int Tc = (a.Nk + Bc - 1) / Bc;
    KeyBlock<Mask> tile;
    tile.index = (int)(index % Tc);  // the first keys, which most queries see if causal, start first
    tile.b = index / Tc / a.Hkv, tile.h_kv = index / Tc % a.Hkv;
    const Mask mask = mask_of<Mask>(a, tile.b);
    tile.mask = narrow(mask);
    tile.j0 = min(mask.keys.begin + tile.index * Bc, mask.keys.end);
    tile.j1 = min(tile.j0 + Bc, mask.keys.end);
    tile.queries = queries_of_any(mask, a.Nq, mask.keys);
    const Interval by_tile = queries_of_any(mask, a.Nq, {tile.j0, tile.j1});
    tile.tiles = {0, 0};
    if (!empty(by_tile))
        tile.tiles = {(by_tile.begin - tile.queries.begin) / Br, (by_tile.end - tile.queries.begin + Br - 1) / Br};
    return tile;
}

// A block skips tiles of Br queries that don't meet its keys. The function returns the number of the next step that it
// computes: `step` or a later one; `steps` if there is none. tile_of(step) is the index of a step's tile. Under a band
// each tile meets the keys.
template <int Br, class Mask, class TileOf>
__device__ int step_from(const KeyBlock<Mask> &block, int step, int steps, const TileOf &tile_of) {
    while (kIsRanges<Mask> && step < steps) {
        const int i0 = block.queries.begin + tile_of(step) * Br;
        if (meet(keys_of_any(block.mask, i0, min(i0 + Br, block.queries.end)), {block.j0, block.j1})) break;
        ++step;
    }
    return step;
}

// Rows of dK or dV that no block owns, since their keys are outside leftpad_k..seqlens_k.
template <class Mask>
__device__ void zero_padding(const Attention &a, const KeyBlock<Mask> &block, int Bc, void *tensor,
                             const Strides &stride, int d) {
    float *const head = (float *)tensor + block.b * stride.batch + block.h_kv * stride.head;
    const int begin = block.index * Bc, end = min(begin + Bc, a.Nk);
    for (int j = begin; j < end; ++j)
        if (j < block.mask.keys.begin || j >= block.mask.keys.end)
            for (int x = threadIdx.x; x < d; x += blockDim.x) head[j * stride.row + x] = 0.f;
}

// Which block is next, and whose turn it is to add to dQ: for each tile of queries and each warp, how many tiles of
// keys have been added.
struct Turns {
    unsigned long long *next_block;
    int *added;
    int64_t count;  // of `added`
};

__device__ void wait_for_turn(const int *added, int turn) {
    while (threadIdx.x % 32 == 0 && load_acquire(*added) != turn) {
    }
    __syncwarp();
}

__device__ void pass_turn(int *added) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_release(*added, 1);
}

// Four numbers, or the first `count`, to dQ. No other thread adds to them now. Atomic additions all the same, since the
// thread doesn't wait for the old values: L2 adds.
__device__ void add_to_dQ(float *to, const float *x, bool aligned, int count) {
#if __CUDA_ARCH__ >= 900
    if (aligned) {
        atomicAdd((float4 *)to, make_float4(x[0], x[1], x[2], x[3]));
        return;
    }
#endif
#pragma unroll
    for (int c = 0; c < 4; ++c)
        if (c < count) atomicAdd(to + c, x[c]);
}

// dQ = 0, and nothing has been added
__global__ void __launch_bounds__(256)
    begin_kernel(const __grid_constant__ Gradient g, const __grid_constant__ Turns turns) {
    const int64_t thread = blockIdx.x * (int64_t)256 + threadIdx.x, threads = gridDim.x * (int64_t)256;
    if (thread == 0) *turns.next_block = 0;
    for (int64_t at = thread; at < turns.count; at += threads) turns.added[at] = 0;
    for (int64_t row = thread / 32; row < g.a.B * g.a.Hq * g.a.Nq; row += threads / 32) {
        const int64_t head = row / g.a.Nq;
        float *const dQ = (float *)g.dq + head / g.a.Hq * g.dq_stride.batch + head % g.a.Hq * g.dq_stride.head +
                          row % g.a.Nq * g.dq_stride.row;
        for (int x = threadIdx.x % 32; x < g.a.d; x += 32) dQ[x] = 0.f;
    }
}

}  // namespace
}  // namespace minimal_attn
