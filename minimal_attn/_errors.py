"""One line that names the argument, in place of pybind11's and the dispatcher's dozens that don't."""

from operator import index

import torch
from torch._C._functorch import is_batchedtensor
from torch.compiler import is_compiling

_MASKS = "use attn_mask, or the faster causal, window_size, seqlens_k, leftpad_k or key_ranges"
# Keywords of other libraries' attention, and what to do here.
_ELSEWHERE = {
    "query": "use q",
    "key": "use k",
    "value": "use v",
    "is_causal": "use causal=True (it aligns the last query with the last key; with offset=0 the first ones)",
    "scale": "use softmax_scale",
    "sm_scale": "use softmax_scale",
    "scaling": "use softmax_scale",
    "attention_mask": _MASKS,
    "block_mask": _MASKS,
    "mask": _MASKS,
    "score_mod": "use softcap, alibi_slopes, bias or attn_mask, or build your own: examples/own_score",
    "attn_bias": "use bias",
    "dropout": "use dropout_p",
    "rng_state": "use dropout_seed",
    "enable_gqa": "k and v may always have fewer heads than q",
    "cu_seqlens": "use cu_seqlens_q and cu_seqlens_k, with all sequences in one batch",
    "cache_seqlens": "use seqlens_k",
    "cache_leftpad": "use leftpad_k",
    "seqused_k": "pack the keys in use, by cu_seqlens_k; without cu_seqlens use seqlens_k",
    "key_padding_mask": "use seqlens_k and leftpad_k",
    "sliding_window": "use window_size=(sliding_window - 1, 0)",
    "window_size_left": "use window_size=(left, right)",
    "window_size_right": "use window_size=(left, right)",
    "window": "use window_size=(left, right)",
    "attention_chunk": "use key_ranges: query i of a chunk sees the keys from i // chunk * chunk to i",
    "s_aux": "use sinks",
    "learnable_sink": "use sinks",
    "sink": "use sinks",
    "return_attn_probs": "use return_lse=True: the probabilities are exp(score - lse)",
    "return_softmax_lse": "use return_lse=True",
    "return_aux": "use return_lse=True",
    "logits_soft_cap": "use softcap",
    "attn_logit_softcapping": "use softcap",
    "page_table": "use block_table",
    "block_tables": "use block_table",
    "num_splits": "leave it out: the keys are split as the number of rows and keys asks for",
    "deterministic": "use torch.use_deterministic_algorithms(True)",
}


def wrong_call(function, positional, surplus, unknown):
    """A TypeError about arguments behind the positional ones, or about a keyword that the function hasn't."""
    if surplus:
        more = ", ".join(type(x).__name__ for x in surplus)
        todo = "name the others, as in causal=True"
        return TypeError(f"{function}() takes {positional} as positional arguments, not {more}: {todo}")
    name = next(iter(unknown))
    hint = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    return TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")


def as_int(x):
    """x, or the int that it stands for (NumPy's, a tensor of one integer); TypeError for True, 2.0, ..."""
    if isinstance(x, bool):
        raise TypeError("a bool is no number")
    if torch.compiler.is_compiling() and isinstance(x, torch.Tensor) and not x.is_floating_point():
        return x.item()  # index can't be traced
    try:
        return x if isinstance(x, (int, torch.SymInt)) else index(x)
    except RuntimeError as error:  # of a meta tensor
        raise TypeError(str(error)) from None


def _is_int(x):
    try:
        return -(2**63) <= as_int(x) < 2**63
    except TypeError:
        return False


def _is_tuple(x, length, is_element):
    return isinstance(x, (tuple, list)) and len(x) == length and all(map(is_element, x))


def _is_number(x):
    try:  # but not strings, which float() reads
        return hasattr(x, "__float__") and not isinstance(x, bool) and float(x) is not None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _is_tensor(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not (x.is_quantized or x.is_nested)


def _or_none(is_right):
    return lambda x: x is None or is_right(x)


# What an argument must be, by its annotation. forward asks only after an error: C++ checks each call.
_MUST_BE = {
    "Tensor": (_is_tensor, "a dense tensor"),
    "Tensor | None": (_or_none(_is_tensor), "a dense tensor or None"),
    "State | None": (
        _or_none(lambda x: _is_tuple(x, 3, _is_tensor)),
        "three dense tensors (o, l, m) or None",
    ),
    "bool": (lambda x: isinstance(x, bool), "True or False"),
    "float | None": (_or_none(_is_number), "a number or None"),
    "int | Tensor | None": (
        lambda x: _is_tensor(x) if isinstance(x, torch.Tensor) else x is None or _is_int(x),
        "an int of 64 bits, a dense tensor or None",
    ),
    "tuple[int, int]": (lambda x: _is_tuple(x, 2, _is_int), "two ints (left, right)"),
    "str": (lambda x: isinstance(x, str) and x == x.encode(errors="replace").decode(), "a Unicode string"),
    "torch.dtype | None": (_or_none(lambda x: isinstance(x, torch.dtype)), "a dtype or None"),
}


def in_words(x):
    """What x is, if it isn't what it must be. For tensors, why they aren't dense."""
    if not isinstance(x, torch.Tensor):
        text = " ".join(repr(x).split())
        text = text if len(text) <= 80 else text[:77] + "..."
        kind = type(x).__qualname__
        if type(x).__module__ == "numpy":  # it calls its own types bool, float64, ...
            kind = "numpy." + kind
        return f"{text} ({kind})"
    if x.is_nested:
        todo = "torch.nested.to_padded_tensor pads it, and seqlens_k says where the padding begins"
        return f"a nested one: {todo}"
    if x.is_quantized:
        return "a quantized one, which x.dequantize() makes dense"
    return f"a tensor of shape {tuple(x.shape)}" if x.layout == torch.strided else f"one of layout {x.layout}"


def wrong_type(function, arguments):
    """A TypeError about the first of `arguments` that isn't what the function's annotation says, or None."""
    for name, annotation in function.__annotations__.items():
        if name in arguments and annotation in _MUST_BE:
            is_right, must_be = _MUST_BE[annotation]
            if not is_right(arguments[name]):
                return TypeError(f"{name} must be {must_be}, but was {in_words(arguments[name])}")
    return None


def clearer(error, function, arguments):
    """wrong_type's error about forward's arguments, or `error` itself."""
    if found := wrong_type(function, arguments):
        return found
    if arguments["out"] is not None and "sharding strategy" in str(error):
        return ValueError("out must be None for DTensors: their placements decide how the result is sharded")
    return error


def check_results(state, return_state, return_lse, out):
    """Refuses what forward can't return together."""
    if return_lse is True and return_state is True:
        raise ValueError("return_lse must be False with return_state=True: the log-sum-exp is m + log(l)")
    if out is not None and (return_lse is True or return_state is True or state is not None):
        raise ValueError(
            "out must be None with return_lse, return_state and state, which return several tensors"
        )


def check_states(states):
    """Refuses what merge can't take, in one line."""
    if len(states) < 2:
        raise ValueError(f"merge must be given at least 2 states (o, l, m), but was given {len(states)}")
    for number, state in enumerate(states):
        name = f"states[{number}]"
        if not _is_tuple(state, 3, lambda x: isinstance(x, torch.Tensor)):
            raise TypeError(
                f"{name} must be three dense tensors (o, l, m), but was of type {type(state).__name__}"
            )
        for t, letter in zip(state, "olm", strict=True):
            if not _is_tensor(t):
                raise TypeError(f"{name}'s {letter} must be a dense tensor, but was {in_words(t)}")
        shape, device = states[0][0].shape, states[0][0].device
        for t, letter, expected in zip(state, "olm", (shape, shape[:-1], shape[:-1]), strict=True):
            if t.dtype != torch.float32:
                raise ValueError(f"{name}'s {letter} must be float32, but is {str(t.dtype)[6:]}")
            if t.device != device:
                raise ValueError(
                    f"{name}'s {letter} must be on {device} as the first o, but is on {t.device}"
                )
            if t.shape != expected:
                raise ValueError(
                    f"{name}'s {letter} must have shape {tuple(expected)}, but has shape {tuple(t.shape)}"
                )
        if not shape:
            raise ValueError(f"{name}'s o must have a last dimension d, but has shape ()")


def known_max(x):
    """The largest number, or 0 where that would cost a synchronisation or isn't there."""
    return int(x.max()) if is_known(x) and x.numel() else 0


def known_min(x):
    return int(x.min()) if is_known(x) and x.numel() else 0


def is_known(x):
    is_data = type(x) is torch.Tensor and not is_batchedtensor(x)  # of torch.vmap
    return is_data and x.device.type == "cpu" and not is_compiling()


def check_range(name, x, end):
    """Refuses an int, or a tensor's numbers, outside 0 to end - 1, as far as the host knows them."""
    if torch.compiler.is_compiling():
        return
    low, high = (known_min(x), known_max(x)) if isinstance(x, torch.Tensor) else (x, x)
    if low < 0 or high >= end:
        raise ValueError(f"{name} must be 0 to {end - 1}, but is {low if low < 0 else high}")


def refuse_grad(where, **tensors):
    """For `where`, which has no gradients."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            todo = f"use torch.no_grad(), or a detached {name}"
            why = f"{where} has no gradients: {todo}"
            raise RuntimeError(f"{name} must not require grad, but does, and {why}")
