"""minimal_attn as an attention implementation of Hugging Face transformers.

    import minimal_attn.huggingface
    minimal_attn.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="minimal_attn")

A model asks transformers for its mask once a call. Here it gets a Mask: bounds (leftpad_k, seqlens_k, offset,
a window) instead of an Nq x Nk tensor. Each layer passes them to the kernel. What the kernels can't compute
goes to transformers' own functions: sdpa's, or the model's eager one where sdpa can't do it either. `calls`
counts which it was and why. What is not understood is refused with an error, never guessed.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter

import torch
from torch import Tensor

import minimal_attn
from minimal_attn._backward import has_fast_backward

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import and_masks, bidirectional_mask_function, causal_mask_function
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(f"minimal_attn.huggingface needs a newer transformers ({error})") from None

__all__ = ["Mask", "attention", "calls", "make_mask", "register"]

#: How many calls of an attention layer the kernels served (the key "served"), and how many went to
#: transformers' functions (the key says why). calls.clear() starts again. Compiled code is counted when it is
#: traced.
calls: Counter[str] = Counter()

# Arguments of an attention layer that don't change its result, since its mask decides; _PACKED's only where
# there is a mask.
_HARMLESS = set(
    "position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits "
    "labels return_dict num_items_in_batch logits_to_keep sliding_window layer_idx deterministic "
    "cache".split()
)
_PACKED = set("cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx".split())
_OTHERS = 'load the model with attn_implementation="sdpa" or "eager"'
_NO_TENSOR = f"minimal_attn's mask is no tensor, but this model computes with it: {_OTHERS}"

# A closure is known by its code, which all closures of one function share.
_AND = and_masks(causal_mask_function).__code__
_LEFT = masking_utils.sliding_window_overlay(1).__code__
_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__


class Mask:
    """Which keys each query of one model call sees, as bounds instead of a tensor (B, 1, Nq, Nk).

    It is no tensor on purpose: a model that computes with its mask itself fails with an error.

    Attributes:
        shape: (B, 1, Nq, Nk).
        window: window_size of minimal_attn.forward, None where `why` isn't None.
        bounds: seqlens_k, leftpad_k and offset of minimal_attn.forward, where they are needed.
        why: why the kernels can't take this mask, or None.
        arguments: of transformers' mask functions, which make the tensor from them, if at all.
    """

    ndim = 4  # by which transformers knows that this is no padding mask

    def __init__(self, arguments, window=None, bounds=None, why=None):
        self.arguments, self.window, self.bounds, self.why = arguments, window, bounds or {}, why
        self.shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        self.tensors = {}

    def tensor(self, dtype=torch.bool):
        """The mask as transformers has it, made once: bool for its sdpa function, else to add to scores.

        None where every key is seen; for bool also where sdpa's is_causal is enough.
        """
        if dtype not in self.tensors:
            make = masking_utils.sdpa_mask if dtype == torch.bool else masking_utils.eager_mask
            self.tensors[dtype] = make(**{**self.arguments, "dtype": dtype})
        return self.tensors[dtype]

    def to(self, device, **options):
        """The same mask on another device. accelerate calls it between layers."""

        def moved(values):
            return {n: x.to(device, **options) if isinstance(x, Tensor) else x for n, x in values.items()}

        return Mask(moved(self.arguments) | {"device": device}, self.window, moved(self.bounds), self.why)

    def contiguous(self):
        """Itself. transformers 5.20 asks a StaticCache's mask for it, whatever its type."""
        return self

    def __getitem__(self, index):
        """Some of the queries, mask[:, :, i:j, :]. Gemma 4 computes its last layers for those alone."""
        everything = slice(None)
        if not (isinstance(index, tuple) and [*index[:2], *index[3:]] == [everything] * 3):
            raise RuntimeError(_NO_TENSOR)
        rows = range(self.shape[2])[index[2]]
        if not isinstance(rows, range) or rows.step != 1:
            raise RuntimeError(_NO_TENSOR)
        first = dict(self.arguments, q_offset=self.arguments["q_offset"] + rows.start)
        return make_mask(**first | {"q_length": len(rows), "allow_is_causal_skip": False})

    def __getattr__(self, name):
        raise AttributeError(f"no {name}: {_NO_TENSOR}")

    def __repr__(self):
        return f"Mask(shape={self.shape}, window={self.window}, bounds={self.bounds}, why={self.why!r})"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        # Not TypeError, for which Python would try mask + tensor next.
        raise RuntimeError(_NO_TENSOR)


def window_of(mask_function):
    """window_size of one of transformers' mask functions, or None where it isn't known to be a window.

    transformers' sliding_window counts keys: sliding_window - 1 before the query, and its own.
    """
    if mask_function is causal_mask_function:
        return -1, 0
    if mask_function is bidirectional_mask_function:
        return -1, -1
    if torch.compiler.is_compiling():  # Dynamo can't look into a closure
        return None
    code = getattr(mask_function, "__code__", None)
    if code is None or code not in (_AND, _LEFT, _BOTH):
        return None
    [inside] = [cell.cell_contents for cell in mask_function.__closure__]
    if code is not _AND:
        if type(inside) is not int or inside < 1:
            return None
        return (inside - 1, -1) if code is _LEFT else (inside, inside)
    windows = [window_of(function) for function in inside]
    if None in windows:
        return None
    return tuple(min((w[side] for w in windows if w[side] >= 0), default=-1) for side in (0, 1))


def make_mask(**arguments) -> Mask:
    """The Mask of a model call: transformers' AttentionMaskInterface.

    Args:
        arguments: those of transformers.masking_utils.sdpa_mask. attention_mask is None or (B, Nk) bool, True
            where there is a token. Its values are read once, which synchronises, as sdpa_mask does.

    Returns:
        A Mask. Its `why` is None where the kernels can take it: all keys, the causal ones or a window of
        either, and each row of attention_mask is one run of tokens with padding before and after it.
    """
    padding, Nk = arguments["attention_mask"], arguments["kv_length"]
    if isinstance(padding, Mask):  # generate() made it before, for a StaticCache
        return padding
    B, Nq, device = arguments["batch_size"], arguments["q_length"], arguments["device"]
    window = window_of(arguments["mask_function"])
    if window is None:
        name = "made while tracing" if torch.compiler.is_compiling() else _name(arguments["mask_function"])
        return Mask(arguments, why=f"mask function {name}")
    kv_offset = arguments["kv_offset"]
    offset = arguments["q_offset"] - kv_offset
    is_grown = not isinstance(offset, Tensor) and offset == Nk - Nq  # a cache without free keys, or none
    if isinstance(offset, Tensor):
        offset = offset.to(device, torch.int32).expand(B).contiguous()
    elif Nq == 1 and not is_grown:  # not an int, for which each step would be another CUDA graph
        offset = torch.full((B,), offset, dtype=torch.int32, device=device)
    bounds = {} if window == (-1, -1) else {"offset": offset}
    if padding is None:
        return Mask(arguments, window, bounds)
    if padding.ndim != 2 or padding.shape[0] != B or isinstance(kv_offset, Tensor):
        return Mask(arguments, why=f"attention_mask of shape {tuple(padding.shape)}")
    if is_tracing(padding):
        return Mask(arguments, why="attention_mask's values aren't known while tracing")
    padding = padding[:, kv_offset : kv_offset + Nk].bool()  # beyond its end is padding
    before = torch.nn.functional.pad(padding, (1, 0))[:, :-1]
    runs = (padding & ~before).sum(-1)
    first = padding.int().argmax(-1) if padding.shape[1] else runs
    end = first + padding.sum(-1)
    has_holes, has_left, has_right = torch.stack([(runs > 1).any(), first.any(), (end < Nk).any()]).tolist()
    if has_holes:
        return Mask(arguments, why="holes in attention_mask")
    if has_left or not is_grown:  # the same arguments for every step of a StaticCache: it is compiled once
        bounds["leftpad_k"] = first.int()
    if has_right or not is_grown:
        bounds["seqlens_k"] = end.int()
    return Mask(arguments, window, bounds)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """One layer's attention, by the kernels or by transformers' functions: its AttentionInterface.

    Args:
        module: the layer.
        query: (B, Hq, Nq, d); key (B, Hkv, Nk, d); value (B, Hkv, Nk, d_v).
        attention_mask: the Mask of this model call. A tensor goes to transformers' functions. None: every key
            is seen, but in a causal layer with several queries transformers' functions know what it means.
        scaling: None is 1 / sqrt(d).
        s_aux: attention sinks (Hq,): a score each that takes part in the softmax and has no value (gpt-oss).
        dropout, is_causal, options: as transformers passes them.

    Returns:
        o (B, Nq, Hq, d_v), contiguous, of query's dtype, or autocast's where that is on; the weights or None.

    Raises:
        ValueError: an argument that neither the kernels nor transformers' functions for this layer know.
    """
    mask, (q, k, v) = attention_mask, _autocast(query, key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = {name: x for name, x in options.items() if x is not None}
    why = _why_not(q, k, v, mask, causal, scaling, dropout, s_aux, options)
    _count(why or "served")
    if why:
        known = dict(scaling=scaling, dropout=dropout, is_causal=is_causal, s_aux=s_aux)
        options |= {name: x for name, x in known.items() if x is not None}
        return _pass_on(module, query, key, value, mask, options)
    bounds = mask.bounds if isinstance(mask, Mask) else {}
    window = mask.window if isinstance(mask, Mask) else (-1, -1)
    d, d_v = k.shape[-1], v.shape[-1]
    if d_v < d:
        v = torch.nn.functional.pad(v, (0, d - d_v))
    o = minimal_attn.forward(q, k, v, window_size=window, softmax_scale=scaling, sinks=s_aux, **bounds)
    return o[..., :d_v].transpose(1, 2).contiguous(), None


def _why_not(q, k, v, mask, causal, scaling, dropout, s_aux, options):
    """Why the kernels can't compute this call, or None."""
    if dropout:
        return "dropout"
    if options.get("output_attentions"):
        return "output_attentions"
    for name in options:
        if name not in _HARMLESS and not (name in _PACKED and isinstance(mask, Mask)):
            return f"argument {name}"
    wants_grad = any(t is not None and t.requires_grad for t in (q, k, v, s_aux))
    if wants_grad and torch.is_grad_enabled() and not has_fast_backward(q):
        return "gradients, which PyTorch's kernels compute faster on this GPU"
    if isinstance(mask, Mask):
        if mask.why:
            return mask.why
        if mask.shape != (q.shape[0], 1, q.shape[2], k.shape[2]):
            return "a mask of another shape"
    elif mask is not None:
        return "a mask that is a tensor"
    elif "sliding_window" in options or (causal and q.shape[2] != 1):
        return "no mask in a layer that is causal or has a window"
    if not (scaling is None or isinstance(scaling, (int, float))):
        return "a scale that is a tensor"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "dtypes"
    if q.device.type not in ("cpu", "cuda"):
        return f"device {q.device.type}"
    if q.ndim != 4 or q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        return "shapes"
    if not v.shape[3] <= k.shape[3] <= 256:
        return "head dimension"
    return None


def _pass_on(module, query, key, value, mask, options):
    """The call by transformers' sdpa function or, where that lacks an option, by the model's eager one."""
    special = options.keys() - _HARMLESS - _PACKED - {"scaling", "dropout", "is_causal"}
    if mask is None and options.keys() & _PACKED:
        raise ValueError(f"packed sequences need a mask in {type(module).__name__}: {_OTHERS}")
    if special <= {"position_bias"} and not options.get("output_attentions"):
        tensor = mask.tensor() if isinstance(mask, Mask) else mask
        return sdpa_attention_forward(module, query, key, value, tensor, **options)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    # Sinks are the layer's own parameter, and there its eager function reads them.
    unknown = special - {"s_aux"} - set(inspect.signature(eager).parameters if eager else ())
    if eager is None or unknown:
        what = f"its argument {min(unknown)}" if unknown else "this call"
        raise ValueError(f"{type(module).__name__}: minimal_attn doesn't know {what}: {_OTHERS}")
    tensor = mask.tensor(query.dtype) if isinstance(mask, Mask) else mask
    if isinstance(tensor, Tensor) and tensor.dtype == torch.bool:
        low = torch.finfo(query.dtype).min
        tensor = torch.zeros_like(tensor, dtype=query.dtype).masked_fill(~tensor, low)
    return eager(module, query, key, value, tensor, **options)


def _autocast(*tensors):
    """In autocast's dtype where that is on, as SDPA does."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(device)) for t in tensors)


@torch.compiler.assume_constant_result  # so that the counter doesn't become part of compiled code
def _count(what):
    calls[what] += 1


def _name(function):
    """A mask function's name for `calls`: what made it, and of what."""
    name = getattr(function, "__qualname__", type(function).__name__).split(".<locals>")[0]
    inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [_name(f) for x in inside for f in (x if isinstance(x, tuple) else (x,)) if callable(f)]
    return f"{name}({', '.join(parts)})" if parts else name


def register() -> None:
    """Makes attn_implementation="minimal_attn" known to transformers. May be called again.

    Raises:
        ImportError: this version of transformers is too old, or its mask functions mean something else.
    """
    version = f"transformers {transformers.__version__}"
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"minimal_attn.huggingface needs transformers 5.4 or newer, but this is {version}")
    functions = [causal_mask_function, bidirectional_mask_function]
    for n in (1, 3):
        functions.append(masking_utils.sliding_window_causal_mask_function(n))
        functions.append(masking_utils.sliding_window_bidirectional_mask_function(n))
    i, j = torch.arange(9)[:, None], torch.arange(9)
    for function in functions:
        left, right = window_of(function) or (0, -2)  # an empty window where it isn't known any more
        seen = ((j >= i - left) | (left == -1)) & ((j <= i + right) | (right == -1))
        if not torch.equal(seen, function(0, 0, i, j).expand(9, 9)):
            raise ImportError(
                f"minimal_attn.huggingface doesn't know the meaning of {_name(function)} in {version}"
            )
    AttentionInterface.register("minimal_attn", attention)
    AttentionMaskInterface.register("minimal_attn", make_mask)
