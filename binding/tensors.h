// tensors.h: how tensors become what the backends read and write: which memory is read where it is, the copies where it
// isn't, the memory of results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "binding/checks.h"
#include "flash.h"

namespace minimal_attn {

inline Dtype dtype_of(const Tensor &t) {
    return t.scalar_type() == at::kFloat  ? Dtype::float32
           : t.scalar_type() == at::kHalf ? Dtype::float16
                                          : Dtype::bfloat16;
}

inline Strides strides_of(const Tensor &t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// What every backend reads: rows of d neighbours.
inline bool has_contiguous_rows(const Tensor &t) { return t.stride(3) == 1 || t.size(3) == 1; }

// A copy that every backend reads. Heads and batches of an expanded tensor (stride 0) are copied once.
inline Tensor aligned_copy(const Tensor &t) {
    Tensor once = t;
    for (int i = 0; i < 2; ++i)
        if (t.stride(i) == 0 && t.size(i) > 0) once = once.narrow(i, 0, 1);
    const int64_t chunk = 16 / t.element_size(), padded = (t.size(3) + chunk - 1) / chunk * chunk;
    const Tensor copy = at::empty({once.size(0), once.size(1), t.size(2), padded}, t.options()).narrow(3, 0, t.size(3));
    return copy.copy_(once).expand(t.sizes());
}

#ifdef WITH_CUDA
// What TMA reads: addresses and strides that are multiples of 16 bytes, and rows that don't overlap.
inline bool has_aligned_rows(const Tensor &t) {
    const int64_t chunk = 16 / t.element_size();
    bool fits = (uintptr_t)t.const_data_ptr() % 16 == 0 && has_contiguous_rows(t) &&
                (t.stride(2) >= t.size(3) || t.size(2) <= 1);
    for (int i = 0; i < 3; ++i) fits &= t.size(i) <= 1 || t.stride(i) % chunk == 0;
    return fits;
}
#endif

// A dense tensor of q's shape, but with d columns, in the order of q's strides, so that transpose(1, 2) of it is as
// free as of q.
inline Tensor empty_like_q(const Tensor &q, const SymInt &d, at::ScalarType dtype) {
    const auto stride = q.sym_strides();
    auto size = q.sym_sizes().vec();
    size[3] = d;
    const auto is_known = [](const c10::SymBool &x) { return TORCH_GUARD_OR_FALSE(x); };
    // A dimension of size 1 or stride 0 has no place of its own.
    const auto has_place = [&](int i) { return !is_known(size[i].sym_eq(1)) && !is_known(stride[i].sym_eq(0)); };
    const auto is_outer = [&](int i, int inner) {
        const c10::SymBool has_stride = stride[i].sym_ge(stride[inner]);
        if (is_known(has_stride) || is_known(has_stride.sym_not())) return is_known(has_stride);
        // Symbols leave it open where a size could be 0, too. Other strides are multiples of those further in.
        return !is_known((stride[inner] % stride[i]).sym_eq(0));
    };
    std::array<int, 3> order = {0, 1, 2};  // outermost first; sorted by insertion
    for (int i = 1; i < 3; ++i) {
        int at = i;
        for (int j = i - 1; j >= 0; --j) {
            if (!has_place(order[j]) || !has_place(order[at])) continue;
            if (is_outer(order[j], order[at])) break;
            std::swap(order[j], order[at]);
            at = j;
        }
    }
    std::array<SymInt, 4> strides;
    strides[3] = 1;
    SymInt step = size[3];
    for (int i = 2; i >= 0; --i) {
        strides[order[i]] = step;
        step = step * size[order[i]].max(1);
    }
    return at::empty_strided_symint(size, strides, q.options().dtype(dtype));
}

// As int32, dense in the last dimension (of three: the last two). Values beyond int32 are clamped, which changes a
// result only if an offset and a window both are that large. Rows that all batches share (stride 0) stay one.
inline Tensor int32_of(const MaybeTensor &t) {
    if (!t) return {};
    constexpr int64_t most = std::numeric_limits<int>::max();
    const Tensor once = t->dim() > 1 && t->size(0) > 1 && t->stride(0) == 0 ? t->narrow(0, 0, 1) : *t;
    const Tensor ints = once.scalar_type() == at::kInt ? once : once.to(at::kLong).clamp(-most, most).to(at::kInt);
    const bool is_dense = ints.stride(-1) == 1 && (ints.dim() < 3 || ints.stride(1) == ints.size(2));
    return (is_dense ? ints : ints.contiguous()).expand(t->sizes());
}

// The keys (B, Hkv, Nk, d) that the block_table finds in pages (pages, Hkv, page_size, d), for a backend that doesn't
// read pages. For an expanded table (stride 0) they are copied once.
inline Tensor gather(const Tensor &pages, const Tensor &block_table) {
    const int64_t B = block_table.size(0), Nk = block_table.size(1) * pages.size(2);
    const Tensor once = B > 1 && block_table.stride(0) == 0 ? block_table.narrow(0, 0, 1) : block_table;
    // index_select moves one number a thread: a complex one has 16 bytes.
    const int64_t chunk = 16 / pages.element_size();
    bool fits = (uintptr_t)pages.const_data_ptr() % 16 == 0 && pages.storage_offset() % chunk == 0 &&
                pages.size(3) % chunk == 0 && pages.stride(3) == 1;
    for (int i = 0; i < 3; ++i) fits &= pages.stride(i) % chunk == 0;
    const Tensor tokens = (fits ? pages.view(at::kComplexDouble) : pages).transpose(1, 2);
    // (.., page_size, Hkv, d)
    const Tensor copy = tokens.index_select(0, once.clamp(0, pages.size(0) - 1).flatten()).view(pages.scalar_type());
    return copy.view({once.size(0), Nk, pages.size(1), pages.size(3)}).transpose(1, 2).expand({B, -1, -1, -1});
}

}  // namespace minimal_attn
