"""F.scaled_dot_product_attention by these kernels: a function of its signature, and for code that calls it.

    minimal_attn.scaled_dot_product_attention(query, key, value, is_causal=True)

    with minimal_attn.activate() as activation:  # or activate() alone, once and for all
        model(x).sum().backward()                # whatever calls F.scaled_dot_product_attention
    print(activation.calls)                      # {"minimal_attn": 12, "PyTorch: attn_mask is given": 2}

A call that goes to PyTorch's kernels gives a FallbackWarning, once for each reason. strict=True makes it an
error. binding/serving.h says which calls are served. binding/sdpa.h has the operators that activate()
replaces.
"""

from __future__ import annotations

import warnings
from types import TracebackType

import torch
import torch.nn.attention
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from minimal_attn._fallback import FallbackWarning, passed_on
from minimal_attn._forward import Explanation
from minimal_attn._load import _C

# Why a call goes to PyTorch, where C++ can't take its arguments. binding/serving.h has the other reasons.
_OVERRIDDEN = "PyTorch: a tensor's class or a mode overrides PyTorch's functions"
_OF_OTHER_TYPES = "PyTorch: an argument is no tensor, bool or number where PyTorch's function has one"
_NAME = "minimal_attn"  # in PyTorch's registry of attention kernels


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    strict: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, by these kernels where they serve the call.

    Every other call goes to PyTorch's function with all its arguments: explain_scaled_dot_product_attention
    says which and why. The values agree within rounding. The first such call for each reason gives a
    minimal_attn.FallbackWarning.

    Args:
        query: (..., Hq, L, E), of 2 to 5 or more dimensions, on a CPU or a CUDA GPU.
        key, value: (..., H, S, E) and (..., H, S, Ev), of query's dtype and device. Their batch dimensions
            broadcast with query's.
        attn_mask: on a CPU it is looked at: if it is the same for all heads and each row is an interval of
            keys, as for padding, causal, windows, only these are computed. Any other mask or bias is served
            as forward's attn_mask, with its gradient; with several batch dimensions it is copied where it
            broadcasts along some of them. On Hopper GPUs half types with d up to 256 are served, too, if the
            mask needs no gradient. Other masks on a GPU, and bool masks on a CPU under torch.compile, are
            passed on to PyTorch, but never to cuDNN's kernel, which gives a row that a bool mask hides the
            softmax over all keys, and NaN for a float32 mask of half types. Other kernels give 0 there.
        dropout_p: served on a CPU, and on Hopper in half types beside a mask or with d above 128. Else passed
            on to PyTorch unless it is 0. minimal_attn.forward says which weights are dropped. There are no
            second derivatives, which PyTorch's separate steps have on a CPU.
        is_causal: query i sees the keys j <= i: the first query is aligned with the first key.
            minimal_attn.forward's causal=True aligns the last ones.
        scale: of the scores. None: 1 / sqrt(E).
        enable_gqa: query may have a multiple of key's and value's heads (dimension -3).
        strict: raise where the call would go to PyTorch. This argument isn't PyTorch's.

    Returns:
        (..., Hq, L, Ev), in query's dtype, or in autocast's.

    Raises:
        What PyTorch's function raises, since arguments that don't fit go there.
        RuntimeError: the call is not served, and strict is set.

    Source: the contract is PyTorch's (torch.nn.functional.scaled_dot_product_attention). Three kinds of calls
    go to PyTorch although the kernels could compute o. The first is calls whose gradients PyTorch computes
    faster: under activate() they get o from these kernels. The second is calls with dual tensors
    (torch.func.jvp), which PyTorch serves only under sdpa_kernel(SDPBackend.MATH). The third is calls under
    sdpa_kernel without any of the device's fused kernels: MATH alone has second derivatives. On a CPU PyTorch
    computes float masks with gradients, and Ev other than E, by MATH's steps; these kernels serve them.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if torch.compiler.is_compiling():  # Dynamo can't look into pybind11
        return torch.ops.minimal_attn.scaled_dot_product_attention(*arguments, strict)
    why = _OVERRIDDEN
    if not has_torch_function_variadic(query, key, value, attn_mask):
        try:
            return _C.scaled_dot_product_attention(*arguments, strict)
        except TypeError:
            why = _OF_OTHER_TYPES
    if strict:
        passed_on(why, strict=True)
    o = F.scaled_dot_product_attention(*arguments[:6], scale=scale, enable_gqa=enable_gqa)
    passed_on(why)  # not before, since PyTorch may refuse the arguments
    return o


def explain_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation | str:
    """What computes scaled_dot_product_attention with these arguments.

    Returns:
        minimal_attn.explain's answer if these kernels serve the call. Else the reason why PyTorch's do, in a
        line such as "PyTorch: attn_mask is given". Nothing is computed.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if has_torch_function_variadic(query, key, value, attn_mask):
        return _OVERRIDDEN
    try:
        found = _C.explain_sdpa(*arguments)
    except TypeError:
        return _OF_OTHER_TYPES
    return found if isinstance(found, str) else Explanation(**found)


# ------------------------------------------------------------------------------- PyTorch's own function


class Activation:
    """F.scaled_dot_product_attention takes these kernels until remove() or the end of the with block.

    Several may overlap and end in any order: the last one that ends restores what was there before the first.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        if _active() != _NAME:
            before = _active()
            _activate()
            _handle.before = before
            _handle.is_owned = True
        self._handle = _handle
        self._handle.activations.add(self)
        self._handle.update()
        self._start = _C.sdpa_calls()
        self._calls: dict[str, int] | None = None

    @property
    def calls(self) -> dict[str, int]:
        """How many calls there were since activate(), until now or remove(), in all threads. The key
        "minimal_attn" counts those that these kernels served. The others went to PyTorch's, by reason.

        "PyTorch chose no fused kernel" are calls that PyTorch computes in separate steps: a last dimension
        that isn't contiguous, nested tensors, on a GPU value heads of another size.
        minimal_attn.scaled_dot_product_attention serves many of them. "PyTorch: MultiheadAttention's fast
        path" are layers that never call F.scaled_dot_product_attention: see activate().

        A compiled function counts when it runs, but its separate steps when it is traced, once or more often.
        On other devices than a CPU and CUDA GPUs nothing counts.
        """
        return self._since_start() if self._calls is None else self._calls

    def _since_start(self) -> dict[str, int]:
        new = {why: n - self._start.get(why, 0) for why, n in _C.sdpa_calls().items()}
        return {why: n for why, n in new.items() if n}

    def remove(self) -> None:
        """Make F.scaled_dot_product_attention what it was before. A second time does nothing."""
        if self._calls is not None:
            return
        self._calls = self._since_start()
        self._handle.activations.discard(self)
        self._handle.update()
        if self._handle is _handle and _handle.is_owned and not _handle.activations:
            _restore(_handle.before)

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def activate(*, strict: bool = False) -> Activation:
    """Let F.scaled_dot_product_attention take these kernels, in the whole process and all threads.

    On CUDA PyTorch's FlashAttention, cuDNN and memory-efficient operators are replaced, on a CPU its
    FlashAttention, with their gradients; PyTorch's choice between them stays. What the kernels don't serve
    (most masks and dropout on a GPU, float64, head dimensions above 512, in float32 on a GPU 256) goes to
    PyTorch's kernel. So do gradients that PyTorch computes faster, from this o and log-sum-exp. From torch
    2.11 on, torch.nn.attention's registry knows it as "minimal_attn": current_flash_attention_impl(),
    restore_flash_attention_impl().

    On Hopper GPUs masks of half types without a gradient are served, on a CPU all masks. There one that is
    the same for all heads and gives each query an interval of keys, as for padding, causal, windows, is fast:
    bool, or 0 and -inf in q's dtype. Its contents are looked at in each call, in compiled functions, too. A
    mask that requires grad, for which PyTorch has no fused operator, is served by forward, with its gradient.

    PyTorch's fused operators take 4 dimensions. Inputs of 2, 3 or 5, and batches or key heads that broadcast,
    are served by forward. What else PyTorch computes in separate steps stays its own. So it is on CUDA with
    enable_gqa in float32: repeat the keys' heads, or call minimal_attn.scaled_dot_product_attention.
    Forward-mode and second derivatives are refused by PyTorch's fused operators and by forward, and work with
    torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which takes none of these kernels.

    Calls that go to PyTorch give a minimal_attn.FallbackWarning, once for each reason, and count in .calls.
    Calls with a mask that PyTorch would give to cuDNN's kernel take its memory-efficient one, or for float32
    masks of half types separate steps. cuDNN's gives rows that a bool mask hides the softmax over all keys,
    and NaN for these masks; here hidden rows are 0.

    nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.TransformerEncoder have a fast path, in eval mode
    without gradients. It has kernels of its own, and none of these is called.
    torch.backends.mha.set_fastpath_enabled(False) lets the layers call F.scaled_dot_product_attention. With
    need_weights=True nn.MultiheadAttention multiplies matrices itself, which .calls can't show.

    Args:
        strict: raise a RuntimeError where a call would go to PyTorch, in one line that says why. For the fast
            path it comes after the computation. One strict activation of several suffices.

    Returns:
        an Activation: a context manager that ends it, with .remove() and .calls. Where others end it before,
        by torch.nn.attention's registry, there is a FallbackWarning.

    Raises:
        TypeError: strict is no bool.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be a bool, but was {strict!r}")
    return Activation(strict)


class _Handle:
    """What PyTorch's registry keeps while the kernels are active; it makes a new one each time."""

    def __init__(self) -> None:
        global _handle
        self.activations: set[Activation] = set()
        self.before: str | None = None  # the kernels that were active before
        # Set by activate() alone, not by the registry's function: then remove() of the last one restores.
        self.is_owned = False
        with warnings.catch_warnings():  # that kernels are overridden is what was asked for
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            _C.override_sdpa()
        _handle = self

    def update(self) -> None:
        """Be strict as long as one of the activations is."""
        if self is _handle:
            _C.set_sdpa_strict(any(activation.strict for activation in self.activations))

    def remove(self) -> None:
        global _handle
        _handle = None
        _C.set_sdpa_strict(False)
        _C.restore_sdpa()
        if self.activations:  # or remove() of the last one has called this
            # PyTorch ends the active kernels before it tries others, and restores none if that fails.
            warnings.warn(
                "minimal_attn.activate() ends here: torch.nn.attention's registry has activated other "
                "kernels, tried to, or restored PyTorch's",
                FallbackWarning,
                stacklevel=4,
            )


_handle: _Handle | None = None  # while the kernels are active
# torch 2.10 has one without the way back.
_registry = torch.nn.attention if hasattr(torch.nn.attention, "restore_flash_attention_impl") else None
if _registry:
    _registry.register_flash_attention_impl(_NAME, register_fn=_Handle)


def _active() -> str | None:
    if _registry:
        return _registry.current_flash_attention_impl()
    return _NAME if _handle else None


def _activate() -> None:
    if _registry:
        _registry.activate_flash_attention_impl(_NAME)
    else:
        _Handle()


def _restore(before: str | None) -> None:
    if _registry:
        _registry.restore_flash_attention_impl()
        if before is not None:
            _registry.activate_flash_attention_impl(before)
    elif _handle:
        _handle.remove()
