"""The package flash_attn as other libraries import it: see minimal_attn.flash_attn.install().

Arguments that have no meaning here are accepted and not used: return_softmax, zero_tensors.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from minimal_attn import _varlen, flash_attn

VERSION = "2.8.3"
NAMES = [name for name in vars(flash_attn) if name.startswith("flash_attn_")]
_hidden = {}  # the modules of an installed flash_attn, which uninstall() puts back
MODULES = "flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"


def install(replace: bool) -> None:
    if _is_installed():
        return
    found = importlib.util.find_spec("flash_attn")
    is_regular = found is not None and found.origin is not None  # FlashAttention-4 has no __init__.py
    if is_regular and not replace:
        raise ImportError(
            f"replace must be True where flash_attn is installed, as in {found.origin}, but was {replace!r}"
        )
    package, interface, padding = (_module(name) for name in MODULES)
    for name in [name for name in list(sys.modules) if name.split(".")[0] == "flash_attn"]:
        if is_regular or name == "flash_attn":
            _hidden[name] = sys.modules.pop(name)
        elif name.count(".") == 1:
            setattr(package, name.split(".")[1], sys.modules[name])
    # Beside FlashAttention-4 flash_attn.cute is still found; a package that is replaced is hidden.
    if found is not None and not is_regular:
        package.__path__ += found.submodule_search_locations
    public = {name: getattr(flash_attn, name) for name in NAMES}
    vars(package).update(public, __version__=VERSION, of_minimal_attn=True)
    vars(package).update(flash_attn_interface=interface, bert_padding=padding)
    vars(interface).update(public, **{f.__name__: f for f in PRIVATE})
    vars(interface)["_get_block_size_n"] = _get_block_size_n
    vars(interface).update({"_wrapped" + f.__name__: f for f in PRIVATE})
    vars(padding).update({f.__name__: f for f in PADDING})
    sys.modules |= {each.__name__: each for each in (package, interface, padding)}
    sys.meta_path[:] = [FINDER, *(each for each in sys.meta_path if each is not FINDER)]
    _tell_transformers()


def uninstall() -> None:
    if _is_installed():
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules |= _hidden
        _hidden.clear()
        sys.meta_path[:] = [each for each in sys.meta_path if each is not FINDER]
        _tell_transformers()


def _is_installed():
    return getattr(sys.modules.get("flash_attn"), "of_minimal_attn", False) is True


def _module(name):
    module = ModuleType(name, f"{name} of flash_attn {VERSION}, by minimal_attn.")
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=name == "flash_attn")
    if name == "flash_attn":
        module.__path__ = module.__spec__.submodule_search_locations
    return module


class MetadataFinder(importlib.metadata.DistributionFinder):
    """Finds what importlib.metadata knows of an installed flash_attn, and no module."""

    def find_spec(self, *arguments):
        return None

    def find_distributions(self, context):
        of_sys_path = vars(context).get("path", sys.path) == sys.path
        wanted = importlib.metadata.Prepared(context.name or "flash_attn").normalized
        return iter([InstalledDistribution()] * (of_sys_path and wanted == "flash_attn"))


FINDER = MetadataFinder()


class InstalledDistribution(importlib.metadata.Distribution):
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
        "top_level.txt": "flash_attn\n",
    }

    def read_text(self, filename):
        return self.texts.get(filename)

    def locate_file(self, path):
        return Path(__file__).with_name(str(path))


def _tell_transformers():
    """transformers caches what is installed, reads it once or serves no CPUs: its check is replaced, too."""
    utils = sys.modules.get("transformers.utils.import_utils")
    for name, function in vars(utils).items() if utils else ():
        if hasattr(function, "cache_clear") and (
            "flash_attn" in name or name == "_package_distribution_mapping"
        ):
            function.cache_clear()
    if importlib.util.find_spec("transformers") is not None:
        _serve_cpus()


def _serve_cpus():
    """Newer versions of transformers have a table of the devices on which flash_attn runs."""
    try:
        attention = importlib.import_module("transformers.modeling_flash_attention_utils")
        check = importlib.import_module("transformers.utils.import_utils").is_flash_attn_2_available
    except Exception:  # another folder of that name, or a transformers that can't be imported
        return
    facts = getattr(attention, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).get(2, {})
    devices = [each for each in facts.get("supported_devices", ()) if each[1] != "cpu"]
    if _is_installed():

        def check(*_, **__):
            return True

        devices.append((check, "cpu"))
    attention.is_flash_attn_2_available = check
    facts |= dict(general_availability_check=check, supported_devices=tuple(devices))


# ------------------------------------------------------------------------------ flash_attn_interface


def _check_is_half(q):
    """ring-flash-attn keeps x.to(torch.float32) while x takes the next block: in float32 these are one."""
    flash_attn._check("q", q, q, ["?"] * q.dim(), (torch.float16, torch.bfloat16))


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
    """(out, softmax_lse, an empty tensor, rng_state: the seed of dropout and 0)."""
    _check_is_half(q)
    window = window_size_left, window_size_right
    options = dict(softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs="rng_state")
    with torch.no_grad():
        return flash_attn.flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window, **options)


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
    """(out, softmax_lse, an empty tensor, rng_state: the seed of dropout and 0)."""
    _check_is_half(q)
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k must be None, but was a tensor: this function has none yet")
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    options = dict(softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs="rng_state")
    options |= dict(block_table=block_table, seqused_k=seqused_k)
    with torch.no_grad():
        return flash_attn.flash_attn_varlen_func(
            q, k, v, *lengths, dropout_p, softmax_scale, causal, window, **options
        )


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
    With dropout_p, rng_state is the forward call's: it says which weights are dropped.

    Returns:
        softmax_d (B, Hq, Nq): the sum of dout * out over a head dimension, float32. flash_attn's has padding.
    """
    options = flash_attn._options(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    options |= flash_attn._slopes(alibi_slopes, q, q.shape[0]) | flash_attn._dropout(dropout_p, q, rng_state)
    return _differentiate(dout, q, k, v, out, softmax_lse, (dq, dk, dv), deterministic, options)


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
    options = flash_attn._options(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    options |= flash_attn._slopes(alibi_slopes, q, None) | flash_attn._dropout(dropout_p, q, rng_state)
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _differentiate(dout, q, k, v, out, softmax_lse, (dq, dk, dv), deterministic, options)


@torch.no_grad()
def _differentiate(dout, q, k, v, out, lse, into, deterministic, options):
    """softmax_d, of packed sequences where options have cu_seqlens; writes the gradients."""
    _check_is_half(q)
    of_o = (*q.shape[:-1], v.shape[-1])
    given = dict(dout=(dout, of_o), out=(out, of_o))
    for name, target, like in zip(("dq", "dk", "dv"), into, (q, k, v), strict=True):
        given |= {} if target is None else {name: (target, like.shape)}
    for name, (x, shape) in given.items():
        flash_attn._check(name, x, q, shape, flash_attn._FLOATS)
    is_packed = "cu_seqlens_q" in options
    one = [x[None] if is_packed else x for x in (dout, q, k, v, out, lse)]
    tensors = (x.transpose(1, 2) for x in one[:5])
    parts = _varlen.backward(
        *tensors, one[5].contiguous(), None, deterministic=bool(deterministic), **options
    )
    for target, part in zip(into, parts, strict=True):
        if target is not None:
            target.copy_((part[0] if is_packed else part).transpose(-3, -2))
    return (dout.float() * out.float()).sum(-1).mT


def _get_block_size_n(device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Of how many keys the values in S_dmask have the same maximum: of all. flash_attn's tests ask for it."""
    return 2**31 - 1


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
    if is_token.shape != hidden_states.shape[:2]:
        shapes = f"shape {tuple(hidden_states.shape[:2])}, but has shape {tuple(is_token.shape)}"
        raise ValueError(f"attention_mask must have hidden_states' {shapes}")
    indices = is_token.flatten().nonzero().flatten()
    lengths = is_token.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int):
    """(batch, seqlen, ...) of packed tokens, 0 elsewhere: undoes unpad_input."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


PADDING = [index_first_axis, index_put_first_axis, unpad_input, pad_input]
if importlib.util.find_spec("einops"):  # libraries import these from there, too
    PADDING += [importlib.import_module("einops").rearrange, importlib.import_module("einops").repeat]
