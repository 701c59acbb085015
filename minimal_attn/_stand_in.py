"""The package flash_attn as other libraries import it, made of minimal_attn.flash_attn.

Names, signatures and results are those of flash_attn 2.8.3. What differs is in minimal_attn.flash_attn.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import Tensor

from minimal_attn import flash_attn
from minimal_attn._backward import backward

VERSION = "2.8.3"
NAMES = [name for name in vars(flash_attn) if name.startswith("flash_attn_")]
MODULES = "flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"


def install(replace: bool) -> None:
    if getattr(sys.modules.get("flash_attn"), "of_minimal_attn", False):
        return
    found = importlib.util.find_spec("flash_attn")
    if found is not None and found.origin is not None and not replace:  # FlashAttention-4 has no __init__.py
        raise ImportError(
            f"flash_attn must not be installed, but is, in {found.origin}: "
            "uninstall it, or take its name by install(replace=True)"
        )
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    package, interface, padding = (_module(name) for name in MODULES)
    package.__path__ = [] if found is None or found.origin else list(found.submodule_search_locations)
    public = {name: getattr(flash_attn, name) for name in NAMES}
    vars(package).update(public, __version__=VERSION, of_minimal_attn=True)
    vars(package).update(flash_attn_interface=interface, bert_padding=padding)
    vars(interface).update(public, **{f.__name__: f for f in PRIVATE})
    vars(interface).update({"_wrapped" + f.__name__: f for f in PRIVATE})
    vars(padding).update({f.__name__: f for f in PADDING})
    sys.modules |= {each.__name__: each for each in (package, interface, padding)}
    sys.meta_path.insert(0, Metadata)
    _tell_transformers()


def uninstall() -> None:
    if getattr(sys.modules.get("flash_attn"), "of_minimal_attn", False):
        for name in MODULES:
            del sys.modules[name]
        sys.meta_path.remove(Metadata)
        _tell_transformers()


def _module(name):
    module = ModuleType(name, f"{name} of flash_attn {VERSION}, by minimal_attn.")
    module.__spec__ = ModuleSpec(name, None, origin=__file__)
    module.__file__ = __file__
    return module


class Metadata(importlib.metadata.DistributionFinder):
    """Finds what importlib.metadata knows of an installed flash_attn, and no module."""

    @classmethod
    def find_spec(cls, *arguments):
        return None

    @classmethod
    def find_distributions(cls, context=importlib.metadata.DistributionFinder.Context()):  # noqa: B008
        wanted = (context.name or "flash_attn").lower().replace("-", "_")
        return iter([Installed()] if wanted == "flash_attn" else [])


class Installed(importlib.metadata.Distribution):
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
        "top_level.txt": "flash_attn\n",
    }

    def read_text(self, filename):
        return self.texts.get(filename)

    def locate_file(self, path):
        return importlib.util.find_spec("minimal_attn").submodule_search_locations[0] + f"/{path}"


def _tell_transformers():
    """It remembers what is installed, and doesn't look for flash_attn on a machine without a GPU."""
    utils = sys.modules.get("transformers.utils.import_utils")
    on_cpu = not torch.cuda.is_available() and importlib.util.find_spec("transformers") is not None
    if utils is None and not on_cpu:
        return
    utils = importlib.import_module("transformers.utils.import_utils")
    for name in (
        "is_flash_attn_2_available",
        "is_flash_attn_greater_or_equal",
        "_package_distribution_mapping",
    ):
        getattr(getattr(utils, name, None), "cache_clear", lambda: None)()
    if on_cpu:
        user = importlib.import_module("transformers.modeling_flash_attention_utils")
        is_there = "flash_attn" in sys.modules
        check = (lambda *_, **__: True) if is_there else utils.is_flash_attn_2_available
        user.is_flash_attn_2_available = check
        facts = getattr(user, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).get(2, {})  # transformers 5.5
        devices = [each for each in facts.get("supported_devices", ()) if each[1] != "cpu"]
        facts |= dict(
            general_availability_check=check, supported_devices=(*devices, *[(check, "cpu")] * is_there)
        )


# ------------------------------------------------------------------------------ flash_attn_interface


def _refuse(q, **missing):
    """float32, too, as flash_attn does: ring-flash-attn adds up in x.to(torch.float32), then x itself."""
    flash_attn._refuse(**missing)
    if q.dtype not in (torch.float16, torch.bfloat16):
        must = "torch.float16 or torch.bfloat16 in flash_attn's private functions"
        raise TypeError(f"q must be {must}, but is {q.dtype}")


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
):
    """(out, softmax_lse, an empty tensor, the state of no generator)."""
    _refuse(q)
    window = window_size_left, window_size_right
    options = dict(softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=True)
    with torch.no_grad():
        results = flash_attn.flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window, **options)
    return *results, torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
):
    """(out, softmax_lse, an empty tensor, the state of no generator)."""
    _refuse(q, leftpad_k=leftpad_k)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    options = dict(softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=True)
    options |= dict(block_table=block_table, seqused_k=seqused_k)
    with torch.no_grad():
        results = flash_attn.flash_attn_varlen_func(
            q, k, v, *lengths, dropout_p, softmax_scale, causal, window, **options
        )
    return *results, torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
):
    """Writes dq, dk and dv, as far as they are given. out and softmax_lse may be those of more keys.

    Returns:
        softmax_d (B, Hq, Nq): the sum of dout * out over a head dimension, float32. flash_attn's has padding.
    """
    _refuse(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    options = flash_attn._options(softmax_scale, causal, (window_size_left, window_size_right))
    return _differentiate(dout, q, k, v, out, softmax_lse, (dq, dk, dv), deterministic, **options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
):
    """_flash_attn_backward of packed sequences: softmax_lse and the result are (Hq, total_q)."""
    _refuse(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    options = flash_attn._options(softmax_scale, causal, (window_size_left, window_size_right))
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    one = [x[None] for x in (dout, q, k, v, out, softmax_lse)]
    into = [None if x is None else x[None] for x in (dq, dk, dv)]
    return _differentiate(*one, into, deterministic, **options)[0]


def _differentiate(dout, q, k, v, out, lse, into, deterministic, **options):
    tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    parts = backward(*tensors, lse.contiguous(), None, deterministic=bool(deterministic), **options)
    for target, part in zip(into, parts, strict=True):
        if target is not None:
            target.copy_(part.transpose(1, 2))
    return (dout.float() * out.float()).sum(-1).mT


PRIVATE = _flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward


# ------------------------------------------------------------------------------ bert_padding


def index_first_axis(input: Tensor, indices: Tensor):
    """The rows input[indices]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int):
    """(first_axis_dim, ...), 0 but for the rows indices, which are the values."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None):
    """The tokens of (B, N, ...), packed. Synchronises with the GPU.

    Args:
        attention_mask: (B, N), bool or int: 1 is a token.
        unused_mask: likewise: tokens that are packed, too, but don't count.

    Returns:
        (tokens (total, ...), their indices among the B N rows, cu_seqlens (B + 1,) int32, the longest length,
        the lengths that count (B,) int32).
    """
    is_token = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = is_token.flatten().nonzero().flatten()
    lengths = is_token.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int):
    """(batch, seqlen, ...) of packed tokens, 0 elsewhere: undoes unpad_input."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


PADDING = index_first_axis, index_put_first_axis, unpad_input, pad_input
