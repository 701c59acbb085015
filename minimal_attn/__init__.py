"""FlashAttention's forward pass (Dao et al. 2022), small enough to read and fast enough to use."""

import torch

from minimal_attn import _C

__all__ = ["forward"]


def forward(
    q,
    k,
    v,
    *,
    causal=False,
    window_size=(-1, -1),
    softmax_scale=None,
    seqlens_k=None,
    leftpad_k=None,
    offset=None,
    state=None,
    return_state=False,
    backend="auto",
):
    """softmax(softmax_scale * q k^T + mask) v without ever storing the scores (arXiv:2205.14135).

    Args:
        q: queries (B, Hq, Nq, d), float32, float16 or bfloat16, on a CPU or a CUDA GPU; d is 1 to 256,
            Nq and Nk are below 2^28, B and Hq anything from 0.
        k, v: keys and values (B, Hkv, Nk, d), of q's dtype and device, where Hkv divides Hq: query head h
            reads key head h // (Hq // Hkv). Strides may be anything (transposed, sliced, expanded); a
            tensor whose last dimension isn't contiguous is copied once.
        causal: query i sees the keys j <= i + offset, whatever window_size says of the right.
        window_size: (left, right): query i sees the keys i + offset - left <= j <= i + offset + right; -1
            is no bound.
        softmax_scale: any finite number; None: 1 / sqrt(d).
        seqlens_k: (B,) int32 on q's device: batch b has only its first seqlens_k[b] keys, clamped to
            0..Nk.
        leftpad_k: (B,) int32 on q's device: batch b's keys begin at leftpad_k[b], clamped likewise; the
            position of a key stays its index.
        offset: position of query 0 among the keys, of any sign: an int, or (B,) int32 on q's device.
            None: the last query sees the last key, so it is seqlens_k[b] - Nq, or Nk - Nq without
            seqlens_k.
        state: (o, l, m) of an earlier call with the same queries and other keys, float32, o in q's shape,
            l and m (B, Hq, Nq): the result covers the keys of both calls. It isn't changed.
        return_state: return the state (implied by `state`).
        backend: "auto", the fastest that serves the inputs, or by name "cpu" (flash_cpu.cpp), "portable"
            (flash.cu) or "hopper" (flash_hopper.cu: GPUs of compute capability 9.0, Hopper; at most 2^30 tiles
            of 64 queries): for tests, benchmarks and readers. For float32 "hopper" takes workspace as large as
            k and v, d rounded up to 64, 128 or 256, of every batch if seqlens_k or leftpad_k is given, and is
            slow where a row or a channel of 64 tokens is all but 0 beside their largest number (README).

    Returns:
        o in q's shape, dtype and order of strides. With `return_state` or `state` the tuple (o, l, m), all
        float32: m (B, Hq, Nq) is the row maximum of the scaled scores, l (B, Hq, Nq) the row sum of
        exp(score - m), so that m + log(l) is the log-sum-exp. A row that sees no key has o = 0, l = 0 and
        m = -inf.

    Raises:
        TypeError: an argument of another type.
        ValueError: another shape, dtype, device or value than said above.
        RuntimeError: an input requires grad while grad mode is on (there is no backward pass), or this
            build has no code for the GPU. In each case nothing has been launched.
    """
    offsets = None
    if isinstance(offset, torch.Tensor):
        offset, offsets = None, offset
    if torch.compiler.is_compiling():  # Dynamo can't look into pybind11, so it gets the operator itself
        options = dict(
            causal=causal,
            window_size=window_size,
            softmax_scale=softmax_scale,
            seqlens_k=seqlens_k,
            leftpad_k=leftpad_k,
            offset=offset,
            offsets=offsets,
            backend=backend,
        )
        if state is None and not return_state:
            return torch.ops.minimal_attn.forward.default(q, k, v, **options)
        o, l, m = (None, None, None) if state is None else state
        return torch.ops.minimal_attn.forward.state(q, k, v, **options, o=o, l=l, m=m)
    try:
        return _C.forward(
            q,
            k,
            v,
            causal,
            window_size,
            softmax_scale,
            seqlens_k,
            leftpad_k,
            offset,
            offsets,
            backend,
            state,
            return_state,
        )
    except (TypeError, NotImplementedError) as error:
        raise _clearer(error, locals()) from None


def _is_int(x):
    return isinstance(x, int) and -(2**63) <= x < 2**63


def _is_tuple(x, length, is_element):
    return isinstance(x, (tuple, list)) and len(x) == length and all(map(is_element, x))


def _is_number(x):
    return isinstance(x, float) or _is_int(x)


def _is_tensor(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not (x.is_quantized or x.is_nested)


# What each argument must be, for _clearer alone: the C++ side checks it, on every call, at no cost to Python.
_MUST_BE = {
    "q": (_is_tensor, "a dense tensor"),
    "k": (_is_tensor, "a dense tensor"),
    "v": (_is_tensor, "a dense tensor"),
    "seqlens_k": (lambda x: x is None or _is_tensor(x), "a dense tensor or None"),
    "leftpad_k": (lambda x: x is None or _is_tensor(x), "a dense tensor or None"),
    "state": (lambda x: x is None or _is_tuple(x, 3, _is_tensor), "three dense tensors (o, l, m) or None"),
    "window_size": (lambda x: _is_tuple(x, 2, _is_int), "two ints (left, right)"),
    "softmax_scale": (lambda x: x is None or _is_number(x), "a number or None"),
    "offset": (lambda x: x is None or _is_int(x), "an int of 64 bits, a tensor or None"),
    "offsets": (lambda x: x is None or _is_tensor(x), "an int of 64 bits, a dense tensor or None"),
    "causal": (lambda x: isinstance(x, bool), "True or False"),
    "return_state": (lambda x: isinstance(x, bool), "True or False"),
    "backend": (lambda x: isinstance(x, str) and x.isascii(), "an ASCII string"),
}


def _clearer(error, arguments):
    """One line that names the argument, for pybind11's and the dispatcher's dozens that don't."""
    for name, (is_right, must_be) in _MUST_BE.items():
        value = arguments[name]
        if not is_right(value):
            was = f"one of layout {value.layout}" if isinstance(value, torch.Tensor) else repr(value)
            was = " ".join(was.split())
            was = was if len(was) <= 80 else was[:77] + "..."
            name = "offset" if name == "offsets" else name
            return TypeError(f"{name} must be {must_be}, but was {was} ({type(value).__name__})")
    return error
