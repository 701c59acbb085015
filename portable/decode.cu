// decode.cu: attention of few queries over many keys, as in decoding. K and V are read once; that is what takes the
// time. docs/decode.md has the budget, a drawing and what was tried.
//
// The queries of the Hq / Hkv heads that share a key head are the rows of one tile. The keys are cut into chunks, a
// block each. The chunk's size depends on the number of keys and of key heads alone: a row's bits are the same in every
// batch and on every GPU.
//
//     role        | warps | registers            | does
//     every warp  | 4     | Qi, Oi, li, mi: up   | loads steps of Bc keys through stages of its own in shared memory and
//                 |       | to 255               | adds them to its Oi, li, mi: every fourth step of the chunk
//     the block   |       |                      | joins the warps' Oi, li, mi; the last block of a tile to arrive joins
//                 |       |                      | the chunks' and ends the rows (steps 12. - 13.)
//
//     barrier                   | arrives and waits | then
//     wait_for_step, __syncwarp | one warp          | Kj and Vj of the oldest step have arrived in the warp's stage
//     __syncwarp, after step 12 | one warp          | all lanes have read the stage: the next step may overwrite it
//     __syncthreads             | the block         | Qi is in shared memory; Oi, li, mi of the warps are; the stages,
//                               |                   | where these were, may be overwritten
//     arrived[] in the workspace| blocks of a tile  | the Oi, li, mi of all chunks are in the workspace
#include "portable/decode_rows.cuh"

namespace minimal_attn {
namespace {

// ------------------------------------------------------------------------------ step 6: a warp's steps

// Where the rows of a step that begins at key j are, j a multiple of Bc.
template <class T>
__device__ const T *step_rows(const void *tensor, const Strides &stride, const WorkItem &item, int j) {
    return (const T *)tensor + item.b * stride.batch + item.h_kv * stride.head + j * stride.row;
}

// Kj or Vj of a step, whole rows, 512 bytes an instruction. Rows outside [begin, end) become zeros, as columns past d.
template <class Tile, class T>
__device__ void load_rows(unsigned to, const T *from, int64_t stride, int begin, int end, int d) {
    constexpr int Element = 16 / sizeof(T), PerRow = Tile::D / Element;
#pragma unroll
    for (int n = 0; n < Tile::Bc * PerRow; n += 32) {
        const int row = (n + threadIdx.x % 32) / PerRow, x = (n + threadIdx.x % 32) % PerRow;
        const bool exists = row >= begin && row < end && x * Element < d;
        copy16(to + 2 * swizzle<8 * PerRow>(row, x), from + row * stride + x * Element, exists);
    }
}

// Waits until all but the last stages - 1 loads of this warp have arrived.
__device__ void wait_for_step(int stages) {
    if (stages == 4)
        __pipeline_wait_prior(3);
    else if (stages == 3)
        __pipeline_wait_prior(2);
    else if (stages == 2)
        __pipeline_wait_prior(1);
    else
        __pipeline_wait_prior(0);
    __syncwarp();
}

// ------------------------------------------------------------------------------ joining

// Of one row: l, m, and 4 columns of the undivided O.
struct Part {
    float l, m;
    float o[4];
};

struct Sum {
    float sum = 0.f, lost = 0.f;
    __device__ void add(float x) {  // Kahan: a row may have thousands of chunks
        const float y = x - lost, next = sum + y;
        lost = fabsf(next) < INFINITY ? (next - sum) - y : 0.f;
        sum = next;
    }
};

// Steps 11. and 12. for parts 0 to count - 1, in this order. lm(n) and o(n) read a part's (l, m) and o.
template <class LM, class O>
__device__ Part join(int count, const LM &lm, const O &o) {
    float m = -INFINITY;
#pragma unroll 8
    for (int n = 0; n < count; ++n) m = fmaxf(m, lm(n).y);
    const float m_safe = m == -INFINITY ? 0.f : m;
    Sum l, x[4];
#pragma unroll 8
    for (int n = 0; n < count; ++n) {
        const float2 part = lm(n);
        const float4 four = o(n);
        const float weight = exp_fast(part.y - m_safe);
        l.add(weight * part.x);
        x[0].add(weight * four.x), x[1].add(weight * four.y), x[2].add(weight * four.z), x[3].add(weight * four.w);
    }
    return {l.sum, m, {x[0].sum, x[1].sum, x[2].sum, x[3].sum}};
}

// 12. - 13. Columns x to x + 3 of row r of the tile
template <class T, class Tile>
__device__ void end_row(const Attention &a, const Decode &p, const WorkItem &item, int r, int x, const Part &part) {
    const Row row = row_of<Tile>(a, p, item, r);
    Block<T> block;
    block.b = item.b, block.h = row.h, block.band = band_of(a, item.b);
    const RowEnd end = end_row(a, block, row.i, part.l, part.m);
    if (x == 0) store_state(a, block, row.i, end);
    store_o<4>(a, block, row.i, x, end, part.o, p.aligned_o);
}

__device__ void wait_for_zeros() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A tile of queries, as the workspace knows it.
template <class Tile>
struct OutputTile {
    int rows, count;       // queries; chunks
    int64_t index, first;  // its counter; the first row of its first chunk

    __device__ OutputTile(const Attention &a, const Decode &p, const WorkItem &item) {
        rows = min(Tile::Rows, p.rows - item.tile * Tile::Rows), count = item.chunks.count;
        index = ((int64_t)item.b * a.Hkv + item.h_kv) * p.tiles + item.tile;
        first = index * p.most_chunks * Tile::Rows;
    }
};

// Joins the parts of the warps, which are in shared memory. The result goes to the workspace, or, if the tile has one
// chunk, to o.
template <class T, class Tile>
__device__ void end_chunk(const Attention &a, const Decode &p, const WorkItem &item, const unsigned char *O, int stride,
                          const float2 *lm) {
    constexpr int D = Tile::D;
    const OutputTile<Tile> tile(a, p, item);
    for (int n = threadIdx.x; n < tile.rows * (D / 4); n += kThreads) {
        const int r = n / (D / 4), x = n % (D / 4) * 4;
        const Part part = join(
            kWarps, [&](int warp) { return lm[warp * Tile::Rows + r]; },
            [&](int warp) { return *(const float4 *)((const float *)(O + warp * stride) + r * D + x); });
        if (tile.count == 1) {
            end_row<T, Tile>(a, p, item, r, x, part);
        } else {
            const int64_t at = tile.first + item.chunk * Tile::Rows + r;
            if (x == 0) p.lm[at] = {part.l, part.m};
            *(float4 *)(p.Oi + at * D + x) = {part.o[0], part.o[1], part.o[2], part.o[3]};
        }
    }
}

// Joins the chunks of a tile, which are in the workspace.
template <class T, class Tile>
__device__ void end_tile(const Attention &a, const Decode &p, const WorkItem &item) {
    constexpr int D = Tile::D;
    const OutputTile<Tile> tile(a, p, item);
    __threadfence();
    for (int n = threadIdx.x; n < tile.rows * (D / 4); n += kThreads) {
        const int r = n / (D / 4), x = n % (D / 4) * 4;
        const auto at = [&](int chunk) { return tile.first + chunk * Tile::Rows + r; };
        const Part part = join(
            tile.count, [&](int chunk) { return __ldcg(&p.lm[at(chunk)]); },
            [&](int chunk) { return __ldcg((const float4 *)(p.Oi + at(chunk) * D + x)); });
        end_row<T, Tile>(a, p, item, r, x, part);
    }
}

// ------------------------------------------------------------------------------ the kernel

// Whether a tile is complete shows when the counter's old value has come back. Meanwhile the next item's loads begin.
template <class T, class Tile>
__device__ void decode_block(const Attention &a, const Decode &p) {
    constexpr int Bc = Tile::Bc, StageBytes = Tile::template StageBytes<T>, Step = kWarps * Bc;
    using Rows = std::conditional_t<Tile::OnTensorCores, MmaRows<T, Tile>, FmaRows<T, Tile>>;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float2 lm[kWarps * Tile::Rows];
    __shared__ unsigned next;
    __shared__ bool completes;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    unsigned char *const stages = shared + warp * p.stages * StageBytes;
    T *const Q_tile = (T *)(shared + kWarps * p.stages * StageBytes);
    bool arrived_last = false;  // of thread 0: whether the item before was the last of its tile to arrive

    WorkItem item, before;
    for (unsigned index = blockIdx.x;; before = item, index = next) {
        const bool is_item = work_item(a, p, index, item);
        const Keys seen = item.chunks.seen;
        const int first = item.chunks.begin + item.chunk * item.chunks.size + warp * Bc;
        const int end = is_item ? min(item.chunks.begin + (item.chunk + 1) * item.chunks.size, seen.end) : 0;
        const auto load = [&](int j, int stage) {
            if (j < end) {
                const unsigned to = (unsigned)__cvta_generic_to_shared(stages + stage * StageBytes);
                load_rows<Tile>(to, step_rows<T>(a.k, a.k_stride, item, j), a.k_stride.row, seen.begin - j,
                                seen.end - j, a.d);
                load_rows<Tile>(to + StageBytes / 2, step_rows<T>(a.v, a.v_stride, item, j), a.v_stride.row,
                                seen.begin - j, seen.end - j, a.d);
            }
            __pipeline_commit();
        };
#pragma unroll 1
        for (int stage = 0; stage < p.stages; ++stage) load(first + stage * Step, stage);
        unsigned ticket = index;
        if (threadIdx.x == 0) {
            completes = arrived_last;
            if (p.arrived) wait_for_zeros();  // so this kernel doesn't end before they are written, either
            if (p.ticket) ticket = atomicAdd(p.ticket, 1);
        }
        Rows rows(a, p, item, Q_tile);
        __syncthreads();
        if (completes) end_tile<T, Tile>(a, p, before);
        if (!is_item) break;
        for (int j = first, stage = 0; j < end; j += Step) {
            wait_for_step(p.stages);
            const T *const Kj = (const T *)(stages + stage * StageBytes), *const Vj = Kj + StageBytes / 2 / sizeof(T);
            rows.add_step(a, Kj, Vj, j);
            __syncwarp();
            load(j + p.stages * Step, stage);
            stage = stage + 1 == p.stages ? 0 : stage + 1;
        }
        rows.store((float *)stages, lm + warp * Tile::Rows, p.rows - item.tile * Tile::Rows);
        __syncthreads();
        end_chunk<T, Tile>(a, p, item, shared, p.stages * StageBytes, lm);
        __threadfence();
        if (threadIdx.x == 0) next = gridDim.x + ticket;
        __syncthreads();
        const OutputTile<Tile> tile(a, p, item);
        if (threadIdx.x == 0) arrived_last = tile.count > 1 && atomicAdd(&p.arrived[tile.index], 1) == tile.count - 1;
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    decode_kernel(const __grid_constant__ Attention a, const __grid_constant__ Decode p) {
    if constexpr (Tile::OnTensorCores == on_tensor_cores<T>()) decode_block<T, Tile>(a, p);
}

// Zeros for the counters. The next kernel may begin at once: it waits before it counts.
__global__ void zero_kernel(unsigned *counters, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    for (int n = threadIdx.x; n < count; n += blockDim.x) counters[n] = 0;
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
    if (a.dtype == Dtype::float32) return with_tile_for<false>(a.d, [&](auto tile) { return use(tile, 0.f); });
    if (a.dtype == Dtype::float16) return with_tile_for<true>(a.d, [&](auto tile) { return use(tile, __half()); });
    if (on_tensor_cores) return with_tile_for<true>(a.d, [&](auto tile) { return use(tile, __nv_bfloat16()); });
    return with_tile_for<false>(a.d, [&](auto tile) { return use(tile, __nv_bfloat16()); });
}

// The parameters, with addresses that count from `workspace`, and the number of work items, or more.
template <class Tile>
int64_t describe(const Attention &a, char *workspace, Decode &p, int64_t &bytes) {
    p.group = (int)(a.Hq / a.Hkv), p.rows = p.group * a.Nq, p.tiles = (p.rows + Tile::Rows - 1) / Tile::Rows;
    p.same_chunks = !a.seqlens_k && !a.leftpad_k && !a.offset;
    if (p.same_chunks) {
        p.most_chunks = chunks_of(a, 0).count;
    } else {
        const auto chunks = [&](int64_t size) { return (a.Nk + 15 + size - 1) / size; };
        p.most_chunks = (int)std::max(chunks(kMostChunk), std::min(chunks(kLeastChunk), kChunks / a.Hkv + 1));
    }
    const int64_t tiles = a.B * a.Hkv * p.tiles, items = tiles * p.most_chunks;
    bytes = 0;
    const auto take = [&](int64_t size) {
        char *const at = workspace + bytes;
        bytes += (size + 255) / 256 * 256;
        return at;
    };
    p.ticket = (unsigned *)take((tiles + 1) * sizeof(unsigned)), p.arrived = p.ticket + 1;
    p.lm = (float2 *)take(items * Tile::Rows * sizeof(float2));
    p.Oi = (float *)take(items * Tile::Rows * Tile::D * sizeof(float));
    return items;
}

// Two blocks on a multiprocessor if they have two stages or more; else as many stages as fit.
template <class Tile, class T>
int stages_for(const Device &device) {
    const int half = (device.shared_memory + 1024) / 2 - 1024;
    for (int stages = kMostStages; stages > 0; --stages)
        if (Tile::template shared_bytes<T>(stages) <= (stages > 1 ? half : device.shared_memory)) {
            if (stages > 1) return stages;
            while (stages < kMostStages && Tile::template shared_bytes<T>(stages + 1) <= device.shared_memory) ++stages;
            return stages;
        }
    return 0;
}

}  // namespace

namespace portable {

bool takes_decode(const Attention &a, const Device &device, bool on_tensor_cores) {
    const int64_t element = a.dtype == Dtype::float32 ? 4 : 2, rows = a.Hq / a.Hkv * a.Nq;
    if (!is_aligned(a.q, a.q_stride, element, a.d) || !is_aligned(a.k, a.k_stride, element, a.d) ||
        !is_aligned(a.v, a.v_stride, element, a.d))
        return false;
    return rows <= (on_tensor_cores ? 64 : 16) && a.Nk >= 128 &&
           with_kernel(a, on_tensor_cores, [&](auto tile, auto element) {
               using Tile = decltype(tile);
               Decode p;
               int64_t bytes;
               return stages_for<Tile, decltype(element)>(device) > 0 &&
                      describe<Tile>(a, nullptr, p, bytes) <= int64_t(1) << 30;
           });
}

Plan plan_decode(const Attention &a, const Device &device, bool on_tensor_cores) {
    return with_kernel(a, on_tensor_cores, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        Decode p;
        int64_t bytes;
        const int64_t items = describe<Tile>(a, nullptr, p, bytes);
        const int stages = stages_for<Tile, decltype(element)>(device);
        const int shared = Tile::template shared_bytes<decltype(element)>(stages);
        const int blocks = std::min((device.shared_memory + 1024) / (shared + 1024), 4);
        return Plan{kDecode,
                    stages,
                    Tile::Rows,
                    Tile::Bc,
                    Tile::D,
                    std::min<int64_t>(items, blocks * device.multiprocessors),
                    kThreads,
                    shared,
                    p.same_chunks && p.most_chunks == 1 ? 0 : bytes,
                    device.multiprocessors};
    });
}

const char *launch_decode(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return why_not(with_kernel(a, plan.Br == 16, [&](auto tile, auto element) {
        using Tile = decltype(tile);
        using T = decltype(element);
        Decode p;
        int64_t bytes;
        const int64_t items = describe<Tile>(a, (char *)workspace, p, bytes);
        p.stages = plan.tile;
        p.aligned_o = is_aligned(a.o, a.o_stride, a.l ? 4 : sizeof(T), a.d);
        if (items <= plan.grid) p.ticket = nullptr;
        int device = 0, major = 0;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        const auto kernel = decode_kernel<T, Tile>;
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_memory);
        if (error != cudaSuccess) return error;
        if (plan.workspace > 0) {
            const int counters = (int)(a.B * a.Hkv) * p.tiles + 1;
            zero_kernel<<<1, 256, 0, stream>>>(p.arrived - 1, counters);
            error = cudaGetLastError();
        } else {
            p.arrived = p.ticket = nullptr;
        }
        if (error != cudaSuccess) return error;
        cudaLaunchAttribute overlap{cudaLaunchAttributeProgrammaticStreamSerialization};
        overlap.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{dim3(plan.grid), dim3(kThreads), (size_t)plan.shared_memory, stream, &overlap, 1};
        config.numAttrs = plan.workspace > 0 && major >= 9;
        return cudaLaunchKernelEx(&config, kernel, a, p);
    }));
}

}  // namespace portable
}  // namespace minimal_attn
