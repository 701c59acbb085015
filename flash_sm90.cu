// flash_sm90.cu: Algorithm 1 on Hopper. Read flash.cu first: the steps and the names are the same, and what is new is who
// does them, and when.
//
// Who runs it. A block stays on its multiprocessor and takes one work after the other, a work being a tile of Br queries
// of one head. Its first warpgroup, the producer, loads tiles by TMA: one thread Qi (and says what the next work is), one
// Kj, one Vj. The other warpgroups, the consumers, have 64 of the rows each: they multiply by wgmma and do the softmax.
//
// What is where. In shared memory are rings of tiles Qi, Kj and Vj, swizzled as TMA writes and wgmma reads them. Sij, Pij
// (which is the A of Pij Vj) and Oi are in the registers of the consumers. The table of tiles, at the end, has the bytes.
//
// What overlaps what, per consumer of half types: the next Sij = Qi Kj+1^T is started before Oi += Pij Vj, so that the row
// maxima and a third of the exponentials of the one run beside the other; where there is room for two Qi, a work ends and
// is stored beside the first Sij of the next. Consumers take turns: the tensor cores have work while others do their softmax.
//
// Which barrier orders what:
//     works, Q, K, V: full   the producer's: the work is described, the tile has arrived (TMA counts its bytes)
//     works, Q, K, V: empty  the readers', one arrival a warp: it may be overwritten
//     named 1, 2, ..         half types: whose turn it is to start products (my_turn, next_turn); 0 is __syncthreads
//     named, one a consumer  half types: its threads have cleared the rows of Vj that no query may see
//
// float32 runs on the same tensor cores, each number in two float16s, a product as three (Markidis et al. 2018; Ootomo and
// Yokota 2022). split_kernel makes the two parts of Q, K and V beforehand, in a workspace of their size, zeros where no query
// may see; a box of TMA brings both, 64 columns of hi and behind them the same of lo. consume_parts does what consume does,
// simpler: the next Sij beside Pij Vj and the softmax, but no turns, and no work begun before the last is stored. New are the
// three products, those with a low part first, while the sum is small; Tij = Pij Vj of each tile, a sum of its own that is
// added to Oi in float32, since the tensor cores truncate; and that a work whose numbers the parts can't carry (judge) is
// multiplied by FMAs from the float32s themselves.
//
// Steps that differ from flash.cu's: Oi isn't rescaled before but among the exponentials; a work that sees no key
// gets a tile all the same, which is masked.
#include <algorithm>
#include <type_traits>

#include "device.h"
#include "flash.h"
#include "hopper.h"

namespace minimal_attn {
namespace {

using namespace hopper;

constexpr int kBox = 64;   // columns of a box of TMA: 128 bytes, the width of the swizzle
constexpr int kWorks = 2;  // one ends, the next is loaded and begun

// Under a mask so many of the last heads are worked on together that a block gets 4 of their tiles (2 and 3 are up to 3 %
// slower, 8 is the same), but no more than have their K and V in 32 MB of the L2 cache.
constexpr int64_t kTogether = 4;
constexpr int64_t kL2Bytes = 32 << 20;

// D, Br, Bc; stages of the rings of Q tiles and of K and V tiles; blocks on a multiprocessor; 16-bit parts of a number
template <int D_, int Br_, int Bc_, int QStages_, int Stages_, int BlocksPerSM_ = 1, int Parts_ = 1>
struct Tile {
    static constexpr int D = D_, Br = Br_, Bc = Bc_, QStages = QStages_, Stages = Stages_, BlocksPerSM = BlocksPerSM_;
    static constexpr int Consumers = Br / 64, Threads = 128 * (1 + Consumers);  // a consumer warpgroup has 64 rows
    // What a thread gets at launch; then the producer's warpgroup gives its own to the consumers.
    static constexpr int LaunchRegisters = 65536 / (Threads * BlocksPerSM) / 8 * 8, ProducerRegisters = 32;
    static constexpr int ConsumerRegisters =
        (LaunchRegisters * (1 + Consumers) - ProducerRegisters) / Consumers / 8 * 8;
    static constexpr int Parts = Parts_, Boxes = (D + kBox - 1) / kBox;
    static constexpr int QBytes = Parts * 64 * Boxes * 128, KBytes = Parts * Bc * Boxes * 128;
    static_assert(Bc % 16 == 0 && D % 32 == 0 && QStages <= 2 && (Parts == 1 || 64 % Bc == 0));
};

// The barriers of one place in a ring.
struct Stage {
    Barrier full, empty;
};

// A walk around a ring, whose n-th lap ends phase n of every barrier in it. The producer waits for the phase before, which
// on the first lap passes at once: a new barrier takes parity 1 for over.
template <int Stages>
struct Ring {
    Stage *stages;
    int place = 0;  // 0 to Stages - 1 on even laps, Stages to 2 Stages - 1 on odd ones

    __device__ int at() const { return place < Stages ? place : place - Stages; }
    __device__ int parity() const { return place >= Stages; }
    __device__ void advance() { place = place == 2 * Stages - 1 ? 0 : place + 1; }
    __device__ void wait_full() const { wait(stages[at()].full, parity()); }
    __device__ void wait_empty() const { wait(stages[at()].empty, parity() ^ 1); }
    // By all lanes of a warp, or by one thread that is its first lane; not before x is computed, which also keeps ptxas from
    // moving the next wait for wgmma above that. x is a result of exp2, so never -0, but ptxas can't know.
    __device__ void release(float x = 0.f) {
        if (threadIdx.x % 32 == 0 && __float_as_int(x) != __float_as_int(-0.f)) arrive(stages[at()].empty);
        advance();
    }
};

// A tile of queries i0 <= i < i1 of head h in batch b, and the keys that some of its rows see.
struct Work {
    int b, h, i0, i1;  // b < 0: there is no more work
    Keys seen;
    BandOf<int> band;
    // Of float32: the largest unscale of its Kj, in units of which all Sij are kept; whether the parts don't carry it, so
    // that FMAs multiply the float32s themselves.
    float unscaleK;
    bool exact;
};

template <class Tile>
struct Shared {
    alignas(1024) unsigned char Qi[Tile::Consumers][Tile::QStages][Tile::QBytes];
    unsigned char Kj[Tile::Stages][Tile::KBytes], Vj[Tile::Stages][Tile::KBytes];
    Work work[kWorks];
    Stage works[kWorks], Q[Tile::Consumers][Tile::QStages], K[Tile::Stages], V[Tile::Stages];
    float unscaleQ[Tile::Consumers], unscaleK[Tile::Stages], unscaleV[Tile::Stages];  // of float32
};

// What TMA must know of a tensor, and whether its heads and batches are one and the same (stride 0).
struct TensorMap {
    CUtensorMap map;
    int head, batch;  // 1, or 0: what the indices are multiplied by
    // Of float32. There TMA's third dimension is the part and its fourth all heads of all batches: batch is their number in a
    // batch, or 0.
    const float *unscale;  // (heads, blocks)
    int blocks;            // of 64 rows
};

struct Parameters {
    Attention a;
    TensorMap Q, K, V;
    int Tr, tiles;  // tiles of queries of a head, and of all heads
    int together;   // so many of the heads, the last ones, are worked on together
    int *next;      // counts the tiles taken after each block's first; null: their order is fixed (produce_Q)
    bool aligned;   // rows of O begin and end at multiples of 16 bytes
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

// A number x becomes hi + lo = x scale, two float16s of 22 bits together. The scale is of 64 rows: the power of 2 that
// brings their largest number to 2^14. Scaled numbers below 2^-3 have a subnormal lo, an absolute error of 2^-25. That is
// harmless beside larger ones, so `split` asks: of every four neighbours the largest must be 0 or, scaled, at least
// least_of_four; of what a thread has of a column, kLeastOfColumn. unscale, of each 64 rows, is 1 / scale; 0 where that fails or
// a number isn't finite, so that the parts can't carry them; kOfZeros where all are 0, which any scale suits.
constexpr float kLeastOfColumn = 1.f / 8;
constexpr float kOfZeros = -1.f;
constexpr float kScaledEnd = 32768.f;  // scaled numbers are below it, unless they aren't finite or beyond the scales
constexpr float kP = 32768.f;          // scale of Pij, of which 1 is the largest

// max, but NaN if one is NaN
__device__ float max_abs(float x, float y) {
    float max;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(fabsf(x)), "f"(fabsf(y)));
    return max;
}
__device__ float max_abs(const float4 &x) { return max_abs(max_abs(x.x, x.y), max_abs(x.z, x.w)); }

// The largest size among what a thread has. Compared as ints, its bits are above all numbers if it is inf, above inf if NaN.
template <int Count>
__device__ float largest_of(const float4 (&x)[Count]) {
    float most = 0.f;
#pragma unroll
    for (int y = 0; y < Count; ++y) most = max_abs(most, max_abs(x[y]));
    return most;
}

__device__ float scale_for(int largest) {
    return __int_as_float(clamp(127 + 14 + 127 - (largest >> 23), 27, 227) << 23);
}

// Four neighbours, of which so many are there
__device__ float4 four_of(const float *from, int count, bool aligned) {
    if (count <= 0) return {};
    if (aligned) return *(const float4 *)from;
    return {from[0], count > 1 ? from[1] : 0.f, count > 2 ? from[2] : 0.f, count > 3 ? from[3] : 0.f};
}

// What a thread has of a tile, by store(y, hi, lo); says whether the parts carry it.
template <int Count, class Store>
__device__ bool split(const float4 (&x)[Count], float scale, float least_of_four, const Store &store) {
    bool fit = true;
    float4 columns = {};
#pragma unroll
    for (int y = 0; y < Count; ++y) {
        const float2 xy = {x[y].x * scale, x[y].y * scale}, zw = {x[y].z * scale, x[y].w * scale};
        const __half2 hi_xy = __float22half2_rn(xy), hi_zw = __float22half2_rn(zw);
        const float2 back_xy = __half22float2(hi_xy), back_zw = __half22float2(hi_zw);
        store(
            y, uint2{*(const uint32_t *)&hi_xy, *(const uint32_t *)&hi_zw},
            uint2{pack<__half>(xy.x - back_xy.x, xy.y - back_xy.y), pack<__half>(zw.x - back_zw.x, zw.y - back_zw.y)});
        const float four = max_abs(x[y]);
        fit &= four == 0.f || four * scale >= least_of_four;
        columns = {max_abs(columns.x, x[y].x), max_abs(columns.y, x[y].y), max_abs(columns.z, x[y].z),
                   max_abs(columns.w, x[y].w)};
    }
    for (float z : {columns.x, columns.y, columns.z, columns.w}) {
        fit &= z == 0.f || z * scale >= kLeastOfColumn;
        fit &= z * scale < kScaledEnd;
    }
    return fit;
}

// Q, K or V, before and after. Heads and batches that are one and the same count once.
struct Halved {
    const float *from;
    Strides stride;
    int H, heads, N, d;  // heads of a batch, and of all
    bool are_keys;
    float least_of_four;
    bool aligned;
    __half *to;      // (heads, 2, 64 blocks(), columns()): hi, lo
    float *unscale;  // (heads, blocks())

    __host__ __device__ int blocks() const { return (N + 63) / 64; }
    __host__ __device__ int columns() const { return (d + 7) / 8 * 8; }
};

struct SplitParameters {
    Attention a;
    Halved tensors[3];
};

// A block of 256 threads splits 64 rows of a head. Keys that no query may see become 0.
template <int D>
__global__ void __launch_bounds__(256) split_kernel(const __grid_constant__ SplitParameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int Lanes = D / 4, Step = 256 / Lanes, Count = 64 / Step;  // a row's threads, rows at a time, and times
    __shared__ int largest;                                              // the bits of a float
    __shared__ bool fits;
    int n = blockIdx.x, which = 0;
    while (n >= p.tensors[which].heads * p.tensors[which].blocks())
        n -= p.tensors[which].heads * p.tensors[which].blocks(), ++which;
    const Halved &t = p.tensors[which];
    const int head = n / t.blocks(), b = head / t.H;
    const Keys rows = t.are_keys ? band_of(p.a, b).keys : Keys{0, t.N};
    const int row0 = 64 * (n % t.blocks()) + threadIdx.x / Lanes, column = threadIdx.x % Lanes * 4;
    const float *const from = t.from + b * t.stride.batch + head % t.H * t.stride.head + column;
    float4 x[Count];
#pragma unroll
    for (int y = 0; y < Count; ++y) {
        const int row = row0 + y * Step;
        x[y] = row >= rows.begin && row < rows.end ? four_of(from + row * t.stride.row, t.d - column, t.aligned)
                                                   : float4{};
    }
    if (threadIdx.x == 0) largest = 0, fits = true;
    __syncthreads();
    atomicMax(&largest, __float_as_int(largest_of(x)));
    __syncthreads();
    const float scale = scale_for(largest);
    const int64_t part = (int64_t)64 * t.blocks() * t.columns();
    const bool fit = split(x, scale, t.least_of_four, [&](int y, uint2 hi, uint2 lo) {
        if (column >= t.columns()) return;
        __half *const to = t.to + head * 2 * part + (int64_t)(row0 + y * Step) * t.columns() + column;
        *(uint2 *)to = hi, *(uint2 *)(to + part) = lo;
    });
    if (!fit) fits = false;
    __syncthreads();
    if (threadIdx.x == 0) t.unscale[n] = largest == 0 ? kOfZeros : fits ? 1.f / scale : 0.f;
#elif defined(__CUDA_ARCH__)
    __trap();
#endif
}

// ------------------------------------------------------------------------------ the producer

// The n-th tile. Head by head, since a head's tiles share K and V in the L2 cache, the last rows first, which have most to
// do under a causal mask; but the last heads together, so that the last tiles of all are short and no block is left with
// a long one. Tiles are counted from the last row: under a causal mask the one that isn't full is then the shortest. Not
// those of float32, of queries and of keys, which must begin at multiples of 64, since a scale is of 64 rows.
template <class Tile>
__device__ Work work_of(const Parameters &p, int n) {
    if (n >= p.tiles) return {-1};
    const int alone = p.tiles / p.Tr - p.together, rest = n - alone * p.Tr;
    const int head = rest < 0 ? n / p.Tr : alone + rest % p.together, Hq = (int)p.a.Hq, b = head / Hq;
    const int from_last = rest < 0 ? n % p.Tr : rest / p.together;
    int i1 = p.a.Nq - from_last * Tile::Br, i0 = max(i1 - Tile::Br, 0);
    if (Tile::Parts == 2) i0 = (p.Tr - 1 - from_last) * Tile::Br, i1 = min(i0 + Tile::Br, p.a.Nq);
    const BandOf<int> band = narrow(band_of(p.a, b));
    Keys seen = keys_of_any(band, i0, i1);
    if (Tile::Parts == 2) seen.begin = seen.begin / 64 * 64;
    return {b, head % Hq, i0, i1, empty(seen) ? Keys{0, 1} : seen, band};  // if need be, a tile that nobody sees
}

// The tile that a block takes after its n-th. Without a counter there and back: who had the longest gets the shortest.
__device__ int tile_after(const Parameters &p, int n) {
    const int grid = gridDim.x;
    return p.next ? grid + atomicAdd(p.next, 1) : n < grid ? 2 * grid - 1 - n : n + grid;
}

// Of the 64 rows that `row` is among; past the last, where TMA fills in zeros, 1
__device__ float unscale_of(const TensorMap &tensor, int row, int h, int b) {
    return row / 64 < tensor.blocks ? tensor.unscale[(b * tensor.batch + h * tensor.head) * tensor.blocks + row / 64]
                                    : 1.f;
}

// Whether the parts carry a work: all unscales but 0 (which `least` or `unit` shows), the units of scores far from overflow and
// underflow, and tiles of V alike enough that what is lost of a small Pij doesn't matter. Nor is there anything to load
// without keys.
__device__ void judge(const Parameters &p, Work &work) {
    const int h = work.h / ((int)p.a.Hq / (int)p.a.Hkv);
    float least_V = INFINITY, most_V = 0.f, least = INFINITY;
    work.unscaleK = 0.f;
#pragma unroll 1
    for (int j0 = work.seen.begin; j0 < work.seen.end; j0 += 64) {
        const float K = unscale_of(p.K, j0, h, work.b), V = unscale_of(p.V, j0, h, work.b);
        if (K != kOfZeros) least = fminf(least, K), work.unscaleK = fmaxf(work.unscaleK, K);
        if (V != kOfZeros) least_V = fminf(least_V, V), most_V = fmaxf(most_V, V);
    }
    if (work.unscaleK == 0.f) work.unscaleK = 1.f;
    work.exact = p.K.blocks == 0 || least == 0.f || least_V == 0.f || most_V > 256.f * least_V;
    for (int i0 = work.i0; i0 < work.i1; i0 += 64) {
        const float unit = fabsf(unscale_of(p.Q, i0, work.h, work.b)) * work.unscaleK;  // of scores
        work.exact |= !(unit > 1e-30f && unit < 1e30f);
    }
}

template <class Tile, int Rows>
__device__ void load(unsigned char *tile, const TensorMap &tensor, int row, int h, int b, Barrier &full) {
    const int head = h * tensor.head, batch = b * tensor.batch, parts = Tile::Parts;
    arrive_expecting(full, parts * Rows * Tile::Boxes * 128);
    for (int box = 0; box < Tile::Boxes; ++box)
        load_box(tile + box * parts * Rows * 128, tensor.map, box * kBox, row, parts == 1 ? head : 0,
                 parts == 1 ? batch : batch + head, full);
}

// 7. - 8. for i: Qi
template <class Tile>
__device__ void produce_Q(const Parameters &p, Shared<Tile> &shared) {
    Ring<Tile::QStages> Q{};
    Ring<kWorks> works{shared.works};
    for (int n = blockIdx.x;;) {
        Work work = work_of<Tile>(p, n);
        if (Tile::Parts == 2 && work.b >= 0) judge(p, work);
        shared.work[works.at()] = work;
        arrive(shared.works[works.at()].full);
        works.advance();
        if (work.b < 0) return;
        for (int warpgroup = 0; warpgroup < Tile::Consumers && !work.exact; ++warpgroup) {
            Q.stages = shared.Q[warpgroup];
            Q.wait_empty();
            if (Tile::Parts == 2)
                shared.unscaleQ[warpgroup] = unscale_of(p.Q, work.i0 + 64 * warpgroup, work.h, work.b);
            load<Tile, 64>(shared.Qi[warpgroup][Q.at()], p.Q, work.i0 + 64 * warpgroup, work.h, work.b,
                           Q.stages[Q.at()].full);
        }
        if (!work.exact) Q.advance();
        works.wait_empty();  // also so that no tile is taken long before its time: another block may be free sooner
        n = tile_after(p, n);
    }
}

// 5. - 6. for j: Kj, or Vj
template <class Tile>
__device__ void produce_K_or_V(const Parameters &p, Shared<Tile> &shared, const TensorMap &tensor, Stage *stages,
                               unsigned char (*tiles)[Tile::KBytes], float *unscales) {
    Ring<kWorks> works{shared.works};
    Ring<Tile::Stages> ring{stages};
    for (;;) {
        works.wait_full();
        const Work work = shared.work[works.at()];
        works.release();
        if (work.b < 0) return;
        if (work.exact) continue;
        const int h = work.h / ((int)p.a.Hq / (int)p.a.Hkv);
        for (int j0 = work.seen.begin; j0 < work.seen.end; j0 += Tile::Bc) {
            ring.wait_empty();
            if (Tile::Parts == 2) unscales[ring.at()] = unscale_of(tensor, j0, h, work.b);
            load<Tile, Tile::Bc>(tiles[ring.at()], tensor, j0, h, work.b, stages[ring.at()].full);
            ring.advance();
        }
    }
}

// ------------------------------------------------------------------------------ what a consumer does with a tile

// exp(softmax_scale (s - m)) is one FFMA and one ex2: exp2(c s - cm), c = |softmax_scale| log2(e), scores of a negative
// scale being negated first. cm is c m rounded: the error is one factor for a whole row, which O / l cancels. But for
// scores in the thousands the difference would count, and for huge ones overflow: then m itself is subtracted first, or,
// as long as a row has seen nothing but -inf, 0. For D > 128, where exponentials are few beside the products, it always is;
// then c may be so small that a difference of scores overflows where it matters, so that s and m are halved.
template <int D>
__device__ bool subtracts_m(float cm) {
    return D > 128 || fabsf(cm) > 1024.f;
}
template <int D>
constexpr float kHalf = D > 128 ? 0.5f : 1.f;

// c of scores in units of `unit`; neither 0 nor inf, nor is 2 c, which would make NaN of a hidden -inf or of a 0
__device__ float scale_of(const Attention &a, float unit = 1.f) {
    return fminf(fmaxf(fabsf(a.softmax_scale) * kLog2e * unit, 1e-45f), 1.5e38f);
}

// The two rows of a thread, lane / 4 and lane / 4 + 8 of its warp's 16. m is of scores that aren't scaled yet.
struct Rows {
    float m[2] = {-INFINITY, -INFINITY}, cm[2] = {-INFINITY, -INFINITY};
    float l[2] = {0.f, 0.f};      // of this thread's columns
    float alpha[2], subtract[2];  // of the tile at hand: Pij = exp2(c Sij - subtract)
};

// 10. - 11. m, and alpha, what its move is for l and Oi
template <int D, int Count>
__device__ void move_max(float (&Sij)[Count], Rows &rows, float c) {
    float m[2][2] = {{rows.m[0], rows.m[0]}, {rows.m[1], rows.m[1]}};  // of even and of odd columns: shorter chains
    const float m_old[2] = {rows.m[0], rows.m[1]};
#pragma unroll
    for (int x = 0; x < Count; ++x) m[x / 2 % 2][x % 2] = fmaxf(m[x / 2 % 2][x % 2], Sij[x]);
    const float m_lane[2] = {fmaxf(m[0][0], m[0][1]), fmaxf(m[1][0], m[1][1])};
    // Asked of the lanes, so that the answer is there when the rows' maxima are. A lane that is far while its row isn't
    // costs time, no more: below each row asks again.
    const bool any = __any_sync(~0u, subtracts_m<D>(m_lane[0] * c) || subtracts_m<D>(m_lane[1] * c));
    for (int r = 0; r < 2; ++r) {
        rows.m[r] = row_max<4>(m_lane[r]);
        rows.subtract[r] = __fmul_rn(rows.m[r], c);
        rows.alpha[r] = exp2_fast(rows.cm[r] - rows.subtract[r]);
        rows.cm[r] = rows.subtract[r];
    }
    if (D <= 128 && !any) return;  // D: or else the vote and the branch stay for D > 128, too
    for (int r = 0; r < 2; ++r) {
        if (!subtracts_m<D>(rows.cm[r])) continue;
        const float m_safe = rows.m[r] == -INFINITY ? 0.f : rows.m[r];
        const auto minus_m = [&](float x) { return fmaf(x, kHalf<D>, -kHalf<D> * m_safe); };
        rows.alpha[r] = exp2_fast(minus_m(m_old[r]) * (c / kHalf<D>)), rows.subtract[r] = 0.f;
#pragma unroll
        for (int x = 2 * r; x < Count; x += 4) Sij[x] = minus_m(Sij[x]), Sij[x + 1] = minus_m(Sij[x + 1]);
    }
}

// 10. - 11. Pij, in place of Sij, and l
template <int D, int Count>
__device__ void exponentiate(float (&Sij)[Count], Rows &rows, float c) {
    for (int r = 0; r < 2; ++r) {
        float sum = 0.f;  // of this tile alone: in a sum over all keys the small terms would be lost
#pragma unroll
        for (int x = 2 * r; x < Count; x += x % 2 ? 3 : 1)
            sum += Sij[x] = exp2_fast(fmaf(Sij[x], c / kHalf<D>, -rows.subtract[r]));
        rows.l[r] = fmaf(rows.l[r], rows.alpha[r], sum);
    }
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

// Sij = Qi Kj^T, begun
template <class T, class Tile, int Count>
__device__ void begin_QK(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj) {
    const Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    fence();
#pragma unroll
    for (int x = 0; x < Tile::D; x += 16)
        multiply_transposed(T(), Sij, Q + x / kBox * (64 * 128) + x % kBox * 2,
                            K + x / kBox * (Tile::Bc * 128) + x % kBox * 2, x > 0);
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

// ------------------------------------------------------------------------------ float32: what a consumer does with a tile

// Sij = Qi Kj^T of columns x0 to x1, begun: the products with a low part first, while the sum is small
template <class Tile, int Count>
__device__ void begin_QK_parts(float (&Sij)[Count], const unsigned char *Qi, const unsigned char *Kj, int x0, int x1) {
    Descriptor Q = descriptor(Qi, 0), K = descriptor(Kj, 0);
    Q.low = __shfl_sync(~0u, Q.low, 0);  // or else what follows from it is kept from tile to tile, in local memory
    fence();
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
        for (int x = x0; x < x1; x += 16)
            multiply_transposed(__half(), Sij, Q + x / kBox * (2 * 64 * 128) + x % kBox * 2 + (part == 0) * 64 * 128,
                                K + x / kBox * (2 * Tile::Bc * 128) + x % kBox * 2 + (part == 1) * Tile::Bc * 128,
                                x > x0 || part > 0);
    commit();
}

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

// Half of Sij by FMAs from the numbers themselves: half, so that a difference of scores can't overflow
template <int Count>
__device__ void multiply_QK_floats(float (&Sij)[Count], const Attention &a, const Work &work, int i, int j0) {
    const float *q = (const float *)a.q + work.b * a.q_stride.batch + work.h * a.q_stride.head;
    const float *k = (const float *)a.k + work.b * a.k_stride.batch + work.h / (a.Hq / a.Hkv) * a.k_stride.head;
    j0 += threadIdx.x % 4 * 2;
#pragma unroll
    for (int x = 0; x < Count; ++x) Sij[x] = 0.f;
#pragma unroll 1
    for (int y0 = 0; y0 < a.d; y0 += 32) {
        float sum[Count] = {};  // of few terms: more exact
#pragma unroll 1
        for (int y = y0; y < min(y0 + 32, a.d); ++y) {
            const float q0 = i < a.Nq ? .5f * q[i * a.q_stride.row + y] : 0.f;
            const float q1 = i + 8 < a.Nq ? .5f * q[(i + 8) * a.q_stride.row + y] : 0.f;
#pragma unroll
            for (int x = 0; x < Count; x += x % 2 ? 3 : 1) {
                const int j = j0 + x / 4 * 8 + x % 2;
                const float kj = j < a.Nk ? k[j * a.k_stride.row + y] : 0.f;
                sum[x] = fmaf(q0, kj, sum[x]), sum[x + 2] = fmaf(q1, kj, sum[x + 2]);
            }
        }
#pragma unroll
        for (int x = 0; x < Count; ++x) Sij[x] += sum[x];
    }
}

// Oi += Pij Vj likewise
template <int Count, int CountP>
__device__ void multiply_PV_floats(float (&Oi)[Count], const float (&Pij)[CountP], const Attention &a, const Work &work,
                                   int j0) {
    const float *v = (const float *)a.v + work.b * a.v_stride.batch + work.h / (a.Hq / a.Hkv) * a.v_stride.head;
    const int end = min(work.band.keys.end - j0, CountP * 2), quad = threadIdx.x % 4;
#pragma unroll 1
    for (int j = max(work.band.keys.begin - j0, 0); j < end; ++j) {
        float p[2] = {0.f, 0.f};
#pragma unroll
        for (int x = 0; x < CountP; ++x)
            if (x / 4 == j / 8 && x % 2 == j % 2) p[x / 2 % 2] = Pij[x];
        for (int r = 0; r < 2; ++r) p[r] = __shfl_sync(~0u, p[r], j % 8 / 2, 4);
        const float *const at = v + (j0 + j) * a.v_stride.row + 2 * quad;
        const int columns = a.d - 2 * quad;
#pragma unroll
        for (int y = 0; y < Count / 2; ++y) {
            const int x = y / 2 * 8 + y % 2;
            const float vj = x < columns ? at[x] : 0.f;
            for (int r = 0; r < 2; ++r) {
                float &o = Oi[y / 2 * 4 + y % 2 + 2 * r];
                o = fmaf(p[r], vj, o);
            }
            if (y % 8 == 7) asm volatile("" ::: "memory");  // or else too many loads are under way for the registers
        }
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

// 12. - 13. O = Oi / li to HBM as T, rows i and i + 8. All shuffles come before the first branch, so that they overlap.
template <class T, int Count>
__device__ void store_o(const Parameters &p, const Work &work, int i, const float (&Oi)[Count], const Rows &rows) {
    const int quad = threadIdx.x % 4;
    uint32_t eight[2][Count / 16][4];  // of row r the columns 32 n + 8 quad + 0..7
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool sees_key = !empty(keys_of_row(work.band, i + 8 * r));
        const float weight = __fdividef(1.f, row_sum<4>(rows.l[r]));
#pragma unroll
        for (int n = 0; n < Count / 16; ++n) {
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                const float *two = &Oi[16 * n + 4 * y + 2 * r];
                eight[r][n][y] = sees_key ? pack<T>(weight * two[0], weight * two[1]) : 0;
            }
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
#pragma unroll
                for (int y = 0; y < 8; ++y)
                    if (32 * n + y < columns) o[32 * n + y] = ((const T *)eight[r][n])[y];
        }
    }
}

// 12. - 13. The same in float32, with l and m, joined with the earlier state if there is one
template <int D, int Count>
__device__ void store_state(const Attention &a, const Work &work, int i, const float (&Oi)[Count], const Rows &rows,
                            float c, float unit = 1.f) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r, i += 8) {
        // What l and Oi, relative to the rounded cm, are to be multiplied by to be relative to c m.
        const float unrounded = subtracts_m<D>(rows.cm[r]) ? 1.f : exp2_fast(-fmaf(rows.m[r], c, -rows.cm[r]));
        const float l = unrounded * row_sum<4>(rows.l[r]), m = rows.m[r] * unit * fabsf(a.softmax_scale);
        if (i >= work.i1) continue;
        const int64_t at = ((int64_t)work.b * a.Hq + work.h) * a.Nq + i;
        const bool sees_key = !empty(keys_of_row(work.band, i));
        const RowEnd end = end_of_row(sees_key, l, m, a.l_in ? a.l_in[at] : 0.f, a.l_in ? a.m_in[at] : -INFINITY);
        if (quad == 0 && a.l) a.l[at] = end.l, a.m[at] = end.m;
        float *o = (float *)a.o + row_at(a.o_stride, work, i);
        const float *o_in = a.o_in && end.reads_o_in ? a.o_in + row_at(a.o_in_stride, work, i) : nullptr;
#pragma unroll
        for (int y = 0; y < Count / 2; ++y) {
            const int x = y / 2 * 8 + y % 2 + 2 * quad;
            if (x >= a.d) continue;
            const float sum = end.reads_Oi ? unrounded * end.weight_Oi * Oi[y / 2 * 4 + y % 2 + 2 * r] : 0.f;
            o[x] = o_in ? sum + end.weight_o_in * o_in[x] : sum;
        }
    }
}

// ------------------------------------------------------------------------------ the consumers

template <class T, class Tile>
__device__ void consume(const Parameters &p, Shared<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc, Consumers = Tile::Consumers;
    const Attention &a = p.a;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // shuffled: now nvcc knows that a warp has one
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row = 64 * warpgroup + 16 * warp + lane / 4;  // and row + 8
    const float c = scale_of(a);
    const bool negated = a.softmax_scale < 0.f;

    // Warpgroups take turns in starting products, but for a work's first: one's softmax runs beside another's products.
    const auto my_turn = [&] {
        if constexpr (Consumers > 1) sync(1 + warpgroup, 256);
    };
    const auto next_turn = [&] {
        if constexpr (Consumers > 1) arrive(1 + (warpgroup + 1) % Consumers, 256);
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
    // 9. - 11. for j
    const auto find_max = [&](const Work &work, int j0, Keys unmasked) {
        if (j0 < unmasked.begin || j0 + Bc > unmasked.end) {
            if (negated) negate(Sij);
            mask(Sij, work.band, work.i0 + row, j0);
        }
        move_max<D>(Sij, rows, c);
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
        Keys unmasked = keys_of_all(work.band, i0, i0 + 64);
        if (negated) unmasked.end = 0;  // every tile goes the longer way
        int j0 = work.seen.begin;
        K.release();
        rows = Rows();
        find_max(work, j0, unmasked);
        exponentiate<D>(Sij, rows, c);
        pack<T>(Pij, Sij);
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
            find_max(work, j0 + Bc, unmasked);  // 10. - 11.
            exponentiate<D>(Sij, rows, c);
            K.release(Sij[Bc / 8 - 1]);  // tuned: about a third of the exponentials before the wait (NOTES.md)
            wait_for<0>(Oi);
            V.release();
            // 12. Oi = diag(alpha) Oi, among the other exponentials, which leave the FMA units free
#pragma unroll
            for (int x = 0; x < D / 2; ++x) Oi[x] *= rows.alpha[x / 2 % 2];
            pack<T>(Pij, Sij);
        }
        Q.release();
        Ring<kWorks> ending = works;  // released when O is stored
        works.advance();
        my_turn();
        V.wait_full();
        clear_rows_past(work.band.keys.end, j0);
        begin_PV<T, Tile>(Oi, Pij, shared.Vj[V.at()]);  // 12. for the last time
        next_turn();
        const bool is_last = j0 + Bc >= end;
        if (!is_last) {  // the other warpgroups need more tiles, and they this one's place: let them pass
            wait_for<0>(Oi);
            V.release();
            for (j0 += Bc; j0 < end; j0 += Bc) {
                K.wait_full();
                K.release();
                my_turn();
                next_turn();
                V.wait_full();
                V.release();
            }
        }
        // With room for two Qi the next work begins beside the end of this one.
        if constexpr (Tile::QStages > 1) begin_work();
        wait_for<Tile::QStages - 1>(Oi);
        if (is_last) V.release();
        if (a.l)
            store_state<D>(a, work, work.i0 + row, Oi, rows, c);
        else
            store_o<T>(p, work, work.i0 + row, Oi, rows);
        __syncwarp();  // all lanes have read the work
        ending.release();
        if constexpr (Tile::QStages == 1) begin_work();
        wait_for<0>(Sij);
    }
}

// Pij in two parts, times kP: the A's of Pij Vj
template <int Count>
__device__ void split(uint32_t (&hi)[Count], uint32_t (&lo)[Count], const float (&Pij)[2 * Count]) {
#pragma unroll
    for (int x = 0; x < Count; ++x) {
        const float2 two = {Pij[2 * x] * kP, Pij[2 * x + 1] * kP};
        const __half2 high = __float22half2_rn(two);
        const float2 back = __half22float2(high);
        hi[x] = *(const uint32_t *)&high, lo[x] = pack<__half>(two.x - back.x, two.y - back.y);
    }
}

// consume for float32, in parts
template <class Tile>
__device__ void consume_parts(const Parameters &p, Shared<Tile> &shared) {
    constexpr int D = Tile::D, Bc = Tile::Bc, Columns = D > 128 ? 64 : D;  // of Vj at once
    const Attention &a = p.a;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // shuffled: now nvcc knows that a warp has one
    const int row = 64 * warpgroup + 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;  // and row + 8
    const bool negated = a.softmax_scale < 0.f;
    Ring<kWorks> works{shared.works};
    Ring<Tile::QStages> Q{shared.Q[warpgroup]};
    Ring<Tile::Stages> K{shared.K}, V{shared.V};
    for (;; works.release()) {
        works.wait_full();
        const Work &work = shared.work[works.at()];
        if (work.b < 0) return;
        const int i0 = work.i0 + 64 * warpgroup, i1 = min(i0 + 64, work.i1);
        const int my_end = i0 < i1 ? min(keys_of_any(work.band, i0, i1).end, work.seen.end) : 0;
        float Oi[D / 2], Sij[Bc / 2], unit = 2.f;  // what Sij is to be multiplied by; multiply_QK_floats halves it
        Rows rows = Rows();
        int j0 = work.seen.begin;
#pragma unroll
        for (int x = 0; x < D / 2; ++x) Oi[x] = 0.f;
        // 10. - 11.
        const auto softmax = [&](int j, float c) {
            const Keys unmasked = keys_of_all(work.band, i0, i0 + 64);
            if (negated || j < unmasked.begin || j + Bc > unmasked.end) {
                if (negated) negate(Sij);
                mask(Sij, work.band, work.i0 + row, j);
            }
            move_max<D>(Sij, rows, c);
            exponentiate<D>(Sij, rows, c);
        };
        const auto rescale = [&] {
            if (!__any_sync(~0u, rows.alpha[0] != 1.f || rows.alpha[1] != 1.f)) return;
#pragma unroll
            for (int x = 0; x < D / 2; ++x) Oi[x] *= rows.alpha[x / 2 % 2];
        };
        if (work.exact) {
            for (; j0 < my_end; j0 += Bc) {
                multiply_QK_floats(Sij, a, work, work.i0 + row, j0);
                softmax(j0, scale_of(a, unit));
                rescale();
                multiply_PV_floats(Oi, Sij, a, work, j0);
            }
        } else {
            uint32_t hi[Bc / 4], lo[Bc / 4];
            float Tij[Columns / 2];
            Q.wait_full();
            unit = shared.unscaleQ[warpgroup] * work.unscaleK;
            const float c = scale_of(a, unit);
            // 9. Sij = Qi Kj^T; for long rows two sums
            float rest[D > 128 ? Bc / 2 : 1];
            const auto begin_S = [&] {
                const unsigned char *Qi = shared.Qi[warpgroup][0], *Kj = shared.Kj[K.at()];
                begin_QK_parts<Tile>(Sij, Qi, Kj, 0, D > 128 ? 128 : D);
                if constexpr (D > 128) begin_QK_parts<Tile>(rest, Qi, Kj, 128, D);
            };
            const auto end_S = [&] {
                if constexpr (D > 128) {
#pragma unroll
                    for (int x = 0; x < Bc / 2; ++x) Sij[x] += rest[x];
                }
                const float unscaleK = shared.unscaleK[K.at()];
                __syncwarp();  // all lanes have read it
                K.release();
                if (unscaleK != work.unscaleK) {
#pragma unroll
                    for (int x = 0; x < Bc / 2; ++x) Sij[x] *= unscaleK / work.unscaleK;
                }
            };
            // 12. Oi += Pij Vj
            const auto begin_T = [&](int x0) {
                begin_PV_parts<Tile>(Tij, hi, lo, shared.Vj[V.at()] + x0 / kBox * (2 * Bc * 128));
            };
            const auto add_T = [&](int x0) {
                const float unscaleV = shared.unscaleV[V.at()] / kP;
#pragma unroll
                for (int x = 0; x < Columns / 2; ++x) Oi[x0 / 2 + x] = fmaf(unscaleV, Tij[x], Oi[x0 / 2 + x]);
            };
            const auto other_columns = [&] {
#pragma unroll
                for (int x0 = Columns; x0 < D; x0 += Columns) {
                    begin_T(x0);
                    wait_for<0>(Tij);
                    add_T(x0);
                }
                __syncwarp();  // all lanes have read unscaleV
                V.release();
            };
            K.wait_full();
            begin_S();
            wait_for<0>(Sij);
            if constexpr (D > 128) wait_for<0>(rest);
            end_S();
            softmax(j0, c);
            split(hi, lo, Sij);
            // 5. for j
            for (; j0 + Bc < my_end; j0 += Bc) {
                K.wait_full();
                begin_S();
                V.wait_full();
                begin_T(0);
                wait_for<1>(Sij);
                if constexpr (D > 128) wait_for<1>(rest);
                end_S();
                softmax(j0 + Bc, c);
                wait_for<0>(Tij);
                add_T(0);
                other_columns();
                rescale();
                split(hi, lo, Sij);
            }
            V.wait_full();
            begin_T(0);
            wait_for<0>(Tij);
            add_T(0);
            other_columns();
            for (j0 += Bc; j0 < work.seen.end; j0 += Bc) {  // the other warpgroups need more, and they this one's place
                K.wait_full();
                K.release();
                V.wait_full();
                V.release();
            }
            Q.release();
        }
        store_state<D>(a, work, work.i0 + row, Oi, rows, scale_of(a, unit), unit);
        __syncwarp();  // all lanes have read the work
    }
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
        init_ring(shared.works, warps + 2);  // the consumers, and who loads K and V
        for (auto &ring : shared.Q) init_ring(ring, 4);
        init_ring(shared.K, warps), init_ring(shared.V, warps);
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<Tile::ProducerRegisters>();
        if (threadIdx.x == 0) produce_Q<Tile>(p, shared);
        if (threadIdx.x == 32) produce_K_or_V<Tile>(p, shared, p.K, shared.K, shared.Kj, shared.unscaleK);
        if (threadIdx.x == 64) produce_K_or_V<Tile>(p, shared, p.V, shared.V, shared.Vj, shared.unscaleV);
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

// A (B, H, N, d) tensor, of which a box has `rows` rows of `heads` heads.
bool describe(TensorMap &tensor, Dtype dtype, const void *data, const Strides &stride, uint64_t B, uint64_t H,
              uint64_t N, uint64_t d, uint32_t rows, uint32_t heads = 1) {
    tensor.batch = stride.batch != 0 && B > 1, tensor.head = stride.head != 0 && H > 1;
    const cuuint64_t size[4] = {d, N, tensor.head ? H : 1, tensor.batch ? B : 1};
    // The stride of a dimension of size 1 doesn't matter, but must look like one.
    const auto bytes = [](bool matters, uint64_t elements) { return matters ? elements * 2 : 16; };
    const cuuint64_t strides[3] = {bytes(N > 1, stride.row), bytes(tensor.head, stride.head),
                                   bytes(tensor.batch, stride.batch)};
    const cuuint32_t box[4] = {kBox, rows, heads, 1}, steps[4] = {1, 1, 1, 1};
    return encoder()(&tensor.map,
                     dtype == Dtype::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                     (void *)data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

Halved parts_of(const Attention &a, const void *from, const Strides &stride, int64_t H, int N, bool are_keys,
                float least_of_four) {
    // Batches may be one and the same, and yet of different lengths.
    const bool same_batch = stride.batch == 0 && !(are_keys && (a.seqlens_k || a.leftpad_k));
    const int heads = stride.head != 0 ? H : 1;
    return {(const float *)from,
            stride,
            heads,
            same_batch ? heads : heads * (int)a.B,
            N,
            a.d,
            are_keys,
            least_of_four,
            is_aligned(from, stride, sizeof(float), a.d)};
}

// Q, K and V in two parts each, in the workspace; returns its size.
int64_t plan(const Attention &a, SplitParameters &split) {
    split = {a,
             {parts_of(a, a.q, a.q_stride, a.Hq, a.Nq, false, kLeastOfColumn),
              parts_of(a, a.k, a.k_stride, a.Hkv, a.Nk, true, kLeastOfColumn),
              parts_of(a, a.v, a.v_stride, a.Hkv, a.Nk, true,
                       1.f)}};  // V's neighbours may differ less: a tiny Pij has an absolute error, times a large Vj
    int64_t bytes = 0;
    for (Halved &parts : split.tensors) {
        const int64_t blocks = (int64_t)parts.heads * parts.blocks();
        parts.to = (__half *)((char *)a.workspace + bytes), bytes += blocks * 64 * parts.columns() * 4;
        parts.unscale = (float *)((char *)a.workspace + bytes), bytes += (blocks * 4 + 15) / 16 * 16;
    }
    return bytes;
}

bool describe_parts(TensorMap &tensor, const Halved &parts, int rows) {
    if (parts.blocks() == 0) return true;  // judge: nobody loads it
    const int64_t N = parts.blocks() * 64, columns = parts.columns();
    const bool described = describe(tensor, Dtype::float16, parts.to, {2 * N * columns, N * columns, columns},
                                    parts.heads, 2, N, columns, rows, 2);
    tensor.head = parts.H > 1, tensor.batch = parts.heads > parts.H ? parts.H : 0;
    tensor.unscale = parts.unscale, tensor.blocks = parts.blocks();
    return described;
}

template <class T, class Tile>
const char *launch(const Attention &a, CUstream_st *stream) {
    Parameters p{a};
    bool described;
    if constexpr (Tile::Parts == 2) {
        SplitParameters split;
        plan(a, split);
        const Halved &Q = split.tensors[0], &K = split.tensors[1], &V = split.tensors[2];
        described = describe_parts(p.Q, Q, 64) && describe_parts(p.K, K, Tile::Bc) && describe_parts(p.V, V, Tile::Bc);
        const int64_t blocks = (int64_t)Q.heads * Q.blocks() + (int64_t)(K.heads + V.heads) * K.blocks();
        if (described) split_kernel<Tile::D><<<blocks, 256, 0, stream>>>(split);
    } else {
        // Without keys a tile of something is loaded, too, and nobody sees it.
        const void *k = a.Nk > 0 ? a.k : a.q, *v = a.Nk > 0 ? a.v : a.q;
        const int64_t B = a.Nk > 0 ? a.B : 1, Hkv = a.Nk > 0 ? a.Hkv : 1;
        described = describe(p.Q, a.dtype, a.q, a.q_stride, a.B, a.Hq, a.Nq, a.d, 64) &&
                    describe(p.K, a.dtype, k, a.k_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc) &&
                    describe(p.V, a.dtype, v, a.v_stride, B, Hkv, std::max(a.Nk, 1), a.d, Tile::Bc);
    }
    if (!described) return "cuTensorMapEncodeTiled refused q, k or v";
    p.aligned = is_aligned(a.o, a.o_stride, sizeof(T), a.d);
    const auto kernel = hopper_kernel<T, Tile>;
    constexpr int bytes = sizeof(Shared<Tile>);
    int multiprocessors = 0;
    cudaError_t error = get_attribute(multiprocessors, cudaDevAttrMultiProcessorCount);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    p.Tr = (a.Nq + Tile::Br - 1) / Tile::Br, p.tiles = a.B * a.Hq * p.Tr;
    const int grid = std::min(p.tiles, multiprocessors * Tile::BlocksPerSM);
    // Under a mask tiles differ, and whoever is free takes the next. Two a block are but put in order: the counter has to
    // be set to 0, which is a launch of its own.
    p.next = p.tiles > 2 * grid ? a.scratch : nullptr;
    const int64_t heads = a.B * a.Hq, in_L2 = kL2Bytes / (std::max<int64_t>(a.Nk, 1) * a.d * 2 * sizeof(T));  // of Hkv
    p.together = p.tiles <= 2 * grid ? heads : 1;
    if (p.next) p.together = clamp(std::min(kTogether * grid / p.Tr, in_L2 * (a.Hq / a.Hkv)), int64_t(1), heads);
    if (error == cudaSuccess && p.next) error = cudaMemsetAsync(p.next, 0, sizeof(int), stream);
    if (error == cudaSuccess) kernel<<<grid, Tile::Threads, bytes, stream>>>(p), error = cudaGetLastError();
    return why_not(error);
}

// ------------------------------------------------------------------------------ step 1: the sizes of the tiles

// 48 KB, 176 KB, 192 KB, 192 KB. A scale is of 64 rows, so that Bc can't be more; nor can the registers hold more of d 256.
// d between goes to the next of 64, 128 and 256.
const char *launch_float32(const Attention &a, CUstream_st *stream) {
    if (a.d <= 64 && a.Nq <= 64) return launch<float, Tile<64, 64, 64, 1, 1, 2, 2>>(a, stream);
    if (a.d <= 64) return launch<float, Tile<64, 192, 64, 1, 4, 1, 2>>(a, stream);
    if (a.d <= 128) return launch<float, Tile<128, 128, 64, 1, 2, 1, 2>>(a, stream);
    return launch<float, Tile<256, 128, 32, 1, 1, 1, 2>>(a, stream);
}

template <class T>
const char *launch_for_d(const Attention &a, CUstream_st *stream) {
    // D, Br, Bc, stages of Q, of K and V, blocks on a multiprocessor; NOTES.md has what others gave.
    // Few queries: 48 KB, so that three blocks hide one another's latencies.
    if (a.d <= 64 && a.Nq <= 64) return launch<T, Tile<64, 64, 64, 2, 2, 3>>(a, stream);
    // 176 KB. With three consumers 7 % faster than with two: exponentials are half the work.
    if (a.d <= 64) return launch<T, Tile<64, 192, 128, 2, 4>>(a, stream);
    if (a.d <= 96) return launch<T, Tile<96, 128, 128, 2, 2>>(a, stream);  // 192 KB, a quarter fewer products than 128
    // 224 KB. A third stage gains up to 3 % over a second Qi; Bc 176, in two stages, loses 6 % at N 512.
    if (a.d <= 128) return launch<T, Tile<128, 128, 128, 1, 3>>(a, stream);
    if (a.d <= 192) return launch<T, Tile<192, 128, 80, 2, 2>>(a, stream);  // 216 KB, a quarter fewer than 256
    return launch<T, Tile<256, 128, 80, 1, 2>>(a, stream);                  // 224 KB; Bc 64 is up to 8 % slower
}

}  // namespace

int64_t workspace_sm90(const Attention &a) {
    SplitParameters split;
    return a.dtype == Dtype::float32 ? plan(a, split) : 0;
}

const char *forward_sm90(const Attention &a, CUstream_st *stream) {
    if (!encoder()) return "the driver has no cuTensorMapEncodeTiled";
    if (a.dtype == Dtype::float32) return launch_float32(a, stream);
    return a.dtype == Dtype::float16 ? launch_for_d<__half>(a, stream) : launch_for_d<__nv_bfloat16>(a, stream);
}

}  // namespace minimal_attn
