// latent.cu: decoding of latent attention (DeepSeek's MLA, after its matrices are absorbed): V is the first d_v columns
// of K, d up to 576. So each key is read once, for both products. docs/latent.md has the budget.
//
// The query heads that share a key head are the rows, 16 a tile. The keys are cut into chunks. A block computes a chunk
// for a tile of rows: its Oi, li, mi go to the workspace. join_latent joins the chunks of a row and writes O, l, m.
//
//     role        | warps | registers           | does, in each step of 64 keys
//     every warp  | 8     | Qi, 64 columns of   | loads 8 keys; Sij of these keys and all rows; Pij to shared memory;
//                 |       | Oi: up to 255       | then Oi += Pij Vj for its columns and all keys
//
//     barrier (__syncthreads)     | arrives and waits | then
//     behind the load of Qi       | the block         | Qi is in shared memory; then in registers, and its stage is free
//     before step 9               | the block         | Kj has arrived; the stage of Kj-1 may be overwritten
//     after step 9                | the block         | the warps' maxima are in shared memory
//     before step 12              | the block         | Pij is in shared memory; all have read the maxima
//     after the last step         | the block         | the warps' sums li are in shared memory
//     wait_for_kernel_before      | join_latent       | latent_kernel has ended
//     before the last join        | join_latent       | the groups' sums are in shared memory
//
// Uses mma.cuh: mma, load_matrices, load_matrices_transposed, lane_address, swizzle, copy16; common.cuh:
// update_row_max, exp_fast, end_row, store_o; decode_join.cuh: join, Part, block_of; flash.h: KeyRows, keys_of_any,
// keys_of_row, narrow, store_l_m_lse; device.h: row_max, row_sum, pack, opaque, pad_lse, launch_overlapping.
#include "portable/decode_join.cuh"
#include "portable/mma.cuh"

namespace minimal_attn {
namespace {

struct LatentTile {
    static constexpr int D = 576, D_v = 512, Rows = 16, Bc = 64, Warps = 8, Threads = 32 * Warps;
    static constexpr int Columns = D_v / Warps;    // of a warp's Oi
    static constexpr int StageBytes = Bc * D * 2;  // of Kj
    static constexpr int kStages = 3, kFewerStages = 2;
};

// What the kernels need beside flash.h's struct.
struct Latent {
    int group, rows, tiles;  // Hq / Hkv; rows of a key head; tiles of them
    int chunks, chunk;       // of a batch; keys of each
    bool aligned_o;
    // Partial results, by batch, key head, chunk, tile, row.
    float2 *lm;
    float *Oi;

    __device__ int64_t slot(int head, int chunk, int tile) const {
        return (((int64_t)head * chunks + chunk) * tiles + tile) * LatentTile::Rows;
    }
    // Row r of key head h_kv
    __device__ Row row(int64_t h_kv, int r) const { return {r / group, h_kv * group + r % group, r < rows}; }
};

struct LatentShared {
    alignas(16) unsigned char P[LatentTile::Rows * LatentTile::Bc * 2];
    float m[LatentTile::Warps][LatentTile::Rows], l[LatentTile::Warps][LatentTile::Rows];
};

// Eight keys from j on, by a warp: 16 bytes a lane, neighbouring lanes side by side. Others than `seen` become zeros.
template <class T>
__device__ void load_keys(const Attention &a, const KeyRows<T> &K, T *tile, int row0, int j, Keys seen) {
    constexpr int Chunks = LatentTile::D / 8;
    const T *const from = j < seen.end ? K[j] : nullptr;  // a page has all eight rows
    const int lane = opaque(threadIdx.x) % 32;            // else places are computed once and spilled
#pragma unroll 3
    for (int n = 0; n < 8 * Chunks / 32; ++n) {
        const int at = 32 * n + lane, row = at / Chunks, x = at % Chunks;
        const bool exists = j + row >= seen.begin && j + row < seen.end && 8 * x < a.d;
        copy16((unsigned)__cvta_generic_to_shared(tile + swizzle<LatentTile::D, T>(row0 + row, x)),
               exists ? from + row * a.k_stride.row + 8 * x : (const T *)a.k, exists);
    }
}

template <class T, int Stages>
__device__ void latent_block(const Attention &a, const Latent &p) {
    using Tile = LatentTile;
    constexpr int D = Tile::D, Bc = Tile::Bc;
    extern __shared__ __align__(128) unsigned char shared[];
    const auto stage = [&](int n) { return (T *)(shared + n * Tile::StageBytes); };
    LatentShared &all = *(LatentShared *)(shared + Stages * Tile::StageBytes);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int tile = blockIdx.x % p.tiles, chunk = blockIdx.x / p.tiles % p.chunks;
    const int head = blockIdx.x / p.tiles / p.chunks, b = head / (int)a.Hkv, h_kv = head % (int)a.Hkv;
    const KeyRows<T> K(a, a.k, a.k_stride, b, h_kv);
    const BandOf<int> band = narrow(band_of(a, b));
    const int first_row = tile * Tile::Rows, last_row = min(first_row + Tile::Rows, p.rows) - 1;
    Keys seen = keys_of_any(band, first_row / p.group, last_row / p.group + 1);
    seen = {max(seen.begin, chunk * p.chunk), min(seen.end, (chunk + 1) * p.chunk)};
    const int64_t slot = p.slot(head, chunk, tile);
    if (empty(seen)) {
        if (threadIdx.x < Tile::Rows) p.lm[slot + threadIdx.x] = {0.f, -INFINITY};
        return;
    }
    const int begin = seen.begin / 16 * 16;

    // 8. Qi, through the stage that is filled last, to registers. The first steps of keys are under way meanwhile.
    T *const Q_tile = stage(Stages - 1);
    for (int at = threadIdx.x; at < Tile::Rows * (D / 8); at += Tile::Threads) {
        const Row row = p.row(h_kv, first_row + at / (D / 8));
        const bool exists = row.exists && at % (D / 8) * 8 < a.d;
        const T *const q = (const T *)a.q + b * a.q_stride.batch + row.h * a.q_stride.head + row.i * a.q_stride.row;
        copy16((unsigned)__cvta_generic_to_shared(Q_tile + swizzle<D, T>(at / (D / 8), at % (D / 8))),
               exists ? q + at % (D / 8) * 8 : (const T *)a.q, exists);
    }
    __pipeline_commit();
    const auto load = [&](int step) {  // a step behind the last one is no load, but a group to wait for
        const int j0 = begin + step * Bc;
        if (j0 < seen.end) load_keys(a, K, stage(step % Stages), 8 * warp, j0 + 8 * warp, seen);
        __pipeline_commit();
    };
    for (int step = 0; step < Stages - 1; ++step) load(step);
    __pipeline_wait_prior(Stages - 1);
    __syncthreads();
    unsigned q[D / 16][4];
    const unsigned Qi = lane_address<D>(Q_tile, lane % 16, lane / 16);
#pragma unroll
    for (int x = 0; x < D / 16; ++x) load_matrices(q[x], (Qi ^ x % 4 * 32) + x / 4 * 128);

    float Oi[Tile::Columns / 8][4] = {}, li[2] = {}, mi[2] = {-INFINITY, -INFINITY};
    Keys keys[2];  // of this thread's rows
    for (int r = 0; r < 2; ++r) {
        const Row row = p.row(h_kv, first_row + lane / 4 + 8 * r);
        keys[r] = row.exists ? intersection(keys_of_row(band, row.i), seen) : Keys{0, 0};
    }
    const unsigned P = lane_address<Bc>((T *)all.P, lane % 16, lane / 16);
    for (int step = 0, j0 = begin; j0 < seen.end; ++step, j0 += Bc) {
        __pipeline_wait_prior(Stages - 2);
        __syncthreads();
        load(step + Stages - 1);
        // 9. Sij = softmax_scale Qi Kj^T of the warp's 8 keys, in four sums: in one, each mma would wait for the last
        const T *const Kj = stage(step % Stages);
        const unsigned of_keys = lane_address<D>(Kj, 8 * warp + lane % 8, lane / 8);
        float S[4][4] = {};
#pragma unroll
        for (int x = 0; x < D / 32; ++x) {
            unsigned k[4];
            load_matrices(k, (of_keys ^ x % 2 * 64) + x / 2 * 128);
            mma<T>(S[x % 2 * 2], q[2 * x], k[0], k[1]);
            mma<T>(S[x % 2 * 2 + 1], q[2 * x + 1], k[2], k[3]);
        }
        const int j = j0 + 8 * warp + lane % 4 * 2;
        float s[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float sum = (S[0][2 * r + n] + S[1][2 * r + n]) + (S[2][2 * r + n] + S[3][2 * r + n]);
                s[r][n] = j + n >= keys[r].begin && j + n < keys[r].end ? sum * a.softmax_scale : -INFINITY;
            }
            const float m = row_max<4>(fmaxf(s[r][0], s[r][1]));
            if (lane % 4 == 0) all.m[warp][lane / 4 + 8 * r] = m;
        }
        __syncthreads();
        // 10. - 11.
        float alpha[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane / 4 + 8 * r;
            float m_new = mi[r], m_safe;
#pragma unroll
            for (int n = 0; n < Tile::Warps; ++n) m_new = fmaxf(m_new, all.m[n][row]);
            alpha[r] = update_row_max(mi[r], m_new, m_safe);
            const float left = exp_fast(s[r][0] - m_safe), right = exp_fast(s[r][1] - m_safe);
            li[r] = alpha[r] * li[r] + (left + right);
            *(unsigned *)((T *)all.P + swizzle<Bc, T>(row, warp) + lane % 4 * 2) = pack<T>(left, right);
        }
        __syncthreads();
        // 12. Oi = alpha Oi + Pij Vj of the warp's columns
        if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
            for (int x = 0; x < Tile::Columns / 8; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) Oi[x][e] *= alpha[e / 2];
        }
        const unsigned V = lane_address<D>(Kj, lane % 16, lane / 16) + 2 * Tile::Columns * warp;
#pragma unroll
        for (int n = 0; n < Bc / 16; ++n) {
            unsigned p_n[4];
            load_matrices(p_n, P ^ 32 * n);
#pragma unroll
            for (int x = 0; x < Tile::Columns / 16; ++x) {
                unsigned v[4];
                load_matrices_transposed(v, (V ^ x % 4 * 32) + 2 * 16 * n * D);
                mma<T>(Oi[2 * x], p_n, v[0], v[1]);
                mma<T>(Oi[2 * x + 1], p_n, v[2], v[3]);
            }
        }
    }

    // Oi, li, mi of the chunk
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const float l = row_sum<4>(li[r]);
        if (lane % 4 == 0) all.l[warp][row] = l;
        float *const to = p.Oi + (slot + row) * Tile::D_v + Tile::Columns * warp + lane % 4 * 2;
#pragma unroll
        for (int x = 0; x < Tile::Columns / 8; ++x) *(float2 *)(to + 8 * x) = {Oi[x][2 * r], Oi[x][2 * r + 1]};
    }
    __syncthreads();
    if (warp > 0 || lane % 4 > 0) return;
    for (int r = 0; r < 2; ++r) {
        float l = 0.f;
        for (int n = 0; n < Tile::Warps; ++n) l += all.l[n][lane / 4 + 8 * r];
        p.lm[slot + lane / 4 + 8 * r] = {l, mi[r]};
    }
}

template <class T, int Stages>
__global__ void __launch_bounds__(LatentTile::Threads, 1)
    latent_kernel(const __grid_constant__ Attention a, const __grid_constant__ Latent p) {
    let_next_kernel_start();
    wait_for_kernel_before();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    latent_block<T, Stages>(a, p);
#endif
}

// 12. - 13. A block joins the chunks of one row, 4 columns a thread. Each group of threads joins every kGroups-th four
// of chunks, then the first group joins the groups' sums.
constexpr int kGroups = 4, kGroupThreads = LatentTile::D_v / 4;
template <class T>
__global__ void __launch_bounds__(kGroups *kGroupThreads)
    join_latent(const __grid_constant__ Attention a, const __grid_constant__ Latent p) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const int head = blockIdx.x / p.rows, r = blockIdx.x % p.rows, b = head / (int)a.Hkv;
    const Row row = p.row(head % (int)a.Hkv, r);
    const auto slot = [&](int chunk) { return p.slot(head, chunk, r / LatentTile::Rows) + r % LatentTile::Rows; };
    const int group = threadIdx.x / kGroupThreads, x = threadIdx.x % kGroupThreads, column = 4 * x;
    __shared__ float2 lm[kGroups];
    __shared__ float4 O[kGroups][kGroupThreads];
    Part sum = join<kFour>(
        kFour * group, kFour * kGroups, p.chunks, [&](int chunk) { return __ldcg(&p.lm[slot(chunk)]); },
        [&](int chunk) {  // of a chunk without a key Oi was never written
            const bool exists = __ldcg(&p.lm[slot(chunk)]).y > -INFINITY;
            return exists ? __ldcg((const float4 *)(p.Oi + slot(chunk) * LatentTile::D_v + column)) : float4{};
        });
    if (x == 0) lm[group] = sum.lm();
    O[group][x] = sum.o4();
    __syncthreads();
    if (group > 0) return;
    sum = join<kGroups>(0, kGroups, kGroups, [&](int n) { return lm[n]; }, [&](int n) { return O[n][x]; });
    const Block<T> block = block_of<T>(b, band_of(a, b), row);
    pad_lse(a, b, row.h, row.i + 1, x);
    const RowEnd end = end_row(a, block, row.i, sum.l, sum.m);
    if (x == 0) store_l_m_lse(a, b, row.h, row.i, end.l, end.m);
    store_o<4>(a, block, row.i, column, end, sum.o, p.aligned_o);
}

// ------------------------------------------------------------------------------ on the host: plan and launch

int shared_bytes(int stages) { return stages * LatentTile::StageBytes + (int)sizeof(LatentShared); }

int stages_for(const Device &device) {
    return shared_bytes(LatentTile::kStages) <= device.shared_memory ? LatentTile::kStages : LatentTile::kFewerStages;
}

// So many chunks that the last wave of blocks is nearly full, and that partial results, written and read, are few bytes
// beside the keys. So a row's bits depend on B and on the GPU.
Latent describe(const Attention &a, int multiprocessors, void *workspace) {
    Latent p;
    p.group = (int)(a.Hq / a.Hkv), p.rows = p.group * a.Nq,
    p.tiles = (p.rows + LatentTile::Rows - 1) / LatentTile::Rows;
    const int64_t items = a.B * a.Hkv * p.tiles;
    const double overhead = 2. * LatentTile::Rows * LatentTile::D_v * 4 / (double(a.Nk) * a.d * 2);  // of a chunk
    double shortest = INFINITY;
    for (int n = 1; n <= std::min((a.Nk + LatentTile::Bc - 1) / LatentTile::Bc, 256); ++n) {
        const int64_t waves = (items * n + multiprocessors - 1) / multiprocessors;
        const double time = double(waves) / n * (1 + overhead * n);
        if (time < shortest) shortest = time, p.chunks = n;
    }
    const int steps = (a.Nk + LatentTile::Bc * p.chunks - 1) / (LatentTile::Bc * p.chunks);
    p.chunk = steps * LatentTile::Bc, p.chunks = (a.Nk + p.chunk - 1) / p.chunk;
    p.aligned_o = is_aligned(a.o, a.o_stride, element_size(a.o_dtype), a.d_v);
    p.Oi = (float *)workspace, p.lm = (float2 *)(p.Oi + items * p.chunks * LatentTile::Rows * LatentTile::D_v);
    return p;
}

}  // namespace

namespace portable {

bool takes_latent(const Attention &a, const Device &device, bool on_tensor_cores) {
    const Strides &k = a.k_stride, &v = a.v_stride;
    const bool is_view = a.v == a.k && v.batch == k.batch && v.head == k.head && v.row == k.row;
    const bool fits = is_wide(a) && a.d <= LatentTile::D && a.d_v <= std::min(a.d, LatentTile::D_v);
    const int64_t rows = a.Hq / a.Hkv * a.Nq, items = a.B * a.Hkv * ((rows + LatentTile::Rows - 1) / LatentTile::Rows);
    return is_view && fits && on_tensor_cores && rows <= 1024 && a.Nk >= 128 && has_aligned_inputs(a) &&
           !needs_general(a) && !a.key_ranges && !a.cu_seqlens_q && (!a.block_table || a.page_size % 16 == 0) &&
           items <= 1 << 20 && device.shared_memory >= shared_bytes(LatentTile::kFewerStages);
}

Plan plan_latent(const Attention &a, const Device &device) {
    using Tile = LatentTile;
    const Latent p = describe(a, device.multiprocessors, nullptr);
    const int stages = stages_for(device);
    const int64_t items = a.B * a.Hkv * p.tiles * p.chunks;
    return {kLatent,
            stages,
            Tile::Rows,
            Tile::Bc,
            Tile::D,
            items,
            Tile::Threads,
            shared_bytes(stages),
            items * Tile::Rows * (Tile::D_v + 2) * (int64_t)sizeof(float),
            device.multiprocessors};
}

const char *launch_latent(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    const Latent p = describe(a, plan.multiprocessors, workspace);
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        const auto kernel = plan.tile == LatentTile::kStages ? latent_kernel<T, LatentTile::kStages>
                                                             : latent_kernel<T, LatentTile::kFewerStages>;
        const cudaError_t error =
            launch_overlapping(kernel, plan.grid, LatentTile::Threads, plan.shared_memory, stream, a, p);
        if (error != cudaSuccess) return error;
        return launch_overlapping(join_latent<T>, a.B * a.Hkv * p.rows, kGroups * kGroupThreads, 0, stream, a, p);
    };
    return why_not(a.dtype == Dtype::float16 ? launch(__half()) : launch(__nv_bfloat16()));
}

}  // namespace portable
}  // namespace minimal_attn
