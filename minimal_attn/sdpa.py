"""F.scaled_dot_product_attention by these kernels: a function of its signature, and for code that calls it.

    minimal_attn.scaled_dot_product_attention(query, key, value, is_causal=True)

    with minimal_attn.activate() as activation:  # or activate() alone, once and for all
        model(x).sum().backward()                # whatever calls F.scaled_dot_product_attention
    print(activation.calls)                      # {"minimal_attn": 12, "PyTorch: attn_mask is given": 2}

A call that goes to PyTorch's kernels gives a FallbackWarning, once for each reason. strict=True makes it an
error. binding/sdpa.h has the operators that activate() replaces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType

import torch
import torch.nn.attention
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from minimal_attn._backward import has_fast_backward
from minimal_attn._fallback import FallbackWarning, passed_on
from minimal_attn._forward import Explanation, explain, forward
from minimal_attn._load import _C
from minimal_attn._sizes import known

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda") if _C.cuda_architectures() else ("cpu",)
_LARGEST = 3.4e38  # of a scale: float32's
_flash_is_allowed = torch._C._get_flash_sdp_enabled  # torch.backends.cuda's function costs 0.2 us more
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
        attn_mask: passed on to PyTorch, but never to cuDNN's kernel, which gives a row that a bool mask hides
            the softmax over all keys, and NaN for a float32 mask of half types. Other kernels give 0 there.
        dropout_p: passed on to PyTorch unless it is 0.
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
    sdpa_kernel without any of the device's fused kernels: MATH alone has second derivatives.
    """
    served = _served(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(served, str):
        if strict:
            passed_on(f"PyTorch: {served}", strict=True)
        by_pytorch = F.scaled_dot_product_attention if attn_mask is None else _with_mask(query, attn_mask)
        o = by_pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        passed_on(f"PyTorch: {served}")  # not before, since PyTorch may refuse the arguments
        return o
    tensors, shape = served
    o = forward(*tensors, causal=is_causal, offset=0, softmax_scale=scale)
    return o if shape is None else o.reshape(shape)


def _with_mask(query: Tensor, attn_mask: Tensor) -> Callable[..., Tensor]:
    """PyTorch's function, without cuDNN's kernel."""
    if len(_DEVICES) == 1 or not (isinstance(query, Tensor) and isinstance(attn_mask, Tensor)):
        return F.scaled_dot_product_attention
    if query.device.type != "cuda" or has_torch_function_variadic(query, attn_mask):
        return F.scaled_dot_product_attention
    return torch.ops.minimal_attn.by_pytorch


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
    served = _served(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(served, str):
        return f"PyTorch: {served}"
    return explain(*served[0], causal=is_causal, offset=0, softmax_scale=scale)


_Shape = tuple[int, ...]
_UNFIT = "the shapes are empty or don't fit together"


def _served(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | tuple[list[Tensor], _Shape | None]:
    """forward's q, k, v and the result's shape, None for forward's own; or why the call goes to PyTorch.

    Whatever is wrong with the arguments goes there, too, to be refused in PyTorch's words.
    """
    if attn_mask is not None:
        return "attn_mask is given"
    if dropout_p != 0:
        return "dropout_p is not 0"
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return "an argument is no tensor"
    # Dynamo has no hasattr of a SymFloat.
    is_scale = scale is None or isinstance(scale, (int, float)) or hasattr(scale, "__float__")
    if not isinstance(is_causal, bool) or not isinstance(enable_gqa, bool) or not is_scale:
        return "is_causal or enable_gqa is no bool, or scale no number"
    if has_torch_function_variadic(query, key, value):
        return "a tensor's class or a mode overrides PyTorch's functions"
    if not query.layout == key.layout == value.layout == torch.strided:
        return "a tensor is not dense"
    if query.is_nested or key.is_nested or value.is_nested:
        return "a tensor is nested"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        return "the dtype is not float32, float16 or bfloat16"
    device = query.device
    if not device == key.device == value.device or device.type not in _DEVICES:
        return f"the device is not one of {', '.join(_DEVICES)}, which this build serves"
    if not _allows_fused_kernels(device.type):
        return "sdpa_kernel allows no fused kernel"
    wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
    if wants_grad and torch.is_grad_enabled() and not has_fast_backward(query):
        return "gradients are wanted, which PyTorch's kernels compute faster on this GPU"
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in (query, key, value)
    ):
        return "forward-mode derivatives are wanted"
    if scale is not None and not abs(scale) < _LARGEST:
        return "scale is not finite"
    q, k, v = query.shape, key.shape, value.shape
    is_empty = query.numel() == 0, key.numel() == 0, value.numel() == 0
    if min(len(q), len(k), len(v)) < 2 or known(*is_empty, k[-2] != v[-2]):
        return _UNFIT
    if not k[-1] == v[-1] == q[-1] <= 256:
        return "a head dimension above 256, or two different ones"
    tensors = [query, key, value]
    if len(q) == len(k) == 4 and k == v and k[0] == q[0] and k[1] == q[1]:  # slices would cost 0.2 us
        return tensors, None
    return _four_dimensional(tensors, enable_gqa)


def _allows_fused_kernels(device: str) -> bool:
    """Whether torch.nn.attention.sdpa_kernel leaves PyTorch one of the fused kernels that the device has."""
    return _flash_is_allowed() or (
        device == "cuda"
        and (torch.backends.cuda.mem_efficient_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled())
    )


# torch.compile asks while it traces, as it does for PyTorch's function.
_allows_fused_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _four_dimensional(tensors: list[Tensor], enable_gqa: bool) -> str | tuple[list[Tensor], _Shape | None]:
    """Views (B, H, N, d), or copies where strides don't allow them. Heads of keys that broadcast stay one."""
    leading = [t.shape[:-2] for t in tensors]
    if enable_gqa and not all(leading):  # without heads: PyTorch's error
        return _UNFIT
    Hq, Hk, Hv = (shape[-1] if shape else 1 for shape in leading)
    if Hk != Hv and 1 not in (Hk, Hv):
        return _UNFIT
    Hkv = max(Hk, Hv)
    if not enable_gqa and Hq == 1:
        Hq = Hkv
    batch = _broadcast([shape[:-1] for shape in leading])
    if batch is None or Hq % Hkv or not (enable_gqa or Hkv in (1, Hq)):
        return _UNFIT
    if len(batch) == 1 and all(
        shape == (*batch, H) for shape, H in zip(leading, (Hq, Hkv, Hkv), strict=True)
    ):
        return tensors, None
    views = [
        t.expand(*batch, H, *t.shape[-2:]).reshape(-1, H, *t.shape[-2:])
        for t, H in zip(tensors, (Hq, Hkv, Hkv), strict=True)
    ]
    return views, (*batch, *[Hq] * any(leading), *tensors[0].shape[-2:])


def _broadcast(shapes: list[_Shape]) -> _Shape | None:
    """As torch.broadcast_shapes, but None where the shapes don't broadcast."""
    result: _Shape = ()
    for i in range(max(map(len, shapes)), 0, -1):
        sizes = {shape[-i] for shape in shapes if len(shape) >= i} - {1}
        if len(sizes) > 1:
            return None
        result += (sizes.pop() if sizes else 1,)
    return result


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

        "PyTorch chose no fused kernel" are calls that PyTorch computes in separate steps: inputs of 2 or 5
        dimensions (before torch 2.15 also of 3), key heads or batches that broadcast, value heads of another
        size, a last dimension that isn't contiguous, on a CPU dropout, a mask that requires grad.
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
    (masks, dropout, float64, head dimensions above 256 or of two sizes) goes to PyTorch's kernel as before.
    So do gradients that PyTorch computes faster, from this o and log-sum-exp. From torch 2.11 on,
    torch.nn.attention's registry knows it as "minimal_attn": current_flash_attention_impl(),
    restore_flash_attention_impl().

    Where PyTorch has no fused operator it computes in separate steps, which stay its own. So it does on CUDA
    with enable_gqa in float32: repeat the keys' heads, or call minimal_attn.scaled_dot_product_attention.
    Forward-mode derivatives are refused by PyTorch's fused operators, and work with
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
