// backward_fused.cu: dK, dV and dQ for float16 and bfloat16 on Hopper, d up to 128. docs/backward.md has its budget and
// measurements. Read half.cu first.
//
//     S = Q K^T,  P = exp(S - lse),  dP = dO V^T,  dS = P o (dP - D)          dV = P^T dO,  dK = dS^T Q,  dQ = dS K
//
// A block computes one work tile after another: Bc keys of one key head, 64 for each consumer warpgroup. It walks the
// tiles of Br queries that see one of the keys, in all query heads of the key head. So no other block adds to this dK
// and dV. Where multiprocessors would be idle, a work tile is a slice (key_slices.h): it walks some of these queries.
//
//         thread 0          shared memory      each consumer warpgroup, in registers           threads 32, 64
//         +-- once ----> Kj, Vj ---------+
//         +------------> Qi, lse_i ------+-> S^T = Kj Qi^T       (wgmma)   P^T = exp(S^T - lse)
//         +------------> dOi, Di --------+-> dP^T = Vj dOi^T     (wgmma)   dS^T = P^T o (dP^T - D)
//                             |          +-> dV += P^T dOi       (wgmma, A = P^T in registers)
//                             +----------+-> dK += dS^T Qi       (wgmma, A = dS^T in registers)
//                        dS <------------+   dS^T of 64 keys
//                         +----------------> dQ^T = Kj^T dS^T    (wgmma), 64 x 64 of it
//                        dQi <-----------+--------------------------------------------> TMA: 64 x 64 of dQ in HBM
//
//         warp 3            shared memory      warp 3
//         +------------> buffer ------------> D = rowsum(dO o O) - dlse, log2_l: to HBM, for thread 0's loads
//         +------------> buffer ------------> dq = softmax_scale dQ: to HBM
//
// With S^T instead of S the accumulators P^T and dS^T are the operand A of dV and dK as they are. dQ of a tile is
// computed one tile later. By then the other consumer has stored its half of dS, so the consumers rarely wait.
//
// Two things are not in the drawing (portable/gradient_rows.h). lse is two numbers a row, m and log2_l. There are two
// kernels: with has_large_rows m is subtracted from S. In float16 P is 2^15 times as large, and dP - D and dV are
// divided by 2^15.
//
// A consumer's step, for one tile of queries. Each product runs beside what follows, until a line waits for it:
//
//     issue                          compute                    wait for    then
//     S^T, dP^T (when it has a turn)                            S^T
//                                    P^T                        dP^T
//     dV                             dS^T; store it as dS
//     dQ of the previous tile, dK                               dV          release dOi
//                                                               dQ          stage dQi of the previous tile
//                                                               dK          release Qi
//
// There are two general kernels (terms.h: with_or_without_terms). The one with softcap (scores.h: change, slope_of)
// waits for dP^T before P^T, which takes the place of the scores. The one with terms computes dS^T before it drops P^T:
//
//     terms.h      add_terms_transposed: ALiBi, masks and biases, beside dP^T
//     dropped.h    KeptWeights: which weights dropout keeps; pack_kept: P^T without the others, as an operand
//     gradient.h   dP_less_D, with the factor of kept weights
//
// A part of dQ is 64 queries x 64 columns, in float32 in the workspace. It needs no memset: the first block that has
// computed something for a part stores it, later blocks add. They do so in any order, or, for deterministic gradients,
// "in order": of the keys that the part's queries see, the last come first (tile_in_order, KeySlice::tiles_before).
//
// Warp 3 does what is bound by memory, beside the products. A unit is 64 queries of one query head. First the warp
// computes log2_l and D of units, unless gradient_rows.cu has done so (fills_rows). Then it converts dQ to dq: a unit
// once dQ of its key head is complete.
//
// | role                | warps           | registers a thread | does                                            |
// |---------------------|-----------------|--------------------|-------------------------------------------------|
// | scheduler, loads    | 0 (thread 0)    | 24 or 40           | takes work tiles, loads Kj, Vj, all Qi and dOi  |
// | adders of dQ        | 1, 2 (lane 0)   | 24 or 40           | store or add the dQi that their consumer staged |
// |                     |                 |                    | and, for the gradient of a bias, store its dS   |
// | rows                | 3               | 24 or 40           | computes log2_l and D of units; converts dQ     |
// | consumer warpgroups | 4 to 7, 8 to 11 | 240 or 232         | S^T, dP^T, dK and dV of 64 keys; 64 x 64 of dQi |
//
// Registers are those at d 64 or d 128. At d 64 the kernels of a band spill 88 and 96 bytes, outside the consumers'
// loop. Those of ranges spill 160 bytes (they grow) and 188, some of it within the loop.
//
// | barrier                 | arrives                      | waits             | then                          |
// |-------------------------|------------------------------|-------------------|-------------------------------|
// | tile_queue full         | thread 0                     | adders, consumers | a work tile is published      |
// | tile_queue empty        | adders, consumers            | thread 0          | its slot is free              |
// | KV full                 | thread 0, for each load; TMA | consumers         | Kj and Vj have arrived        |
// | Q full, dO full         | thread 0, for each load; TMA | consumers         | Qi or dOi has arrived, with   |
// |                         |                              |                   | Qi `is_whole`, too            |
// | KV, Q, dO empty         | consumers                    | thread 0          | all products have read it     |
// | dS full                 | both consumers               | both consumers    | dS of all keys is stored      |
// | dS empty                | both consumers               | both consumers    | both products dQ have read dS |
// | dS full, for a bias     |                              | adders, too       | they store it by TMA          |
// | dS empty, for a bias    | adders, too                  |                   | TMA has read dS               |
// | dQ full (per consumer)  | that consumer                | its adder         | dQi is staged                 |
// | dQ empty (per consumer) | its adder                    | that consumer     | TMA has read dQi              |
// | buffer full             | lane 0 of warp 3; TMA        | warp 3            | its buffer is loaded          |
// | named kTurn + index     | the consumer before it       | that consumer     | it may issue S^T and dP^T     |
// | named kZeroed + index   | that consumer                | that consumer     | hidden rows are 0             |
//
// full and empty are mbarriers, on which a consumer warp arrives once. index is the consumer's. Warp 3 needs no empty:
// it reads the buffer before it loads again.
//
// | counter in memory | one for      | adds                                    | waits    | until                |
// |-------------------|--------------|-----------------------------------------|----------|----------------------|
// | tile_counter      | the launch   | thread 0: takes a work tile             | no role  |                      |
// | any_large         | the launch   | large_rows.cu before: sets it to 1      | no role  |                      |
// | units_taken       | the launch   | warp 3: takes a unit, for log2_l and D  | no role  |                      |
// | filled            | a key head   | warp 3: stored log2_l and D of a unit   | thread 0 | all units are stored |
// | stored            | a part of dQ | first adder: before and after its store | adders   | 2: then they add     |
// | stored, in order  | a part of dQ | each adder: stored or added             | adders   | tiles_before         |
// | added             | a key head   | each adder: 1 for a slice, or for a     | warp 3   | all: dQ is complete  |
// |                   |              | whole tile 2^log_slices                 |          |                      |
// | steps_stored      | 16 keys of a | consumer warp: stored dK and dV of so   | no role  |                      |
// |                   | split tile   | many steps                              |          |                      |
//
// No wait is circular, even if only some blocks run: these take all work tiles, and all units for log2_l and D. Thread
// 0 waits for these, which wait for no other role. An adder waits only for a store that has begun. In order it waits
// for work tiles taken earlier. A block ends its tiles in the order in which it took them: so of all unfinished tiles
// the one taken first never waits. No role waits for dq, or to sum slices.
// An adder releases dS of a step before it waits for dQ of that step.
#include "hopper/backward_fused.h"

#include "hopper/backward_rows.h"

namespace minimal_attn::hopper {
namespace {

// ------------------------------------------------------------------------------ thread 0: work tiles and loads

// The n-th tile of keys in order. Each head's last keys come first: under a causal mask only the last queries see
// them. So they add first, and earlier keys rarely wait. Without causal or a window heads are interleaved: a tile
// begins later than the one of its head that adds before it. A tile waits only for tiles of a smaller n: no deadlock.
__device__ inline int tile_in_order(const FusedParameters &p, int n) {
    const int first_head = n / (p.interleaved * p.Tc) * p.interleaved, rest = n - first_head * p.Tc;
    const int heads = min(p.interleaved, int(p.a.B) * p.Hkv - first_head);
    return (first_head + rest % heads) * p.Tc + p.Tc - 1 - rest / heads;
}

__device__ inline KeyWork take_work_tile(const FusedParameters &p) {
    const int n = atomicAdd(p.tile_counter, 1);
    if (n >= p.work_tiles) return {kNoTile, kWhole};
    KeyWork work = key_work(p, n);
    if (p.in_order) work.tile = tile_in_order(p, work.tile);
    return work;
}

// Thread 0 takes a work tile after it has issued the last load of the one before.
template <class Tile, class Mask>
__device__ void schedule_and_load(const FusedParameters &p, FusedStorage<Tile, Mask> &shared) {
    Pipeline tile_queue{shared.tile_queue};
    Pipeline KV{shared.KV};
    Pipeline Q{shared.Q};
    Pipeline dO{shared.dO};
    for (;; tile_queue.advance()) {
        const KeyWork taken = take_work_tile(p);
        const KeyWorkOf<Mask> work = {taken,
                                      taken.tile == kNoTile ? KeyEntry<Mask>() : key_entry<Tile, Mask>(p, taken.tile)};
        tile_queue.producer_acquire();
        shared.work[tile_queue.stage()] = work;
        arrive(tile_queue.full());
        if (work.tile == kNoTile) return;
        const KeySlice<Tile, Mask> keys(p, work, work);
        if (p.fills_rows) wait_for(p.filled[work.tile / p.Tc], p.units_of_group);
        keys.for_each_step([&](int h, int i0, bool is_first) {
            if constexpr (kHasTerms<Mask>)
                Q.producer_acquire(), shared.is_whole[Q.stage()] = is_shown_whole(p.a, keys.b, i0, keys.j0);
            load_query_tile<Tile>(p, keys.b, h, i0, p.Q, {p.rows.m, p.rows.log2_l}, Q, shared.Qi, shared.m_l);
            load_query_tile<Tile>(p, keys.b, h, i0, p.dO, {p.rows.D}, dO, shared.dOi, shared.Di);
            if (!is_first) return;
            KV.producer_acquire();  // after the first Qi and dOi: their stages are free earlier
            for (int x = 0; x < Tile::Consumers; ++x) {
                load_tile<64, Tile::Boxes>(shared.Kj[x], p.K, keys.j0 + 64 * x, keys.key_head, keys.b, KV.full());
                load_tile<64, Tile::Boxes>(shared.Vj[x], p.V, keys.j0 + 64 * x, keys.key_head, keys.b, KV.full());
            }
            KV.advance();
        });
    }
}

// ------------------------------------------------------------------------------ adders of dQ

// For the gradient of a bias: dS^T of the consumer's 64 keys, behind which dQ of this step comes.
template <class Tile, class Mask>
__device__ void store_dS(const FusedParameters &p, FusedStorage<Tile, Mask> &shared, Pipeline<Tile::dSStages> &dS,
                         const KeySlice<Tile, Mask> &keys, int consumer, int h, int i0) {
    dS.consumer_wait();
    for (int box = 0; box < Tile::QueryBoxes && !keys.unseen; ++box)
        tma_store(p.dS.map, shared.dS[dS.stage()][box] + consumer * (64 * 128), i0 + 64 * box, keys.j0 + 64 * consumer,
                  h * p.dS.head, keys.b * p.dS.batch);
    tma_store_wait_read();
    dS.consumer_release();
}

// An adder stores or adds the parts of dQ that its consumer staged. In any order, the adder that sets a part's counter
// from 0 to 1 stores, and sets it to 2 when the part is in global memory. From then on adders add. In order, the
// counter is the number of tiles that have been stored or added, and an adder waits until it is tiles_before.
template <class Tile, class Mask>
__device__ void add_dQ(const FusedParameters &p, FusedStorage<Tile, Mask> &shared, int consumer) {
    Pipeline<1> dQ{shared.dQ[consumer]};
    Pipeline<Tile::dSStages> dS{shared.dS_ready};
    // Adds n to the counter when all that this thread has sent is in global memory.
    const auto publish = [](int &counter, int n) { tma_store_wait(), fence_async_global(), add_release(counter, n); };
    for_each_key_work(shared, [&](const KeyWorkOf<Mask> &work) {
        const KeySlice<Tile, Mask> keys(p, work, work);
        keys.for_each_step([&](int h, int i0, bool) {
            if constexpr (kHasTerms<Mask>)
                if (p.stores_dS) store_dS(p, shared, dS, keys, consumer, h, i0);
            dQ.consumer_wait();
            // In any order, a walk of ranges that grow adds a few zeros: is_met would wait for memory.
            if (keys.unseen || ((p.in_order || !keys.grows()) && !keys.is_met(i0))) return dQ.consumer_release();
            const auto send = [&](const auto &store_or_add) {
                for (int box = 0; box < 2; ++box)
                    store_or_add(p.dQ.map, shared.dQi[consumer][box], 64 * Tile::column_box(consumer) + 32 * box,
                                 i0 + 64 * Tile::query_box(consumer), h * p.dQ.head, keys.b * p.dQ.batch);
            };
            const unsigned row = (keys.b * p.Hq + h) * (unsigned)p.rows.head_stride + i0;  // 2^32 rows of dQ are 1 TB
            // The two consumers' parts are neighbours, at d 64 in rows, at d 128 in columns, and so are their counters.
            int &counter = p.stored[row / 64 * Tile::Boxes + consumer];
            int state = p.in_order ? load_acquire(counter) : set_if_0_acquire(counter, 1);
            const bool is_first = p.in_order ? keys.tiles_before(i0) == 0 : state == 0;
            while (p.in_order ? state < keys.tiles_before(i0) : state == 1) state = load_acquire(counter);
            fence_async_global();
            if (is_first)
                send(tma_store);
            else
                send(tma_add);
            tma_store_wait_read();
            dQ.consumer_release();
            if (!is_first && !p.in_order) return;
            publish(counter, 1);
        });
        publish(p.added[work.tile / p.Tc], work.slice == kWhole ? 1 << p.log_slices : 1);
    });
}

// ------------------------------------------------------------------------------ consumer warpgroups

// Starts dQ^T = Kj^T dS^T, 64 columns of Kj x 64 queries.
template <class T, class Tile>
__device__ void issue_dQ(float (&dQ)[32], const unsigned char (&Kj)[Tile::Consumers][Tile::KBytes], int column_box,
                         const unsigned char (&dS)[Tile::Bc * 128]) {
    const Descriptor K = descriptor(Kj[0] + column_box * 64 * 128), S = descriptor(dS);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16)
        wgmma_shared<Product::AtB>(T(), dQ, K + j / 64 * Tile::KBytes + j % 64 * 128, S + j * 128, j > 0);
    wgmma_commit();
}

// Stores dS^T of 64 keys to shared memory, with the swizzle that wgmma expects. `thread` counts in the warpgroup.
template <int Boxes, int BoxBytes, int Count>
__device__ void stage_dS(unsigned char (&boxes)[Boxes][BoxBytes], const uint32_t (&dS)[Count], int consumer,
                         int thread) {
    const int row = 64 * consumer + thread / 32 * 16 + thread % 16;
    // Opaque, or ptxas would keep four addresses in registers.
    const int first = opaque(row * 128 + (thread / 16 % 2 ^ row % 8) * 16);
#pragma unroll
    for (int n = 0; n < Count / 4; ++n)  // 16 queries each
        store_matrices(boxes[n / 4] + (first ^ n % 4 * 32), &dS[4 * n]);
    fence_async();
}

// Stores dQ^T, 64 columns x 64 queries, to two boxes of 32 columns, with the swizzle that TMA expects.
__device__ inline void stage_dQ(unsigned char (&boxes)[2][64 * 128], const float (&dQ)[32], int thread) {
    const int query = thread % 4 * 2, column = thread / 32 % 2 * 16 + thread % 32 / 4;
    unsigned char *const tile = boxes[0] + thread / 64 * (64 * 128) + query * 128 + column % 4 * 4;
#pragma unroll
    for (int x = 0; x < 32; ++x) {  // query + 8 (x / 4) + x % 2, column + 8 (x / 2 % 2)
        const int swizzle = (column / 4 ^ query) ^ (x / 2 % 2 * 2 ^ x % 2);
        *(float *)(tile + (x / 4 * 8 + x % 2) * 128 + swizzle * 16) = dQ[x];
    }
    fence_async();
}

// Describes the slice again, since the loop over queries has no registers for that.
template <class T, class Tile, class Mask>
__device__ void store_dK_dV(const FusedParameters &p, const KeyWork &work, const KeyEntry<Mask> &entry,
                            float (&dK)[Tile::D / 2], float (&dV)[Tile::D / 2]) {
    const KeySlice<Tile, Mask> keys(p, work, entry);
    if (keys.steps < keys.all_steps && !sum_slices(p, keys, work.slice, dK, dV)) return;
    const int thread = opaque(threadIdx.x) - 128, j = keys.j0 + thread / 32 * 16 + thread % 32 / 4;  // keys j and j + 8
    const auto is_seen = [&](int key) { return keys.is_seen(key, p.a.Nq); };
    const float of_kept = kIsGeneral<Mask> ? factor_of_kept(p.a) : 1.f;
    store_gradient<T>(p.dv, keys.b, keys.key_head, j, p.a.Nk, p.a.d_v, of_kept / kPScale<T>, dV, is_seen);
    store_gradient<T>(p.dk, keys.b, keys.key_head, j, p.a.Nk, p.a.d, p.a.scores.scale, dK, is_seen);
}

// A consumer's mask: P^T = 0 where a query doesn't see key j, or j + 8. Tiles of queries that see all of the 64 keys
// from j64 on need none. There are three kinds: of a band, of ranges that grow, of any ranges.
template <class Tile, class Mask>
struct Hide {
    int begin, end;  // of i0 of the tiles that need none, the end included
    __device__ Hide(const KeySlice<Tile, Mask> &keys, int j64, int) {
        const BandOf<int> &band = keys.band;
        const bool all_exist = band.keys.begin <= j64 && j64 + 64 <= band.keys.end;
        begin = broadcast_lane0(all_exist ? j64 + 63 - band.last : 1 << 30);
        end = broadcast_lane0(j64 - band.first - Tile::Br + 1);
    }
    template <int Count>
    __device__ void operator()(float (&P)[Count], const KeySlice<Tile, Mask> &keys, int i0, int j) const {
        if (i0 < begin || i0 > end) mask_columns(P, {keys.queries(j), keys.queries(j + 8)}, i0, 0.f);
    }
};
template <class Tile>
struct Hide<Tile, GrowingRanges> {
    int begin, end;
    Interval queries[2];  // loaded once: a masked tile would wait for memory
    __device__ Hide(const KeySlice<Tile, GrowingRanges> &keys, int j64, int j)
        : queries{keys.queries(j), keys.queries(j + 8)} {
        begin = broadcast_lane0(keys.queries(j64 + 63).begin);
        end = broadcast_lane0(keys.queries(j64).end - Tile::Br);
    }
    template <int Count>
    __device__ void operator()(float (&P)[Count], const KeySlice<Tile, GrowingRanges> &, int i0, int) const {
        if (i0 < begin || i0 > end) mask_columns(P, queries, i0, 0.f);
    }
};
template <class Tile>
struct Hide<Tile, Ranges> {
    int j64;
    template <class Slice>
    __device__ Hide(const Slice &, int j64, int) : j64(j64) {}
    template <int Count, class Slice>
    __device__ void operator()(float (&P)[Count], const Slice &keys, int i0, int j) const {
        const Keys all = keys_of_all(keys.mask(), i0, i0 + Tile::Br);
        if (all.begin > j64 || all.end < j64 + 64) hide_keys(P, keys.mask(), i0, j);
    }
};
template <class Tile>
struct Hide<Tile, General> : Hide<Tile, Ranges> {
    int begin, end;  // of ranges that grow, as above. Registers are short: `queries` are loaded where a tile is masked
    template <class Slice>
    __device__ Hide(const Slice &keys, int j64, int j) : Hide<Tile, Ranges>(keys, j64, j) {
        begin = broadcast_lane0(keys.queries(j64 + 63).begin), end = broadcast_lane0(keys.queries(j64).end - Tile::Br);
    }
    template <int Count, class Slice>
    __device__ void operator()(float (&P)[Count], const Slice &keys, int i0, int j) const {
        if (!keys.grows()) return Hide<Tile, Ranges>::operator()(P, keys, i0, j);
        if (i0 < begin || i0 > end) mask_columns(P, {keys.queries(j), keys.queries(j + 8)}, i0, 0.f);
    }
};

template <class Tile>
struct Hide<Tile, WithTerms> : Hide<Tile, General> {
    using Hide<Tile, General>::Hide;
};

template <class T, class Tile, class Mask, bool has_large_rows>
__device__ void consume(const FusedParameters &p, FusedStorage<Tile, Mask> &shared) {
    constexpr int D = Tile::D, Br = Tile::Br, Bc = Tile::Bc;
    const Attention &a = p.a;
    const int consumer = consumer_index(), thread = threadIdx.x % 128;
    const PingPong<Tile> ping_pong{consumer};
    if (consumer == Tile::Consumers - 1) ping_pong.pass_turn();  // the first turn is consumer 0's
    Pipeline<1> KV{shared.KV}, dQ_staged{shared.dQ[consumer]};
    Pipeline<Tile::QStages> Q{shared.Q};
    Pipeline<Tile::dOStages> dO{shared.dO};
    Pipeline<Tile::dSStages> dS_written{shared.dS_ready}, dS_read{shared.dS_ready};  // of this tile; of the previous

    const bool may_be_large = kIsGeneral<Mask> && __ldcg(p.rows.any_large);
    for_each_key_work(shared, [&](const KeyWorkOf<Mask> &published) {
        const KeyWork work = {broadcast_lane0(published.tile), broadcast_lane0(published.slice)};
        const KeySlice<Tile, Mask> keys = KeySlice<Tile, Mask>(p, work, published).of_warp();
        if (keys.steps < 1) return;
        float dK[D / 2], dV[D / 2];
        const auto zero_hidden = [&](unsigned char (&tiles)[Tile::Consumers][Tile::KBytes]) {
            const Keys of_batch = keys.keys_of_batch();
            const int end = of_batch.end == a.Nk ? keys.j0 + Bc : of_batch.end;  // TMA has set rows from Nk on to 0
            for (int x = 0; x < Tile::Consumers; ++x)
                zero_rows_outside<64, Tile::Boxes>(tiles[x], of_batch.begin - keys.j0 - 64 * x, end - keys.j0 - 64 * x,
                                                   Tile::kZeroed + consumer);
        };
        const auto zero_blind = [&](unsigned char *tile, int i0) {
            if constexpr (kHasTerms<Mask>)
                if (may_hide(a))
                    return zero_hidden_rows<Br, Tile::Boxes>(tile, shared.m_l[Q.stage()][1], Tile::kZeroed + consumer);
            if constexpr (keys.is_ranges)
                if (!keys.any_blind) return;
            zero_blind_rows<Tile>(tile, keys.mask(), i0, a.Nq, Tile::kZeroed + consumer);
        };
        const int j64 = keys.j0 + 64 * consumer, j = j64 + thread / 32 * 16 + thread % 32 / 4;  // keys j and j + 8
        const Hide<Tile, Mask> hide(keys, j64, j);

        const auto issue_dQ_of_previous_tile = [&](float (&dQ)[32], bool exists) {
            if (exists) dS_read.consumer_wait();
            issue_dQ<T, Tile>(dQ, shared.Kj, Tile::column_box(consumer),
                              shared.dS[dS_read.stage()][Tile::query_box(consumer)]);
        };
        const auto store_dQ = [&](const float (&dQ)[32]) {
            dS_read.consumer_release();
            dQ_staged.producer_acquire();
            stage_dQ(shared.dQi[consumer], dQ, thread);
            producer_commit(dQ_staged);
        };

        KV.consumer_wait();
        zero_hidden(shared.Kj), zero_hidden(shared.Vj);
#pragma unroll
        for (int x = 0; x < D / 2; ++x) dK[x] = dV[x] = 0.f;
        keys.for_each_step([&](int h, int i0, bool is_first) {
            float S[Br / 2], dP[Br / 2], dQ[32];  // inside the loop: ptxas keeps none for the next tile
            uint32_t P[Br / 4], dS[Br / 4];
            KeptWeights<Br / 2> kept;
            Q.consumer_wait();
            bool is_whole = false;
            if constexpr (kHasTerms<Mask>) is_whole = shared.is_whole[Q.stage()];
            zero_blind(shared.Qi[Q.stage()], i0);
            ping_pong.wait_turn();
            issue_ABt<T, D>(S, descriptor(shared.Kj[consumer]), descriptor(shared.Qi[Q.stage()]));
            dO.consumer_wait();
            zero_blind(shared.dOi[dO.stage()], i0);
            issue_ABt<T, D>(dP, descriptor(shared.Vj[consumer]), descriptor(shared.dOi[dO.stage()]));
            ping_pong.pass_turn();
            wgmma_wait<1>(S);
            if constexpr (kIsGeneral<Mask> &&
                          !kHasTerms<Mask>) {  // dP^T waits for no P^T, which takes the place of S^T
                change<T, true>(a.scores, S);
                wgmma_wait<0>(dP);
                multiply_by_slopes<T>(dP, S, shared.Di[dO.stage()][0] + thread % 4 * 2);
            }
            if constexpr (kHasTerms<Mask>) {  // beside dP^T
                if (has_dropout(a)) kept.template draw<true>({a, keys.b, h}, j, i0);
                add_terms_transposed<T>(S, a, keys.b, h, i0, j, is_whole);
            }
            if (has_large_rows && (!kIsGeneral<Mask> || may_be_large))
                subtract_m<T>(S, shared.m_l[Q.stage()], thread % 4 * 2, p.c);
            compute_P(S, shared.m_l[Q.stage()][1] + thread % 4 * 2, p.c);  // beside dP^T
            if (!is_whole) hide(S, keys, i0, j);
            if constexpr (kHasTerms<
                              Mask>) {  // dS^T comes before P^T, which is dropped, and needs no registers behind it
                wgmma_wait<0>(dP);
                if (has_dropout(a)) kept.drop(dP);
                subtract_D_of_columns<T>(dP, shared.Di[dO.stage()][0] + thread % 4 * 2, factor_of_kept(a));
                multiply_elements(dP, S);
                if (!is_whole) hide(dP, keys, i0, j);
                if (may_hide(a) && (!is_whole || a.terms.bias)) clear_hidden(dP, S);
                pack_kept<T>(P, S, kept, has_dropout(a));
            } else {
                pack_operand<T>(P, S);
            }
            if constexpr (!kIsGeneral<Mask>) wgmma_wait<0>(dP);
            issue_AB<T>(dV, P, descriptor(shared.dOi[dO.stage()]));
            __syncwarp();  // keeps what follows behind the products
            if constexpr (kIsGeneral<Mask> && !kHasTerms<Mask>)
                multiply_elements(dP, S), hide(dP, keys, i0, j);  // P^T = 0 times the slope of a hidden NaN is NaN
            else if constexpr (!kHasTerms<Mask>)
                compute_dS<T>(dP, S, shared.Di[dO.stage()][0] + thread % 4 * 2);  // beside dV
            pack_operand<T>(dS, dP);
            dS_written.producer_acquire();
            stage_dS(shared.dS[dS_written.stage()], dS, consumer, thread);
            producer_commit(dS_written);
            // For the first tile, too, where nothing reads dQ: under an if, ptxas would wait for the product at once
            // (C7517, docs/ptxas.md).
            issue_dQ_of_previous_tile(dQ, !is_first);
            issue_AB<T>(dK, dS, descriptor(shared.Qi[Q.stage()]));
            __syncwarp();
            wgmma_wait<1>(dV);
            dO.consumer_release();
            wgmma_wait<1>(dQ);
            if (!is_first) store_dQ(dQ);  // beside dK
            wgmma_wait<0>(dK);
            Q.consumer_release();
        });
        float dQ[32];
        issue_dQ_of_previous_tile(dQ, true);
        wgmma_wait<0>(dQ);
        store_dQ(dQ);
        KV.consumer_release();
        store_dK_dV<T, Tile, Mask>(p, work, published, dK, dV);
    });
}

// Whether the kernel with large rows runs: a row is large (large_rows.cu sets any_large), a batch has ranges that don't
// grow, or the call is general. All threads of a block call it.
template <class Mask>
__device__ bool takes_large_rows(const FusedParameters &p) {
    if constexpr (kIsGeneral<Mask>) return true;
    bool takes = __ldcg(p.rows.any_large);
    if constexpr (kIsRanges<Mask>) {
        for (int b = threadIdx.x; b < p.a.B; b += blockDim.x) takes |= !p.a.ranges.batches[b].grows;
        takes = __syncthreads_or(takes);
    }
    return takes;
}

// Each call but a general one launches two kernels, of which one returns at once. In one kernel a branch behind S^T, or
// m for all rows, made d 128 6 to 9 % slower (docs/backward.md).
template <class T, class Tile, class Mask, bool has_large_rows>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    fused_backward_kernel(const __grid_constant__ FusedParameters p) {
    wait_for_kernel_before();
    if (takes_large_rows<Mask>(p) != has_large_rows) return;
    auto &shared = shared_storage<FusedStorage<Tile, Mask>>();
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, warps + Tile::Consumers);
        init_pipeline(shared.KV, warps, 2 * Tile::Consumers), init_pipeline(shared.buffer_ready, 1);
        init_pipeline(shared.Q, warps, 1 + Tile::QueryBoxes), init_pipeline(shared.dO, warps, 1 + Tile::QueryBoxes);
        init_pipeline(shared.dS_ready, warps + (kHasTerms<Mask> && p.stores_dS ? Tile::Consumers : 0), warps);
        for (auto &dQ : shared.dQ) init_pipeline(dQ, 1, 4);
    };
    const auto produce = [&] {
        if (threadIdx.x == 0) schedule_and_load(p, shared);
        if (threadIdx.x / 32 == 3) fill_rows_and_convert_dQ<T, Tile, Mask>(p, shared);
#pragma unroll  // else the adders spill
        for (int consumer = 0; consumer < Tile::Consumers; ++consumer)
            if (threadIdx.x == 32 + 32 * consumer) add_dQ(p, shared, consumer);
    };
    run_roles<Tile>(init_barriers, produce, [&] { consume<T, Tile, Mask, has_large_rows>(p, shared); });
}

// ------------------------------------------------------------------------------ the launch

// D, Br, stages of Q, of dO, registers of the producer warpgroup
using Tiles = TileList<FusedTile<64, 128, 2, 2, 24>, FusedTile<128, 64, 3, 2, 40>>;
int tile_of(const Attention &a) { return most_columns(a) <= 64 ? 0 : 1; }

// Whether warp 3 computes log2_l and D, else gradient_rows.cu. Where queries see few keys, the products take less time
// than warp 3's work. A mask is taken to hide half of the keys that the bounds leave, as causal does.
bool fills_rows(const Attention &a) {
    if (has_ranges(a)) return false;  // the host doesn't know how many keys a query sees
    return std::min<int64_t>(a.Nk, a.last - a.first + 1) / (is_masked(a) ? 2 : 1) >= 1024;
}

// In order, without causal or a window: so many key heads that a whole tile of keys begins about one step after the one
// before it in its head. That was worth 6 to 24 %. Under a causal mask tiles arrive one after the other anyway, and it
// was up to 7 % slower.
template <class Tile>
int interleaved_heads(const Attention &a, int multiprocessors) {
    const int64_t steps = (a.Nq + Tile::Br - 1) / Tile::Br * (a.Hq / a.Hkv);
    return is_banded(a) || has_ranges(a) ? 1 : clamp((multiprocessors + steps - 1) / steps, int64_t(1), a.B * a.Hkv);
}

template <class Tile, bool has_large_rows>
auto kernel_for(const Attention &a) {
    return with_mask_and_scores(a, [&](auto mask) {
        using Any = Narrow<decltype(mask)>;
        using Mask = std::conditional_t<kIsRanges<Any> && !has_large_rows, GrowingRanges, Any>;
        return with_or_without_terms<Mask>(a, [&](auto mask) {
            using Mask = decltype(mask);
            return a.dtype == Dtype::float16 ? fused_backward_kernel<__half, Tile, Mask, has_large_rows>
                                             : fused_backward_kernel<__nv_bfloat16, Tile, Mask, has_large_rows>;
        });
    });
}

// The workspace behind GradientRows: counters, dQ, dK and dV of slices, then dS. The counters are tile_counter,
// any_large, units_taken, `added` and `filled` for each key head, `stored` for each part of dQ, `steps_stored` for each
// warp of a split tile. Zeros may place them in memory of its own instead.
template <class Tile>
struct Workspace {
    Split split;
    int64_t key_heads, units, parts, counter_bytes, slices_begin, dS_begin, bytes;
    Workspace(const Gradient &g, int multiprocessors)
        : split(best_split<Tile>(g.a, multiprocessors, g.deterministic)),
          key_heads(g.a.B * g.a.Hkv),
          units(g.a.B * g.a.Hq * padded_rows(g.a) / 64),
          parts(units * Tile::D / 64),
          counter_bytes((3 + 2 * key_heads + parts + split.warps<Tile>() + 63) / 64 * 256),
          slices_begin(counter_bytes + parts * (64 * 64 * 4)),
          dS_begin(slices_begin + split.bytes<Tile>()),
          bytes(dS_begin + (g.dbias ? dS_bytes(g.a) : 0)) {}
};

}  // namespace

Plan plan_fused(const Gradient &g, const Device &device) {
    return with_tile(tile_of(g.a), Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        const Workspace<Tile> workspace(g, device.multiprocessors);
        constexpr const char *kNames[2][2] = {
            {"half backward, fused", "half backward, fused, keys split"},
            {"half backward, fused, in order", "half backward, fused, in order, keys split"}};
        const char *const name = kNames[g.deterministic][workspace.split.split_tiles > 0];
        Plan plan = make_plan<Tile, FusedStorage<Tile, Ranges>>(g.a, device, name, tile_of(g.a));
        // Blocks without a work tile fill rows and convert dQ.
        plan.grid = std::min<int64_t>(workspace.split.work_tiles() + workspace.parts, device.multiprocessors);
        plan.workspace = workspace.bytes;
        return plan;
    });
}

const char *launch_fused(const Gradient &g, const GradientRows &rows, const Plan &plan, void *memory,
                         CUstream_st *stream) {
    return with_tile(plan.tile, Tiles(), [&](auto tile) -> const char * {
        using Tile = decltype(tile);
        const Attention &a = g.a;
        const auto kernel = kernel_for<Tile, false>(a), with_large_rows = kernel_for<Tile, true>(a);
        const cudaError_t error = allow_shared_memory(kernel);  // first, for make_tensor_map
        if (error != cudaSuccess) return why_not(error);
        const Workspace<Tile> workspace(g, plan.multiprocessors);
        FusedParameters p{key_parameters<Tile>(g, rows, workspace.split)};
        p.lse = g.lse, p.dlse = g.dlse, p.fills_rows = fills_rows(a);
        p.in_order = p.whole_heads = g.deterministic, p.starts_apart = g.deterministic ? 0 : -1;
        p.interleaved = interleaved_heads<Tile>(a, plan.multiprocessors);
        p.keeps_D = g.is_complete;
        if (const char *why = p.fills_rows ? nullptr : launch_gradient_rows(g, rows, stream)) return why;
        const Zeros counters(memory, workspace.counter_bytes, stream);
        p.rows.any_large = (int *)counters.memory + 1, p.units_taken = p.rows.any_large + 1;
        if (const char *why = launch_large_rows(g, p.rows, stream)) return why;
        p.added = p.units_taken + 1;
        p.filled = p.added + workspace.key_heads, p.stored = p.filled + workspace.key_heads;
        p.steps_stored = p.stored + workspace.parts;
        p.slices = (float4 *)((char *)memory + workspace.slices_begin);
        p.units = workspace.units, p.units_of_head = rows.head_stride / 64;
        p.units_of_group = p.units_of_head * int(a.Hq / a.Hkv);
        p.dQ_data = (float *)((char *)memory + workspace.counter_bytes);
        const int64_t head = rows.head_stride * Tile::D;
        if (!make_tensor_map(p.dO, a.dtype, g.do_, g.do_stride, a.B, a.Hq, a.Nq, a.d_v, 64) ||
            !make_tensor_map(p.O, a.dtype, g.o, g.o_stride, a.B, a.Hq, a.Nq, a.d_v, 64) ||
            !make_tensor_map(p.dQ, Dtype::float32, p.dQ_data, {a.Hq * head, head, Tile::D}, a.B, a.Hq, rows.head_stride,
                             Tile::D, 64))
            return "cuTensorMapEncodeTiled refused o or do";
        void *const dS = (char *)memory + workspace.dS_begin;
        p.stores_dS = g.dbias;
        if (p.stores_dS && !make_tensor_map(p.dS, a.dtype, dS, dS_stride(a), a.B, a.Hq, a.Nk, a.Nq, 64))
            return "cuTensorMapEncodeTiled refused the workspace";
        const int work_tiles = workspace.split.work_tiles();
        if (!a.is_general)
            return launch_kernels<Tile>({with_large_rows, kernel}, p, plan, counters, stream, 64, work_tiles);
        const char *why = launch_kernels<Tile>({with_large_rows}, p, plan, counters, stream, 64, work_tiles);
        return why || !p.stores_dS ? why : launch_dS_sums(g, dS, stream);
    });
}

}  // namespace minimal_attn::hopper
