// flash_sm90.cu: Algorithm 1 on Hopper. Read flash.cu first: the steps and the names are the same, and what is new is
// who does them, and when.
//
// Who runs it. A block stays on its multiprocessor and takes one work after the other, a work being a tile of Br
// queries of one head. Its first warpgroup is the producer. Thread 0 says what the next work is, and loads Kj by TMA;
// thread 32 loads Qi, 64 Vj, and each stores O if that takes the place of what it loads (leaves_O; or else the
// consumers store it). For float32 thread 0 loads Qi, and copies the parts of Kj and Vj from the workspace, where other
// warps of the producer put them, or consumers; of the small tile it loads Kj, Qi and Vj, before it works out the rest.
// The other warpgroups, the consumers, have 64 of the rows each: they multiply by wgmma and do the softmax.
//
// What is where. In shared memory are rings of tiles Qi, Kj and Vj (float32: of Qi, and of Kj and Vj in turn), swizzled
// as TMA writes and wgmma reads them. Sij, Pij (which is the A of Pij Vj) and Oi are in the registers of the consumers
// (float32: after many keys Oi is added to what O has, if D > 128 or in attend_by_floats, see add_up). Of half types O
// takes the place of its Qi on its way to HBM, if there are two (OTakesQ), or the places of the next Vj (OTakesV). The
// table of tiles, at the end, has the bytes. float32's workspace, in global memory, has the parts of each tile of K and
// V as they lie in shared memory. At last float32s of what was left take the places of Qi and of the tiles.
//
// The softmax is hopeful: but for a work's first tile, and where m is subtracted first (subtracts_m), exponentials are
// taken by the m of earlier tiles. If a thread's add up to little (kMostByOldM), or, of float32, none times kP is
// beyond float16, that was right: O / l cancels what m is short of the maximum. If not, m moves, and they are taken
// again. So for most tiles nothing comes before the exponentials, and Oi is rescaled for a few. (Not for float32 with
// D > 128, nor if float32's state is wanted.)
//
// What overlaps what, per consumer of half types: the next Sij = Qi Kj+1^T is started before Oi += Pij Vj, so that some
// of the exponentials of the one run beside the other. With two Qi consumers take turns in starting products, so that
// the tensor cores have work while others do their softmax, and a work ends, and is stored, beside the first Sij of the
// next. With one a work ends before the next begins; only TMA's store runs beside it.
//
// Which barrier orders what (float32 has one ring, KV, for K and V):
//     works, Q, K, V: full   the producer's: the work is described, the tile has arrived (TMA counts its bytes; KV of
//                            the small tile: it is split)
//     works, Q, K, V: empty  the readers', one arrival a warp (works: of half types also one each of threads 32 and
//                            64): it may be overwritten; of Q, where O takes the place: O is there; of V, where O
//                            takes the places: O may be put there, too
//     O_there                half types: a consumer's, one arrival a warp: O is in a place of Vj, where thread 64 may
//                            store it
//     named 1, 2, ..         half types, with two Qi: whose turn it is to start products (my_turn, next_turn), and that
//                            a consumer's warps have all used Qi; 0 is __syncthreads
//     named, one a consumer  half types: its threads have cleared the rows of Vj that no query may see
//     floats_there           float32: what one of the producer's splitters is to split has arrived (TMA counts its
//                            bytes); of the small tile two, Kj and Vj, before they are split in place
//     named 1, 2, ..         float32: one a team: it has met (split_in_place, split_K_and_V, help, attend_by_floats);
//                            what its warps found (Team::largest, any); whether to help, and whether a warp has left
//                            something
//     KV: empty, at the end  float32: all of them: no consumer needs a tile any more, so floats may take the places
//     Head::there            float32: so many of the head's tiles are in the workspace (report, await_parts)
//
// float32 runs on the same tensor cores, each number in two float16s, a product as three (Markidis et al. 2018; Ootomo
// and Yokota 2022). Each tile of K and V is split once, for all queries. All blocks take shares of that, for all heads,
// from a counter: the producer's warps do (split_K_and_V), and consumers that would wait (help). Who needs a head waits
// until all its tiles are there (await_parts). Who splits waits, at most, until so many works are taken (begins_at):
// fewer than come before the first one that needs the tile, so that no two wait for each other. A consumer splits its
// own Qi where TMA put it. Of the small tile nobody else has Kj and Vj: the producer's warps split them there, too
// (produce_and_split).
//
// consume_parts is Algorithm 1 as it stands, step after step, and no tile's step beside another's: that leaves
// registers for more consumers, up to four at d 64 and three at d 128, and one's softmax runs beside another's
// products. New are the three products, those with a low part first, while the sum is small; Tij = Pij Vj of each tile,
// a sum of its own that is added to Oi in float32, since the tensor cores truncate; that what this does in the mean is
// made up for (kShortS, kShortT), and that what tiny Pij lose adds up to little (dither_of). What the parts can't carry
// is left (leave) until a block has done all its works; then FMAs multiply the float32s themselves (attend_to_left).
// The code is short on purpose: with several warps at several places instructions are waited for, at N 512 for a third
// of the time (NOTES.md).
//
// Steps that differ from flash.cu's: m moves only if it must, and then Oi is rescaled after the exponentials (float32:
// in the FMA that adds Tij); a work that sees no key gets a tile all the same, which is masked.
#include <algorithm>
#include <type_traits>

#include "device.h"
#include "flash.h"
#include "hopper.h"

namespace minimal_attn {
namespace {

using namespace hopper;

constexpr int kBox = 64;   // columns of a box of TMA: 128 bytes, the width of the swizzle; of float32s half as many
constexpr int kWorks = 2;  // one ends, the next is loaded and begun

// Under a mask so many of the last heads are worked on together that a block gets 4 of their tiles (2 and 3 are up to 3
// % slower, 8 is the same), but no more than have their K and V in 32 MB of the L2 cache.
constexpr int64_t kTogether = 4;
constexpr int64_t kL2Bytes = 32 << 20;
// Tiles are dealt out in a fixed order, there and back, the longest first, instead of being counted: without a mask any
// number; under one up to two a block, or so many, if of half types batches have one mask, and K and V are short and
// stay in the L2 cache: N 1000 at d 64 and 128 9 to 11 and 3 to 5 % faster; at N 4096, where tiles differ more, 2 %
// slower. Of float32 with a workspace all are counted.
constexpr int kRounds = 4, kShort = 2048;
// Of float32: a head is split so many works a block before its first work. 1, 2 and 6 are up to 2 % slower at d 64,
// N 512; without a bound d 64, N 2048 had 174 instead of 188 TFLOP/s, K and V being larger than the L2 cache.
constexpr int kAhead = 4;

// D, Br, Bc; stages of the rings of Q tiles and of K and V tiles (of two parts: of the one ring of both); blocks on a
// multiprocessor; 16-bit parts of a number; who split for the workspace
template <int D_, int Br_, int Bc_, int QStages_, int Stages_, int BlocksPerSM_ = 1, int Parts_ = 1, int Splitters_ = 1>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, QStages = QStages_, Stages = Stages_, BlocksPerSM = BlocksPerSM_;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);  // a consumer warpgroup has 64 rows
    // What a thread gets at launch; then the producer's warpgroup gives its own to the consumers. Of float32 it keeps
    // what these can spare, to have more under way when it splits (56: with 32, 3 % slower at d 128, N 512, then with
    // three consumers; with two 96 is the same); of the small tile it splits by all warps, as they do. A float division
    // calls a subroutine that doesn't know of this, so there is none in the producer.
    static constexpr int LaunchRegisters = 65536 / (Threads * BlocksPerSM) / 8 * 8;
    static constexpr int ProducerRegisters = Parts_ == 1      ? 32
                                             : Consumers == 1 ? 96
                                             : Consumers == 4 ? 32
                                             : D > 128        ? 40
                                                              : 56;
    static constexpr int ConsumerRegisters =
        (LaunchRegisters * (1 + Consumers) - ProducerRegisters) / Consumers / 8 * 8;
    static constexpr int Parts = Parts_, Boxes = (D + kBox - 1) / kBox * Parts;
    static constexpr int QBytes = 64 * Boxes * 128, KBytes = Bc * Boxes * 128;
    // On its way to HBM, O takes the place of its Qi if there are two. That needs turns: they also say when all warps
    // of the consumer have used Qi, so a single consumer stores O itself. With one Qi, which the next work needs first,
    // O takes a place of the Vj to come, each consumer's another; there no turns are faster. (NOTES.md)
    static constexpr bool OTakesQ = Parts == 1 && QStages > 1 && Consumers > 1;
    static constexpr bool OTakesV = Parts == 1 && QStages == 1 && Consumers <= Stages && QBytes <= KBytes;
    // Of two parts: K and V come in parts from the workspace, or, of the small tile, whole, and are split in place.
    static constexpr bool FromWorkspace = Parts == 2 && Consumers > 1, SplitsAll = Parts == 2 && Consumers == 1;
    // Of two parts: whether exponentials may be taken by an m from before, and l is set aside when m moves. Not where m
    // is always subtracted first (D > 128; there l alone set aside costs 1 to 4 %), nor for one tile of keys.
    static constexpr bool Hopes = FromWorkspace && D <= 128;
    // The producer's last warps split for the workspace: two or three, each alone, as many as there is room for tiles
    // of float32s; or, if that is one, two together. Alone is faster, since one loads and reports while another splits:
    // at N 512, causal, three alone 7 to 10 % at d 64, two 3 to 5 % at d 128. (The small tile's split in place: all
    // four, together, which is the one splitter.)
    static constexpr int Splitters = Splitters_, SplitterWarps = Splitters > 1 ? 1 : 2;
    static_assert(Bc % 16 == 0 && D % 32 == 0 && QStages <= 2);
    static_assert(Parts == 1 || (D % 64 == 0 && QStages == 1));
    static_assert(!SplitsAll || (Bc == 64 && Stages == 2));
    static_assert(!Hopes || D <= 128);              // kAlwaysSubtracts
    static_assert(Parts == 1 || Consumers <= 4);    // WorkOfParts::ends
    static_assert(Splitters * SplitterWarps <= 3);  // of the producer's warps; the first has other things to do
};

// The barriers of one place in a ring.
struct Stage {
    Barrier full, empty;
};

// A walk around a ring, whose n-th lap ends phase n of every barrier in it. The producer waits for the phase before,
// which on the first lap passes at once: a new barrier takes parity 1 for over.
template <int Stages>
struct Ring {
    Stage *stages;
    int place = 0;  // 0 to Stages - 1 on even laps, Stages to 2 Stages - 1 on odd ones

    __device__ int at() const { return place < Stages ? place : place - Stages; }
    __device__ int parity() const { return place >= Stages; }
    __device__ void advance() { place = place == 2 * Stages - 1 ? 0 : place + 1; }
    __device__ Barrier &full() const { return stages[at()].full; }
    __device__ void wait_full() const { wait(full(), parity()); }
    __device__ void pass() { wait_full(), release(); }
    __device__ void wait_empty() const { wait(stages[at()].empty, parity() ^ 1); }
    // By all lanes of a warp, or by one thread that is its first lane; not before x is computed, which also keeps ptxas
    // from moving the next wait for wgmma above that. x is a sum of results of exp2, or an unscale: never -0, but ptxas
    // can't know.
    __device__ void release(float x = 0.f, bool is_lane_0 = threadIdx.x % 32 == 0) {
        if (is_lane_0 && __float_as_int(x) != __float_as_int(-0.f)) arrive(stages[at()].empty);
        advance();
    }
};

template <class T>
__device__ T of_all(T x) {  // what the first lane has
    return __shfl_sync(~0u, x, 0);
}
// x, in a place of a ring, for all lanes. One lane reads it, the one whose arrival gives the place back: another's read
// could still be under way then, since an arrival doesn't wait for a load. Its own has to be used before, see
// release(x).
__device__ float by_one(const float &x, bool is_lane_0) { return of_all(is_lane_0 ? x : 0.f); }
// Whether this is a warp's first lane, out of a shuffle, so that it is kept: ptxas would ask for threadIdx.x anew in a
// loop, where others wait for the answer (S2R; NOTES.md).
__device__ bool kept_lane_0() { return __shfl_sync(~0u, threadIdx.x, threadIdx.x % 32) % 32 == 0; }

// A tile of queries i0 <= i < i1 of head h in batch b, and the keys that some of its rows see.
struct alignas(16) Work {  // aligned: read by fewer instructions, up to 2 % of half types at d 64
    int b, h, i0, i1;      // b < 0: there is no more work
    Keys seen;
    BandOf<int> band;
    int key_head;  // whose keys and values head h reads
};

// Of float32 besides
struct WorkOfParts : Work {
    int n;           // its number (work_of)
    int place;       // in the ring of works, for a consumer that is short of registers
    bool by_floats;  // FMAs multiply the float32s themselves, since there is no key, or the parts don't carry Kj or Vj
    // The largest unscale of the head's Kj (kUnscaleOfZeros if all are zeros), in units of which m is kept, each Sij
    // being in units of its own Kj; and of its Vj, 0 if all are zeros. Of the small tile inf if the parts don't carry
    // it; `by_floats` is false there.
    float unscaleK, unscaleV;
    int ends[4];                  // of the keys that a consumer's rows see
    alignas(8) Keys unmasked[4];  // unmasked_of a consumer's rows; aligned: read by one instruction
};

// What of a tile counts; other rows become 0.
struct Counted {
    Keys rows;
    bool is_V;

    __device__ bool has(int row) const { return row >= rows.begin && row < rows.end; }
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

// Who splits a tile together is a team: first the consumers, then those of the producer. Each has a named barrier.
__device__ int barrier_of(int team) { return 1 + team; }

template <class Tile>
struct SharedOfHalves {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char Kj[Tile::Stages][Tile::KBytes], Vj[Tile::Stages][Tile::KBytes];
    Work work[kWorks];
    Stage works[kWorks], Q[Tile::Consumers][Tile::QStages], K[Tile::Stages], V[Tile::Stages];
    Barrier O_there[Tile::Consumers];  // if O takes the places of Vj
};

template <class Tile>
struct SharedOfParts {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char tiles[Tile::Stages][Tile::KBytes];  // Kj and Vj in turn, as they are used
    // The tile that each of the producer's splitters splits; of the small tile none: Kj and Vj are split in place.
    unsigned char floats[Tile::Splitters][Tile::SplitsAll ? 1 : Tile::KBytes];
    WorkOfParts work[kWorks];
    Stage works[kWorks], Q[Tile::Consumers][Tile::QStages], KV[Tile::Stages];
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

template <class Tile>
using Shared = std::conditional_t<Tile::Parts == 2, SharedOfParts<Tile>, SharedOfHalves<Tile>>;

// What TMA must know of a tensor, and whether its heads and batches are one and the same (stride 0).
struct TensorMap {
    CUtensorMap map;
    int head, batch;  // 1, or 0: what the indices are multiplied by
};

// What is known of the tiles of a key head, in the workspace. All begin as 0.
struct Head {
    int there;               // tiles of K and of V that are in the workspace
    int unscaleK, unscaleV;  // the largest of all tiles, as bits of floats; inf if the parts don't carry one of them
    int inverseV;            // likewise, the largest 1 / unscale of tiles that aren't zeros
};

// Division of 0 <= x < 2^31 by a number that the host knows, as a multiplication (CUTLASS has it as FastDivmod): else
// up to six divisions, of 20 to 30 instructions each, would come before a work's first load, where nothing hides them.
struct Divisor {
    int divisor, shift;
    uint32_t inverse;  // 2^shift / divisor, rounded down, + 1: too large by so little that quotients are right

    Divisor() = default;
    Divisor(int x) : divisor(x), shift(31) {
        while (int64_t(1) << (shift - 31) < x) ++shift;
        inverse = uint32_t((uint64_t(1) << shift) / x + 1);
    }
    __host__ __device__ operator int() const { return divisor; }
};
__device__ int operator/(int x, const Divisor &y) { return int((uint64_t)(uint32_t)x * y.inverse >> y.shift); }
__device__ int operator%(int x, const Divisor &y) { return x - x / y * y.divisor; }

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

struct Parameters {
    Attention a;
    TensorMap Q, K, V, O;
    Divisor Hq, Hkv, group;  // a's, to divide by; query heads of a key head
    Divisor Tr;              // tiles of queries of a head
    Divisor grid;            // blocks
    int tiles;               // of all heads
    int alone;               // so many of the heads are worked on one after the other,
    Divisor together;        // and then so many together
    bool same_band;          // no array says what differs by batch: `band` is that of all, worked out by the host
    BandOf<int> band;
    int *next;  // counts the tiles taken after each block's first, unless workspace has heads; null: see tile_after
    bool tma_stores_O;    // where it can, see leaves_O
    bool aligned;         // rows of O begin and end at multiples of 16 bytes
    Workspace workspace;  // of float32
};

template <class T>
__device__ uint32_t pack(float x, float y) {
    uint32_t two;
    if constexpr (std::is_same_v<T, __half>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
}

// ------------------------------------------------------------------------------ float32 in two parts

// A number x becomes hi + lo = x scale, two float16s of 22 bits together. The scale is a power of 2 and a tile's (of K
// and V Bc rows, of Q 64): by its largest number, which it brings to 2^kLargest or above. To read tiles of K and V but
// once, theirs is guessed by the largest number of the first four rows, with room for numbers four times as large; if
// that isn't enough, or 0, or too small for columns of Vj, it is by the tile's largest number, too. What is guessed
// doesn't depend on who splits, or the same inputs wouldn't give the same bits.
constexpr int kGuessed = 13, kLargest = 14;  // exponents
// Scaled numbers below 2^-2 have a subnormal lo, an absolute error of 2^-25. Of V that is harmless beside a row of O
// that isn't small (are_small), but for a channel it must be beside larger ones of its own: the largest number of each
// column of Vj must be 0 or, scaled, at least kLeast, of which 2^-25 is what float32 rounds away, too. Otherwise the
// parts don't carry the tile, nor if a number is inf, NaN, or too large for a scale of 2^-100.
constexpr float kLeast = 1.f;
constexpr uint32_t kTwoLeast = 0x3c003c00;  // kLeast as two float16s
// Of columns of fewer than 16 rows, of which one in 100 is below kLeast by chance
constexpr float kLeastOfFew = 1.f / 256;
// Of Q and K it is harmless if units of scores, unscaleQ unscaleK, are small: then the loss is nothing beside 1, how
// small a row or column ever is. The most that d softmax_scale may be in these units: beside some 2^-22 of itself a
// product loses at most 2^-9 units, 2^-25 of each factor times up to 2^15 of the other; half as much again if K's scale
// was guessed, whose numbers reach 2^16. So a score loses less than 2^-17, if all products are at their worst; in the
// mean 2^-22 or less (d 64; a fuzz in NOTES.md). Beyond it are, at d 64 and the usual scale, Q and K whose largest
// numbers, rounded down to powers of 2 and multiplied, are 2^15 to 2^17 or more, by how the largest of K was guessed.
constexpr float kMostUnit = 0x1p-9f;
// Of tiles of zeros, which lose nothing, as if 2^-10 were their largest number: so units with it are small, but not
// below what a float can be in units of.
constexpr float kUnscaleOfZeros = 0x1p-24f;
__device__ float or_of_zeros(float unscale) { return unscale > 0.f ? unscale : kUnscaleOfZeros; }
// Scale of Pij. By an m of all keys so far the largest Pij is 1, and 2^15 leaves room for its rounding. By an m from
// before, 15.99 times 2^12 is where float16 ends. With 2^13, and 7.99, m moves in 6 % of a consumer's tiles at N 2048
// instead of 0.4 % (random numbers, on a CPU), which is 1 to 3 % slower at d 64.
template <class Tile>
constexpr float kP = Tile::Hopes ? 0x1p12f : 0x1p15f;

// Tensor cores truncate every sum towards 0, so that Sij and Tij are, in the mean, too small by these parts of
// themselves. What they are multiplied by anyway makes up for it, which takes a quarter off the error of O (NOTES.md);
// as floats it is 0.58 and 1.27 times 2^-23. For D > 128 Sij is four sums of 64 columns, each as short as d 64's. The
// m that is returned stays as it is: exact where Sij is.
template <int D>
constexpr double kShortS = (D <= 64 || D > 128 ? 0.8 : 1.4) * 0x1p-23;
template <int D>
constexpr float kLog2eOfS = 1.4426950408889634 * (1 + kShortS<D>);
// Of Tij, a sum of 64 keys; for D > 128 of 32, which is short by half of 2^-23, and no float says half. Not where few
// keys have the weight, as the only one that a row sees: such a sum isn't truncated. Of l a key has 1 at most by its
// row's largest score as m; by an m from before up to 15.99, and is corrected for nothing, by 2^-23.
template <int D>
constexpr float kShortT = D <= 128 ? 0x1p-23f : 0.f;
constexpr float kFewKeys = 8.f;
__device__ float corrected(float unitO, float l, float shortT) { return l > kFewKeys ? unitO * (1.f + shortT) : unitO; }

// x, of which the compiler knows nothing here: what follows from it is computed here, rather than before all loops and
// kept in local memory.
template <class T>
__device__ T opaque(T x) {
    if constexpr (sizeof(T) == 8)
        asm volatile("" : "+l"(x));
    else
        asm volatile("" : "+r"(x));
    return x;
}

// max, but NaN if one is NaN
__device__ float max_abs(float x, float y) {
    float max;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(fabsf(x)), "f"(fabsf(y)));
    return max;
}
__device__ float max_abs(const float4 &x) { return max_abs(max_abs(x.x, x.y), max_abs(x.z, x.w)); }

// 1 / x of a power of 2; of 0 it is 2^127, so that 0 times it is 0
__device__ float inverse_of_power(float x) { return __int_as_float((254 << 23) - __float_as_int(x)); }

// Two numbers, scaled, as two hi and two lo
__device__ void split(float2 x, uint32_t &hi, uint32_t &lo) {
    const __half2 high = __float22half2_rn(x);
    const float2 back = __half22float2(high);
    hi = *(const uint32_t *)&high, lo = pack<__half>(x.x - back.x, x.y - back.y);
}

// max of two pairs of float16s without their signs, but NaN if one is NaN. Signs of the result mean nothing.
__device__ uint32_t max_abs_of_halves(uint32_t x, uint32_t y) {
    uint32_t max;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(max) : "r"(x), "r"(y));
    return max;
}

// Whether two float16s that aren't negative are neither inf nor NaN
__device__ bool are_finite(uint32_t two) { return !((two + 0x04000400) & 0x80008000); }

// What a thread adds to the one kP Pij of each pair, and takes from the other, before they are split: below 2^-25, so
// that 0 stays 0. Of a Pij below 2^-2, scaled, up to 2^-25 is lost, of equal ones always the same. So moved each loses
// another part, from lane to lane and from tile to tile (by a golden section), and the sum of all loses next to
// nothing.
__device__ float dither_of(int j0) {
    const uint32_t turn = j0 * 0x9e3779b9 + (opaque(threadIdx.x) << 30);
    return __uint_as_float(0x33000000 | turn >> 9) - 0x1p-25f;
}

// The x-th pair of a thread in two parts, times kP. Signs by Thue and Morse's sequence: nothing adds up for each second
// or fourth key, say, either.
template <class Tile>
__device__ void split_P(float P0, float P1, float dither, int x, uint32_t &hi, uint32_t &lo) {
    const float d = 0x96 >> x / 2 & 1 ? -dither : dither;
    split({fmaf(P0, kP<Tile>, d), fmaf(P1, kP<Tile>, -d)}, hi, lo);
}

struct Eight {
    float4 four[2];

    __device__ float operator[](int n) const {
        const float4 &x = four[n / 4];
        return n % 4 == 0 ? x.x : n % 4 == 1 ? x.y : n % 4 == 2 ? x.z : x.w;
    }
};
__device__ float max_abs(const Eight &x) { return max_abs(max_abs(x.four[0]), max_abs(x.four[1])); }

// Eight numbers to the places of their parts; note(c, hi) hears of the hi's, two at a time.
template <class Note>
__device__ void split(const Eight &x, float scale, unsigned char *to_hi, unsigned char *to_lo, const Note &note) {
    uint32_t hi[4], lo[4];
    for (int c = 0; c < 4; ++c) {
        split({x[2 * c] * scale, x[2 * c + 1] * scale}, hi[c], lo[c]);
        note(c, hi[c]);
    }
    *(uint4 *)to_hi = {hi[0], hi[1], hi[2], hi[3]};
    *(uint4 *)to_lo = {lo[0], lo[1], lo[2], lo[3]};
}

// The power of 2 that brings `largest`, a float's bits, to 2^exponent or above; 2^-100 to 2^100, so that 1 / scale is
// normal. Of 0 it is 2^127, of which inverse_of_power makes 0.
__device__ float power_for(int largest, int exponent) {
    return largest == 0 ? 0x1p127f : __int_as_float(clamp(127 + exponent + 127 - (largest >> 23), 27, 227) << 23);
}

// Those who split a tile of so many rows together: 4 warps, 2 or 1, each its share of the rows. Float32s lie, as TMA
// writes them, in boxes of 32 columns, 128 bytes a row, swizzled. Two neighbours, a pair, become one box of hi and one
// of lo of the same 64 columns: a row of both is the same 256 bytes before and after. Of these a thread has 8 columns,
// of its warp's rows each fourth (Places).
template <class Tile, int Rows, int Warps>
struct Team {
    static constexpr int Box = Rows * 128, Pair = 2 * Box, Pairs = Tile::Boxes / 2, OfWarp = Rows / Warps;
    static constexpr int Threads = 32 * Warps, Count = OfWarp / 4;  // a thread's rows
    SharedOfParts<Tile> &shared;
    int number;

    // Lanes 4 to 7 of eight have the second box, and there the row's neighbour: of one row the swizzle would take both
    // boxes' 16 bytes to the same banks.
    struct Places {
        unsigned warp, lane;
        int row;  // the first

        __device__ Places(unsigned thread)
            : warp(thread / 32), lane(thread % 8), row(warp * OfWarp + (thread % 32 / 8 ^ lane / 4)) {}
        // Of the first row the 16 bytes called `chunk`. The swizzle takes them to chunk ^ row % 8; warps begin at
        // multiples of 8, and of one the first rows are below 4.
        __device__ unsigned at(unsigned chunk) const { return row * 128 + (chunk ^ row % 4) * 16; }
        __device__ unsigned of_hi() const { return at(lane); }
        // Of four float32s; the next four are 16 bytes away, one way or the other.
        __device__ unsigned of_floats() const { return lane / 4 * Box + at(lane % 4 * 2); }
    };
    // Asked for anew each time (opaque), which takes a while (S2R): who can keeps it.
    static __device__ unsigned thread() { return opaque(threadIdx.x) % Threads; }
    // From a thread's first row to its y-th, which is 4 y further down
    template <class Place>
    static __device__ Place below(Place place, int y) {
        return (Place)((uintptr_t)place ^ y % 2 * 64) + y * 512;
    }

    // The largest of all threads' x, which aren't negative, as an int: so the bits of inf are above all numbers, those
    // of NaN above inf. And, if asked for (of four warps), the least of another number. There is one place: all must
    // meet (any, sync) before the next such question.
    __device__ int largest(unsigned thread, float x, float *least = nullptr) const {
        int result = __reduce_max_sync(~0u, __float_as_int(x));
        if constexpr (Warps > 1) {
            int(&of_warps)[4] = shared.largest[number], (&least_of_warps)[4] = shared.least[number];
            int least_of_warp = least ? __reduce_min_sync(~0u, __float_as_int(*least)) : 0;
            if (thread % 32 == 0) {
                of_warps[thread / 32] = result;
                if (least) least_of_warps[thread / 32] = least_of_warp;
            }
            sync(barrier_of(number), Threads);
            for (int warp = 0; warp < Warps; ++warp) {
                result = max(result, of_warps[warp]);
                if (least) least_of_warp = min(least_of_warp, least_of_warps[warp]);
            }
            if (least) *least = __int_as_float(least_of_warp);
        }
        return result;
    }
    // Whether x is true of one. They have met then: what one wrote before is there for all.
    __device__ bool any(bool x) const {
        if constexpr (Warps > 1) return hopper::any(barrier_of(number), Threads, x);
        __syncwarp();
        return __any_sync(~0u, x);
    }
    // What doesn't count may be anything, NaN, too, which would decide the scale.
    __device__ void clear_others(unsigned thread, unsigned char *tile, const Counted &counted) const {
        if (counted.rows.begin <= 0 && counted.rows.end >= Rows) return;
        const Places places(thread);
#pragma unroll 1
        for (int y = 0; y < Count; ++y)
            if (!counted.has(places.row + 4 * y))
                for (int pair = 0; pair < Pairs; ++pair)
                    for (int n = 0; n < 2; ++n)
                        *(float4 *)(tile + pair * Pair + below(places.of_floats() ^ n * 16, y)) = {};
        fence_async();  // TMA writes there again
    }
    // Whether each column's largest number is large enough, or 0. In a column of few all may be small by chance.
    template <class Read>
    __device__ bool columns_fit(const Counted &counted, float scale, const Read &read) const {
        const bool few = min(counted.rows.end, Rows) - max(counted.rows.begin, 0) < 16;
        bool fit = true;
#pragma unroll 1
        for (int x = thread(); x < Tile::D; x += Threads) {
            float column = 0.f;
#pragma unroll 4
            for (int row = 0; row < Rows; ++row) column = max_abs(column, read(row, x));
            fit &= !(column > 0.f && column * scale < (few ? kLeastOfFew : kLeast));
        }
        return !any(!fit);
    }
    static __device__ float float_at(const unsigned char *tile, int row, int x) {
        return *(const float *)(tile + x / 32 * Box + row * 128 + (x % 32 * 4 ^ row % 8 * 16));
    }
};

// Splits a tile where TMA put it, by its largest number: each of 4 warps keeps in registers what it read. At the end
// all have met, and written. Returns, and writes to unscale, 1 / scale, 0 of a tile of zeros, inf if the parts don't
// carry it.
template <class Team>
__device__ float split_in_place(const Team &team, unsigned char *tile, const Counted &counted, float &unscale) {
    const unsigned thread = team.thread();
    team.clear_others(thread, tile, counted);
    const typename Team::Places places(thread);
    Eight x[Team::Pairs][Team::Count];
    float most = 0.f, least_of_column = INFINITY;  // a thread's part of a column stands for the column
#pragma unroll
    for (int pair = 0; pair < Team::Pairs; ++pair) {
#pragma unroll
        for (int y = 0; y < Team::Count; ++y) {
            for (int n = 0; n < 2; ++n)
                x[pair][y].four[n] = *(float4 *)(tile + pair * Team::Pair + team.below(places.of_floats() ^ n * 16, y));
            most = max_abs(most, max_abs(x[pair][y]));
        }
        for (int c = 0; counted.is_V && c < 8; ++c) {
            float column = 0.f;
#pragma unroll
            for (int y = 0; y < Team::Count; ++y) column = max_abs(column, x[pair][y][c]);
            if (column > 0.f) least_of_column = fminf(least_of_column, column);
        }
    }
    const int largest = team.largest(thread, most, counted.is_V ? &least_of_column : nullptr);
    const float scale = power_for(largest, kLargest);
    bool fit = __int_as_float(largest) < 0x1p115f;  // by a scale of 2^-100 it is below 2^15, as others are
    if (counted.is_V && least_of_column * scale < kLeast)
        fit &= team.columns_fit(counted, scale, [&](int row, int x) { return team.float_at(tile, row, x); });
#pragma unroll
    for (int pair = 0; pair < Team::Pairs; ++pair)
#pragma unroll
        for (int y = 0; y < Team::Count; ++y) {
            unsigned char *const place = tile + pair * Team::Pair + team.below(places.of_hi(), y);
            split(x[pair][y], scale, place, place + Team::Box, [](int, uint32_t) {});
        }
    const float result = fit ? inverse_of_power(scale) : INFINITY;
    if (thread == 0) unscale = result;
    fence_async();
    sync(barrier_of(team.number), Team::Threads);
    return result;
}

// A tile of float32s: in shared memory, where one or two warps read it row by row; or in the tensor itself, which four
// read to registers.
struct InShared {
    unsigned char *tile;
};
struct InGlobal {
    const float *first;  // rows of the tensor; d is a multiple of 4 (consume_parts asks)
    int64_t stride;
};

// Splits a tile of K or V to the workspace, and returns likewise. The hi's say whether the scale was guessed right; if
// not, all is done again. The producer is short of registers: what shared memory says (counted_of, parts_of) is asked
// late, and places are computed anew where they are needed.
template <class Team, class From, class CountedOf, class PartsOf>
__device__ float split_to_workspace(const Team &team, const From &from, int d, const CountedOf &counted_of,
                                    const PartsOf &parts_of) {
    constexpr bool holds = std::is_same_v<From, InGlobal>;
    constexpr int Pairs = Team::Pairs, Count = Team::Count;
    const unsigned thread = team.thread();
    Eight held[holds ? Pairs : 1][holds ? Count : 1];
    float most = 0.f;
    if constexpr (holds) {
        const typename Team::Places places(thread);
#pragma unroll
        for (int pair = 0; pair < Pairs; ++pair)
#pragma unroll
            for (int y = 0; y < Count; ++y) {
                const int row = places.row + 4 * y, column = 64 * pair + 8 * places.lane;
                const float *const first = from.first + row * from.stride + column;
                held[pair][y] = {};
                for (int n = 0; n < 2; ++n)
                    if (counted_of().has(row) && column + 4 * n < d)
                        held[pair][y].four[n] = *(const float4 *)(first + 4 * n);
            }
        for (int pair = 0; places.warp == 0 && pair < Pairs; ++pair) most = max_abs(most, max_abs(held[pair][0]));
    } else {
        team.clear_others(thread, from.tile, counted_of());
        const typename Team::Places places(opaque(thread));
        for (int pair = 0; places.warp == 0 && pair < Pairs; ++pair) {
            const unsigned here = pair * Team::Pair + places.of_floats();
            most = max_abs(most, max_abs(*(float4 *)(from.tile + here)));
            most = max_abs(most, max_abs(*(float4 *)(from.tile + (here ^ 16))));
        }
    }
    float scale = power_for(team.largest(thread, most), kGuessed);
    for (bool is_guess = true;; is_guess = false) {
        bool overflows = is_guess && scale == 0x1p127f, small = false;
        unsigned char *const to = parts_of();
#pragma unroll(holds ? Pairs : 1)
        for (int pair = 0; pair < Pairs; ++pair) {
            uint32_t columns[4] = {};  // the largest hi's, of two columns each
            const auto note = [&](int c, uint32_t hi) { columns[c] = max_abs_of_halves(columns[c], hi); };
            const typename Team::Places places(opaque(thread));
            unsigned char *place = to + pair * Team::Pair + places.of_hi();
            if constexpr (holds) {
#pragma unroll
                for (int y = 0; y < Count; ++y) {
                    unsigned char *const row = team.below(place, y);
                    split(held[pair][y], scale, row, row + Team::Box, note);
                }
            } else {
                unsigned here = pair * Team::Pair + places.of_floats();
                float4 ahead = *(float4 *)(from.tile + here);
#pragma unroll 1
                do {  // two rows, of which places have parts in common; each half of a row is read while one is split
                    const float4 next = *(float4 *)(from.tile + (here ^ 16));
                    split({ahead, next}, scale, place, place + Team::Box, [&](int c, uint32_t hi) {
                        note(c, hi);
                        if (c == 1) ahead = *(float4 *)(from.tile + team.below(here, 1));
                    });
                    unsigned char *const odd = team.below(place, 1);
                    const float4 next_of_odd = *(float4 *)(from.tile + team.below(here ^ 16, 1));
                    split({ahead, next_of_odd}, scale, odd, odd + Team::Box, [&](int c, uint32_t hi) {
                        note(c, hi);
                        if (c != 1) return;
                        constexpr unsigned bytes = Team::OfWarp * 128;  // behind the last row comes the first
                        here = (here & ~(bytes - 1)) | ((here + 1024) & (bytes - 1));
                        ahead = *(float4 *)(from.tile + here);
                    });
                    place += 1024;
                } while (here & (Team::OfWarp * 128 - 1024));
            }
            // Of a thread that has rows, its part of a column stands for the column. One without a hi above kLeast may
            // be too small, or 0: columns_fit knows.
            const typename Team::Places again(opaque(thread));
            const int there = d - (int)(64 * pair + 8 * again.lane);  // so many columns
            uint32_t least = 0x7bff7bff, largest = 0;                 // float16's largest, twice
            for (int c = 0; c < 4; ++c) {
                columns[c] &= 0x7fff7fff;
                largest = __vmaxu2(largest, columns[c]);
                if (2 * c < there) least = __vminu2(least, 2 * c + 1 < there ? columns[c] : columns[c] | 0x7bff0000);
            }
            overflows |= !are_finite(largest);
            const Counted counted = counted_of();
            if (counted.is_V && again.row < counted.rows.end && again.row + 4 * (Count - 1) >= counted.rows.begin)
                small |= __vcmpleu2(least, kTwoLeast) != 0;
        }
        if (!team.any(overflows || small)) return inverse_of_power(scale);
        const auto number_at = [&](int row, int x) {
            if constexpr (holds)
                return counted_of().has(row) && x < d ? from.first[row * from.stride + x] : 0.f;
            else
                return team.float_at(from.tile, row, x);
        };
        if (!team.any(overflows) && team.columns_fit(counted_of(), scale, number_at)) return inverse_of_power(scale);
        if (!is_guess) return INFINITY;
        most = 0.f;
        if constexpr (holds) {
#pragma unroll
            for (int pair = 0; pair < Pairs; ++pair)
#pragma unroll
                for (int y = 0; y < Count; ++y) most = max_abs(most, max_abs(held[pair][y]));
        } else {
#pragma unroll 1
            for (int n = opaque(thread); n < Pairs * Team::Pair / 16; n += Team::Threads)
                most = max_abs(most, max_abs(((float4 *)from.tile)[n]));
        }
        scale = power_for(team.largest(thread, most), kLargest);
    }
}

// ------------------------------------------------------------------------------ the producer

// From p, if it can be: its limits in 64 bits are many instructions before a work's first load.
__device__ BandOf<int> band_in(const Parameters &p, int b) { return p.same_band ? p.band : narrow(band_of(p.a, b)); }

// Keys that all 64 rows from i0 on see: their scores need no mask. With a negative scale none: all tiles are negated.
__device__ Keys unmasked_of(const Parameters &p, const Work &work, int i0) {
    Keys unmasked = keys_of_all(work.band, i0, i0 + 64);
    if (p.a.softmax_scale < 0.f) unmasked.end = 0;
    return unmasked;
}

// The n-th tile. Head by head, since a head's tiles share K and V in the L2 cache, the last rows first, which have most
// to do under a causal mask; but the last heads together, so that the last tiles of all are short and no block is left
// with a long one. Tiles are counted from the last row: under a causal mask the one that isn't full is then the
// shortest. Float32's tiles of keys begin at multiples of Bc instead: they are split once, for all queries.
template <class Tile>
__device__ Work work_of(const Parameters &p, int n) {
    if (n >= p.tiles) return {-1};
    const int rest = n - p.alone * p.Tr;
    const int head = rest < 0 ? n / p.Tr : p.alone + rest % p.together, b = head / p.Hq, h = head % p.Hq;
    const int i1 = p.a.Nq - (rest < 0 ? n % p.Tr : rest / p.together) * Tile::Br, i0 = max(i1 - Tile::Br, 0);
    const BandOf<int> band = band_in(p, b);
    Keys seen = keys_of_any(band, i0, i1);
    // If need be, a tile that nobody sees; of float32 one that is split.
    const int none = Tile::Parts == 2 ? band.keys.begin / Tile::Bc * Tile::Bc : 0;
    if (empty(seen)) seen = {none, none + 1};
    if (Tile::Parts == 2) seen.begin = seen.begin / Tile::Bc * Tile::Bc;
    return {b, h, i0, i1, seen, band, h / p.group};
}

// The first work of a head, by the same order
__device__ int first_work(const Parameters &p, int head) {
    return head < p.alone ? head * p.Tr : p.alone * (p.Tr - 1) + head;
}

// The tile that a block takes after tile n; after -1 its first. Of float32 with a workspace all are counted, from the
// first on, so that only a block that runs has one: others wait for what it splits. Without a counter there and back,
// round by round: who had the longest gets the shortest.
__device__ int tile_after(const Parameters &p, int n) {
    if (p.workspace.heads) return atomicAdd(p.workspace.works_taken, 1);
    if (n < 0) return blockIdx.x;
    if (p.next) return p.grid + atomicAdd(p.next, 1);
    const int next_round = (n / p.grid + 1) * p.grid;
    return next_round + (next_round - 1 - n);
}

// A tile's boxes. float32s come as they are.
template <class Tile, int Rows>
__device__ void load(unsigned char *tile, const TensorMap &tensor, int row, int h, int b, Barrier &full) {
    arrive_expecting(full, Rows * Tile::Boxes * 128);
    for (int box = 0; box < Tile::Boxes; ++box)
        load_box(tile + box * Rows * 128, tensor.map, box * (kBox / Tile::Parts), row, h * tensor.head,
                 b * tensor.batch, full);
}

template <class Tile>
__host__ __device__ int tiles_before(int j) {
    return (j + Tile::Bc - 1) / Tile::Bc;
}

// Which of Workspace's heads a work reads
__device__ int head_of(const Parameters &p, const Work &work) {
    return (p.workspace.batches > 1 ? work.b * p.Hkv : 0) + work.key_head;
}

// The next share with something in it, if there is one
template <class Tile>
__device__ Share take_share(const Parameters &p) {
    const Workspace &w = p.workspace;
    for (;;) {
        const int at = atomicAdd(w.shares_taken, 1), head = at / w.shares, b = head / p.Hkv, h = head % p.Hkv;
        if (b >= w.batches) return {-1};
        const Keys keys = band_in(p, b).keys;
        const int first = at % w.shares * w.tiles_a_share, n = max(first, 2 * (keys.begin / Tile::Bc));
        const int end = min(first + w.tiles_a_share, 2 * tiles_before<Tile>(keys.end));
        const int begins_at = first_work(p, b * p.Hq + h * p.group) - kAhead * p.grid;
        if (n < end) return {head, h, b, n, end, keys, begins_at};
    }
}

// Waits until a work's keys and values are split, and says whether the parts carry them. Not V if units of tiles are
// 2^60 apart: Oi, kept in units of the last Vj, would overflow.
template <class Tile>
__device__ void await_parts(const Parameters &p, WorkOfParts &work) {
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
__device__ bool help(const Parameters &p, Shared<Tile> &shared, int warpgroup) {
    Share &mine = shared.next[warpgroup];
    if (threadIdx.x % 128 == 0 && mine.head >= 0) mine = take_share<Tile>(p);
    sync(barrier_of(warpgroup), 128);
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
__device__ void split_K_and_V(const Parameters &p, Shared<Tile> &shared, int splitter) {
    constexpr int Warps = Tile::SplitterWarps;
    const int team = Tile::Consumers + splitter;
    Share &next = shared.next[team];
    const auto leads = [] { return opaque(threadIdx.x) % (32 * Warps) == 0; };
    const auto reports = [] { return opaque(threadIdx.x) % (32 * Warps) == 32 * (Warps - 1); };
    const auto begin = [&] {  // next, unless it is too early, which the end of all shares never is
        if (next.begins_at > *(volatile int *)p.workspace.works_taken) return false;
        if (next.head >= 0)
            load<Tile, Tile::Bc>(shared.floats[splitter], next.is_V() ? p.V : p.K, next.t() * Tile::Bc, next.h, next.b,
                                 shared.floats_there[splitter]);
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
        sync(barrier_of(team), 32 * Warps);
        if (now.head < 0) return;
        wait(shared.floats_there[splitter], parity);
        unscale = split_to_workspace(
            Team<Tile, Tile::Bc, Warps>{shared, team}, InShared{shared.floats[splitter]}, p.a.d,
            [&] { return now.counted<Tile>(); }, [&] { return parts_of<Tile>(p.workspace, now.head, now.n); });
    }
}

// 5. - 6. for j: the parts of Kj and Vj, in the order in which they are used
template <class Tile>
__device__ void produce_parts(const Parameters &p, Shared<Tile> &shared, const WorkOfParts &work,
                              Ring<Tile::Stages> &KV) {
    if (work.by_floats) return;
    const Workspace &w = p.workspace;
    fence_async_global();  // the parts were written by threads, and are read by asynchronous copies
    const int head = head_of(p, work), end = 2 * tiles_before<Tile>(work.seen.end);
    for (int n = 2 * (work.seen.begin / Tile::Bc); n < end; ++n) {
        KV.wait_empty();
        arrive_expecting(KV.full(), Tile::KBytes + sizeof(float4));
        load_bytes(shared.tiles[KV.at()], parts_of<Tile>(w, head, n), Tile::KBytes, KV.full());
        load_bytes(&shared.unscale[KV.at()], w.unscale + place_of(w, head, n), sizeof(float4), KV.full());
        KV.advance();
    }
}

// 7. for i: says what the n-th tile is, or that there is none; of float32 once its K and V are split.
template <class Tile>
__device__ Work announce_work(const Parameters &p, Shared<Tile> &shared, Ring<kWorks> &works, int n) {
    const Work work = work_of<Tile>(p, n);
    static_cast<Work &>(shared.work[works.at()]) = work;
    if constexpr (Tile::Parts == 2) {
        WorkOfParts &there = shared.work[works.at()];
        there.n = n, there.place = works.place, there.by_floats = false;
        if (work.b >= 0) {
            for (int i0 = work.i0, warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup, i0 += 64) {
                there.ends[warpgroup] =
                    i0 < work.i1 ? min(keys_of_any(work.band, i0, min(i0 + 64, work.i1)).end, work.seen.end) : 0;
                there.unmasked[warpgroup] = unmasked_of(p, work, i0);
            }
            if constexpr (Tile::FromWorkspace) await_parts<Tile>(p, there);
        }
    }
    arrive(shared.works[works.at()].full);
    return work;
}

// 8. Qi, 64 rows for each consumer
template <class Tile>
__device__ void produce_Q(const Parameters &p, Shared<Tile> &shared, int i0, int h, int b, Ring<Tile::QStages> &Q) {
    for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
        Q.stages = shared.Q[warpgroup];
        Q.wait_empty();
        load<Tile, 64>(shared.Qi[warpgroup][Q.at()], p.Q, i0 + 64 * warpgroup, h, b, Q.full());
    }
    Q.advance();
}

// Of the small tile: all warps split Kj, then Vj, where TMA put them. Thread 0 does what produce does, too, but loads
// first, and writes what is learnt of the scales.
template <class Tile>
__device__ void produce_and_split(const Parameters &p, Shared<Tile> &shared) {
    Ring<1> Q{};
    Ring<kWorks> works{shared.works};
    int parity = 0;  // of this work's phase of floats_there and KV
    const auto load_whole = [&](bool is_V, int key_head, int b) {
        wait(shared.KV[is_V].empty, parity ^ 1);
        load<Tile, Tile::Bc>(shared.tiles[is_V], is_V ? p.V : p.K, 0, key_head, b, shared.floats_there[is_V]);
    };
    const auto split_whole = [&](bool is_V, WorkOfParts &work) {
        wait(shared.floats_there[is_V], parity);
        const float unscale = split_in_place(Team<Tile, Tile::Bc, 4>{shared, Tile::Consumers}, shared.tiles[is_V],
                                             {work.band.keys, is_V}, shared.unscale[is_V].x);
        if (threadIdx.x == 0) {
            if (is_V)
                work.unscaleV = unscale;
            else
                work.unscaleK = or_of_zeros(unscale);
            arrive(shared.KV[is_V].full);
        }
    };
    for (int n = -1;; parity ^= 1, __syncwarp(), works.release()) {
        if (threadIdx.x == 0) {
            works.wait_empty();
            n = tile_after(p, n);
            // Tile n is head n, from row 0, since Nq <= Br and Nk <= Bc: its loads needn't wait for work_of.
            if (n < p.tiles) {
                const int b = n / p.Hq, h = n % p.Hq, key_head = h / p.group;
                load_whole(false, key_head, b);
                produce_Q<Tile>(p, shared, 0, h, b, Q);
                load_whole(true, key_head, b);
            }
            announce_work<Tile>(p, shared, works, n);
        }
        __syncwarp();
        works.wait_full();
        WorkOfParts &work = shared.work[works.at()];
        if (work.b < 0) return;
        split_whole(false, work);
        split_whole(true, work);
    }
}

// Half types: whether a consumer leaves O for TMA, which stores boxes of 64 rows. All must be the work's: what follows
// in O is another's. In the places of Vj this work must have had a tile in each: or else the last work's O may still be
// there, of which V's `empty` says nothing.
template <class Tile>
__device__ bool leaves_O(const Parameters &p, const Work &work, int warpgroup) {
    return (Tile::OTakesQ || (Tile::OTakesV && work.seen.end - work.seen.begin > (Tile::Stages - 1) * Tile::Bc)) &&
           p.tma_stores_O && work.i0 + 64 * (warpgroup + 1) <= work.i1;
}

// 13. What a consumer left of O to HBM
template <class Tile>
__device__ void store_left_O(const Parameters &p, const Work &work, int warpgroup, const unsigned char *tile) {
    for (int box = 0; box < Tile::Boxes; ++box)
        store_box(p.O.map, tile + box * 64 * 128, box * kBox, work.i0 + 64 * warpgroup, work.h * p.O.head,
                  work.b * p.O.batch);
}

// Half types, thread 32's: Qi; then, if O takes the place of Qi, 13. O of the work before to HBM, before the next Qi
// but this one comes there. One thread can do both: the work that has that Qi isn't announced before this O is there
// (kWorks).
template <class Tile>
__device__ void produce_Q_and_store_O(const Parameters &p, Shared<Tile> &shared) {
    static_assert(!Tile::OTakesQ || Tile::QStages == kWorks);
    Ring<kWorks> works{shared.works};
    Ring<Tile::QStages> Q{}, O{};
    for (Work last{-1};;) {
        works.wait_full();
        const Work work = shared.work[works.at()];
        if (work.b >= 0) produce_Q<Tile>(p, shared, work.i0, work.h, work.b, Q);
        works.release();
        if (Tile::OTakesQ && last.b >= 0) {
            for (int warpgroup = 0; warpgroup < Tile::Consumers; ++warpgroup) {
                wait(shared.Q[warpgroup][O.at()].empty, O.parity());
                if (leaves_O<Tile>(p, last, warpgroup))
                    store_left_O<Tile>(p, last, warpgroup, shared.Qi[warpgroup][O.at()]);
            }
            wait_until_read();
            O.advance();
        }
        if (work.b < 0) return;
        last = work;
    }
}

// Half types. 5. - 6. for j: Kj, or Vj; before() comes before each load
template <class Tile, class Before>
__device__ void produce_tiles(const TensorMap &tensor, const Work &work, Ring<Tile::Stages> &ring,
                              unsigned char (*tiles)[Tile::KBytes], const Before &before) {
    for (int j0 = work.seen.begin; j0 < work.seen.end; j0 += Tile::Bc) {
        before();
        ring.wait_empty();
        load<Tile, Tile::Bc>(tiles[ring.at()], tensor, j0, work.key_head, work.b, ring.full());
        ring.advance();
    }
}

// Half types, thread 64's: Vj. If O takes the places of the next Vj, 13. O of the work before to HBM, one consumer's
// before each of the first Vj, so that none of these waits for a slower consumer.
template <class Tile>
__device__ void produce_V_and_store_O(const Parameters &p, Shared<Tile> &shared) {
    Ring<Tile::Stages> V{shared.V};
    Ring<kWorks> works{shared.works};
    uint32_t parities = 0;  // of O_there, a bit each
    for (Work last{-1};; works.release()) {
        works.wait_full();
        const Work work = shared.work[works.at()];
        Ring<Tile::Stages> O = V;
        int warpgroup = Tile::OTakesV && last.b >= 0 ? 0 : Tile::Consumers;  // whose O is the next
        const auto store_next_O = [&] {
            if (warpgroup == Tile::Consumers) return;
            if (leaves_O<Tile>(p, last, warpgroup)) {
                wait(shared.O_there[warpgroup], parities >> warpgroup & 1);
                parities ^= 1u << warpgroup;
                store_left_O<Tile>(p, last, warpgroup, shared.Vj[O.at()]);
                wait_until_read();
            }
            O.advance();
            ++warpgroup;
        };
        if (work.b >= 0) produce_tiles<Tile>(p.V, work, V, shared.Vj, store_next_O);
        while (warpgroup < Tile::Consumers) store_next_O();
        if (work.b < 0) return;
        last = work;
    }
}

// Thread 0's, but of the small tile: the works; of half types Kj, of float32 Qi and the parts of Kj and Vj. A work is
// taken when the last tile of the one before is under way, not earlier: another block may be free sooner.
template <class Tile>
__device__ void produce(const Parameters &p, Shared<Tile> &shared) {
    Ring<Tile::QStages> Q{};
    Ring<Tile::Stages> tiles{};
    if constexpr (Tile::Parts == 2)
        tiles.stages = shared.KV;
    else
        tiles.stages = shared.K;
    Ring<kWorks> works{shared.works};
    for (int n = -1;; works.advance()) {
        works.wait_empty();
        n = tile_after(p, n);
        const Work work = announce_work<Tile>(p, shared, works, n);
        if (work.b < 0) return;
        if constexpr (Tile::FromWorkspace) {
            const WorkOfParts &there = shared.work[works.at()];  // not `work`: registers are short
            produce_Q<Tile>(p, shared, there.i0, there.h, there.b, Q);
            produce_parts<Tile>(p, shared, there, tiles);
        } else {
            produce_tiles<Tile>(p.K, work, tiles, shared.Kj, [] {});
        }
    }
}

// ------------------------------------------------------------------------------ what a consumer does with a tile

// Shuffled: now nvcc knows that a warp has one.
__device__ int which_consumer() { return of_all(threadIdx.x / 128) - 1; }

// exp(softmax_scale (s - m)) is one FFMA and one ex2: exp2(c s - cm), c = |softmax_scale| log2(e), scores of a negative
// scale being negated first. cm is c m rounded: the error is one factor for a whole row, which O / l cancels. But for
// scores in the thousands the difference would count, and for huge ones overflow: then m itself is subtracted first,
// or, as long as a row has seen nothing but -inf, 0. For float32 with D > 128, where exponentials are few beside the
// products, and in attend_by_floats it always is; then c may be so small that a difference of scores overflows where it
// matters, so that s and m are halved.
template <int D>
constexpr bool kAlwaysSubtracts = D > 128;  // of float32
template <bool AlwaysSubtracts>
__device__ bool subtracts_m(float cm) {
    return AlwaysSubtracts || fabsf(cm) > 1024.f;
}
template <bool AlwaysSubtracts>
constexpr float kHalf = AlwaysSubtracts ? 0.5f : 1.f;

// c of scores in units of `unit`, and with kLog2eOfS of truncated ones; neither 0 nor inf, nor is 2 c, which would make
// NaN of a hidden -inf or of a 0
constexpr float kLeastScale = 1e-45f;
__device__ float scale_of(const Attention &a, float unit = 1.f, float log2e = kLog2e) {
    return fminf(fmaxf(fabsf(a.softmax_scale) * (log2e * unit), kLeastScale), 1.5e38f);
}

// The two rows of a thread, lane / 4 and lane / 4 + 8 of its warp's 16. m is of scores that aren't scaled yet.
struct Rows {
    float m[2] = {-INFINITY, -INFINITY}, cm[2] = {-INFINITY, -INFINITY};
    float l[2] = {0.f, 0.f};      // of this thread's columns; where l is set aside, since m moved last
    float lost[2] = {0.f, 0.f};   // by l's roundings; only where m is always subtracted first (Kahan's sum)
    float alpha[2], subtract[2];  // of move_max: Pij = exp2(c Sij - subtract); of float32 alpha is 1 where m stays
};

// What is subtracted where subtracts_m: m, or 0
__device__ float m_or_0(float m) { return m == -INFINITY ? 0.f : m; }

// alpha there: the difference is taken before it is scaled.
template <bool AlwaysSubtracts>
__device__ float alpha_of(float m_old, float m, float c) {
    return exp2_fast(fmaf(m_old, kHalf<AlwaysSubtracts>, -kHalf<AlwaysSubtracts> * m_or_0(m)) *
                     (c / kHalf<AlwaysSubtracts>));
}

// 10. - 11. m, and alpha, what its move is for l and Oi. Sij times tile_unit, a power of 2, is in units of m. Says
// whether m may be subtracted first somewhere in the warp.
template <bool AlwaysSubtracts, int Count>
__device__ bool move_max(float (&Sij)[Count], Rows &rows, float c, float tile_unit = 1.f) {
    const float m_old[2] = {rows.m[0], rows.m[1]};
    // Of even and of odd columns: shorter chains. The old m joins last.
    float m[2][2] = {{Sij[0], Sij[1]}, {Sij[2], Sij[3]}};
#pragma unroll
    for (int x = 4; x < Count; ++x) m[x / 2 % 2][x % 2] = fmaxf(m[x / 2 % 2][x % 2], Sij[x]);
    float m_lane[2];
    for (int r = 0; r < 2; ++r) m_lane[r] = fmaxf(m_old[r], fmaxf(m[r][0], m[r][1]) * tile_unit);
    // Asked of the lanes, so that the answer is there when the rows' maxima are. A lane that is far while its row isn't
    // costs time, no more: below each row asks again.
    const bool any =
        __any_sync(~0u, subtracts_m<AlwaysSubtracts>(m_lane[0] * c) || subtracts_m<AlwaysSubtracts>(m_lane[1] * c));
    for (int r = 0; r < 2; ++r) {
        rows.m[r] = row_max<4>(m_lane[r]);
        rows.subtract[r] = __fmul_rn(rows.m[r], c);
        rows.alpha[r] = exp2_fast(rows.cm[r] - rows.subtract[r]);
        rows.cm[r] = rows.subtract[r];
    }
    if (!AlwaysSubtracts && !any) return false;  // !AlwaysSubtracts: or else the vote and the branch stay for it, too
    for (int r = 0; r < 2; ++r) {
        if (!subtracts_m<AlwaysSubtracts>(rows.cm[r])) continue;
        const float m_safe = m_or_0(rows.m[r]);
        rows.alpha[r] = alpha_of<AlwaysSubtracts>(m_old[r], rows.m[r], c);
        rows.subtract[r] = 0.f;
        const auto minus_m = [&](float x) {
            return fmaf(x, kHalf<AlwaysSubtracts>, -kHalf<AlwaysSubtracts> * (m_safe * inverse_of_power(tile_unit)));
        };
#pragma unroll
        for (int x = 2 * r; x < Count; x += 4) Sij[x] = minus_m(Sij[x]), Sij[x + 1] = minus_m(Sij[x + 1]);
    }
    return true;
}

// 10. - 11. Pij, in place of Sij, and l
template <bool AlwaysSubtracts, int Count>
__device__ void exponentiate(float (&Sij)[Count], Rows &rows, float c) {
    for (int r = 0; r < 2; ++r) {
        float sum = 0.f;  // of this tile alone: in a sum over all keys the small terms would be lost
#pragma unroll
        for (int x = 2 * r; x < Count; x += x % 2 ? 3 : 1)
            sum += Sij[x] = exp2_fast(fmaf(Sij[x], c / kHalf<AlwaysSubtracts>, -rows.subtract[r]));
        if (AlwaysSubtracts) sum = fmaf(rows.lost[r], rows.alpha[r], sum);
        const float l = fmaf(rows.l[r], rows.alpha[r], sum);
        if (AlwaysSubtracts) rows.lost[r] = sum - fmaf(-rows.l[r], rows.alpha[r], l);
        rows.l[r] = l;
    }
}

// 12. Oi = diag(alpha) Oi
template <int Count>
__device__ void rescale(float (&Oi)[Count], const Rows &rows) {
    if (!__any_sync(~0u, rows.alpha[0] != 1.f || rows.alpha[1] != 1.f)) return;
#pragma unroll
    for (int x = 0; x < Count; ++x) Oi[x] *= rows.alpha[x / 2 % 2];
}

// Pij as the A of Pij Vj: a thread's places in the accumulator Sij, in pairs, are its places in A
template <class T, int Count>
__device__ void pack(uint32_t (&Pij)[Count], const float (&Sij)[2 * Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) Pij[x] = pack<T>(Sij[2 * x], Sij[2 * x + 1]);
}

template <int Count>
__device__ void negate(float (&x)[Count]) {
#pragma unroll
    for (int y = 0; y < Count; ++y) x[y] = -x[y];
}

// 9. -inf for the keys of this tile that a row doesn't see
template <int Count>
__device__ void mask(float (&Sij)[Count], const BandOf<int> &band, int i, int j0) {
    const Keys keys[2] = {keys_of_row(band, i), keys_of_row(band, i + 8)};
    const int j_lane = j0 + threadIdx.x % 4 * 2;
    const auto hide = [&](auto hidden) {
#pragma unroll
        for (int x = 0; x < Count; ++x)
            if (hidden(x / 4 * 8 + x % 2, keys[x / 2 % 2])) Sij[x] = -INFINITY;
    };
    hide([&](int j, Keys row) { return j >= row.end - j_lane; });
    if (__any_sync(~0u, j0 < max(keys[0].begin, keys[1].begin)))
        hide([&](int j, Keys row) { return j < row.begin - j_lane; });
}

// Sij = Qi Kj^T of columns x0 to x1, begun. In parts: the products with a low part first, while the sum is small
template <class T, class Tile, int Count>
__device__ void begin_QK(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj, int x0 = 0,
                         int x1 = Tile::D) {
    constexpr int Parts = Tile::Parts, QBox = 64 * 128, KBox = Tile::Bc * 128;
    Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    if (Parts == 2) Q.low = of_all(Q.low);  // or else what follows from it is kept in local memory
    fence();
#pragma unroll
    for (int product = Parts == 2 ? 0 : 2; product < 3; ++product)
#pragma unroll
        for (int x = x0; x < x1; x += 16)
            multiply_transposed(T(), Sij, Q + x / kBox * (Parts * QBox) + x % kBox * 2 + (product == 0) * QBox,
                                K + x / kBox * (Parts * KBox) + x % kBox * 2 + (product == 1) * KBox,
                                x > x0 || (Parts == 2 && product > 0));
    commit();
}

// Oi += Pij Vj, begun
template <class T, class Tile, int CountO, int CountP>
__device__ void begin_PV(float (&Oi)[CountO], const uint32_t (&Pij)[CountP], const unsigned char *Vj) {
    const Descriptor V = descriptor(Vj, Tile::Bc * 128);
    fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) multiply(T(), Oi, &Pij[j / 4], V + j * 128);
    commit();
}

// ------------------------------------------------------------------------------ float32: a consumer's tile

// Tij = Pij Vj, begun, and not added to what Tij was
template <class Tile, int CountT, int CountP>
__device__ void begin_PV_parts(float (&Tij)[CountT], const uint32_t (&hi)[CountP], const uint32_t (&lo)[CountP],
                               const unsigned char *Vj) {
    const Descriptor V = descriptor(Vj, 2 * Tile::Bc * 128);
    fence();
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) {
        multiply(__half(), Tij, &hi[j / 4], V + Tile::Bc * 128 + j * 128, j > 0);
        multiply(__half(), Tij, &lo[j / 4], V + j * 128);
    }
#pragma unroll
    for (int j = 0; j < Tile::Bc; j += 16) multiply(__half(), Tij, &hi[j / 4], V + j * 128);
    commit();
}

// What Sij is to be multiplied by if it is of FMAs: 2, so that a difference of scores can't overflow; or less for
// scales that, times 2, would.
__device__ float unit_of_floats(const Attention &a) { return fabsf(a.softmax_scale) > 1e10f ? .25f : 2.f; }

// Four neighbours, of which so many are there
__device__ float4 load_four(const float *from, int count) {
    if (count >= 4) return *(const float4 *)from;
    return {from[0], count > 1 ? from[1] : 0.f, count > 2 ? from[2] : 0.f, 0.f};
}

// What the parts don't carry FMAs multiply, from tiles of float32s in shared memory, of so many keys.
template <int D>
constexpr int kKeysOfFloats = D == 128 ? 32 : 16;

// Four neighbours in a tile of Qi or Kj: those of eight rows lie in different banks.
template <int D>
__device__ float4 &four_at(float *tile, int row, int x) {
    return *(float4 *)(tile + row * D + ((x / 4) ^ (row % 8)) * 4);
}

// Rows x D numbers by a warpgroup, zeros where row and column aren't there
template <int Rows, int D, class Store>
__device__ void copy_floats(const float *from, int64_t stride, Keys rows, int d, const Store &store) {
#pragma unroll 4
    for (int n = threadIdx.x % 128; n < Rows * D / 4; n += 128) {
        const int row = n / (D / 4), x = n % (D / 4) * 4;
        const bool is_there = row >= rows.begin && row < rows.end && x < d;
        store(row, x, is_there ? load_four(from + row * stride + x, d - x) : float4());
    }
}

// Sij, but for the unit, of Qi, of which this thread's first row is `row`; a sum of sums of 32, which is more exact
template <int D, int Count>
__device__ void multiply_QK_floats(float (&Sij)[Count], float *Qi, float *Kj, int row, int d) {
#pragma unroll
    for (int y0 = 0; y0 < D; y0 += 32) {
        float sum[Count] = {};
#pragma unroll 1
        for (int y = y0; y < min(y0 + 32, d); y += 4) {
            const float4 q[2] = {four_at<D>(Qi, row, y), four_at<D>(Qi, row + 8, y)};
#pragma unroll
            for (int n = 0; n < Count / 2; ++n) {
                const float4 k = four_at<D>(Kj, n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2, y);
                for (int r = 0; r < 2; ++r) {
                    float &s = sum[n / 2 * 4 + 2 * r + n % 2];
                    s = fmaf(q[r].x, k.x, s), s = fmaf(q[r].y, k.y, s);
                    s = fmaf(q[r].z, k.z, s), s = fmaf(q[r].w, k.w, s);
                }
            }
        }
#pragma unroll
        for (int x = 0; x < Count; ++x) Sij[x] = y0 > 0 ? Sij[x] + sum[x] : sum[x];
    }
}

// Oi += Pij Vj, summed for the tile and then added: in a sum over all keys small terms are lost. P is Pij transposed;
// of Vj a thread's four columns of sixteen are neighbours.
template <int D, int Keys, int Count>
__device__ void multiply_PV_floats(float (&Oi)[Count], const float *P, const float *Vj, int row) {
#pragma unroll
    for (int x0 = 0; x0 < Count; x0 += 32) {
        float Tij[32] = {};
#pragma unroll 1
        for (int j = 0; j < Keys; ++j) {
            const float p[2] = {P[64 * j + row], P[64 * j + row + 8]};
#pragma unroll
            for (int x = 0; x < 32; x += 8) {
                const float4 v = *(const float4 *)(Vj + j * D + 2 * (x0 + x) + threadIdx.x % 4 * 4);
                for (int r = 0; r < 2; ++r) {
                    float *const T = Tij + x + 2 * r;
                    T[0] = fmaf(p[r], v.x, T[0]), T[1] = fmaf(p[r], v.y, T[1]);
                    T[4] = fmaf(p[r], v.z, T[4]), T[5] = fmaf(p[r], v.w, T[5]);
                }
            }
        }
#pragma unroll
        for (int x = 0; x < 32; ++x) Oi[x0 + x] += Tij[x];
    }
}

// ------------------------------------------------------------------------------ the results

// Transposes what 4 neighbours have of a row: x[n] of neighbour `quad` goes to x[quad] of neighbour n.
__device__ void transpose_quad(uint32_t (&x)[4], int quad) {
    for (int step = 1; step <= 2; step *= 2)
        for (int n = 0; n < 4; ++n) {
            if (n & step) continue;
            const bool upper = quad & step;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? x[n] : x[n + step], step);
            x[n] = upper ? received : x[n];
            x[n + step] = upper ? x[n + step] : received;
        }
}

// Where row i of the work's head begins, in O or a state's o.
__device__ int64_t row_at(const Strides &stride, const Work &work, int i) {
    return work.b * stride.batch + work.h * stride.head + i * stride.row;
}

// 12. O = Oi / li as T, of row i, which is r of a thread's two: says its columns 8 x + 2 (lane % 4) and the next.
template <class T, int Count>
__device__ auto divided(const Work &work, int i, int r, const float (&Oi)[Count], const Rows &rows) {
    const bool sees_key = !empty(keys_of_row(work.band, i));
    const float weight = __fdividef(1.f, row_sum<4>(rows.l[r]));
    return
        [=, &Oi](int x) { return sees_key ? pack<T>(weight * Oi[4 * x + 2 * r], weight * Oi[4 * x + 2 * r + 1]) : 0; };
}

// 13. O to HBM, rows i and i + 8, where TMA doesn't store it. All shuffles come before the first branch, so that they
// overlap.
template <class T, int Count>
__device__ void store_o(const Parameters &p, const Work &work, int i, const float (&Oi)[Count], const Rows &rows) {
    const int quad = threadIdx.x % 4;
    uint32_t eight[2][Count / 16][4];  // of row r the columns 32 n + 8 quad + 0..7
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const auto two = divided<T>(work, i + 8 * r, r, Oi, rows);
#pragma unroll
        for (int n = 0; n < Count / 16; ++n) {
            for (int y = 0; y < 4; ++y) eight[r][n][y] = two(4 * n + y);
            transpose_quad(eight[r][n], quad);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        T *const o = (T *)p.a.o + row_at(p.a.o_stride, work, i) + 8 * quad;
        const int columns = i < work.i1 ? p.a.d - 8 * quad : 0;
        if (p.aligned) {
#pragma unroll
            for (int n = 0; n < Count / 16; ++n)
                if (32 * n < columns) *(uint4 *)(o + 32 * n) = *(const uint4 *)eight[r][n];
        } else {
#pragma unroll
            for (int n = 0; n < Count / 16; ++n)
                for (int y = 0; y < 8; ++y)
                    if (32 * n + y < columns) o[32 * n + y] = ((const T *)eight[r][n])[y];
        }
    }
}

// O to `tile`, the place of Qi or of a Vj, swizzled, for TMA to store
template <class T, int Count>
__device__ void leave_o(const Work &work, int i, const float (&Oi)[Count], const Rows &rows, unsigned char *tile) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // of the 64 there
    tile += row * 128 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const auto two = divided<T>(work, i + 8 * r, r, Oi, rows);
#pragma unroll
        for (int x = 0; x < Count / 4; ++x)
            *(uint32_t *)(tile + x / 8 * (64 * 128) + r * (8 * 128) + (x % 8 ^ row % 8) * 16) = two(x);
    }
    fence_async();
}

// Two neighbours trade what they have of 16 columns of row r, so that each has 4 in a row: x[n] of columns
// 16 n + first_column() to + 3.
template <int Count>
__device__ void trade(float4 (&x)[Count / 8], const float (&Oi)[Count], int r, int quad) {
    const bool odd = quad % 2;
#pragma unroll
    for (int n = 0; n < Count / 8; ++n) {
        const float *const mine = &Oi[8 * n + 2 * r];
        const float y = __shfl_xor_sync(~0u, odd ? mine[0] : mine[4], 1),
                    z = __shfl_xor_sync(~0u, odd ? mine[1] : mine[5], 1);
        x[n] = odd ? float4{y, z, mine[4], mine[5]} : float4{mine[0], mine[1], y, z};
    }
}
__device__ int first_column(int quad) { return quad % 2 * 8 + quad / 2 * 4; }

template <int Count>
__device__ void store_row(float *o, int columns, float weight, const float4 (&x)[Count]) {
#pragma unroll
    for (int n = 0; n < Count; ++n)
        if (16 * n < columns)
            *(float4 *)(o + 16 * n) = {weight * x[n].x, weight * x[n].y, weight * x[n].z, weight * x[n].w};
}

// 12. - 13. The same in float32, with l and m, joined with the earlier state if there is one
template <bool AlwaysSubtracts, int Count>
__device__ void store_state(const Parameters &p, const Work &work, int i, const float (&Oi)[Count], const Rows &rows,
                            float c, float unit = 1.f, float unitO = 1.f, float shortT = 0.f) {
    const Attention &a = p.a;
    const int quad = opaque(threadIdx.x) % 4, first = first_column(quad), columns = a.d - first;
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        // What l and Oi, relative to the rounded cm, are to be multiplied by to be relative to c m.
        const float unrounded =
            subtracts_m<AlwaysSubtracts>(rows.cm[r]) ? 1.f : exp2_fast(-fmaf(rows.m[r], c, -rows.cm[r]));
        const float l = unrounded * row_sum<4>(rows.l[r]), m = rows.m[r] * (unit * fabsf(a.softmax_scale));
        float4 x[Count / 8];
        trade(x, Oi, r, quad);
        if (i >= work.i1) continue;
        const int64_t at = ((int64_t)work.b * a.Hq + work.h) * a.Nq + i;
        const bool sees_key = !empty(keys_of_row(work.band, i));
        const RowEnd end = end_of_row(sees_key, l, m, a.l_in ? a.l_in[at] : 0.f, a.l_in ? a.m_in[at] : -INFINITY);
        if (quad == 0 && a.l) a.l[at] = end.l, a.m[at] = end.m;
        float *o = (float *)a.o + row_at(a.o_stride, work, i) + first;
        const float *o_in = a.o_in && end.reads_o_in ? a.o_in + row_at(a.o_in_stride, work, i) + first : nullptr;
        const float weight = unrounded * end.weight_Oi * corrected(unitO, l, shortT);
        if (p.aligned && end.reads_Oi && !o_in) {
            store_row(o, columns, weight, x);
            continue;
        }
#pragma unroll
        for (int n = 0; n < Count / 8; ++n) {
            const float four[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
            for (int y = 0; y < 4; ++y) {
                if (16 * n + y >= columns) continue;
                const float sum = end.reads_Oi ? weight * four[y] : 0.f;
                o[16 * n + y] = o_in ? sum + end.weight_o_in * o_in[16 * n + y] : sum;
            }
        }
    }
}

// 12. - 13. O alone, of float32s. What is rare goes to store_state: code that runs once a work is waited for, line by
// line (NOTES.md), so that it should be short and in one piece.
template <int D, int Count>
__device__ void store_floats(const Parameters &p, const Work &work, int i, const float (&Oi)[Count], const Rows &rows,
                             const float (&l)[2], float c, float unit, float unitO) {
    // A row that sees no key has l = 0, too.
    if (p.a.l || !p.aligned || __any_sync(~0u, l[0] == 0.f || l[1] == 0.f))
        return store_state<kAlwaysSubtracts<D>>(p, work, i, Oi, rows, c, unit, unitO, kShortT<D>);
    const int quad = opaque(threadIdx.x) % 4, first = first_column(quad);
    float *const o = (float *)p.a.o + row_at(p.a.o_stride, work, i) + first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float4 x[Count / 8];
        trade(x, Oi, r, quad);
        // 1 / l by a step of Newton's: shorter than a division
        const float near = __fdividef(1.f, l[r]), inverse = fmaf(near, fmaf(-l[r], near, 1.f), near);
        const float weight = inverse * corrected(unitO, l[r], kShortT<D>);
        store_row(o + 8 * r * p.a.o_stride.row, i + 8 * r < work.i1 ? p.a.d - first : 0, weight, x);
    }
}

// ------------------------------------------------------------------------------ the consumers

// By an m from before the tile, a thread's Pij of the tile may add up to so much, those of a row to 4 times that; else
// m moves. Equal scores come to 64, and must do. float16 ends at 65504. Oi has room for n such tiles if V is below 3e35
// / n; if m moved with every tile, below 3e38 / (n Bc).
constexpr float kMostByOldM = 256.f;

template <class T, class Tile>
__device__ void consume(const Parameters &p, Shared<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc, Consumers = Tile::Consumers;
    // So many of a thread's exponentials come before the wait for Pij Vj. Three consumers hide them by one another (and
    // have no registers for more). Two are 3 % slower with 16 or 28 at d 128, the same from 8 on at d 256.
    constexpr int Early = Consumers > 2 ? 2 : 22;
    const Attention &a = p.a;
    const int warpgroup = which_consumer();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // and row + 8
    const float c = scale_of(a);
    const bool negated = a.softmax_scale < 0.f;

    // If OTakesQ, warpgroups take turns in starting products, but for a work's first: one's softmax beside another's
    // products.
    const auto my_turn = [&] {
        if constexpr (Tile::OTakesQ) sync(1 + warpgroup, 256);
    };
    const auto next_turn = [&] {
        if constexpr (Tile::OTakesQ) arrive(1 + (warpgroup + 1) % Consumers, 256);
    };
    if (warpgroup == Consumers - 1) next_turn();  // the first turn is warpgroup 0's

    Ring<kWorks> works{shared.works};
    Ring<Tile::QStages> Q{shared.Q[warpgroup]};
    Ring<Tile::Stages> K{shared.K}, V{shared.V};
    float Oi[D / 2], Sij[Bc / 2];
    uint32_t Pij[Bc / 4];
    Rows rows;

    // Rows of the last Vj past seqlens_k must be 0: Pij = 0 times NaN is NaN. Each warpgroup writes all of these zeros.
    const auto clear_rows_past = [&](int end, int j0) {
        if (end - j0 >= Bc || end == a.Nk) return;
        for (int at = (end - j0) * 128 + threadIdx.x % 128 * 16; at < Bc * 128; at += 128 * 16)
            for (int box = 0; box < Tile::Boxes; ++box) *(uint4 *)(shared.Vj[V.at()] + box * Bc * 128 + at) = uint4{};
        fence_async();
        sync(1 + Consumers + warpgroup, 128);
    };
    // 9. for j: the mask, and, if the state is wanted, whose m is exact, the largest score. Most tiles skip both by one
    // branch.
    float most[2];  // of a thread's scores
    const auto mask_and_note_most = [&](const Work &work, int j0, Keys unmasked) {
        const bool is_cut = j0 < unmasked.begin || j0 + Bc > unmasked.end;
        if (!is_cut && !a.l) return;
        if (is_cut) {
            if (negated) negate(Sij);
            mask(Sij, work.band, work.i0 + row, j0);
        }
        if (!a.l) return;
#pragma unroll
        for (int x = 0; x < Bc / 2; x += 2) most[x / 2 % 2] = fmaxf(most[x / 2 % 2], fmaxf(Sij[x], Sij[x + 1]));
    };
    bool needs_max;  // the next tile's exponentials can't do without: in the warp m is subtracted first, or -inf
    // 10. - 11.
    const auto move_m_and_find_Pij = [&] {
        needs_max = move_max<false>(Sij, rows, c);
        exponentiate<false>(Sij, rows, c);
        pack<T>(Pij, Sij);
    };

    // 9. The first Sij of the next work
    bool more;
    const auto begin_work = [&] {
        works.wait_full();
        more = shared.work[works.at()].b >= 0;
        if (more) {  // else it multiplies stale tiles, for nothing: under an if ptxas would wait for it at once (C7517)
            Q.wait_full();
            K.wait_full();
        }
        begin_QK<T, Tile>(Sij, shared.Qi[warpgroup][Q.at()], shared.Kj[K.at()]);
    };
    begin_work();
    wait_for<0>(Sij);
    while (more) {
        const Work &work = shared.work[works.at()];
        // The keys that this warpgroup's rows see may end before those of the block; at least one tile is computed.
        const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, work.i1), end = work.seen.end;
        const int my_end = i0 < i1 ? min(keys_of_any(work.band, i0, i1).end, end) : 0;
        const Keys unmasked = unmasked_of(p, work, i0);
        int j0 = work.seen.begin;
        K.release();
        rows = Rows();
        most[0] = most[1] = -INFINITY;
        mask_and_note_most(work, j0, unmasked);
        move_m_and_find_Pij();
#pragma unroll
        for (int x = 0; x < D / 2; ++x) Oi[x] = 0.f;

        // 5. for j
        for (; j0 + Bc < my_end; j0 += Bc) {
            // 9. the next Sij = Qi Kj+1^T; 12. Oi += Pij Vj
            K.wait_full();
            my_turn();
            begin_QK<T, Tile>(Sij, shared.Qi[warpgroup][Q.at()], shared.Kj[K.at()]);
            V.wait_full();
            begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.at()]);
            next_turn();
            wait_for<1>(Sij);
            mask_and_note_most(work, j0 + Bc, unmasked);
            // 10. - 11. by the m that is there: most tiles move no row's far enough to matter, and without a maximum
            // there is nothing to wait for, and nothing to rescale. Sij is kept for move_m_and_find_Pij.
            float P[Bc / 2], sum[2] = {0.f, 0.f};  // of this tile alone, as in exponentiate
            const auto exponentiate_by_old_m = [&](int begin, int end) {
#pragma unroll
                for (int x = begin; x < end; ++x)
                    sum[x / 2 % 2] += P[x] = exp2_fast(fmaf(Sij[x], c, -rows.cm[x / 2 % 2]));
            };
            if (!needs_max) exponentiate_by_old_m(0, Early);
            K.release(sum[0] + sum[1]);  // or else ptxas would move the wait up
            wait_for<0>(Oi);
            V.release();
            if (!needs_max) {
                exponentiate_by_old_m(Early, Bc / 2);
                pack<T>(Pij, P);
            }
            const bool fits = !needs_max && sum[0] + sum[1] <= kMostByOldM;  // no if one is NaN
            if (__all_sync(~0u, fits)) {
                for (int r = 0; r < 2; ++r) rows.l[r] += sum[r];
            } else {
                move_m_and_find_Pij();
                rescale(Oi, rows);  // 12. Oi = diag(alpha) Oi
            }
        }
        Ring<kWorks> ending = works;   // released when O is stored, or left
        Ring<Tile::QStages> of_O = Q;  // likewise, where O takes the place of Qi
        if constexpr (Tile::OTakesQ)
            Q.advance();
        else
            Q.release();
        works.advance();
        my_turn();  // besides, all of the warpgroup have used Qi then: OTakesQ relies on it
        V.wait_full();
        clear_rows_past(work.band.keys.end, j0);
        begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.at()]);  // 12. for the last time
        next_turn();
        const bool is_last = j0 + Bc >= end;
        if (!is_last) {  // the other warpgroups need more tiles, and they this one's place: let them pass
            wait_for<0>(Oi);
            V.release();
            for (j0 += Bc; j0 < end; j0 += Bc) {
                K.pass();
                my_turn();
                next_turn();
                V.pass();
            }
        }
        // With room for two Qi the next work begins beside the end of this one.
        if constexpr (Tile::QStages > 1) begin_work();
        wait_for<Tile::QStages - 1>(Oi);
        if (is_last) V.release();
        if (a.l) {
            // m may be short of the largest score. It moves there, as by a tile of these.
            float two_of_each_row[4] = {most[0], most[0], most[1], most[1]};
            move_max<false>(two_of_each_row, rows, c);
            for (int r = 0; r < 2; ++r) rows.l[r] *= rows.alpha[r];
            rescale(Oi, rows);
            store_state<false>(p, work, work.i0 + row, Oi, rows, c);
        } else if (leaves_O<Tile>(p, work, warpgroup)) {
            if constexpr (Tile::OTakesV) {
                Ring<Tile::Stages> next = V;  // each consumer's O goes where another of the next Vj will
                for (int n = 0; n < warpgroup; ++n) next.advance();
                next.wait_empty();  // this work's own tile there (leaves_O) is used by all
                leave_o<T>(work, work.i0 + row, Oi, rows, shared.Vj[next.at()]);
                __syncwarp();
                if (lane == 0) arrive(shared.O_there[warpgroup]);
            } else {
                leave_o<T>(work, work.i0 + row, Oi, rows, shared.Qi[warpgroup][of_O.at()]);
            }
        } else {
            store_o<T>(p, work, work.i0 + row, Oi, rows);
        }
        __syncwarp();  // all lanes have read the work, and left O
        if constexpr (Tile::OTakesQ) of_O.release();
        ending.release();
        if constexpr (Tile::QStages == 1) begin_work();
        wait_for<0>(Sij);
    }
}

// The first of a thread's rows, counted from the work's first. Computed anew where it is needed: registers are short.
__device__ int row_of_thread() {
    const unsigned thread = opaque(threadIdx.x);
    return 64 * (thread / 128 - 1) + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// 9. -Sij if the scale is negative, and the mask, of a tile of keys from j0 on
template <int Count>
__device__ void negate_and_mask(float (&Sij)[Count], const Attention &a, const Work &work, int j0) {
    if (a.softmax_scale < 0.f) negate(Sij);
    mask(Sij, work.band, work.i0 + row_of_thread(), j0);
}

// Whether rows of O are far below V, so that what the parts lose may count: of small Vj, as where the largest Pij are
// those of rows of zeros in V, or of small Pij, as where a few small Vj have the weight. Each Pij, scaled, may lose
// 2^-25, one way or the other (dither_of), n of them sqrt(n) times that: by the second bound 2^-20 of O's largest
// number, if the Vj that count are as large as the largest. Means of as many ordinary numbers are 2^5 larger than both
// bounds. Rows with nearly all the weight on one key of small values (a sink) may be below: 13 to 17 times the time.
// A row with l = 0 sees no key.
template <class Tile, int Count>
__device__ bool are_small(const float (&Oi)[Count], const float (&l)[2], const WorkOfParts &work, float unitO) {
    const float unit = work.unscaleV * inverse_of_power(unitO), n = work.seen.end - work.seen.begin;
    bool small = false;
    for (int r = 0; r < 2; ++r) {
        float most = 0.f;
#pragma unroll
        for (int x = 2 * r; x < Count; x += x % 2 ? 3 : 1) most = fmaxf(most, fabsf(Oi[x]));
        small |= row_max<4>(most) < unit * rsqrtf(n) * fmaxf(256.f * l[r], 0x1p11f / kP<Tile> * n) && l[r] > 0.f &&
                 work.i0 + row_of_thread() + 8 * r < work.i1;
    }
    return __any_sync(~0u, small);
}

// For D > 128 (tiles of 32 keys) no more tiles are added up in Oi, since each addition is rounded: with one sum of 2048
// the error at N 65536 was 0.93 times SDPA efficient's, with these 0.48 times.
constexpr int kTilesInOi = 256;

// Oi is added to the sum of earlier tiles, which O has, relative to m_of_O. The new sum goes to O, and Oi begins at 0;
// at last it goes to Oi. Only where m is always subtracted first: Oi is then relative to m, not to a rounded cm.
template <int Count>
__device__ void add_up(const Parameters &p, const Work &work, float (&Oi)[Count], float &unitO, const Rows &rows,
                       float c, float *m_of_O, bool is_first, bool is_last) {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {  // one after the other: registers are short
        const int row = row_of_thread() + 8 * r, column = 2 * (opaque(threadIdx.x) % 4);
        float *const o = (float *)p.a.o + row_at(p.a.o_stride, work, work.i0 + row) + column;
        const int columns = work.i0 + row < work.i1 ? p.a.d - column : 0;
        const float m = r == 0 ? rows.m[0] : rows.m[1], alpha = is_first ? 0.f : alpha_of<true>(m_of_O[row], m, c);
#pragma unroll
        for (int x = 0; x < Count; x += x % 2 ? 3 : 1) {
            const int at = x / 4 * 8 + x % 2;
            float sum = (r == 0 ? Oi[x] : Oi[x + 2]) * unitO;
            if (at < columns) {
                if (!is_first) sum = fmaf(alpha, o[at], sum);
                if (!is_last) o[at] = sum;
            }
            if (!is_last) sum = 0.f;
            Oi[x] = r == 0 ? sum : Oi[x], Oi[x + 2] = r == 0 ? Oi[x + 2] : sum;
        }
        __syncwarp();  // the row's four lanes have read it
        m_of_O[row] = m;
    }
    unitO = 1.f;
}

// If m moved in the warp, l goes to shared memory, of the whole row, and begins at 0: what is added before m's next
// move may be so little, tile by tile, that beside it all would be lost. With a row's first tile m moves, from -inf.
__device__ void set_l_aside(Rows &rows, float *l_of_rows, bool is_first) {
    if (!__any_sync(~0u, rows.alpha[0] != 1.f || rows.alpha[1] != 1.f)) return;
    for (int r = 0; r < 2; ++r) {
        float &aside = l_of_rows[row_of_thread() + 8 * r];
        const float l = row_sum<4>(rows.l[r]), sum = is_first ? l : fmaf(aside, rows.alpha[r], l);
        __syncwarp();  // the row's four lanes have read it
        if (threadIdx.x % 4 == 0) aside = sum;
        rows.l[r] = 0.f;
    }
}
// At the end what was set aside is added, by the row's first lane.
__device__ void join_l(Rows &rows, const float *l_of_rows) {
    for (int r = 0; r < 2; ++r)
        if (threadIdx.x % 4 == 0) rows.l[r] += l_of_rows[row_of_thread() + 8 * r];
}

// A consumer's part of a work, from the float32s themselves. Its Qi is where Qi was, its Kj and Vj are in its part of
// the tiles' places.
template <class Tile>
__device__ void attend_by_floats(const Parameters &p, Shared<Tile> &shared, const Work &work, int warpgroup) {
    constexpr int D = Tile::D, Bc = kKeysOfFloats<D>, InOi = 64 * Bc;  // so many keys are added up in Oi (add_up)
    static_assert(2 * Bc * D * 4 * Tile::Consumers <= sizeof(shared.tiles) && 64 * D * 4 <= sizeof(shared.Qi[0]));
    float *const Qi = (float *)shared.Qi[warpgroup], *const Kj = (float *)shared.tiles + warpgroup * 2 * Bc * D;
    float *const Vj = Kj + Bc * D, *const P = Kj;
    const Attention &a = p.a;
    const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, work.i1), row = row_of_thread() - 64 * warpgroup;
    const auto first_row = [&](const void *tensor, const Strides &stride, int h) {
        return (const float *)tensor + work.b * stride.batch + h * stride.head;
    };
    const auto meet = [&] { sync(barrier_of(warpgroup), 128); };

    // 8. Qi, times the part of the unit that is below 1
    const float unit = unit_of_floats(a), c = scale_of(a, unit), of_q = fminf(1.f / unit, 1.f);
    copy_floats<64, D>(first_row(a.q, a.q_stride, work.h) + i0 * a.q_stride.row, a.q_stride.row, {0, i1 - i0}, a.d,
                       [&](int i, int x, const float4 &q) {
                           four_at<D>(Qi, i, x) = {of_q * q.x, of_q * q.y, of_q * q.z, of_q * q.w};
                       });
    float Oi[D / 2] = {}, Sij[Bc / 2], unitO = 1.f;
    Rows rows = Rows();
    const Keys seen = keys_of_any(work.band, i0, i1);
    int j0 = seen.begin;
#pragma unroll 1
    for (; j0 < seen.end; j0 += Bc) {  // 5. - 6. for j: Kj, Vj
        const int keys = j0 - seen.begin;
        if (!Tile::SplitsAll && keys > 0 && keys % InOi == 0)
            add_up(p, work, Oi, unitO, rows, c, shared.m_of_O, keys == InOi, false);
        const Keys there = {work.band.keys.begin - j0, work.band.keys.end - j0};
        copy_floats<Bc, D>(first_row(a.k, a.k_stride, work.key_head) + j0 * a.k_stride.row, a.k_stride.row, there, a.d,
                           [&](int j, int x, const float4 &k) { four_at<D>(Kj, j, x) = k; });
        copy_floats<Bc, D>(first_row(a.v, a.v_stride, work.key_head) + j0 * a.v_stride.row, a.v_stride.row, there, a.d,
                           [&](int j, int x, const float4 &v) {
                               float2 *const at = (float2 *)(Vj + j * D + x / 16 * 16 + x % 8 * 2 + x % 16 / 8 * 2);
                               at[0] = {v.x, v.y}, at[2] = {v.z, v.w};
                           });
        meet();
        // 9.
        multiply_QK_floats<D>(Sij, Qi, Kj, row, a.d);
        const float of_sum = fmaxf(1.f / unit, 1.f);
#pragma unroll
        for (float &s : Sij) s *= of_sum;
        negate_and_mask(Sij, a, work, j0);
        // 10. - 11.
        move_max<true>(Sij, rows, c);
        exponentiate<true>(Sij, rows, c);
        // 12.
        rescale(Oi, rows);
        meet();  // Kj has been read; P takes its place, 16 rows for each warp
#pragma unroll
        for (int x = 0; x < Bc / 2; ++x)
            P[(x / 4 * 8 + threadIdx.x % 4 * 2 + x % 2) * 64 + row + x / 2 % 2 * 8] = Sij[x];
        __syncwarp();
        multiply_PV_floats<D, Bc>(Oi, P, Vj, row);
        meet();
    }
    if (!Tile::SplitsAll && j0 - seen.begin > InOi) add_up(p, work, Oi, unitO, rows, c, shared.m_of_O, false, true);
    store_state<true>(p, work, work.i0 + row_of_thread(), Oi, rows, c, unit);
}

// What is left to do by floats, until all works are done, since it needs the tiles' places: a list for each warp, of
// works of which its rows are left. The last, which has the largest number, is first; which one comes next lies where
// the first number of the warp's rows of O will be.
__device__ int &left_after(const Parameters &p, const Work &work) {
    return ((int *)p.a.o)[row_at(p.a.o_stride, work, work.i0 + row_of_thread())];
}
template <class Tile>
__device__ void leave(const Parameters &p, Shared<Tile> &shared, const WorkOfParts &work) {
    const int thread = opaque(threadIdx.x);
    if (thread % 32 != 0 || work.i0 + row_of_thread() >= work.i1) return;
    int &left = shared.left[thread / 32 - 4];
    left_after(p, work) = left, left = work.n;
}
template <class Tile>
__device__ void attend_to_left(const Parameters &p, Shared<Tile> &shared, Ring<Tile::Stages> KV) {
    const int warpgroup = which_consumer();
    for (int place = 0; place < Tile::Stages; ++place) KV.wait_empty(), KV.advance();  // nobody reads tiles any more
    for (;;) {                                                                         // the works of its four warps
        int n = -1;
        for (int warp = 0; warp < 4; ++warp) n = max(n, shared.left[4 * warpgroup + warp]);
        if (n < 0) return;
        const Work work = work_of<Tile>(p, n);
        int &left = shared.left[threadIdx.x / 32 - 4];
        sync(barrier_of(warpgroup), 128);  // all have read which
        if (threadIdx.x % 32 == 0 && left == n) left = left_after(p, work);
        attend_by_floats<Tile>(p, shared, work, warpgroup);
        sync(barrier_of(warpgroup), 128);
    }
}

// Out of line: amid the small tile's code, which runs once, it cost 3 %.
template <class Tile>
__device__ __noinline__ void attend_to_left_elsewhere(const Parameters &p, Shared<Tile> &shared,
                                                      Ring<Tile::Stages> KV) {
    attend_to_left<Tile>(p, shared, KV);
}

// consume for float32, in parts
template <class Tile>
__device__ void consume_parts(const Parameters &p, Shared<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc;
    constexpr int Columns = Tile::Consumers == 2 ? 128 : 64;  // of Vj at once: registers for Tij
    constexpr int InOi = kTilesInOi * Bc, Sums = D > 128 ? 4 : 1;
    // The small tile has one tile of keys, so what only a loop needs is left out: code that runs once is waited for,
    // line by line (NOTES.md).
    constexpr bool loops = !Tile::SplitsAll;
    const Attention &a = p.a;
    const int warpgroup = which_consumer();
    Ring<kWorks> works{shared.works};
    Ring<Tile::Stages> KV{shared.KV};
    const float dither_of_first = dither_of(0);
    for (;; works.release()) {
        // If the work isn't there yet, its K and V are being split. All go the same way, who see the phase end and who
        // don't.
        if (Tile::FromWorkspace && p.workspace.heads && a.d % 4 == 0)
            while (!any(barrier_of(warpgroup), 128, is_over(works.full(), works.parity())) &&
                   help<Tile>(p, shared, warpgroup)) {
            }
        works.wait_full();
        const WorkOfParts &work = shared.work[works.at()];
        if (work.b < 0) {
            if (!any(barrier_of(warpgroup), 128, shared.left[threadIdx.x / 32 - 4] >= 0)) return;
            break;
        }
        // Q's one place goes with the works: in step, so that it needs no register of its own.
        const auto Q = [&] { return Ring<1>{shared.Q[warpgroup], (loops ? work.place : works.place) % 2}; };
        const auto at = [&](bool is_V) { return loops ? KV.at() : is_V; };  // of the small tile a constant
        const auto pass_tiles = [&](int j0) {                               // that other warpgroups need
            for (; j0 < work.seen.end; j0 += Bc) KV.pass(), KV.pass();
        };
        const auto unit = [&] { return work.unscaleK * or_of_zeros(shared.unscaleQ[warpgroup]); };  // of m
        Q().wait_full();
        bool by_floats = work.by_floats;
        if (!by_floats) {
            split_in_place(Team<Tile, 64, 4>{shared, warpgroup}, shared.Qi[warpgroup][0],
                           {{0, work.i1 - work.i0 - 64 * warpgroup}, false}, shared.unscaleQ[warpgroup]);
            if constexpr (Tile::SplitsAll) KV.wait_full();  // Kj's unscale is known
            // If the parts don't carry Qi or, of the small tile, Kj (inf), or m couldn't be a float in this unit, or
            // products may lose too much of a score (kMostUnit); or softmax_scale is NaN.
            const float scale = fabsf(a.softmax_scale);
            by_floats = !(unit() > 1e-30f && unit() * fmaxf(scale, 1.f) < 1e30f && unit() * scale * a.d < kMostUnit);
            if (by_floats) pass_tiles(work.seen.begin);
        }
        if (by_floats) {
            Q().release();
        } else {
            const bool is_lane_0 = kept_lane_0();
            const float c = scale_of(a, unit(), kLog2eOfS<D>);
            float Oi[D / 2] = {};
            // Oi times unitO is what it stands for: unscaleV / kP of the last Vj that wasn't zeros, 0 before there was
            // one, 1 after add_up.
            float unitO = 0.f;
            Rows rows = Rows();
            int j0 = work.seen.begin, end;
            do {  // 5. for j
                if constexpr (D > 128) {
                    const int keys = j0 - work.seen.begin;
                    if (keys > 0 && keys % InOi == 0)
                        add_up(p, work, Oi, unitO, rows, c, shared.m_of_O, keys == InOi, false);
                }
                // What shared memory is asked comes before products, or behind the last one begun: between two, where
                // ptxas would put it but for the __syncwarps, the second product waits for the answer.
                const Keys unmasked = work.unmasked[warpgroup];
                const bool is_cut = j0 < unmasked.begin || j0 + Bc > unmasked.end;
                const bool is_last = !loops || j0 + Bc >= work.ends[warpgroup];
                // 9. Sij = Qi Kj^T, for long rows as several sums: the tensor cores truncate less
                KV.wait_full();
                const float unscaleK = by_one(shared.unscale[at(false)].x, is_lane_0);
                const unsigned char *const Qi = shared.Qi[warpgroup][0], *const Kj = shared.tiles[at(false)];
                float sums[Sums][Bc / 2], (&Sij)[Bc / 2] = sums[0];
#pragma unroll
                for (int n = 0; n < Sums; ++n)
                    begin_QK<__half, Tile>(sums[n], Qi, Kj, n * (D / Sums), (n + 1) * (D / Sums));
                __syncwarp();  // keeps what follows behind the products, see above
                // Kj's unit in units of m, the head's largest. Below 2^-60 its scores are next to 0 (kMostUnit limits
                // units), as are those of zeros. c_tile is not 0, or else 0 times a hidden -inf.
                const float tile_unit = fmaxf(unscaleK * inverse_of_power(work.unscaleK), 0x1p-60f);
                const float c_tile = fmaxf(c * tile_unit, kLeastScale);
                const bool needs_max =
                    subtracts_m<kAlwaysSubtracts<D>>(rows.cm[0]) || subtracts_m<kAlwaysSubtracts<D>>(rows.cm[1]);
                const bool hopes = Tile::Hopes && !a.l && __all_sync(~0u, !needs_max);
                const auto dither_here = [&] { return loops ? dither_of(j0) : dither_of_first; };
                const float dither = dither_here();
                wait_for<0>(Sij);
#pragma unroll
                for (int n = 1; n < Sums; ++n) {
                    wait_for<0>(sums[n]);
#pragma unroll
                    for (int x = 0; x < Bc / 2; ++x) Sij[x] += sums[n][x];
                }
                KV.release(unscaleK, is_lane_0);
                if (is_last) Q().release(0.f, is_lane_0);
                if (is_cut) negate_and_mask(Sij, a, work, j0);
                // 10. - 11. Pij in two parts, times kP: the A's of Pij Vj
                uint32_t hi[Bc / 4], lo[Bc / 4];
                float sum[2] = {0.f, 0.f};  // of this tile alone, as in exponentiate
                const auto are_all_finite = [&] {
                    uint32_t largest = 0;  // of the hi's, two at a time, as ints: the largest are NaN and inf
#pragma unroll
                    for (int x = 0; x < Bc / 4; x += 2) largest = __vimax3_s16x2(largest, hi[x], hi[x + 1]);
                    return are_finite(largest);
                };
                if (hopes) {
#pragma unroll
                    for (int x = 0; x < Bc / 4; ++x) {
                        const float P[2] = {exp2_fast(fmaf(Sij[2 * x], c_tile, -rows.cm[x % 2])),
                                            exp2_fast(fmaf(Sij[2 * x + 1], c_tile, -rows.cm[x % 2]))};
                        sum[x % 2] += P[0], sum[x % 2] += P[1];
                        split_P<Tile>(P[0], P[1], dither, x, hi[x], lo[x]);
                    }
                }
                // Mostly the sums say that none times kP is beyond float16.
                if (Tile::Hopes &&
                    __all_sync(~0u, hopes && (sum[0] + sum[1] < 65000.f / kP<Tile> || are_all_finite()))) {
                    for (int r = 0; r < 2; ++r) rows.l[r] += sum[r], rows.alpha[r] = 1.f;
                } else {
                    move_max<kAlwaysSubtracts<D>>(Sij, rows, c, tile_unit);
                    exponentiate<kAlwaysSubtracts<D>>(Sij, rows, c_tile);
                    if (Tile::Hopes) set_l_aside(rows, shared.l_of_rows, j0 == work.seen.begin);
                    const float dither = dither_here();  // again: kept, it would take a register
#pragma unroll
                    for (int x = 0; x < Bc / 4; ++x) split_P<Tile>(Sij[2 * x], Sij[2 * x + 1], dither, x, hi[x], lo[x]);
                }
                // 12. Oi = diag(alpha) Oi + Pij Vj in one FMA, not of all columns at a time: registers are short
                KV.wait_full();
                float unscaleV, factor[2];
#pragma unroll
                for (int x0 = 0; x0 < D / 2; x0 += Columns / 2) {
                    float Tij[Columns / 2];
                    begin_PV_parts<Tile>(Tij, hi, lo, shared.tiles[at(true)] + 2 * x0 / kBox * (2 * Bc * 128));
                    if (x0 == 0) {
                        __syncwarp();  // likewise
                        unscaleV = by_one(shared.unscale[at(true)].x, is_lane_0);
                        end = work.ends[warpgroup];
                        const float unitT = unscaleV > 0.f ? unscaleV / kP<Tile> : unitO;
                        const float in_unitT = unitO * inverse_of_power(unitT);
                        factor[0] = rows.alpha[0] * in_unitT, factor[1] = rows.alpha[1] * in_unitT;
                        unitO = unitT;
                    }
                    wait_for<0>(Tij);
#pragma unroll
                    for (int x = 0; x < Columns / 2; ++x) Oi[x0 + x] = fmaf(Oi[x0 + x], factor[x / 2 % 2], Tij[x]);
                }
                KV.release(unscaleV, is_lane_0);
                j0 += Bc;
            } while (loops && j0 < end);  // not is_last, with which Vj's place is given back later
            if constexpr (D > 128)
                if (j0 - work.seen.begin > InOi) add_up(p, work, Oi, unitO, rows, c, shared.m_of_O, false, true);
            if (Tile::Hopes) join_l(rows, shared.l_of_rows);
            const float l[2] = {row_sum<4>(rows.l[0]), row_sum<4>(rows.l[1])};  // of whole rows
            by_floats = work.unscaleV == INFINITY || are_small<Tile>(Oi, l, work, unitO);
            if (unitO < 0x1p-60f || a.l_in) {  // or else unitO times the row's weight could be subnormal
#pragma unroll
                for (float &x : Oi) x *= unitO;
                unitO = 1.f;
            }
            store_floats<D>(p, work, work.i0 + row_of_thread(), Oi, rows, l, c, unit(), unitO);
            pass_tiles(j0);
        }
        if (by_floats) leave<Tile>(p, shared, work);
        if (loops) works.place = work.place;  // the same, read again: so it takes no register while the work lasts
        __syncwarp();                         // all lanes have read the work
    }
    if constexpr (loops)
        attend_to_left<Tile>(p, shared, KV);
    else
        attend_to_left_elsewhere<Tile>(p, shared, KV);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::Threads, Tile::BlocksPerSM)
    hopper_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared<Tile> &shared = *(Shared<Tile> *)memory;
    if (threadIdx.x == 0) {
        const auto init_ring = [](auto &ring, int readers) {
            for (Stage &stage : ring) init(stage.full, 1), init(stage.empty, readers);
        };
        constexpr int warps = 4 * Tile::Consumers;
        init_ring(shared.works, warps + (Tile::SplitsAll ? 4 : Tile::Parts == 2 ? 0 : 2));  // and who loads, or splits
        for (auto &ring : shared.Q) init_ring(ring, 4);
        if constexpr (Tile::Parts == 2) {
            init_ring(shared.KV, warps);
            for (Barrier &there : shared.floats_there) init(there, 1);
            for (auto &places : shared.now)
                for (Share &now : places) now.head = -1;
            for (Share &next : shared.next) next.head = 0;
            for (int &left : shared.left) left = -1;
        } else {
            init_ring(shared.K, warps), init_ring(shared.V, warps);
        }
        if constexpr (Tile::OTakesV)
            for (Barrier &there : shared.O_there) init(there, 4);
        fence_async();
    }
    // Programmatic dependent launch: up to here the kernel before may still be at work, since only shared memory was
    // touched; from here on it has ended, and what it wrote is seen. The next one may begin once all blocks have come
    // this far, so it takes no place from one that others wait for (await_parts).
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<Tile::ProducerRegisters>();
        if constexpr (Tile::SplitsAll) {
            produce_and_split<Tile>(p, shared);
        } else {
            if (threadIdx.x == 0) produce<Tile>(p, shared);
            if constexpr (Tile::FromWorkspace) {
                constexpr int threads = 32 * Tile::SplitterWarps, first = 128 - Tile::Splitters * threads;
                if (threadIdx.x >= first && p.workspace.heads)
                    split_K_and_V<Tile>(p, shared, Tile::Splitters > 1 ? of_all((threadIdx.x - first) / threads) : 0);
            } else {
                if (threadIdx.x == 32) produce_Q_and_store_O<Tile>(p, shared);
                if (threadIdx.x == 64) produce_V_and_store_O<Tile>(p, shared);
            }
        }
    } else {
        take_registers<Tile::ConsumerRegisters>();
        if constexpr (Tile::Parts == 2)
            consume_parts<Tile>(p, shared);
        else
            consume<T, Tile>(p, shared);
    }
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for something else than sm_90a, which no launch should come to
#endif
}

// ------------------------------------------------------------------------------ the launch

// The driver's encoder, found at run time, so that nothing has to be linked with the driver.
auto encoder() {
    static const auto encode = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return (decltype(&cuTensorMapEncodeTiled))function;
    }();
    return encode;
}

// A (B, H, N, d) tensor, of which a box has 128 bytes of so many rows.
bool describe(TensorMap &tensor, Dtype dtype, const void *data, const Strides &stride, uint64_t B, uint64_t H,
              uint64_t N, uint64_t d, uint32_t rows) {
    tensor.batch = stride.batch != 0 && B > 1, tensor.head = stride.head != 0 && H > 1;
    const uint32_t element = dtype == Dtype::float32 ? 4 : 2;
    const cuuint64_t size[4] = {d, N, tensor.head ? H : 1, tensor.batch ? B : 1};
    // The stride of a dimension of size 1 doesn't matter, but must look like one.
    const auto bytes = [&](bool matters, uint64_t elements) { return matters ? elements * element : 16; };
    const cuuint64_t strides[3] = {bytes(N > 1, stride.row), bytes(tensor.head, stride.head),
                                   bytes(tensor.batch, stride.batch)};
    const cuuint32_t box[4] = {128 / element, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    const auto type = dtype == Dtype::float32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                      : dtype == Dtype::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encoder()(&tensor.map, type, 4, (void *)data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The parts of workspace `memory`; returns its size, 0 where heads is null.
template <class Tile>
int64_t plan(const Attention &a, void *memory, Workspace &w) {
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

template <class T, class Tile>
const char *launch(const Attention &a, CUstream_st *stream) {
    Parameters p{a};
    // Without keys a tile of something is loaded, too, and nobody sees it.
    const void *k = a.Nk > 0 ? a.k : a.q, *v = a.Nk > 0 ? a.v : a.q;
    const int64_t B = a.Nk > 0 ? a.B : 1, Hkv = a.Nk > 0 ? a.Hkv : 1;
    if (!describe(p.Q, a.dtype, a.q, a.q_stride, a.B, a.Hq, a.Nq, a.d, 64) ||
        !describe(p.K, a.dtype, k, a.k_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc) ||
        !describe(p.V, a.dtype, v, a.v_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc))
        return "cuTensorMapEncodeTiled refused q, k or v";
    p.aligned = is_aligned(a.o, a.o_stride, a.l ? sizeof(float) : sizeof(T), a.d);
    p.tma_stores_O = (Tile::OTakesQ || Tile::OTakesV) && !a.l && p.aligned &&
                     describe(p.O, a.dtype, a.o, a.o_stride, a.B, a.Hq, a.Nq, a.d, 64);
    const auto kernel = hopper_kernel<T, Tile>;
    constexpr int bytes = sizeof(Shared<Tile>);
    static_assert(bytes * Tile::BlocksPerSM <= 227 * 1024);
    int multiprocessors = 0;
    cudaError_t error = get_attribute(multiprocessors, cudaDevAttrMultiProcessorCount);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return why_not(error);
    p.Hq = a.Hq, p.Hkv = a.Hkv, p.group = a.Hq / a.Hkv, p.Tr = (a.Nq + Tile::Br - 1) / Tile::Br;
    p.tiles = a.B * a.Hq * p.Tr;
    p.same_band = !a.seqlens_k && !a.leftpad_k && !a.offset;
    if (p.same_band) p.band = narrow(band_of(a, 0));
    int grid = std::min(p.tiles, multiprocessors * Tile::BlocksPerSM);
    // Under a mask tiles differ, and whoever is free takes the next. But the counter has to be set to 0, which is a
    // launch of its own: few are put in order instead (kRounds).
    const int64_t heads = a.B * a.Hq, in_L2 = kL2Bytes / (std::max<int64_t>(a.Nk, 1) * a.d * 2 * sizeof(T));  // of K, V
    const bool is_short = Tile::Parts == 1 && a.scratch && p.same_band && a.Nk <= kShort && heads <= in_L2 * p.group;
    const bool in_order = p.tiles <= (is_short ? kRounds : 2) * grid;
    p.next = in_order ? nullptr : a.scratch;
    p.together = in_order ? heads : 1;
    if (p.next) p.together = clamp(std::min(kTogether * grid / (int)p.Tr, in_L2 * p.group), int64_t(1), heads);
    p.alone = heads - p.together;
    Workspace &w = p.workspace;
    if (plan<Tile>(a, a.workspace, w) > 0) {
        // A share is a tile, or more where there are many, so that those in which nothing counts are soon passed over.
        const int key_heads = w.batches * a.Hkv;
        w.tiles_a_share =
            clamp(2 * w.Tc * (int64_t)key_heads / (16 * multiprocessors), int64_t(1), std::max<int64_t>(1, w.Tc / 32));
        w.shares = (2 * w.Tc + w.tiles_a_share - 1) / w.tiles_a_share;
        const int64_t shares = (int64_t)w.shares * key_heads;  // of all heads
        grid = std::min<int64_t>(std::max<int64_t>(p.tiles, shares), multiprocessors * Tile::BlocksPerSM);
        error = cudaMemsetAsync(w.heads, 0, (char *)(w.shares_taken + 1) - (char *)w.heads, stream);
    } else if (p.next) {
        error = cudaMemsetAsync(p.next, 0, sizeof(int), stream);
    }
    p.grid = grid;
    // The kernel may begin while the one before it ends, but not beside a memset.
    cudaLaunchAttribute overlaps{cudaLaunchAttributeProgrammaticStreamSerialization};
    overlaps.val.programmaticStreamSerializationAllowed = !p.next && !w.heads;
    const cudaLaunchConfig_t config{dim3(grid), dim3(Tile::Threads), bytes, stream, &overlaps, 1};
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
    return why_not(error);
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

// 48, 208, 208 and three of 224 KB, of which `floats` are 0, 48, 48, 64, 32 and 32. Other d go to the next of 64, 128
// and 256. The first is for at most 64 queries and keys: nobody else reads their K and V, so the producer's warps split
// them in place, and two blocks share a multiprocessor. 132 is what a H100 has multiprocessors; it isn't asked, so that
// workspace_sm90 finds the same tile. d 64 has four consumers, unless rows are few, or works. Three were only measured
// in the loop before (NOTES.md). Seven places for four consumers: the same within 3 %. d 128 has three, and one
// splitter, of two warps. It has two, and two splitters, where those have a tenth fewer rows to go through: a head's
// last tile of 192 would be emptier, up to N 640 (N 512 causal 3 to 5 %, full 3 %; at N 1024 they are up to 1 %
// slower, at 2048 4 %), or a multiprocessor has one or two works ((1, 32, 1024) 33 %, causal 12 %).
// test_float32_of_many_heads and test_same_bits_of_float32_whoever_splits_it rely on these bounds.
template <class Use>
auto with_tile_of_float32(Attention a, const Use &use) {
    if (a.k_stride.head == 0 && a.v_stride.head == 0) a.Hkv = 1;  // heads that are one and the same: split once
    if (a.d <= 64 && a.Nq <= 64 && a.Nk <= 64) return use(a, Tile<64, 64, 64, 1, 2, 2, 2>());
    const auto works = [&](int rows) { return a.B * a.Hq * ((a.Nq + rows - 1) / rows); };
    constexpr int multiprocessors = 132;
    const auto rows_each = [&](int rows) { return (works(rows) + multiprocessors - 1) / multiprocessors * rows; };
    const bool few = a.Nq <= 192 || works(256) < multiprocessors;
    if (a.d <= 64 && few) return use(a, Tile<64, 192, 64, 1, 7, 1, 2, 3>());
    if (a.d <= 64) return use(a, Tile<64, 256, 64, 1, 6, 1, 2, 3>());
    if (a.d <= 128 && (a.Nq <= 640 || works(192) <= 2 * multiprocessors) && 10 * rows_each(128) <= 9 * rows_each(192))
        return use(a, Tile<128, 128, 64, 1, 3, 1, 2, 2>());
    if (a.d <= 128) return use(a, Tile<128, 192, 64, 1, 3, 1, 2>());
    return use(a, Tile<256, 128, 32, 1, 2, 1, 2>());
}

template <class T>
const char *launch_for_d(const Attention &a, CUstream_st *stream) {
    // D, Br, Bc, stages of Q, of K and V, blocks on a multiprocessor; NOTES.md has what others gave.
    // Few queries: 48 KB, so that three blocks hide one another's latencies.
    if (a.d <= 64 && a.Nq <= 64) return launch<T, Tile<64, 64, 64, 2, 2, 3>>(a, stream);
    // 176 KB. With three consumers 7 % faster than with two (an earlier loop): exponentials are half the work.
    if (a.d <= 64) return launch<T, Tile<64, 192, 128, 2, 4>>(a, stream);
    // 192 KB, a quarter fewer products than 128. 128 x 128 was 5 to 12 % faster at N 512, 4 to 12 % slower from 2048.
    if (a.d <= 96) return launch<T, Tile<96, 192, 96, 2, 2>>(a, stream);
    // 192 KB. Bc 144, 160 or 176, with one Qi, lost 9 to 21 % at N 512 and gained at most 2 % at N 8192.
    if (a.d <= 128) return launch<T, Tile<128, 128, 128, 2, 2>>(a, stream);
    // 216 KB, a quarter fewer products than 256. Bc 80 with two Qi was 8 % slower at N 8192.
    if (a.d <= 192) return launch<T, Tile<192, 128, 112, 1, 2>>(a, stream);
    return launch<T, Tile<256, 128, 80, 1, 2>>(a, stream);  // 224 KB. Bc 64 was up to 8 % slower, in an earlier loop.
}

}  // namespace

int64_t workspace_sm90(const Attention &a) {
    if (a.dtype != Dtype::float32) return 0;
    Workspace w;
    return with_tile_of_float32(a, [&](const Attention &a, auto tile) { return plan<decltype(tile)>(a, nullptr, w); });
}

const char *forward_sm90(const Attention &a, CUstream_st *stream) {
    if (!encoder()) return "the driver has no cuTensorMapEncodeTiled";
    if (a.dtype == Dtype::float32)
        return with_tile_of_float32(
            a, [&](const Attention &a, auto tile) { return launch<float, decltype(tile)>(a, stream); });
    return a.dtype == Dtype::float16 ? launch_for_d<__half>(a, stream) : launch_for_d<__nv_bfloat16>(a, stream);
}

}  // namespace minimal_attn
