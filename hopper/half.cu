// half.cu: the Hopper kernel for float16 and bfloat16. docs/hopper.md has its budget, measurements and what was tried.
//
// A block computes one work tile after another: Br queries of one head, 64 for each consumer warpgroup. Producer
// threads load tiles by TMA into pipelines in shared memory; consumer warpgroups multiply them by wgmma.
//
//     thread 0          thread 32         thread 64
//     work tile, Kj     Qi                Vj               shared memory       each consumer warpgroup, in registers
//         |                |                 |
//         +----------------|-----------------|--> tile_queue, 2 stages ------> which rows of which head
//         |                +-----------------|--> Qi, QStages each ----+
//         +----------------------------------|--> Kj, Stages ----------+-----> Sij = Qi Kj^T         (wgmma)
//                                            |                                 Pij = exp(Sij - mi), li
//                                            +--> Vj, Stages ----------------> Oi += Pij Vj          (wgmma)
//     O in HBM <-- TMA: thread 32 or 64 <-- the stage of a Qi or a Vj <------- O = Oi / li
//
// | role                | warps         | registers a thread   | does                                                |
// |---------------------|---------------|----------------------|-----------------------------------------------------|
// | scheduler, K        | 0 (thread 0)  | 32                   | takes work tiles, publishes them, loads Kj          |
// | Q                   | 1 (thread 32) | 32                   | loads Qi; stores O that was staged in a stage of Q  |
// | V                   | 2 (thread 64) | 32                   | loads Vj; stores O that was staged in a stage of V  |
// | scheduler of ranges | 3 (thread 96) | 32                   | takes work tiles in thread 0's place; else it ends  |
// | consumer warpgroups | 4 to 15       | 128, 232 or 160 for  | Sij, softmax, Oi of 64 rows each; writes O, or      |
// |                     |               | 1, 2 or 3 consumers  | stages it for TMA                                   |
//
// | barrier                 | arrives                   | waits                             | then                    |
// |-------------------------|---------------------------|-----------------------------------|-------------------------|
// | tile_queue full         | thread 0; or 96, and TMA  | threads (0), 32, 64; consumers    | work tile is published  |
// | tile_queue empty        | the threads that wait     | thread 0 or 96                    | its slot is free        |
// | Q full, K full, V full  | threads 32, 0, 64; TMA    | consumers                         | the tile has arrived,   |
// |                         |                           |                                   | with Kj `behind`, too   |
// | Q empty (per consumer)  | that consumer             | thread 32                         | Qi is read, O staged    |
// | K empty                 | consumers                 | thread 0                          | Kj, `behind` are read   |
// | V empty                 | consumers                 | thread 64; consumers that stage O | Vj is read              |
// | O_staged (per consumer) | that consumer             | thread 64                         | O is in a stage of V    |
// | named kTurn + index     | the consumer before it    | that consumer                     | it may issue products   |
// | named kVZeroed + index  | that consumer             | that consumer                     | hidden rows of Vj are 0 |
//
// full and empty are mbarriers, on which a consumer warp arrives once. index is the consumer's. racecheck doesn't see
// that the __syncwarp before an arrival orders all lanes' reads of the work tile (docs/ptxas.md).
//
// | file        | what this file uses of it                                                                           |
// |-------------|-----------------------------------------------------------------------------------------------------|
// | half.h      | load_K: thread 0. schedule: thread 96. for_each_work_tile: how a thread follows the tile queue.     |
// |             | load_tiles: one Kj or Vj after another. PingPong: the turns. issue_ABt, issue_AB: begin a product.  |
// |             | PagedTile: a Kj or Vj from pages. pack_operand: Pij to the half type                                |
// | scheduler.h | TileScheduler, WorkTileOf: what a block computes next. end_of_keys, fully_visible_keys: of 64 rows. |
// |             | PagedBand: the mask of the kernel that reads pages and the tables of sequences.h                    |
// | ranges.h    | Ranges, General: masks of the kernels for ranges. sort_tiles_cuda: the order of their tiles.        |
// |             | ShownTile: with terms, the next tile of keys that an attn_mask shows                                |
// | tma.h       | load_Q: Qi of all consumers. zero_rows_outside: rows of Vj outside of the batch's keys              |
// | pipeline.h  | Pipeline: producer_acquire waits for empty, consumer_wait for full, consumer_release arrives at     |
// |             | empty. run_roles: gives registers to the roles and starts them                                      |
// | scores.h    | change: all scores of a thread. changed_approximately, changed_near_0, is_near_0: beside exponentials |
// | dropped.h   | for_each_weight: which weights are kept. factor_of_kept: of O                                      |
// | terms.h     | add_terms: ALiBi, a bias and a mask. with_or_without_terms: which general kernel                    |
// | softmax.h   | SoftmaxState, mask_scores; update_row_max, exponentiate, rescale: steps 10 to 12                    |
// | epilogue.h  | store_O, stage_O, store_lse, store_state: steps 12 and 13                                           |
// | ptx.h       | one function for each instruction: wgmma_wait, descriptor, tma_store, wait, arrive                  |
// | launch.h    | make_plan, launch_kernels; params.h: Parameters, what the host hands to the kernel                   |
#include "hopper/epilogue.h"
#include "hopper/dropped.h"
#include "hopper/half.h"
#include "hopper/launch.h"
#include "hopper/softmax.h"
#include "hopper/terms.h"

namespace minimal_attn::hopper {
namespace {

// How O gets to HBM.
enum class StoreO {
    direct,     // each thread stores its own numbers
    through_Q,  // staged where its Qi was, then stored by TMA. Here consumers also take turns, see PingPong
    through_V,  // staged where a later Vj will be, then stored by TMA
};

// QStages stages of Q for each consumer, Stages of K and of V; BlocksPerSM blocks share a multiprocessor. V and O have
// D_v columns.
template <int D_, int Br_, int Bc_, int QStages_, int Stages_, StoreO O_, int BlocksPerSM_ = 1, int D_v_ = D_>
struct Tile {
    static constexpr int D = D_, D_v = D_v_, Br = Br_, Bc = Bc_, QStages = QStages_, Stages = Stages_;
    static constexpr int BlocksPerSM = BlocksPerSM_;
    static constexpr StoreO O = O_;
    // wait_turn also synchronises the 4 warps of a consumer: all have read Qi before one writes O there.
    static constexpr bool TakesTurns = O == StoreO::through_Q;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);
    static constexpr int ProducerRegisters = 32;
    static constexpr int Boxes = (D + kBoxColumns - 1) / kBoxColumns, VBoxes = (D_v + kBoxColumns - 1) / kBoxColumns;
    static constexpr int QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128, VBytes = Bc * VBoxes * 128;
    static constexpr int OBytes = 64 * VBoxes * 128;
    static constexpr bool AlignKeys = false;
    // Which kernels this tile has (tile_of): general ones, ones with terms, no others.
    static constexpr bool has_general = (D == 64 && Br > 64) || D == 128 || D == 256;
    static constexpr bool only_terms = D == 64 && Br == 128, has_terms = has_general && !(D == 64 && Br == 192);
    enum NamedBarrier { kTurn = 1, kVZeroed = kTurn + Consumers };  // + the consumer; 0 is __syncthreads
    static_assert(Bc % 16 == 0 && D % 32 == 0 && D_v % 32 == 0 && Br % 64 == 0);
    static_assert(O != StoreO::through_Q || (Consumers > 1 && QStages == 2 && kQueueStages == 2 && OBytes <= QBytes));
    static_assert(O != StoreO::through_V || (Consumers <= Stages && OBytes <= VBytes));
};

// KB, all stages   | few_queries | d 64 | d 96 | d 128 | d 192 | d 256 | d192_v128
// Qi               | 16          | 48   | 96   | 64    | 48    | 64    | 48
// Kj               | 16          | 64   | 48   | 64    | 84    | 80    | 96
// Vj               | 16          | 64   | 48   | 64    | 84    | 80    | 64
// sum              | 48          | 176  | 192  | 192   | 216   | 224   | 208, and less than 1 KB for the rest; d64_terms 160.
// With ranges RangeEntries take 17 bytes more for each query of Br.
template <class Tile, class Mask>
struct SharedStorage {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char Kj[Tile::Stages][Tile::KBytes], Vj[Tile::Stages][Tile::VBytes];
    WorkTileOf<Mask> work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], Q[Tile::Consumers][Tile::QStages], K[Tile::Stages], V[Tile::Stages];
    Barrier O_staged[Tile::Consumers];  // only for StoreO::through_V
    std::conditional_t<kIsRanges<Mask>, RangeEntries<Tile>[kQueueStages], char> ranges;
    std::conditional_t<kIsGeneral<Mask>, ShownTile[Tile::Stages], char> behind;  // of each Kj: the next tile
};

// Whether a consumer stages O for TMA, which stores 64 rows: all of them must belong to the work tile. With through_V
// each stage must also have received a Vj of this work tile: thread 64 loads it only after it has stored the O that was
// staged there before.
template <class Tile, class Mask>
__device__ bool stages_O(const Parameters &p, const WorkTileOf<Mask> &work, int warpgroup) {
    if (Tile::O == StoreO::direct) return false;
    const bool has_stage =
        Tile::O == StoreO::through_Q || work.visible.end - work.visible.begin > (Tile::Stages - 1) * Tile::Bc;
    return has_stage && p.tma_stores_O && work.i0 + 64 * (warpgroup + 1) <= work.i1;
}

template <class Tile, class Mask>
__device__ void store_staged_O(const Parameters &p, const WorkTileOf<Mask> &work, int warpgroup,
                               const unsigned char *tile) {
    for (int box = 0; box < Tile::VBoxes; ++box)
        tma_store(p.O.map, tile + box * 64 * 128, box * kBoxColumns, work.i0 + 64 * warpgroup, work.h * p.O.head,
                  work.b * p.O.batch);
}

// ------------------------------------------------------------------------------ producer threads

// Thread 32 loads Qi (step 8), 64 rows for each consumer. With through_Q it then stores O of the work tile before
// (step 13). It can't deadlock, since kQueueStages = QStages = 2: the next Qi in O's stage belongs to a work tile that
// thread 0 publishes only after this O is staged.
template <class Tile, class Mask>
__device__ void load_Q_and_store_O(const Parameters &p, SharedStorage<Tile, Mask> &shared) {
    Pipeline<Tile::QStages> Q{}, O{};
    for_each_work_tile(shared, [&](const auto &work, const auto &previous) {
        if (work.b >= 0) load_Q<Tile>(shared, p.Q, work.i0, work.h, work.b, Q);
        if (Tile::O == StoreO::through_Q && previous.b >= 0) {
            for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
                wait(shared.Q[warpgroup][O.stage()].empty, O.phase());
                if (stages_O<Tile>(p, previous, warpgroup))
                    store_staged_O<Tile>(p, previous, warpgroup, shared.Qi[warpgroup][O.stage()]);
            }
            tma_store_wait_read();
            O.advance();
        }
    });
}

// Thread 64 loads Vj. With through_V it also stores O of the work tile before (step 13). Each of the first Vj goes
// where one consumer has staged its O, so the thread waits for that consumer alone and stores its O before the load.
template <class Tile, class Mask>
__device__ void load_V_and_store_O(const Parameters &p, SharedStorage<Tile, Mask> &shared) {
    Pipeline V{shared.V};
    uint32_t phases = 0;  // of O_staged, one bit for each consumer
    for_each_work_tile(shared, [&](const auto &work, const auto &previous) {
        Pipeline O = V;  // where the next O is staged: in the stages of the next Vj
        int warpgroup = Tile::O == StoreO::through_V && previous.b >= 0 ? 0 : Tile::Consumers;  // its O is next
        const auto store_next_O = [&] {
            if (warpgroup == Tile::Consumers) return;
            if (stages_O<Tile>(p, previous, warpgroup)) {
                wait(shared.O_staged[warpgroup], phases >> warpgroup & 1);
                phases ^= 1u << warpgroup;
                store_staged_O<Tile>(p, previous, warpgroup, shared.Vj[O.stage()]);
                tma_store_wait_read();
            }
            O.advance();
            ++warpgroup;
        };
        if (work.b >= 0) load_tiles<Tile>(p, p.V, work, V, shared.Vj, store_next_O);
        while (warpgroup < Tile::Consumers) store_next_O();
    });
}

// ------------------------------------------------------------------------------ consumer warpgroups

// A general kernel changes the products Sij here (scores.h). Then the mask hides keys. Where the state is wanted, each
// thread tracks its largest scores: m may be stale, the maximum of earlier tiles (stale_softmax). Most tiles skip both
// the mask and the tracking by one branch.
template <class T, class Mask, int Count>
__device__ void mask_and_track_max(float (&Sij)[Count], SoftmaxState &softmax, const Attention &a,
                                   const WorkTileOf<Mask> &work, int row, int j0, Keys fully_visible,
                                   bool is_whole = false) {
    if constexpr (kHasTerms<Mask>)
        add_terms<T>(Sij, a, work.b, work.h, work.i0 + row, j0, is_whole);
    else if constexpr (kIsGeneral<Mask>)
        change<T, true>(a.scores, Sij);
    const bool is_cut = j0 < fully_visible.begin || j0 + 2 * Count > fully_visible.end;
    if (!is_cut && !a.l) return;
    if (is_cut) mask_scores(Sij, a, work.mask, work.i0 + row, j0);
    if (!a.l) return;
#pragma unroll
    for (int x = 0; x < Count; x += 2)
        softmax.largest[x / 2 % 2] = fmaxf(softmax.largest[x / 2 % 2], fmaxf(Sij[x], Sij[x + 1]));
}

// Steps 10 and 11: Pij by the exact maximum. Returns whether the next tile must use it, too: scores are so large that m
// is subtracted before the scaling (softmax.h), which stale_softmax can't do.
// drop(Pij) is dropout.
template <class T, int Count, class Drop>
__device__ bool exact_softmax(uint32_t (&Pij)[Count], float (&Sij)[2 * Count], SoftmaxState &softmax, float c,
                              const Drop &drop) {
    const bool needs_max = update_row_max(Sij, softmax, c);
    exponentiate(Sij, softmax, c);
    drop(Sij);
    pack_operand<T>(Pij, Sij);
    return needs_max;
}

// Whether scores change beside the exponentials, unless the mask hides some or the state is wanted. Else they change
// before, as where there are terms. With the polynomial of float16 three consumers have no registers for it.
template <class T, class Tile, class Mask>
constexpr bool kChangesLate = kIsGeneral<Mask> && !kHasTerms<Mask> && (kApproximates<T> || Tile::Consumers == 2);

// Steps 10 and 11 by the maximum of earlier tiles, for the scores Begin to End of a thread. Adds them to sum. If they
// change here, Sij are products. In float16 `largest`, of their absolute values, tells whether all were near 0
// (scores.h).
template <class T, int Begin, int End, bool changes_here, int Count>
__device__ void stale_softmax(float (&P)[Count], float (&sum)[2], float (&largest)[2], const float (&Sij)[Count],
                              const SoftmaxState &softmax, float c, const Scores &scores, float last) {
#pragma unroll
    for (int x = Begin; x < End; ++x) {
        float s = Sij[x];
        if constexpr (changes_here && kApproximates<T>)
            s = changed_approximately(scores, s);
        else if constexpr (changes_here)
            largest[x / 2 % 2] = fmaxf(largest[x / 2 % 2], fabsf(s)), s = changed_near_0(scores, s, last);
        sum[x / 2 % 2] += P[x] = exp2_fast(fmaf(s, c, -softmax.cm[x / 2 % 2]));
    }
}

// With a stale maximum a thread's Pij of a tile add up to at most this, those of a row (4 threads) to 4 times this.
// Equal scores add up to 64 with Bc 128. No Pij is above 256, and float16 ends at 65504. Oi can't overflow while V is
// below 3e35 / (number of tiles).
constexpr float kMostByStaleMax = 256.f;

// A thread computes so many exponentials before the wait for Pij Vj. Three consumers have no registers for more than 2.
// With two, 16 and 28 were 3 % slower at d 128; at d 256 any count from 8 on gives the same time. Beside terms 22
// spill.
template <class Tile, class Mask>
constexpr int kEarly = Tile::Consumers > 2 || kHasTerms<Mask> ? 2 : 22;

template <class T, class Tile, class Mask>
__device__ void consume(const Parameters &p, SharedStorage<Tile, Mask> &shared) {
    constexpr int D = Tile::D, D_v = Tile::D_v, Bc = Tile::Bc;
    const Attention &a = p.a;
    const int warpgroup = consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // a thread's rows of the work tile: this one and row + 8
    const float c = scale_of(a);
    const PingPong<Tile> ping_pong{warpgroup};
    if (warpgroup == Tile::Consumers - 1) ping_pong.pass_turn();  // the first turn is warpgroup 0's
    Pipeline tile_queue{shared.tile_queue};
    Pipeline Q{shared.Q[warpgroup]};
    Pipeline K{shared.K}, V{shared.V};
    float Oi[D_v / 2], Sij[Bc / 2];
    uint32_t Pij[Bc / 4];
    SoftmaxState softmax;
    constexpr bool changes_late = kChangesLate<T, Tile, Mask>;
    const float last = changes_late ? opaque(kLast) : 0.f;  // for changed_near_0

    // Waits for the next work tile and starts its first Sij. Without a next work tile the product is of stale tiles and
    // isn't read: inside an if, ptxas would wait for it at once (C7517, docs/ptxas.md).
    constexpr bool begins_early = Tile::QStages > 1;  // beside the last Pij Vj of the work tile before
    bool has_work;
    const auto begin_work_tile = [&] {
        tile_queue.consumer_wait();
        has_work = shared.work[tile_queue.stage()].b >= 0;
        if (has_work) Q.consumer_wait(), K.consumer_wait();
        issue_ABt<T, D>(Sij, descriptor(shared.Qi[warpgroup][Q.stage()]), descriptor(shared.Kj[K.stage()]));
    };
    begin_work_tile();
    wgmma_wait<0>(Sij);
    while (has_work) {
        const WorkTileOf<Mask> &work = shared.work[tile_queue.stage()];
        const int i0 = work.i0 + 64 * warpgroup, end = work.visible.end, my_end = end_of_keys(work, i0);
        const Keys fully_visible = fully_visible_keys(p, work, i0);
        int j0 = work.visible.begin;
        // With terms the next tile is the next one that a mask shows; thread 0 has published it.
        ShownTile shown = {}, behind = {};
        const auto next = [&] { return kHasTerms<Mask> ? shown.j0() : j0 + Bc; };
        const auto read_next = [&](ShownTile &tile) {
            if constexpr (kHasTerms<Mask>) tile = shared.behind[K.stage()];
        };
        read_next(shown);
        K.consumer_release(kHasTerms<Mask> ? (float)shown.bits : 0.f);
        softmax = SoftmaxState();
        const auto drop_from = [&](int j) {
            return [&, j](float (&P)[Bc / 2]) {
                if constexpr (kHasTerms<Mask>)
                    if (has_dropout(a))
                        for_each_weight<false, Bc / 2>({a, work.b, work.h}, work.i0 + row, j,
                                                       [&](int x, bool is_kept) { P[x] = is_kept ? P[x] : 0.f; });
            };
        };
        mask_and_track_max<T>(Sij, softmax, a, work, row, j0, fully_visible);
        bool needs_max = exact_softmax<T>(Pij, Sij, softmax, c, drop_from(j0));
#pragma unroll
        for (int x = 0; x < D_v / 2; ++x) Oi[x] = 0.f;

        if constexpr (kIsPaged<Mask> || kHasTerms<Mask>)  // rows before the first key may hold anything
            if (j0 < work.mask.keys.begin) {
                V.consumer_wait();
                zero_rows_outside<Bc, Tile::VBoxes>(shared.Vj[V.stage()], work.mask.keys.begin - j0, Bc,
                                                    Tile::kVZeroed + warpgroup);
            }
        for (; next() < my_end; j0 = next(), shown = behind) {  // step 5: for j
            K.consumer_wait();
            read_next(behind);
            ping_pong.wait_turn();
            issue_ABt<T, D>(Sij, descriptor(shared.Qi[warpgroup][Q.stage()]),
                            descriptor(shared.Kj[K.stage()]));  // step 9 for j + 1
            V.consumer_wait();
            issue_AB<T>(Oi, Pij, descriptor(shared.Vj[V.stage()]));  // step 12 for j
            ping_pong.pass_turn();
            wgmma_wait<1>(Sij);
            if constexpr (changes_late)
                needs_max |= a.l || next() < fully_visible.begin || next() + Bc > fully_visible.end;
            else
                mask_and_track_max<T>(Sij, softmax, a, work, row, next(), fully_visible, shown.is_whole());
            // Most tiles raise no row's maximum by enough to matter. The stale maximum saves them the reduction over
            // lanes and the rescaling of Oi. Sij is kept for exact_softmax.
            float P[Bc / 2], sum[2] = {0.f, 0.f}, largest[2] = {0.f, 0.f};  // of this tile alone, as in exponentiate
            if (!needs_max)
                stale_softmax<T, 0, kEarly<Tile, Mask>, changes_late>(P, sum, largest, Sij, softmax, c, a.scores, last);
            K.consumer_release(sum[0] + sum[1]);  // the sum keeps ptxas from moving the wait up
            wgmma_wait<0>(Oi);
            V.consumer_release();
            if (!needs_max) {
                stale_softmax<T, kEarly<Tile, Mask>, Bc / 2, changes_late>(P, sum, largest, Sij, softmax, c, a.scores,
                                                                           last);
                drop_from(next())(P);
                pack_operand<T>(Pij, P);
            }
            bool fits = !needs_max && sum[0] + sum[1] <= kMostByStaleMax;  // false for NaN
            if constexpr (changes_late && !kApproximates<T>) fits &= is_near_0(a.scores, fmaxf(largest[0], largest[1]));
            if (__all_sync(~0u, fits)) {
                for (int r = 0; r < 2; ++r) softmax.l[r] += sum[r];
            } else {
                if constexpr (changes_late) mask_and_track_max<T>(Sij, softmax, a, work, row, next(), fully_visible);
                needs_max = exact_softmax<T>(Pij, Sij, softmax, c, drop_from(next()));
                rescale(Oi, softmax);
            }
        }

        // The last Pij Vj
        Pipeline<kQueueStages> my_tile = tile_queue;  // released once O is staged or stored
        Pipeline<Tile::QStages> my_Q = Q;             // likewise, if O is staged in Qi's stage
        Tile::O == StoreO::through_Q ? Q.advance() : Q.consumer_release();
        tile_queue.advance();
        ping_pong.wait_turn();
        V.consumer_wait();
        if (work.mask.keys.end < p.zeros_from)  // TMA has set rows from there on to 0
            zero_rows_outside<Bc, Tile::VBoxes>(shared.Vj[V.stage()], 0, work.mask.keys.end - j0,
                                                Tile::kVZeroed + warpgroup);
        issue_AB<T>(Oi, Pij, descriptor(shared.Vj[V.stage()]));
        ping_pong.pass_turn();
        const bool is_last = next() >= end;
        if (!is_last) {  // tiles that only other warpgroups need
            wgmma_wait<0>(Oi);
            V.consumer_release();
            for (j0 = next(); j0 < end; j0 = next()) {
                K.consumer_wait();
                read_next(shown);
                if constexpr (kHasTerms<Mask>) __syncwarp();  // all lanes have read it
                K.consumer_release();
                ping_pong.wait_turn();
                ping_pong.pass_turn();
                V.skip_stage();
            }
        }
        if constexpr (begins_early) begin_work_tile();
        wgmma_wait<begins_early ? 1 : 0>(Oi);
        if (is_last) V.consumer_release();
        if constexpr (kHasTerms<Mask>)
#pragma unroll
            for (float &o : Oi) o *= factor_of_kept(a);

        if (a.lse) store_lse(a, work, work.i0 + row, softmax);  // store_state does it again, with the earlier state
        if (a.o_dtype == Dtype::float32 || a.o_in) {
            if (a.l)  // the exact maximum; l and Oi stay relative to cm
                for (int r = 0; r < 2; ++r) softmax.m[r] = row_max<4>(fmaxf(softmax.m[r], softmax.largest[r]));
            store_state<T>(p, work, work.i0 + row, Oi, softmax, c);
        } else if (!stages_O<Tile>(p, work, warpgroup)) {
            store_O<T>(p, work, work.i0 + row, Oi, softmax);
        } else if constexpr (Tile::O == StoreO::through_V) {
            Pipeline<Tile::Stages> my_V = V;  // consumer w takes the stage of the w-th next Vj
            for (int n = 0; n < warpgroup; ++n) my_V.advance();
            my_V.producer_acquire();  // all consumers have read this work tile's Vj from that stage
            stage_O<T>(a, work, work.i0 + row, Oi, softmax, shared.Vj[my_V.stage()]);
            __syncwarp();
            if (lane == 0) arrive(shared.O_staged[warpgroup]);
        } else {
            stage_O<T>(a, work, work.i0 + row, Oi, softmax, shared.Qi[warpgroup][my_Q.stage()]);
        }
        __syncwarp();  // all lanes have read `work` and staged O
        if constexpr (Tile::O == StoreO::through_Q) my_Q.consumer_release();
        my_tile.consumer_release();
        if constexpr (!begins_early) begin_work_tile();
        wgmma_wait<0>(Sij);
    }
}

template <class T, class Tile, class Mask>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    half_hopper_kernel(const __grid_constant__ Parameters p) {
    auto &shared = shared_storage<SharedStorage<Tile, Mask>>();
    const auto init_barriers = [&] {
        constexpr int warps = 4 * Tile::Consumers;
        init_pipeline(shared.tile_queue, warps + (kIsRanges<Mask> ? 3 : 2));
        for (auto &Q : shared.Q) init_pipeline(Q, 4);
        init_pipeline(shared.K, warps), init_pipeline(shared.V, warps);
        if constexpr (Tile::O == StoreO::through_V)
            for (Barrier &staged : shared.O_staged) init(staged, 4);
    };
    const auto produce = [&] {
        if constexpr (kHasTerms<Mask>) {
            if (threadIdx.x == 0) load_K<Tile, Mask>(p, shared, shared.behind);
        } else {
            if (threadIdx.x == 0) load_K<Tile, Mask>(p, shared);
        }
        if (threadIdx.x == 32) load_Q_and_store_O(p, shared);
        if (threadIdx.x == 64) load_V_and_store_O(p, shared);
        if constexpr (kIsRanges<Mask>)
            if (threadIdx.x == 96) schedule<Tile, Mask>(p, shared);
    };
    run_roles<Tile>(init_barriers, produce, [&] { consume<T>(p, shared); });
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

// D, Br, Bc, stages of Q, stages of K and V, way of O, blocks on a multiprocessor. docs/hopper.md has other tiles.
using Tiles = TileList<
    // few_queries: so small that three blocks share a multiprocessor and hide each other's latencies
    Tile<64, 64, 64, 2, 2, StoreO::direct, 3>,
    // d64: three consumers were 7 % faster than two, since exponentials are half of the work
    Tile<64, 192, 128, 2, 4, StoreO::through_Q>,
    // d96: 128 x 128 was 5 to 12 % faster at N 512, 4 to 12 % slower from N 2048 on
    Tile<96, 192, 96, 2, 2, StoreO::through_Q>,
    // d128: one stage of Q and Bc 144 to 176 lost 9 to 21 % at N 512, gained at most 2 % at N 8192
    Tile<128, 128, 128, 2, 2, StoreO::through_Q>,
    // d192: two stages of Q and Bc 80 were 8 % slower at N 8192
    Tile<192, 128, 112, 1, 2, StoreO::through_V>,
    // d256: Bc 64 was up to 8 % slower
    Tile<256, 128, 80, 1, 2, StoreO::through_V>,
    // d192_v128: d_v up to 128
    Tile<192, 128, 128, 1, 2, StoreO::through_V, 1, 128>,
    // d64_terms: beside terms or dropout three consumers have too few registers
    Tile<64, 128, 128, 2, 4, StoreO::through_Q>>;
enum TileOf { few_queries, d64, d96, d128, d192, d256, d192_v128, d64_terms };  // its place in Tiles

TileOf tile_of(const Attention &a) {
    const int d = most_columns(a);
    if (a.is_general && d <= 64) return has_terms(a) || has_dropout(a) ? d64_terms : d64;
    if (a.is_general) return d <= 128 ? d128 : d256;
    if (d <= 64) return a.Nq <= 64 ? few_queries : d64;
    if (d > 128 && d <= 192 && a.d_v <= 128) return d192_v128;
    return d <= 96 ? d96 : d <= 128 ? d128 : d <= 192 ? d192 : d256;
}

// Whether tiles of queries are sorted. Where their order is fixed, there are few; those of short documents are alike.
// Sorting gained 0 to 5 % where documents have 16 to 8192 tokens, and cost 9 us of 197 where they have 8 to 128.
bool sorts_tiles(const Attention &a, const Plan &plan) {
    const bool is_short = a.cu_seqlens_q && a.Nk < int64_t(a.documents) * 2 * plan.Br;
    return has_ranges(a) && !is_short && plan.workspace && a.Nq <= kMostSorted * plan.Br;
}
constexpr int kOrderBegin = 256;  // in the workspace, behind the counter

// use(a Mask) for one of four kernels.
template <class Use>
auto with_mask_of(const Attention &a, const Use &use) {
    if constexpr (kHasGeneral)
        if (a.is_general) return use(General());
    if (has_ranges(a)) return use(Ranges());
    return a.block_table || a.by_sequence ? use(PagedBand()) : use(BandOf<int>());
}

}  // namespace

Plan plan_half(const Attention &a, const Device &device) {
    const TileOf choice = tile_of(a);
    return with_tile(choice, Tiles(), [&](auto tile) {
        return with_mask_of(a, [&](auto mask) {
            using Tile = decltype(tile);
            Plan plan = make_plan<Tile, SharedStorage<Tile, decltype(mask)>>(a, device, "half", choice);
            if (sorts_tiles(a, plan))
                plan.workspace = kOrderBegin + a.B * ((a.Nq + plan.Br - 1) / plan.Br) * sizeof(int);
            return plan;
        });
    });
}

const char *launch_half(const Attention &a, const Plan &plan, void *workspace, CUstream_st *stream) {
    return with_tile(plan.tile, Tiles(), [&](auto tile) {
        using Tile = decltype(tile);
        Parameters p{a};
        p.tma_stores_O = Tile::O != StoreO::direct && a.o_dtype == a.dtype && !a.o_in &&
                         is_aligned(a.o, a.o_stride, 2, a.d_v) &&
                         make_tensor_map(p.O, a.dtype, a.o, a.o_stride, a.B, a.Hq, a.Nq, a.d_v, 64);
        if (sorts_tiles(a, plan)) {
            p.order = (int *)((char *)workspace + kOrderBegin);
            if (const char *why = sort_tiles_cuda(a, Tile::Br, p.order, stream)) return why;
        }
        return with_mask_of(a, [&](auto mask) -> const char * {
            using Wanted = decltype(mask);
            constexpr bool exists = kIsGeneral<Wanted> ? Tile::has_general : !Tile::only_terms;
            if (!exists) return "this tile has no such kernel";
            using Mask = std::conditional_t<exists, Wanted, std::conditional_t<Tile::only_terms, General, Ranges>>;
            const auto kernel = with_or_without_terms<Mask>(a, [&](auto wanted) {
                using Wanted = decltype(wanted);
                constexpr bool with_terms = Tile::only_terms || (kHasTerms<Wanted> && Tile::has_terms);
                using Any = std::conditional_t<with_terms, WithTerms, Mask>;
                return a.dtype == Dtype::float16 ? half_hopper_kernel<__half, Tile, Any>
                                                 : half_hopper_kernel<__nv_bfloat16, Tile, Any>;
            });
            if (a.by_sequence) p.tile_counter = &a.sequences.counts->tiles_taken;
            const Zeros counter(workspace, std::min<int64_t>(plan.workspace, sizeof(int)), stream);
            return launch_kernels<Tile>({kernel}, p, plan, counter, stream);
        });
    });
}

}  // namespace minimal_attn::hopper
