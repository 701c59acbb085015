// launch.h: what the plans and launches of all Hopper kernels have in common. Host code.
#pragma once
#include <initializer_list>
#include <limits>
#include <numeric>

#include "hopper/scheduler.h"

namespace minimal_attn::hopper {

template <class Tile, class SharedStorage>
Plan make_plan(const Attention &a, const Device &device, const char *kernel, int tile) {
    static_assert(sizeof(SharedStorage) * Tile::BlocksPerSM <= 227 * 1024);
    const Order order = order_of<Tile>(a, device.multiprocessors);
    Plan plan{kernel, tile, Tile::Br, Tile::Bc, Tile::D, order.grid, Tile::Threads, sizeof(SharedStorage)};
    plan.workspace = order.uses_counter ? sizeof(int) : 0;
    plan.multiprocessors = device.multiprocessors;
    plan.error = tensor_map_encoder() ? nullptr : "the driver has no cuTensorMapEncodeTiled";
    return plan;
}

inline void set_heads_and_mask(Parameters &p) {
    const Attention &a = p.a;
    p.Hq = a.Hq, p.Hkv = a.Hkv, p.group = a.Hq / a.Hkv;
    p.same_band = has_same_band(a);
    if (p.same_band) p.band = narrow(band_of(a, 0));
}

// Launches the kernels one after the other, with the parameters that all kernels have. A kernel may begin while the one
// before it in the stream ends (programmatic dependent launch). A box that TMA loads has k_rows rows of K or V, or 64
// of q. With pages these rows are cut where a page may end. work_tiles: how many there are, or 0 where each is Br
// queries of a head.
template <class Tile, class Parameters>
const char *launch_kernels(std::initializer_list<void (*)(Parameters)> kernels, Parameters &p, const Plan &plan,
                           const Zeros &counters, cudaStream_t stream, int k_rows = Tile::Bc, int work_tiles = 0) {
    const Attention &a = p.a;
    // First, since it gives this thread the context that cuTensorMapEncodeTiled needs.
    cudaError_t error = counters.error;
    for (const auto kernel : kernels)
        if (error == cudaSuccess) error = allow_shared_memory(kernel);
    if (error != cudaSuccess) return why_not(error);
    // Without any key a tile of q is loaded instead, and masked.
    const void *k = a.Nk > 0 ? a.k : a.q, *v = a.Nk > 0 ? a.v : a.q;
    int64_t B = a.Nk > 0 ? a.B : 1, Hkv = a.Nk > 0 ? a.Hkv : 1, Nk = std::max(a.Nk, 1);
    p.rows_of_piece = 0, p.zeros_from = a.Nk;
    if (a.block_table && a.Nk > 0) {
        B = a.pages, Nk = a.page_size;
        p.rows_of_piece = k_rows = std::gcd(a.page_size, k_rows);
        p.page_size = a.page_size, p.last_page = (int)a.pages - 1, p.zeros_from = std::numeric_limits<int>::max();
    }
    if (!make_tensor_map(p.Q, a.dtype, a.q, a.q_stride, a.B, a.Hq, a.Nq, a.d, 64) ||
        !make_tensor_map(p.K, a.dtype, k, a.k_stride, B, Hkv, Nk, a.d, k_rows) ||
        !make_tensor_map(p.V, a.dtype, v, a.v_stride, B, Hkv, Nk, a.d_v, k_rows))
        return "cuTensorMapEncodeTiled refused q, k or v";
    p.aligned = is_aligned(a.o, a.o_stride, element_size(a.o_dtype), a.d_v);
    p.stores_O_alone = p.aligned && !a.l && !a.lse && !a.l_in;
    set_heads_and_mask(p);
    p.Tr = tiles_of_head(a, Tile::Br), p.grid = plan.grid;
    p.work_tiles = work_tiles ? work_tiles : a.B * a.Hq * p.Tr;
    p.interleaved_heads = order_of<Tile>(a, plan.multiprocessors).interleaved_heads;
    p.sequential_heads = a.B * a.Hq - p.interleaved_heads;
    if (counters.memory) p.tile_counter = (int *)counters.memory;
    cudaLaunchAttribute overlap{cudaLaunchAttributeProgrammaticStreamSerialization};
    overlap.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{dim3(plan.grid), dim3(plan.threads), (size_t)plan.shared_memory,
                                    stream,          &overlap,           1};
    for (const auto kernel : kernels)
        if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
    return why_not(error);
}

}  // namespace minimal_attn::hopper
