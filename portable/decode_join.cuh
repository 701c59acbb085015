// decode_join.cuh: how decode.cu joins partial results: of a chunk's warps, of four chunks, of a row's fours.
#pragma once
#include "portable/decode_chunks.cuh"

namespace minimal_attn {
namespace {

constexpr int kJoinThreads = 128;

// How many groups of D / 4 threads a block of join_kernel has. Each joins every Groups-th four of chunks.
template <int D>
constexpr int Groups = kJoinThreads / (D / 4);

// Of one row: l, m, and 4 columns of the undivided O. Without a key l is 0 and m is -inf.
struct Part {
    float2 lm{0.f, -INFINITY};
    float4 o{};
};

struct Sum {
    float sum = 0.f, lost = 0.f;
    __device__ void add(float x) {  // Kahan: a row may have thousands of chunks
        const float y = x - lost, next = sum + y;
        lost = fabsf(next) < INFINITY ? (next - sum) - y : 0.f;
        sum = next;
    }
    __device__ void scale(float x) { sum *= x, lost *= x; }
};

// Steps 11 and 12 over parts, Count at a time
class Joined {
    float m = -INFINITY;
    Sum l, x[4];

public:
    template <int Count>
    __device__ void add(const Part (&part)[Count]) {
        float m_new = m, m_safe;
#pragma unroll
        for (int k = 0; k < Count; ++k) m_new = fmaxf(m_new, part[k].lm.y);
        const float alpha = update_row_max(m, m_new, m_safe);
        l.scale(alpha), x[0].scale(alpha), x[1].scale(alpha), x[2].scale(alpha), x[3].scale(alpha);
#pragma unroll
        for (int k = 0; k < Count; ++k) {
            const float weight = exp_fast(part[k].lm.y - m_safe);
            l.add(weight * part[k].lm.x);
            x[0].add(weight * part[k].o.x), x[1].add(weight * part[k].o.y);
            x[2].add(weight * part[k].o.z), x[3].add(weight * part[k].o.w);
        }
    }
    __device__ Part result() const { return {{l.sum, m}, {x[0].sum, x[1].sum, x[2].sum, x[3].sum}}; }
};

template <int Count>
__device__ Part join(const Part (&part)[Count]) {
    Joined joined;
    joined.add(part);
    return joined.result();
}

// Of a row, what the steps that end it read
template <class T>
__device__ Block<T> block_of(const Attention &a, int b, const Row &row) {
    Block<T> block;
    block.b = b, block.h = row.h, block.band = band_of(a, b);
    return block;
}

// 13. Columns 4 x to 4 x + 3 of a row. D / 4 threads have the row.
template <class T, class Tile>
__device__ void finish_row(const Attention &a, const Decode &p, const Block<T> &block, int i, int x, const Part &sum) {
    const RowEnd end = end_row(a, block, i, sum.lm.x, sum.lm.y);
    const float o[] = {sum.o.x, sum.o.y, sum.o.z, sum.o.w};
    if (x == 0) store_l_m_lse(a, block.b, block.h, i, end.l, end.m);
    for (int past = x; past < 32; past += Tile::D / 4) pad_lse(a, block.b, block.h, i + 1, past);
    store_o<4>(a, block, i, 4 * x, end, o, p.aligned_o);
}

// Programmatic dependent launch: a kernel's blocks start while the kernel before ends, and wait here until its writes
// can be read. The next kernel's blocks may start as soon as all blocks are here.
__device__ void wait_for_the_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 12. - 13. A block joins the chunks of one row. A group of D / 4 threads, 4 columns each, joins every Groups-th four.
// Then the first group joins the groups' sums.
template <class T, class Tile>
__global__ void __launch_bounds__(kJoinThreads)
    join_kernel(const __grid_constant__ Attention a, const __grid_constant__ Decode p) {
    constexpr int D = Tile::D, Groups = minimal_attn::Groups<D>;
    __shared__ float2 lm[Groups];
    __shared__ float4 O[Groups][D / 4];
    if (!p.same_chunks) wait_for_the_kernel_before();
    const int head = blockIdx.x / p.rows, r = blockIdx.x - head * p.rows, b = head / (int)a.Hkv;
    const int x = threadIdx.x % (D / 4), group = threadIdx.x / (D / 4), count = chunks_of(a, p, b).count;
    const int64_t first = ((int64_t)head * p.tiles + r / Tile::Rows) * p.most_chunks * Tile::Rows + r % Tile::Rows;
    const Row row = row_of(p, head - b * (int)a.Hkv, r);
    const Block<T> block = block_of<T>(a, b, row);
    if (p.same_chunks) wait_for_the_kernel_before();
    Joined joined;
#pragma unroll 1
    for (int chunk = kFour * group; chunk < count; chunk += kFour * Groups) {
        Part part[kFour];  // their loads are under way together
#pragma unroll
        for (int k = 0; k < kFour; ++k) {
            const int64_t at = first + (int64_t)(chunk + k) * Tile::Rows;
            if (chunk + k < count) part[k] = {__ldcg(&p.lm[at]), __ldcg((const float4 *)(p.Oi + at * D) + x)};
        }
        joined.add(part);
    }
    const Part four = joined.result();
    if (x == 0) lm[group] = four.lm;
    O[group][x] = four.o;
    __syncthreads();
    if (group > 0) return;
    Part part[Groups];
#pragma unroll
    for (int n = 0; n < Groups; ++n) part[n] = {lm[n], O[n][x]};
    finish_row<T, Tile>(a, p, block, row.i, x, join(part));
}

}  // namespace
}  // namespace minimal_attn
