// backward_rows.h: what warp 3 of backward_fused.cu computes of rows, beside the products: log2_l and D before, dq
// after.
#pragma once
#include "hopper/backward_fused.h"

namespace minimal_attn::hopper {

// Where unit n is.
struct Unit {
    int b, h, i0, key_head;
    __device__ Unit(const FusedParameters &p, int n) {
        const int head = n / p.units_of_head;
        b = head / p.Hq, h = head % p.Hq, i0 = n % p.units_of_head * 64, key_head = head / p.group;
    }
};

// Lane 0 loads into the buffer by load(), when all lanes have read what it had before. All lanes wait for the data.
template <class Load>
__device__ void load_buffer(Pipeline<1> &buffer, const Load &load) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        arrive_expect_tx(buffer.full(), kBufferBytes);
        load();
    }
    __syncwarp();
    buffer.consumer_wait();
    buffer.advance();
}

// m, log2_l and D of unit n. Each lane has two rows. m and log2_l of large rows are large_rows.cu's.
template <class T, class Tile, class Mask>
__device__ void fill_rows(const FusedParameters &p, FusedStorage<Tile, Mask> &shared, Pipeline<1> &buffer, int n) {
    constexpr int kBox = 64 * 128;
    const Unit unit(p, n);
    const int lane = threadIdx.x % 32;
    float sum[2] = {};
    for (int box = 0; box < Tile::Boxes; ++box) {
        load_buffer(buffer, [&] {
            for (int n = 0; n < 2; ++n) {
                const TensorMap &tensor = n == 0 ? p.O : p.dO;
                tma_load(shared.buffer + n * kBox, tensor.map, 64 * box, unit.i0, unit.h * tensor.head,
                         unit.b * tensor.batch, buffer.full());
            }
        });
#pragma unroll 1
        for (int x = 0; x < 16; ++x) {  // 8 bytes each, without bank conflicts. O and dO have the same swizzle
            const unsigned char *const from = shared.buffer + lane * 128 + (x ^ lane % 16) * 8;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint2 O = *(const uint2 *)(from + r * 32 * 128),
                            dO = *(const uint2 *)(from + r * 32 * 128 + kBox);
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    sum[r] = fmaf((float)((const T *)&O)[n], (float)((const T *)&dO)[n], sum[r]);
            }
        }
    }
    const BandOf<int> band = band_of_batch(p, unit.b);
    const unsigned head = unit.b * p.Hq + unit.h;  // 2^32 rows of dQ are 1 TB
#pragma unroll
    for (int r = 0; r < 64; r += 32) {
        const int i = unit.i0 + lane + r;
        const unsigned padded = head * (unsigned)p.rows.head_stride + i, dense = head * p.a.Nq + i;
        const bool sees_key = i < p.a.Nq && !empty(keys_of_row(band, i));
        const float D = sum[r / 32];
        const float lse = sees_key ? p.lse[dense] : INFINITY;
        const bool is_large = is_large_for<T>(p.a, lse);
        if (!is_large) p.rows.m[padded] = 0.f, p.rows.log2_l[padded] = log2_l_of<T>(p.a, lse);
        if (is_large && p.keeps_D) continue;
        p.rows.D[padded] = !sees_key ? 0.f : D_of_dS<T>(p.dlse ? D - p.dlse[dense] : D);
    }
    __syncwarp();
    if (lane == 0) add_release(p.filled[unit.key_head], 1);
}

// Returns an interval of queries. The kernel has stored the dQ of these, and memory of other queries' dQ isn't
// initialised. The interval may be larger than the unit of 64 queries. With ranges it is the whole unit or empty.
template <class Mask>
__device__ Interval queries_that_see(const FusedParameters &p, const Unit &unit) {
    const Mask mask = mask_of_batch<Mask>(p, unit.b);
    if constexpr (kIsRanges<Mask>) {
        return empty(keys_of_any(mask, unit.i0, unit.i0 + 64)) ? Interval{0, 0} : Interval{unit.i0, unit.i0 + 64};
    } else {
        const int begin = mask.keys.begin - mask.last;
        return {begin, empty(mask.keys) ? begin : mask.keys.end - mask.first};
    }
}

// dq = softmax_scale dQ of unit n. Queries from `begin` to `end` see a key. For the others dQ may never have been
// stored: their dq becomes 0.
template <class T, class Tile, class Mask>
__device__ void convert_dQ(const FusedParameters &p, FusedStorage<Tile, Mask> &shared, Pipeline<1> &buffer, int n) {
    constexpr int kLanes = Tile::D / 4, kRows = 32 / kLanes;  // lanes of a row; rows of the warp
    const Unit unit(p, n);
    const int lane = threadIdx.x % 32, column = lane % kLanes * 4;
    const Interval seeing = queries_that_see<Mask>(p, unit);
    const int begin = seeing.begin, end = seeing.end;
    const bool is_usual = p.dq.dtype != Dtype::float32 && p.dq.aligned && begin <= unit.i0 && unit.i0 + 64 <= end;
    const float scale = p.a.scores.scale;
    const int64_t step = kRows * p.dq.stride.row;
    int rows = p.a.Nq - unit.i0 - lane / kLanes;  // of the head, from this lane's next row on
    int64_t to =
        unit.b * p.dq.stride.batch + unit.h * p.dq.stride.head + (unit.i0 + lane / kLanes) * p.dq.stride.row + column;
    for (int piece = 0; piece < Tile::Boxes; ++piece) {  // of the unit, as large as the buffer
        load_buffer(buffer, [&] {
            if (piece == 0) wait_for(p.added[unit.key_head], (p.Tc * Tile::Consumers) << p.log_slices);
            const float *const from = p.dQ_data + int64_t(n) * 64 * Tile::D + piece * (kBufferBytes / 4);
            bulk_load(shared.buffer, from, kBufferBytes, buffer.full());
        });
        const float4 *const x = (const float4 *)shared.buffer + lane;
        if (is_usual) {  // no branch in the loop, and as many rows at a time as the registers hold
            T *dq = (T *)p.dq.data + to;
            const int rows_of_lane = column < p.a.d ? rows : 0;
#pragma unroll(Tile::ProducerRegisters / 10)
            for (int y = 0; y < kBufferBytes / 512; ++y, dq += step) {
                const float4 four = x[32 * y];
                const uint2 packed = {pack<T>(scale * four.x, scale * four.y), pack<T>(scale * four.z, scale * four.w)};
                if (kRows * y < rows_of_lane) *(uint2 *)dq = packed;
            }
        } else {
#pragma unroll 1
            for (int y = 0; y < kBufferBytes / 512; ++y) {
                const int i = p.a.Nq - rows + kRows * y, columns = kRows * y < rows ? p.a.d - column : 0;
                float4 four = begin <= i && i < end ? x[32 * y] : float4{};
                four = {scale * four.x, scale * four.y, scale * four.z, scale * four.w};
                if (p.dq.dtype == Dtype::float32)
                    store_row<4>((float *)p.dq.data + to + y * step, columns, p.dq.aligned, [&](int) { return four; });
                else
                    store_row<4>((T *)p.dq.data + to + y * step, columns, p.dq.aligned,
                                 [&](int) { return uint2{pack<T>(four.x, four.y), pack<T>(four.z, four.w)}; });
            }
        }
        to += kBufferBytes / 512 * step, rows -= kBufferBytes / 512 * kRows;
    }
}

// log2_l and D come first, since thread 0 waits for them. Their units come from a counter: in fixed shares a block
// could wait for one that another kernel keeps from starting.
template <class T, class Tile, class Mask>
__device__ void fill_rows_and_convert_dQ(const FusedParameters &p, FusedStorage<Tile, Mask> &shared) {
    Pipeline buffer{shared.buffer_ready};
    const auto take = [&] { return threadIdx.x % 32 == 0 ? atomicAdd(p.units_taken, 1) : 0; };
    if constexpr (!kIsRanges<Mask>) {  // there gradient_rows.cu does it
        for (int n = p.fills_rows ? take() : p.units, next;; n = next) {
            n = broadcast_lane0(n);
            if (n >= p.units) break;
            next = take();
            fill_rows<T>(p, shared, buffer, n);
        }
    }
    for (int n = blockIdx.x; n < p.units; n += gridDim.x) convert_dQ<T, Tile, Mask>(p, shared, buffer, n);
}

}  // namespace minimal_attn::hopper
