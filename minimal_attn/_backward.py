"""backward: the gradients in q, k and v, from what forward has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minimal_attn._errors import wrong_call, wrong_type
from minimal_attn._load import _C

if TYPE_CHECKING:
    from typing_extensions import Never


def has_fast_backward(q: Tensor, v: Tensor) -> bool:
    """Whether gradients of tensors like q and v have a fast kernel. Else drop-ins leave them to PyTorch."""
    sizes = (512,) if _widest(q, v) > 256 else (64, 128, 256)
    return q.device.type == "cpu" or _holds("has_fast_backward", q.device, q.dtype, sizes)


def has_fast_pairs(q: Tensor, v: Tensor) -> bool:
    """Whether masks and biases are as fast as PyTorch's for q and v. If not, drop-ins pass them on."""
    is_wide = _widest(q, v) > 256
    return q.device.type == "cpu" or (not is_wide and _holds("has_fast_pairs", q.device, q.dtype, (64,)))


def has_fast_bias_gradient(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether, if has_fast_pairs, a bias's gradient needs no pass of its own (hopper: sums_bias)."""
    rows = q.shape[0] * q.shape[1] * k.shape[2]
    fits = _widest(q, v) <= 128 and q.shape[2] > 64 and rows * ((q.shape[2] + 7) // 8 * 16) <= 4 << 30
    return q.device.type == "cpu" or fits


def _widest(q, v):
    return max(q.shape[-1], v.shape[-1])


def _holds(question: str, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """What _C's function of this name answers, for tensors of all these head dimensions."""
    key = question, device, dtype, sizes
    if key not in _known:
        tensors = (torch.empty(1, 1, 8, d, device=device, dtype=dtype) for d in sizes)
        _known[key] = all(map(getattr(_C, question), tensors))
    return _known[key]


_known: dict[tuple, bool] = {}
# What torch.compiler.assume_constant_result does, which imports the compiler in a second.
_holds._dynamo_marked_constant = True  # type: ignore[attr-defined]


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    l: Tensor,
    m: Tensor | None,
    *surplus: Never,
    dlse: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    offset: int | Tensor | None = None,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    complete: bool = False,
    key_ranges: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prefix_k: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: Tensor | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a loss in q, k and v, from its gradient in o: Algorithm 4 of arXiv:2205.14135.

    Autograd calls the same operator where minimal_attn.forward's inputs require grad. By hand it serves keys
    in chunks: (o, l, m) may cover more keys than k and v. Then dk and dv are those of these keys, and dq is
    this chunk's part of a sum over all chunks.

    Args:
        do: the gradient in o, (B, Hq, Nq, d_v), in q's dtype, or float32, which is rounded to q's dtype.
        q: the queries (B, Hq, Nq, d), float32, float16 or bfloat16, d from 1 to 576.
        k, v: keys (B, Hkv, Nk, d) and values (B, Hkv, Nk, d_v) in q's dtype; there is no block_table. Hkv
            divides Hq.
        o: forward's result over all keys, (B, Hq, Nq, d_v), in q's dtype, or float32, which is rounded to it.
        l, m: its state over all keys, float32 (B, Hq, Nq). With m None, l is the log-sum-exp m + log(l).
        dlse: the gradient in the log-sum-exp, float32 (B, Hq, Nq). None: 0.
        causal, window_size, softmax_scale, seqlens_k, leftpad_k, offset, key_ranges, cu_seqlens_q,
            cu_seqlens_k, prefix_k, softcap, alibi_slopes, attn_mask, bias, dropout_p, dropout_seed: those of
            the forward call with these keys. Sinks are in l and m. With dropout_p the seed must be given.
        backend: "auto", or a name as in forward. Where that backend has no kernel for gradients of q's dtype
            and shape, the next slower one of its device computes them.
        out_dtype: of the results: q's dtype (None) or torch.float32, for sums over chunks.
        deterministic: the same bits on every run, as under torch.use_deterministic_algorithms.
        complete: (o, l, m) cover these keys and nothing else: no other chunk, no sinks. Then gradients are
            about as exact at large scores as at small ones. Otherwise P has the relative error of a float32
            log-sum-exp: 1e-5 where scores are 400, 1e-3 at 4e4 (docs/numerics.md). The gradients of
            minimal_attn.forward set it. Nothing changes with prefix_k and a window, which are two chunks.

    Returns:
        (dq, dk, dv) in the shapes of q, k and v and the order of their strides. Query heads that share a key
        head are summed in dk and dv. What is hidden has gradients of exactly 0, whatever it holds; an inf or
        NaN in a key that only key_ranges or attn_mask hide, or of another document, may spread. The gradient
        of bias or attn_mask is autograd's alone. The same inputs give the
        same bits, on a CPU with any number of threads. Only on Hopper, in half types with d up to 128, the
        last bits of dq vary unless `deterministic` is set.

    Raises:
        TypeError, ValueError: as forward raises them.
        RuntimeError: a result is differentiated.
    """
    if unknown or surplus:
        raise wrong_call("backward", "do, q, k, v, o, l, m", surplus, unknown)
    position, offsets = (None, offset) if isinstance(offset, Tensor) else (offset, None)
    if not torch.compiler.is_compiling() and (error := wrong_type(backward, locals())):
        raise error
    if m is not None and m.shape != l.shape:
        raise ValueError(f"m must have l's shape {tuple(l.shape)}, but has shape {tuple(m.shape)}")
    return torch.ops.minimal_attn.backward(
        do,
        q,
        k,
        v,
        o,
        l if m is None else m + l.log(),
        dlse,
        causal,
        window_size,
        softmax_scale,
        seqlens_k,
        leftpad_k,
        position,
        offsets,
        backend,
        key_ranges,
        cu_seqlens_q,
        cu_seqlens_k,
        prefix_k,
        softcap,
        alibi_slopes,
        attn_mask,
        bias,
        dropout_p,
        dropout_seed,
        out_dtype,
        deterministic,
        complete,
    )


def backward_into(do, q, k, v, o, lse, dlse, *, dq, dk, dv, **options) -> None:
    """backward, for rings: the results go to tensors that the caller has, unchecked."""
    _C.backward_into(do, q, k, v, o, lse, dlse, *(_DEFAULTS | options).values(), dq, dk, dv)


# The operator's options, between dlse and out_dtype: binding/arguments.h.
_NAMES = [x.name for x in torch.ops.minimal_attn.backward.default._schema.arguments]
_OPTIONS = _NAMES[_NAMES.index("dlse") + 1 : _NAMES.index("out_dtype")]
_DEFAULTS = {name: backward.__kwdefaults__.get(name) for name in _OPTIONS}
