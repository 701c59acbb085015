// what the blocks split for one another
#pragma once
#include "hopper/scheduler.h"
#include "hopper/float32/split.h"
namespace minimal_attn::hopper {
namespace {

// Of float32: a head is split so many works a block before its first work. 1, 2 and 6 are up to 2 % slower at d 64,
// N 512; without a bound d 64, N 2048 had 174 instead of 188 TFLOP/s, K and V being larger than the L2 cache.
constexpr int kAhead = 4;

// Of float32 besides
struct WorkOfParts : WorkTile {
    int n;           // its number (work_of)
    int place;       // in the ring of works, for a consumer that is short of registers
    bool by_floats;  // FMAs multiply the float32s themselves, since there is no key, or the parts don't carry Kj or Vj
    // The largest unscale of the head's Kj (kUnscaleOfZeros if all are zeros), in units of which m is kept, each Sij
    // being in units of its own Kj; and of its Vj, 0 if all are zeros. Of the small tile inf if the parts don't carry
    // it; `by_floats` is false there.
    float unscaleK, unscaleV;
    int ends[4];                       // of the keys that a consumer's rows see
    alignas(8) Keys fully_visible[4];  // fully_visible_keys a consumer's rows; aligned: read by one instruction
};

// Of float32: tiles of a key head that somebody splits, from n to end: 2 t are the keys, 2 t + 1 the values of tile t.
struct Share {
    int head, h, b;  // its index in Workspace::heads (< 0: there is no more); the key head and the batch
    int n, end;
    Keys keys;      // only these count, the others' rows become 0
    int begins_at;  // in the producer it waits until so many works are taken

    __device__ bool is_V() const { return n % 2; }
    __device__ int t() const { return n / 2; }
    template <class Tile>
    __device__ Counted counted() const {
        return {{keys.begin - t() * Tile::Bc, keys.end - t() * Tile::Bc}, is_V()};
    }
};

// What is known of the tiles of a key head, in the workspace. All begin as 0.
struct Head {
    int there;               // tiles of K and of V that are in the workspace
    int unscaleK, unscaleV;  // the largest of all tiles, as bits of floats; inf if the parts don't carry one of them
    int inverseV;            // likewise, the largest 1 / unscale of tiles that aren't zeros
};

// The workspace of float32: what the blocks split for one another, and how they share that work. heads is null where
// nobody splits for others: the small tile, or no key at all.
struct Workspace {
    Head *heads;
    int *works_taken, *shares_taken;  // counters
    float4 *unscale;                  // (heads, 2 Tc), K's and V's in turn, in x; 0 of a tile of zeros
    unsigned char *parts;             // likewise, tiles as they lie in shared memory
    int batches, Tc;                  // batches (1 if they are one and the same), tiles of keys
    Divisor shares;                   // of a head
    int tiles_a_share;                // of K or of V
};

struct ParametersOfParts : Parameters {
    Workspace workspace;
};

template <class Tile>
struct SharedOfParts {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char tiles[Tile::Stages][Tile::KBytes];  // Kj and Vj in turn, as they are used
    // The tile that each of the producer's splitters splits; of the small tile none: Kj and Vj are split in place.
    unsigned char floats[Tile::Splitters][Tile::SplitsAll ? 1 : Tile::KBytes];
    WorkOfParts work[kQueueStages];
    StageBarriers tile_queue[kQueueStages], Q[Tile::Consumers][Tile::QStages], KV[Tile::Stages];
    float4 unscale[Tile::Stages];  // in x; less than 16 bytes can't be copied
    Barrier floats_there[Tile::SplitsAll ? 2 : Tile::Splitters];
    // What each splitter splits; of two warps also what it did before, which the second reports meanwhile.
    Share now[Tile::Splitters][Tile::SplitterWarps];
    Share next[Tile::Consumers + Tile::Splitters];  // what a team splits next, or did last; head -1: there is no more
    float unscaleQ[Tile::Consumers];
    float l_of_rows[Tile::Br];                  // l, set aside (set_l_aside)
    float m_of_O[Tile::Br];                     // what the sums in O are relative to (add_up)
    alignas(16) int left[4 * Tile::Consumers];  // of each warp's list (left_after) the first, or -1
    // Of each team's warps, what Team::largest asks. Aligned: a 16-byte read must not take another team's words along,
    // which racecheck reports.
    alignas(16) int largest[Tile::Splitters + Tile::Consumers][4];
    alignas(16) int least[Tile::Splitters + Tile::Consumers][4];
};

// The first work of a head, by the same order
__device__ int first_work(const ParametersOfParts &p, int head) {
    return head < p.sequential_heads ? head * p.Tr : p.sequential_heads * (p.Tr - 1) + head;
}

template <class Tile>
__host__ __device__ int tiles_before(int j) {
    return (j + Tile::Bc - 1) / Tile::Bc;
}

// Which of Workspace's heads a work reads
__device__ int head_of(const ParametersOfParts &p, const WorkTile &work) {
    return (p.workspace.batches > 1 ? work.b * p.Hkv : 0) + work.key_head;
}

// The next share with something in it, if there is one
template <class Tile>
__device__ Share take_share(const ParametersOfParts &p) {
    const Workspace &w = p.workspace;
    for (;;) {
        const int at = atomicAdd(w.shares_taken, 1), head = at / w.shares, b = head / p.Hkv, h = head % p.Hkv;
        if (b >= w.batches) return {-1};
        const Keys keys = band_of_batch(p, b).keys;
        const int first = at % w.shares * w.tiles_a_share, n = max(first, 2 * (keys.begin / Tile::Bc));
        const int end = min(first + w.tiles_a_share, 2 * tiles_before<Tile>(keys.end));
        const int begins_at = first_work(p, b * p.Hq + h * p.group) - kAhead * p.grid;
        if (n < end) return {head, h, b, n, end, keys, begins_at};
    }
}

// Waits until a work's keys and values are split, and says whether the parts carry them. Not V if units of tiles are
// 2^60 apart: Oi, kept in units of the last Vj, would overflow.
template <class Tile>
__device__ void await_parts(const ParametersOfParts &p, WorkOfParts &work) {
    const Keys keys = work.band.keys;
    work.by_floats = empty(keys);
    if (work.by_floats) return;
    const Head &head = p.workspace.heads[head_of(p, work)];
    while (load_acquire(head.there) < 2 * (tiles_before<Tile>(keys.end) - keys.begin / Tile::Bc)) {
    }
    const float unscaleK = __int_as_float(head.unscaleK), unscaleV = __int_as_float(head.unscaleV);
    work.unscaleK = or_of_zeros(unscaleK), work.unscaleV = unscaleV;
    // |, not ||: no load waits for another's verdict.
    work.by_floats = (fmaxf(unscaleK, unscaleV) == INFINITY) | (unscaleV * __int_as_float(head.inverseV) >= 0x1p60f);
}

// Where tile n of a head is among all
__device__ int64_t place_of(const Workspace &w, int head, int n) { return (int64_t)head * 2 * w.Tc + n; }

// By one thread: what is known of a tile that was split.
__device__ void report(const Workspace &w, const Share &share, float unscale) {
    w.unscale[place_of(w, share.head, share.n)].x = unscale;
    Head &head = w.heads[share.head];
    atomicMax(share.is_V() ? &head.unscaleV : &head.unscaleK, __float_as_int(unscale));
    if (share.is_V() && unscale > 0.f) atomicMax(&head.inverseV, __float_as_int(inverse_of_power(unscale)));
    fence_async_global();  // there is one where they are read, too: the PTX manual asks for one on the way
    add_release(head.there, 1);
}

// Where the parts of tile n of a share go
template <class Tile>
__device__ unsigned char *parts_of(const Workspace &w, int head, int n) {
    return opaque(w.parts + place_of(w, head, n) * Tile::KBytes);
}

// A consumer that would wait splits a share, if there is one left, straight from global memory.
template <class Tile>
__device__ bool help(const ParametersOfParts &p, SharedOfParts<Tile> &shared, int warpgroup) {
    Share &mine = shared.next[warpgroup];
    if (threadIdx.x % 128 == 0 && mine.head >= 0) mine = take_share<Tile>(p);
    named_barrier_sync(barrier_of(warpgroup), 128);
    Share share = mine;
    if (share.head < 0) return false;
    for (; share.n < share.end; ++share.n) {
        const Strides &stride = share.is_V() ? p.a.v_stride : p.a.k_stride;
        const int j0 = share.t() * Tile::Bc;
        const float *const first = (const float *)(share.is_V() ? p.a.v : p.a.k) + share.b * stride.batch +
                                   share.h * stride.head + j0 * stride.row;
        const float unscale = split_to_workspace(
            Team<Tile, Tile::Bc, 4>{shared, warpgroup}, InGlobal{first, stride.row}, p.a.d,
            [&] { return share.counted<Tile>(); }, [&] { return parts_of<Tile>(p.workspace, share.head, share.n); });
        if (threadIdx.x % 128 == 0) report(p.workspace, share, unscale);
        __syncwarp();
    }
    return true;
}

// One of the producer's splitters: tile after tile, but for one no further ahead of the works than is good for the L2
// cache. There is one place: the next tile comes once all have read. The first thread takes the shares and loads; the
// last warp's first reports what is done, which waits for the stores (all's: Team::any came between). Of two warps the
// one is beside the other. A warp alone loads first, then reports, and only then waits for works, which may be waiting
// for what it reports.
template <class Tile>
__device__ void split_K_and_V(const ParametersOfParts &p, SharedOfParts<Tile> &shared, int splitter) {
    constexpr int Warps = Tile::SplitterWarps;
    const int team = Tile::Consumers + splitter;
    Share &next = shared.next[team];
    const auto leads = [] { return opaque(threadIdx.x) % (32 * Warps) == 0; };
    const auto reports = [] { return opaque(threadIdx.x) % (32 * Warps) == 32 * (Warps - 1); };
    const auto begin = [&] {  // next, unless it is too early, which the end of all shares never is
        if (next.begins_at > *(volatile int *)p.workspace.works_taken) return false;
        if (next.head >= 0)
            load_tile<Tile::Bc, Tile::Boxes, kBoxColumns / Tile::Parts>(shared.floats[splitter],
                                                                        next.is_V() ? p.V : p.K, next.t() * Tile::Bc,
                                                                        next.h, next.b, shared.floats_there[splitter]);
        return true;
    };
    if (leads()) next = take_share<Tile>(p);
    float unscale;  // of `last`
    for (int parity = 0;; parity ^= 1) {
        // In shared memory: registers are short, and all read `now`. Of one warp both are one place, used in turn.
        Share &now = shared.now[splitter][parity % Warps], &last = shared.now[splitter][(parity + 1) % Warps];
        const bool begun = leads() && begin();
        if (reports() && last.head >= 0) report(p.workspace, last, unscale);
        if (leads()) {
            while (!begun && !begin()) __nanosleep(100);
            now = next;  // now's place nobody reads any more: all have met since
            if (now.head >= 0 && ++next.n >= next.end) next = take_share<Tile>(p);
        }
        __syncwarp();
        named_barrier_sync(barrier_of(team), 32 * Warps);
        if (now.head < 0) return;
        wait(shared.floats_there[splitter], parity);
        unscale = split_to_workspace(
            Team<Tile, Tile::Bc, Warps>{shared, team}, InShared{shared.floats[splitter]}, p.a.d,
            [&] { return now.counted<Tile>(); }, [&] { return parts_of<Tile>(p.workspace, now.head, now.n); });
    }
}

// The parts of workspace `memory`; returns its size, 0 where heads is null.
template <class Tile>
int64_t lay_out(const Attention &a, void *memory, Workspace &w) {
    if (!Tile::FromWorkspace || a.Nk == 0) return 0;
    const bool same_batch = a.k_stride.batch == 0 && a.v_stride.batch == 0 && !a.seqlens_k && !a.leftpad_k;
    w.batches = same_batch ? 1 : a.B, w.Tc = tiles_before<Tile>(a.Nk);
    int64_t size = 0;
    const auto take = [&](auto *&part, int64_t bytes) {
        part = (std::remove_reference_t<decltype(part)>)((char *)memory + size), size += (bytes + 127) / 128 * 128;
    };
    const int64_t heads = w.batches * a.Hkv, tiles = heads * 2 * w.Tc;
    take(w.heads, heads * sizeof(Head)), take(w.works_taken, sizeof(int)),
        take(w.shares_taken, sizeof(int));  // set to 0 by one memset
    take(w.unscale, tiles * sizeof(float4)), take(w.parts, tiles * Tile::KBytes);
    return size;
}

}  // namespace
}  // namespace minimal_attn::hopper
