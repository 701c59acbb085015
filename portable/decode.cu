// decode.cu: attention of few queries over many keys, as in decoding. Reading K and V is what takes the time, so each
// tile of queries reads them once. docs/decode.md has the budget, a drawing and what was tried.
//
// The queries of the Hq / Hkv heads that share a key head are the rows of a tile. The keys are cut into chunks. The
// size of a chunk depends only on how many keys and key heads there are: so a row's bits are the same in each batch and
// on each GPU.
// A block of decode_kernel takes one item after another. For a tile of rows an item covers (Share):
//     a chunk       its Oi, li, mi go to the workspace. Then join_kernel joins the chunks of a row and writes O, l, m
//     a whole row   all chunks: decode_kernel joins them and writes O, l, m. Taken where rows fill the GPU (share_for;
//                   of documents rows_fill in sequences.cu)
// decode_sequences_kernel does the same for documents with few queries (sequences.h).
// Both join the sums of a chunk's warps, then those of four chunks, then the fours: so the bits are the same.
//
//     role        | warps | registers            | does
//     every warp  | 4     | Oi, li, mi, operands:| takes every fourth step (Bc keys) of a chunk: loads it into a stage
//                 |       | up to 255            | of its own in shared memory, adds it to its own Oi, li, mi
//
//     barrier                   | arrives           | then
//     Loader::wait              | one warp          | Kj and Vj of the oldest step have arrived in the warp's stage
//     __syncwarp, after step 12 | one warp          | all lanes have read the stage: a later step may overwrite it
//     __syncthreads, first      | the block         | Qi of the first item is in shared memory
//     __syncthreads before join | the block         | Oi, li, mi of all warps are in shared memory, for a chunk or for
//                               |                   | four; at the end of an item all have read Qi, so the next item's
//                               |                   | may overwrite it
//     __syncthreads after join  | the block         | the next item's Qi is in shared memory; all have read Oi, li, mi,
//                               |                   | so those of the next chunks may overwrite them
//     griddepcontrol.wait       | the kernel before | all that it has written can be read
//
// Loads run ahead of the products, into the block's next item: memory is busy while an item ends.
//
// General kernels: decode_rows.cuh changes scores (scores.h) and drops weights (dropout.h).
#include "portable/decode_join.cuh"
#include "portable/decode_rows.cuh"

namespace minimal_attn {
namespace {

constexpr int kMostStages = 2;  // three were slower

// ------------------------------------------------------------------------------ step 6: a warp's steps

// copy16 of bytes that are the first to leave L2. K and V are read once, the partial results twice.
__device__ void stream16(unsigned to, const void *from, bool exists) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(exists ? 16 : 0), "l"(policy)
                 : "memory");
#else
    copy16(to, from, exists);
#endif
}

// Kj or Vj of the step that begins at key j: 16 bytes a lane, neighbouring lanes side by side. Rows that no query sees
// and columns past `columns` become zeros.
template <class Tile, class T, class Item>
__device__ void load_step(const Attention &a, unsigned to, const void *tensor, const Strides &stride, int columns,
                          const Item &item, int j) {
    constexpr int Element = 16 / sizeof(T), PerRow = Tile::D / Element;
    const T *const from = KeyRows<T>(a, tensor, stride, item.batch(), item.h_kv)[j];  // a page has all rows of a step
    const Keys seen = item.chunks.seen;
#pragma unroll
    for (int n = 0; n < Tile::Bc * PerRow; n += 32) {
        const int row = (n + threadIdx.x % 32) / PerRow, x = (n + threadIdx.x % 32) % PerRow;
        const bool exists = j + row >= seen.begin && j + row < seen.end && x * Element < columns;
        stream16(to + (int)sizeof(T) * swizzle<Tile::D, T>(row, x), from + row * stride.row + x * Element, exists);
    }
}

// A warp's loads. They run ahead of its products, into the block's next items.
template <class T, class Tile, class Item>
struct Loader {
    static constexpr int StageBytes = Tile::template StageBytes<T>, Step = kWarps * Tile::Bc;
    const unsigned stages;  // this warp's, in shared memory
    const int warp;
    Item item;
    int j = 0, j_end = 0, loaded = 0, used = 0;  // the next step's first key; the item's end; steps

    __device__ Loader(unsigned stages, int warp, const Item &first) : stages(stages), warp(warp), item(first) {
        begin();
    }
    __device__ void begin() { j = item.begin() + warp * Tile::Bc, j_end = item.end(); }
    __device__ int stage(const Decode &p, int step) const { return p.stages == 2 ? step % 2 : 0; }

    // Begins to load the next steps, until each stage has one.
    __device__ void fill(const Attention &a, const Decode &p) {
        while (loaded - used < p.stages) {
            while (j >= j_end && item.exists) item.advance(a, p), begin();
            if (!item.exists) return;
            const unsigned to = stages + stage(p, loaded++) * StageBytes;
            load_step<Tile, T>(a, to, a.k, a.k_stride, a.d, item, j);
            load_step<Tile, T>(a, to + StageBytes / 2, a.v, a.v_stride, a.d_v, item, j);
            __pipeline_commit();
            j += Step;
        }
    }

    // Waits until the oldest step has arrived, and returns its stage.
    __device__ int wait(const Decode &p) const {
        if (loaded - used == 2)
            __pipeline_wait_prior(1);
        else
            __pipeline_wait_prior(0);
        __syncwarp();
        return stage(p, used);
    }
};

// ------------------------------------------------------------------------------ the kernel

// Adds a step to Oi, li, mi of the warp. Then the load of a later step may take its stage.
template <class Tile, class T, class Item, class MmaOrFmaRows>
__device__ void add_step(const Attention &a, const Decode &p, Loader<T, Tile, Item> &loader, MmaOrFmaRows &rows,
                         const unsigned char *stages, int j) {
    constexpr int StageBytes = Tile::template StageBytes<T>;
    const T *const Kj = (const T *)(stages + loader.wait(p) * StageBytes);
    rows.add_step(a, Kj, Kj + StageBytes / 2 / sizeof(T), j);
    __syncwarp();
    ++loader.used;
    loader.fill(a, p);
}

// 12. - 13. The block joins the warps' sums of four chunks, which are in shared memory. At the row's end it also joins
// the fours. The order is that of join_kernel, so the bits are the same.
template <class T, class Tile, class Item>
__device__ void join_four(const Attention &a, const Decode &p, const Item &item, int four,
                          const float2 (*lm)[kWarps][Tile::Rows], float2 (*lm_of_fours)[Tile::Rows], float *O) {
    constexpr int D = Tile::D;
    const int count = min(Tile::Rows, item.rows(p) - item.tile * Tile::Rows), rows_of_O = min(p.rows, Tile::Rows);
    const int chunks = min(kFour, item.chunks.count - four * kFour);
    const bool row_ends = (four + 1) * kFour >= item.chunks.count;
    for (int n = threadIdx.x; n < count * (D / 4); n += kThreads) {
        const int r = n / (D / 4), x = n % (D / 4) * 4;
        Part part[kFour];
#pragma unroll
        for (int k = 0; k < kFour; ++k)
            if (k < chunks) part[k] = join_warps<Tile>(lm[k], O + k * kWarps * rows_of_O * D, rows_of_O, r, x);
        const Part sum =
            join<kFour>(0, kFour, kFour, [&](int k) { return part[k].lm(); }, [&](int k) { return part[k].o4(); });
        float4 *const O_of_fours = (float4 *)(O + kFour * kWarps * rows_of_O * D) + n;  // this thread's
        if (!row_ends) {
            if (x == 0) lm_of_fours[four][r] = sum.lm();
            O_of_fours[four * rows_of_O * (D / 4)] = sum.o4();
            continue;
        }
        const Row row = item.row(p, item.tile * Tile::Rows + r);
        const Part whole = join<Groups<D>>(
            0, Groups<D>, four + 1, [&](int n) { return n < four ? lm_of_fours[n][r] : sum.lm(); },
            [&](int n) { return n < four ? O_of_fours[n * rows_of_O * (D / 4)] : sum.o4(); });
        for (int past = x / 4; past < 32; past += D / 4) pad_lse(a, item.batch(), row.h, row.i + 1, past);
        finish_row<Tile>(a, p, block_of<T>(item.batch(), item.band(a), row), row.i, x / 4, whole);
    }
}

// lm_of_parts: memory for (li, mi) of the warps, for a chunk or for four; behind them those of the fours of a row.
template <class T, class Tile, Share share, bool BySequence>
__device__ void decode_block(const Attention &a, const Decode &p, float2 (*lm_of_parts)[Tile::Rows]) {
    constexpr int Bc = Tile::Bc, D = Tile::D, StageBytes = Tile::template StageBytes<T>, Step = kWarps * Bc;
    using Item = WorkItem<share, BySequence>;
    const auto lm = (float2(*)[kWarps][Tile::Rows])lm_of_parts;
    float2(*const lm_of_fours)[Tile::Rows] = lm_of_parts + kWarps * chunks_at_once(share);
    using MmaOrFmaRows = std::conditional_t<Tile::OnTensorCores, MmaRows<T, Tile>, FmaRows<T, Tile>>;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rows_of_O = min(p.rows, Tile::Rows);
    // Not `warp`, a uniform register: with it ptxas puts stream16's policy into an odd one (docs/ptxas.md).
    unsigned char *const stages = shared + threadIdx.x / 32 * p.stages * StageBytes;
    T *const Q_tile = (T *)(shared + kWarps * p.stages * StageBytes);
    float *const O = (float *)((unsigned char *)Q_tile + Tile::template QBytes<T>);
    if (!BySequence && !p.same_chunks)
        let_next_kernel_start(), wait_for_kernel_before();  // which may write the lengths
    Item item(a, p);
    if (!BySequence && p.same_chunks) let_next_kernel_start(), wait_for_kernel_before();
    Loader<T, Tile, Item> loader((unsigned)__cvta_generic_to_shared(stages), warp, item);
    loader.fill(a, p);
    MmaOrFmaRows rows;
    rows.load_queries(a, p, item);
    rows.take_queries(a, p, item, Q_tile);
    __syncthreads();
    while (item.exists) {
        Item next = item;
        next.advance(a, p);
        rows.load_queries(a, p, next);
        int j = item.begin() + warp * Bc;
        if constexpr (share == kOneChunk) {
            rows.clear();
            for (; j < item.end(); j += Step) add_step<Tile>(a, p, loader, rows, stages, j);
            const int count = min(Tile::Rows, item.rows(p) - item.tile * Tile::Rows);
            const int64_t first =
                slots_of<Tile, BySequence>(a, p, item.b, item.h_kv, item.tile, item.chunks.count)[item.chunk];
            rows.store(O + warp * rows_of_O * D, lm[0][warp], count);
            __syncthreads();
            rows.take_queries(a, p, next, Q_tile);
            for (int n = threadIdx.x; n < count * (D / 4); n += kThreads) {
                const int r = n / (D / 4), x = n % (D / 4) * 4;
                const Part part = join_warps<Tile>(lm[0], O, rows_of_O, r, x);
                if (x == 0) p.lm[first + r] = {part.l, part.m};
                *(float4 *)(p.Oi + (first + r) * D + x) = {part.o[0], part.o[1], part.o[2], part.o[3]};
            }
            __syncthreads();
        } else {
            static_assert(kLeastChunk % Step == 0);  // so a warp's next step is its first one of the next chunk
            const int count = min(Tile::Rows, item.rows(p) - item.tile * Tile::Rows), chunks = item.chunks.count;
            for (int four = 0; four * kFour < chunks; ++four) {
                const int first = four * kFour, chunks_of_four = min(kFour, chunks - first);
                for (int k = 0; k < chunks_of_four; ++k) {
                    const int end = min(item.begin() + (first + k + 1) * item.chunks.size, item.end());
                    rows.clear();
                    for (; j < end; j += Step) add_step<Tile>(a, p, loader, rows, stages, j);
                    rows.store(O + (k * kWarps + warp) * rows_of_O * D, lm[k][warp], count);
                }
                __syncthreads();
                if (first + kFour >= chunks) rows.take_queries(a, p, next, Q_tile);
                join_four<T, Tile>(a, p, item, four, lm, lm_of_fours, O);
                __syncthreads();
            }
        }
        item = next;
    }
}

template <class T, class Tile, Share share>
__global__ void __launch_bounds__(kThreads, 2)
    decode_kernel(const __grid_constant__ Attention a, const __grid_constant__ Decode p) {
    __shared__ float2 lm[parts_in_shared(share)][Tile::Rows];
    if constexpr (Tile::OnTensorCores == on_tensor_cores<T>()) decode_block<T, Tile, share, false>(a, p, lm);
}

// Documents with few queries (sequences.h). fill_sequences has chosen what the items are. It must have ended before
// join_kernel starts, which reads the tables before it waits.
template <class T, class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    decode_sequences_kernel(const __grid_constant__ Attention a, const __grid_constant__ Decode p) {
    __shared__ float2 lm[parts_in_shared(Tile::HasWholeRows ? kWholeRow : kOneChunk)][Tile::Rows];
    if constexpr (Tile::OnTensorCores == on_tensor_cores<T>()) {
        wait_for_kernel_before();
        let_next_kernel_start();
        if constexpr (Tile::HasWholeRows)
            if (a.sequences.counts->whole_rows) return decode_block<T, Tile, kWholeRow, true>(a, p, lm);
        decode_block<T, Tile, kOneChunk, true>(a, p, lm);
    }
}

// ------------------------------------------------------------------------------ on the host: plan and launch

template <bool OnTensorCores, class Use>
auto with_tile_for(int d, const Use &use) {
    if (d <= 64) return use(DecodeTile<64, OnTensorCores>());
    if (d <= 128) return use(DecodeTile<128, OnTensorCores>());
    return use(DecodeTile<256, OnTensorCores>());
}

// use(Tile(), T()) for the dtype.
template <class Use>
auto with_kernel(const Attention &a, bool on_tensor_cores, const Use &use) {
    if (a.dtype == Dtype::float32)
        return with_tile_for<false>(most_columns(a), [&](auto tile) { return use(tile, 0.f); });
    if (a.dtype == Dtype::float16)
        return with_tile_for<true>(most_columns(a), [&](auto tile) { return use(tile, __half()); });
    if (on_tensor_cores)
        return with_tile_for<true>(most_columns(a), [&](auto tile) { return use(tile, __nv_bfloat16()); });
    return with_tile_for<false>(most_columns(a), [&](auto tile) { return use(tile, __nv_bfloat16()); });
}

// The number of work items and the workspace. Where only the device knows the lengths, the items are an upper bound.
struct Size {
    int64_t items, bytes;
};

// Fills p but for stages and aligned_o. Its addresses begin at `workspace`.
template <class Tile>
Size describe(const Attention &a, char *workspace, Share share, Decode &p) {
    p.group = (int)(a.Hq / a.Hkv), p.rows = p.group * a.Nq, p.tiles = (p.rows + Tile::Rows - 1) / Tile::Rows;
    p.same_chunks = !a.seqlens_k && !a.leftpad_k && !a.offset;
    if (p.same_chunks) {
        p.chunks = chunks_of<false>(a, 0), p.most_chunks = p.chunks.count;
    } else {
        const auto chunks = [&](int64_t size) { return (a.Nk + 15 + size - 1) / size; };
        p.most_chunks = (int)std::max(chunks(kMostChunk), std::min(chunks(kLeastChunk), kChunks / a.Hkv + 1));
    }
    const int64_t tiles = a.B * a.Hkv * p.tiles, rows = tiles * p.most_chunks * Tile::Rows;
    p.Oi = (float *)workspace, p.lm = (float2 *)(p.Oi + rows * Tile::D);
    if (share == kWholeRow) return {tiles, 0};
    return {tiles * p.most_chunks, rows * (Tile::D + 2) * (int64_t)sizeof(float)};
}

// The same for the documents with few queries. The items are an upper bound.
template <class Tile>
Size describe_sequences(const Attention &a, const SequencePlan &plan, char *workspace, Decode &p) {
    p.group = (int)(a.Hq / a.Hkv), p.rows = plan.rows, p.tiles = plan.row_tiles, p.same_chunks = false;
    const int64_t items = most_chunks_of_documents(a) * a.Hkv * p.tiles, rows = items * std::min(p.rows, Tile::Rows);
    p.Oi = (float *)workspace, p.lm = (float2 *)(p.Oi + rows * Tile::D);
    return {items, rows * (Tile::D + 2) * (int64_t)sizeof(float)};
}

template <class Tile, class T>
int stages_for(const Device &device, int rows) {
    int stages = kMostStages;
    while (stages > 0 && shared_bytes<Tile, T>(stages, rows, kOneChunk) > device.shared_memory) --stages;
    return stages;
}

// How many blocks run on the device at once. CUDA takes 1 KB of shared memory for each.
template <class Tile, class T>
int64_t resident_blocks(const Device &device, int stages, int rows, Share share) {
    const int shared = shared_bytes<Tile, T>(stages, rows, share) + 1024;
    return (int64_t)std::min((device.shared_memory + 1024) / shared, 2) * device.multiprocessors;
}

// What an item is: a whole row where rows fill the device evenly and a block has room for one, else a chunk. The choice
// may depend on B and on the GPU, since the bits don't depend on it.
template <class Tile, class T>
Share share_for(const Attention &a, const Device &device, const Decode &p, int stages) {
    if (!Tile::HasWholeRows || needs_general(a) || !p.same_chunks || p.chunks.count > kMostOfRow) return kOneChunk;
    const int64_t resident = resident_blocks<Tile, T>(device, stages, p.rows, kWholeRow), rows = a.B * a.Hkv * p.tiles;
    if (resident == 0) return kOneChunk;
    const int64_t waves = (rows + resident - 1) / resident;
    return rows >= kLeastFull * waves * resident ? kWholeRow : kOneChunk;
}

// Whether all batches share their keys (a stride of 0), and differ in seqlens_k and leftpad_k. Each could see all of
// the keys, so the workspace would grow with the square of the number of batches.
bool share_keys(const Attention &a) {
    return a.B > 1 && (a.block_table ? a.block_table_stride == 0 : a.k_stride.batch == 0);
}
constexpr int64_t kLittleWorkspace = 64 << 20;

}  // namespace

namespace portable {

// docs/decode.md has the measurements behind the bounds of rows and Nk. The choice must not depend on B: else a row's
// bits would, too.
bool takes_decode(const Attention &a, const Device &device, bool on_tensor_cores) {
    if (takes_latent(a, device, on_tensor_cores)) return true;
    const int64_t element = element_size(a.dtype), rows = a.Hq / a.Hkv * a.Nq;
    const int64_t most_rows = on_tensor_cores && a.Nk >= 2048 ? 32 : 16;
    if (!has_aligned_inputs(a) || rows > most_rows || a.Nk < 128 || is_wide(a)) return false;
    if (a.key_ranges || a.cu_seqlens_q || (a.block_table && a.page_size % 16 != 0)) return false;
    const int64_t kv_bytes = a.Hkv * a.Nk * (a.d + a.d_v) * element;  // of one batch
    return with_kernel(a, on_tensor_cores, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        Decode p;
        const Size size = describe<Tile>(a, nullptr, kOneChunk, p);
        return stages_for<Tile, decltype(element)>(device, rows) > 0 &&
               size.items <= int64_t(1) << 26 &&  // WorkItem counts them as unsigned
               (p.same_chunks || !share_keys(a) || size.bytes <= std::max(kv_bytes / 4, kLittleWorkspace));
    });
}

Plan plan_decode(const Attention &a, const Device &device, bool on_tensor_cores) {
    if (takes_latent(a, device, on_tensor_cores)) return plan_latent(a, device);
    return with_kernel(a, on_tensor_cores, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        using T = decltype(element);
        Decode p;
        Size size = describe<Tile>(a, nullptr, kOneChunk, p);
        const int stages = stages_for<Tile, T>(device, p.rows);
        const Share share = share_for<Tile, T>(a, device, p, stages);
        if (share == kWholeRow) size = describe<Tile>(a, nullptr, share, p);
        const int64_t blocks = std::min(size.items, resident_blocks<Tile, T>(device, stages, p.rows, share));
        const int shared = shared_bytes<Tile, T>(stages, p.rows, share) - static_bytes<Tile>(share);
        // Plan::tile is the number of stages: d and the dtype decide all else of a tile.
        return Plan{share == kWholeRow ? kDecodeRows : kDecode,
                    stages,
                    Tile::Rows,
                    Tile::Bc,
                    Tile::D,
                    blocks,
                    kThreads,
                    shared,
                    size.bytes};
    });
}

const char *launch_decode(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    if (plan.kernel == kLatent) return launch_latent(a, plan, workspace, stream);
    return why_not(with_kernel(a, plan.Br == 16, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        using T = decltype(element);
        Decode p;
        const Share share = plan.kernel == kDecodeRows ? kWholeRow : kOneChunk;
        describe<Tile>(a, (char *)workspace, share, p);
        p.stages = plan.tile;  // see plan_decode
        p.aligned_o = is_aligned(a.o, a.o_stride, element_size(a.o_dtype), a.d_v);
        auto kernel = decode_kernel<T, Tile, kOneChunk>;
        if constexpr (Tile::HasWholeRows)
            if (share == kWholeRow) kernel = decode_kernel<T, Tile, kWholeRow>;
        if constexpr (kHasGeneral)
            if (needs_general(a)) kernel = decode_kernel<T, typename Tile::General, kOneChunk>;
        const cudaError_t error = launch_overlapping(kernel, plan.grid, kThreads, plan.shared_memory, stream, a, p);
        if (error != cudaSuccess || share == kWholeRow) return error;
        auto join = join_kernel<T, Tile, false>;
        if constexpr (kHasGeneral)
            if (has_terms(a)) join = join_kernel<T, typename Tile::General, false>;
        return launch_overlapping(join, a.B * a.Hkv * p.rows, kJoinThreads, 0, stream, a, p);
    }));
}

// Few queries: those of all heads that share a key head are one tile of rows.
FewQueries plan_few_queries(const Attention &a, const Device &device, bool on_tensor_cores) {
    const int64_t group = a.Hq / a.Hkv;
    if (!has_aligned_inputs(a)) return {};
    return with_kernel(a, on_tensor_cores, [&](auto tile, auto element) -> FewQueries {
        using Tile = decltype(tile);
        using T = decltype(element);
        const bool each_query = each_query_is_few(a);
        const int most_queries = each_query ? 1 : std::max<int>(1, Tile::Rows / group),
                  rows = (int)group * most_queries;
        SequencePlan plan;
        plan.most_queries = most_queries, plan.each_query = each_query;
        plan.rows = rows, plan.row_tiles = (rows + Tile::Rows - 1) / Tile::Rows;
        Decode p;
        const Size size = describe_sequences<Tile>(a, plan, nullptr, p);
        Device for_chunks = device;  // where shared memory has the sums of whole rows, too
        if (Tile::HasWholeRows)
            for_chunks.shared_memory -= static_bytes<Tile>(kWholeRow) - static_bytes<Tile>(kOneChunk);
        const int stages = stages_for<Tile, T>(for_chunks, rows);
        const int64_t kv_bytes = a.Hkv * a.Nk * (a.d + a.d_v) * sizeof(T);
        if (stages == 0 || a.documents == 0 || size.items > int64_t(1) << 26 ||
            size.bytes > std::max(kv_bytes / 4, kLittleWorkspace))
            return {};
        int64_t blocks = resident_blocks<Tile, T>(for_chunks, stages, rows, kOneChunk);
        int shared = shared_bytes<Tile, T>(stages, rows, kOneChunk) - static_bytes<Tile>(kOneChunk);
        if (const int64_t resident = resident_blocks<Tile, T>(device, stages, rows, kWholeRow);
            Tile::HasWholeRows && resident > 0) {
            plan.resident = blocks = std::min(blocks, resident);
            shared = std::max(shared, shared_bytes<Tile, T>(stages, rows, kWholeRow) - static_bytes<Tile>(kWholeRow));
        }
        blocks = std::min(blocks, size.items);
        return {plan, {kDecode, stages, Tile::Rows, Tile::Bc, Tile::D, blocks, kThreads, shared, size.bytes}};
    });
}

const char *launch_few_queries(const Attention &a, const FewQueries &few, void *workspace, CUstream_st *stream) {
    return why_not(with_kernel(a, few.decode.Br == 16, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        using T = decltype(element);
        Decode p;
        describe_sequences<Tile>(a, few.sequences, (char *)workspace, p);
        p.stages = few.decode.tile;
        p.aligned_o = is_aligned(a.o, a.o_stride, element_size(a.o_dtype), a.d_v);
        const cudaError_t error = launch_overlapping(decode_sequences_kernel<T, Tile>, few.decode.grid, kThreads,
                                                     few.decode.shared_memory, stream, a, p);
        if (error != cudaSuccess) return error;
        const int64_t rows = most_few(a) * a.Hkv * p.rows;
        return launch_overlapping(join_kernel<T, Tile, true>, rows, kJoinThreads, 0, stream, a, p);
    }));
}

}  // namespace portable
}  // namespace minimal_attn
