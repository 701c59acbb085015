// small.cu: float32 on Hopper for at most 64 queries and 64 keys a head, d up to 64. Such a head is one work tile, and no
// other work tile reads its K and V, so they are split in place, without a workspace. Two blocks share a multiprocessor.
//
// Each step runs once a head, so nothing hides latencies: loads come first, before the work tile is worked out, and the
// code is short and straight, as each line of it is waited for in the instruction cache.
//
// role                | warps  | registers | does
// producer warpgroup  | 0 to 3 | 96        | thread 0 loads Kj, Qi and Vj; all split Kj, then Vj, in place
// consumer warpgroup  | 4 to 7 | 160       | splits Qi in place, then Sij, Pij, O; fallback.h
//
// barrier                | who arrives               | who waits            | orders what
// tile_queue full, empty | thread 0; all 8 warps     | all warps; thread 0  | a work tile's description: written; read
// Q full, empty          | TMA; consumer             | consumer; thread 0   | Qi: there, as float32s; Sij is done
// loaded                 | TMA                       | producer             | Kj or Vj is there, as float32s
// KV full, empty         | thread 0; consumer        | consumer; thread 0   | Kj or Vj: split; read
// named, 1 and 2         | consumer; producer        | the same             | what its threads exchange when they split
#include "hopper/float32/fallback.h"
#include "hopper/float32/producer.h"
#include "hopper/float32/single.h"
#include "hopper/launch.h"

namespace minimal_attn::hopper {
namespace {

using Tile = Float32Tile<64, 64, 64, 2, 1, 2>;

struct SmallMemory : ConsumerMemory<Tile> {
    Barrier loaded[2];  // Kj, Vj
};

__device__ void produce_and_split(const Parameters &p, SmallMemory &shared) {
    Pipeline<1> Q{};
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    int parity = 0;  // of this work tile's phase of `loaded` and KV
    const auto load = [&](bool is_V, int key_head, int b) {
        wait(shared.KV[is_V].empty, parity ^ 1);
        load_tile<Tile::Bc, Tile::Boxes, 32>(shared.tiles[is_V], is_V ? p.V : p.K, 0, key_head, b, shared.loaded[is_V]);
    };
    const auto split = [&](bool is_V, Float32Work &work) {
        wait(shared.loaded[is_V], parity);
        const float inverse_scale =
            split_in_place(SplitterGroup<Tile::D, Tile::Bc, 4>{shared.groups[1], 1}, shared.tiles[is_V],
                           {work.band.keys, is_V}, shared.inverse_scale[is_V].x);
        if (threadIdx.x == 0) {
            if (is_V)
                work.inverse_scale_V = inverse_scale;
            else
                work.inverse_scale_K = nonzero_inverse_scale(inverse_scale);
            arrive(shared.KV[is_V].full);
        }
    };
    for (int n = -1;; parity ^= 1, __syncwarp(), tile_queue.consumer_release()) {
        if (threadIdx.x == 0) {
            tile_queue.producer_acquire();
            n = TileScheduler<Tile>{p}.next(n);
            if (n < p.work_tiles) {  // work tile n is head n
                const int b = n / p.Hq, h = n % p.Hq, key_head = h / p.group;
                load(false, key_head, b);
                produce_Q<Tile>(p, shared, 0, h, b, Q);
                load(true, key_head, b);
            }
            describe_work<Tile>(p, shared, tile_queue, n);
            arrive(tile_queue.full());
        }
        __syncwarp();
        tile_queue.consumer_wait();
        Float32Work &work = shared.work[tile_queue.stage()];
        if (work.b < 0) return;
        split(false, work);
        split(true, work);
    }
}

// Out of line: amid the code that runs once it costs 3 %.
__device__ __noinline__ void run_deferred_out_of_line(const Parameters &p, SmallMemory &shared, Pipeline<2> KV) {
    run_deferred<Tile>(p, shared, KV);
}

__device__ void consume(const Parameters &p, SmallMemory &shared) {
    const Attention &a = p.a;
    const int warpgroup = consumer_index();
    Pipeline<kQueueStages> tile_queue{shared.tile_queue};
    Pipeline<2> KV{shared.KV};
    const float dither = dither_at(0);
    for (;; tile_queue.consumer_release()) {
        tile_queue.consumer_wait();
        const Float32Work &work = shared.work[tile_queue.stage()];
        if (work.b < 0) {
            if (!named_barrier_any(barrier_of_group(warpgroup), 128, shared.deferred[threadIdx.x / 32 - 4] >= 0))
                return;
            break;
        }
        Pipeline<1> Q{shared.Q[warpgroup], tile_queue.position % 2};
        Q.consumer_wait();
        split_in_place(SplitterGroup<Tile::D, 64, 4>{shared.groups[warpgroup], warpgroup}, shared.Qi[warpgroup],
                       {{0, work.i1 - work.i0 - 64 * warpgroup}, false}, shared.inverse_scale_Q[warpgroup]);
        KV.consumer_wait();      // Kj's inverse scale is known
        const auto unit = [&] {  // of Sij and m
            return work.inverse_scale_K * nonzero_inverse_scale(shared.inverse_scale_Q[warpgroup]);
        };
        bool fallback = !scores_fit(a, unit);
        if (fallback) {
            KV.skip_stage(), KV.skip_stage();
            Q.consumer_release();
        } else {
            const bool is_lane_0 = is_lane0_kept();
            const float c = scale_of(a, unit(), kLog2eS<Tile::D>);
            SoftmaxState softmax = SoftmaxState();
            const Keys fully_visible = work.fully_visible[warpgroup];
            const bool needs_mask =
                work.visible.begin < fully_visible.begin || work.visible.begin + Tile::Bc > fully_visible.end;
            // 9. Sij = Qi Kj^T
            KV.consumer_wait();
            const float inverse_scale_K = read_by_lane0(shared.inverse_scale[0].x, is_lane_0);
            float Sij[Tile::Bc / 2];
            issue_QK<Tile>(Sij, shared.Qi[warpgroup], shared.tiles[0], 0, Tile::D);
            __syncwarp();
            const float tile_unit = fmaxf(inverse_scale_K * inverse_of_power(work.inverse_scale_K), 0x1p-60f);
            const float c_tile = fmaxf(c * tile_unit, kLeastScale);
            wgmma_wait<0>(Sij);
            KV.consumer_release(inverse_scale_K, is_lane_0);
            Q.consumer_release(0.f, is_lane_0);
            if (needs_mask) negate_and_mask(Sij, a, work, work.visible.begin);
            // 10. - 11. Pij
            uint32_t hi[Tile::Bc / 4], lo[Tile::Bc / 4];
            update_row_max<false>(Sij, softmax, c, tile_unit);
            exponentiate<false>(Sij, softmax, c_tile);
#pragma unroll
            for (int x = 0; x < Tile::Bc / 4; ++x) split_P<Tile>(Sij[2 * x], Sij[2 * x + 1], dither, x, hi[x], lo[x]);
            // 12. Oi = Pij Vj
            KV.consumer_wait();
            float Oi[Tile::D / 2];
            issue_PV<Tile>(Oi, hi, lo, shared.tiles[1]);
            __syncwarp();
            const float inverse_scale_V = read_by_lane0(shared.inverse_scale[1].x, is_lane_0);
            float unitO = inverse_scale_V > 0.f ? inverse_scale_V / kPScale<Tile> : 0.f;
            wgmma_wait<0>(Oi);
            KV.consumer_release(inverse_scale_V, is_lane_0);
            const float l[2] = {row_sum<4>(softmax.l[0]), row_sum<4>(softmax.l[1])};  // of whole rows
            fallback = work.inverse_scale_V == INFINITY || any_row_small<Tile>(Oi, l, work, unitO);
            if (unitO < 0x1p-60f || a.l_in) {  // else unitO times the row's weight could be subnormal
#pragma unroll
                for (float &x : Oi) x *= unitO;
                unitO = 1.f;
            }
            store_O<Tile>(p, work, work.i0 + row_of_thread(), Oi, softmax, l, c, unit(), unitO);
        }
        if (fallback) defer<Tile>(p, shared, work);
        __syncwarp();  // all lanes have read the work tile
    }
    run_deferred_out_of_line(p, shared, KV);
}

__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    small_float32_hopper_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    SmallMemory &shared = *(SmallMemory *)memory;
    const auto init_barriers = [&] {
        init_consumer_memory(shared, 4);
        for (Barrier &loaded : shared.loaded) init(loaded, 1);
    };
    run_roles<Tile>(init_barriers, [&] { produce_and_split(p, shared); }, [&] { consume(p, shared); });
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for something else than sm_90a, which no launch should come to
#endif
}

}  // namespace

Plan plan_single_tile(const Attention &a, const Device &device) {
    return make_plan<Tile, SmallMemory>(a, device, "float32, a single tile", 0);
}

const char *launch_single_tile(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    Parameters p{a};
    return launch_kernel<Tile>(small_float32_hopper_kernel, p, plan, workspace, sizeof(int), stream);
}

}  // namespace minimal_attn::hopper
