"""forward and explain: their signatures, what they document, and the way into the extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from minimal_attn._dropout import draw_seed
from minimal_attn._errors import check_results, clearer, wrong_call, wrong_type
from minimal_attn._load import _C

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack

State = tuple[Tensor, Tensor, Tensor]
# The operator's, behind q, k and v: binding/arguments.h.
_ARGUMENTS = tuple(x.name for x in torch.ops.minimal_attn.forward.default._schema.arguments[3:])


class _Options(TypedDict, total=False):
    """forward's keywords that don't change what it returns."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    seqlens_k: Tensor | None
    leftpad_k: Tensor | None
    offset: int | Tensor | None
    backend: str
    sinks: Tensor | None
    out: Tensor | None
    block_table: Tensor | None
    key_ranges: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    prefix_k: Tensor | None
    seqused_k: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    attn_mask: Tensor | None
    bias: Tensor | None
    dropout_p: float | None
    dropout_seed: Tensor | None


class _AllOptions(_Options, total=False):
    state: State | None
    return_state: bool
    return_lse: bool


_False = Literal[False]
_True = Literal[True]


@overload
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: None = ...,
    return_state: _False = ...,
    return_lse: _False = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, state: State, return_lse: _False = ..., **options: Unpack[_Options]
) -> State: ...
@overload
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: _True,
    state: State | None = ...,
    **options: Unpack[_Options],
) -> State: ...
@overload
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: _True,
    state: State | None = ...,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = ...,
    return_state: bool = ...,
    return_lse: bool = ...,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor] | State: ...
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *surplus: Never,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    offset: int | Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    backend: str = "auto",
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    key_ranges: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prefix_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: Tensor | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor] | State:
    """softmax(softmax_scale * q k^T + mask) v without ever storing the scores (arXiv:2205.14135).

    Args:
        q: queries (B, Hq, Nq, d), float32, float16 or bfloat16, on a CPU or a CUDA GPU. d is 1 to 576;
            Nq and Nk are below 2^28, B and Hq may be 0. flash_attn has (B, N, H, d): pass
            x.transpose(1, 2). Under torch.autocast, q, k and v are cast to its dtype first, as SDPA casts
            them.
        k, v: keys (B, Hkv, Nk, d) and values (B, Hkv, Nk, d_v), of q's dtype and device. d_v, the columns of
            v and o, may be another number than d, in the same limits (DeepSeek: 192 and 128). Hkv divides
            Hq: query head h reads key head h // (Hq // Hkv). Strides may be anything (transposed, sliced,
            expanded); a tensor whose last dimension isn't contiguous is copied once.
        causal: query i sees the keys j <= i + offset. This replaces window_size's right by 0.
        window_size: (left, right): query i sees the keys i + offset - left <= j <= i + offset + right. -1 is
            no bound.
        softmax_scale: any finite float32. None: 1 / sqrt(d).
        seqlens_k: (B,) of an integer dtype on q's device: batch b has only its first seqlens_k[b] keys,
            clamped to 0..Nk. int32 is read as it is, another dtype is converted first.
            **With causal: where q is padded on the right like k and v, give offset=0.** Without it the last
            padding query sees the last key that counts, and real queries see too few keys.
        leftpad_k: (B,) likewise: the keys of batch b begin at leftpad_k[b], clamped likewise. The position of
            a key stays its index.
        offset: position of query 0 among the keys, of any sign: an int, or (B,) of an integer dtype on q's
            device (beyond int32 it counts as the nearest int32). None: the last query sees the last key, so
            it is seqlens_k[b] - Nq, or Nk - Nq without seqlens_k.
        state: (o, l, m) of an earlier call with the same queries and other keys, float32, o (B, Hq, Nq, d_v),
            l and m (B, Hq, Nq). The result covers the keys of both calls. The tensors are not changed.
        return_state: return the state (implied by `state`, unless return_lse is given).
        backend: "auto" takes the fastest that serves the inputs. By name, for tests, benchmarks and readers:
            "cpu", "paper" (flash.cu, Algorithm 1 as printed), "portable" (every GPU since Turing), "hopper"
            (compute capability 9.0, at most 2^30 tiles of 64 queries). For float32, "hopper" allocates
            workspace as large as k and v, with d rounded up to 64, 128 or 256; where d_v is another number,
            "portable"'s kernels compute float32.
        sinks: (Hq,) or (B, Hq), of any floating dtype: one more score a query head, with the value 0, which
            every query sees. It isn't scaled. Not together with `state`: the first call counts it. -inf is
            no sink; +inf, or more than float32 holds, gives NaN, as softmax does.
        return_lse: return the log-sum-exp of the scaled scores, too. Not together with return_state.
        out: where o is written: o's shape, q's dtype and device, the last dimension contiguous, in memory
            apart from all inputs. Not together with return_state, state or return_lse.
        block_table: (B, n) of an integer dtype on q's device: k and v are then pages of a cache, (pages,
            Hkv, page_size, d or d_v), at least one. Keys p * page_size .. of batch b are page
            block_table[b, p], so that Nk is n * page_size. Numbers outside 0..pages - 1 count as the
            nearest page. Behind seqlens_k they may be anything, and so may pages not in use. vLLM and
            flash_attn have (pages, page_size, Hkv, d): pass x.transpose(1, 2). Pages of a multiple of 16
            keys are read in place by "hopper" in half types (not with key_ranges, softcap, alibi_slopes,
            attn_mask, bias, or d or d_v above 256), and where `explain` says a kernel "decode...". Else
            "hopper" and "portable" copy the keys of the whole table first. With cu_seqlens one row has the
            pages of all documents.
        key_ranges: (B, Nq, 2), or (1, Nq, 2) for all batches, of an integer dtype on q's device: of the keys
            that the other arguments leave, query i of batch b sees only begin <= j < end. These are
            key_ranges[b, i], clamped to 0..Nk. Chunks, prefixes and images within text are such ranges. Any
            ranges are right. Those that only grow with i are fast: a tile of queries computes all keys from
            the first to the last one that it sees. With them there is no kernel for few queries yet.
        cu_seqlens_q, cu_seqlens_k: (documents + 1,), of an integer dtype on q's device, both or none: packed
            documents, one behind the other in one batch, q (1, Hq, total_q, d), k and v (1, Hkv, total_k,
            d). Document n has the queries cu_seqlens_q[n] <= i < cu_seqlens_q[n + 1], and the keys
            likewise. causal and window_size hold within it, with its last query at its last key; key_ranges
            count from key 0 of all. Queries of no document see nothing. Keys of none are seen by no query.
            Both may hold anything. Not together with seqlens_k, leftpad_k or offset. Values must never
            decrease, and lie within 0..total: on a CPU this is checked, on a GPU they are clamped. Where
            there are more than twice as many keys as queries, or with seqused_k or a block_table, each
            document is computed by itself (not with what keeps pages from being read in place), by a kernel
            for few queries if it has few. Else kernels are those of key_ranges.
        seqused_k: (documents,) with cu_seqlens_k, likewise: only the first seqused_k[n] keys of document n
            count, and its last query is at the last of them. The others may hold anything. At least 0: on a
            CPU this is checked, on a GPU clamped.
        prefix_k: (B,), or (documents,) with cu_seqlens_q, of an integer dtype on q's device: the first
            prefix_k[b] keys of a batch or document, from leftpad_k on, stay visible when the window has
            passed them (StreamingLLM's attention sinks, global tokens). It widens window_size's left alone;
            all else still hides. No other library has a name for it; a prefix-LM is key_ranges. At least 0:
            on a CPU this is checked, on a GPU clamped. The call then computes the window's keys, and joins
            the first ones with their state: a float32 o costs memory besides.
        softcap: scaled scores s become softcap * tanh(s / softcap), before the mask (Gemma 2, Grok). sinks
            stay as they are. From 1e-30 to 1e30; None or 0: none. In bfloat16 on a GPU tanh has a relative
            error of 2^-11, up to softcap 128. Packed queries over caches are slow with it, and pages are
            copied unless `explain` says "decode".
        alibi_slopes: (Hq,) or (B, Hq), float32, on q's device: the score of query i and key j is less by
            slope * |i + offset - j|, behind a softcap and before the mask (ALiBi, as flash_attn has it). In
            a document i + offset is the query's position in it. Slopes have no gradient. Packed queries
            over caches are slow with them, and pages are copied unless `explain` says "decode". On Hopper
            GPUs "portable"'s kernels compute float32, and calls with softcap besides.
        attn_mask: bool (True: visible), or of q's dtype or float32, which is added to the scores, behind
            softcap and slopes. It broadcasts to (B, Hq, Nq, Nk), with any strides (0, too), and is read
            where it is. What it shows and the other arguments leave is visible: the intersection. With
            cu_seqlens i and j count from the first token of all, with a block_table j from key 0. A row
            whose scores are all -inf sees no key. Keys that it hides may hold any finite number. Of a bool
            mask that all heads share, GPUs compute what lies between the first and the last visible key of a
            query; else all tiles of keys that the other arguments leave. CPUs leave out each tile that is
            hidden as a whole, by -inf, too. What is a range of keys for each query is faster by the
            arguments for it. Kernels are those of alibi_slopes.
        bias: what is added, beside an attn_mask that is bool, likewise. Without such a mask it is the same as
            an attn_mask of its dtype. Both have gradients, but not for bfloat16 on GPUs before compute
            capability 8.0.
        dropout_p: from 0 to 1: each weight softmax(..)ij becomes 0 with this probability, in steps of 2^-16
            (below 1 at most 1 - 2^-15), and the others are divided by 1 - dropout_p, so that o's mean stays.
            l, m and the log-sum-exp are those without. Dropout isn't a state of a module here: pass 0 outside
            of training. On Hopper GPUs "portable"'s kernels compute float32, and calls with softcap besides.
            Packed queries over caches are slow with it.
        dropout_seed: int64, one element, on q's device. None: drawn from PyTorch's generator of the device
            (torch.manual_seed, CUDA graphs, torch.utils.checkpoint and torch.compile hold for it). The seed,
            the batch, the query head, i and j decide whether a weight is dropped, in each backend and in the
            gradients: minimal_attn.dropout_mask says which. i and j count as in attn_mask. Where keys come in
            several calls (`state`), j counts from each call's first key: give each call a seed of its own.

    Returns:
        o (B, Hq, Nq, d_v) in q's dtype and order of strides, or `out`. With `return_lse` the tuple (o,
        lse): lse (B, Hq, Nq), float32, is the natural logarithm of the row sum of exp(score), -inf for a
        row that sees no key. With `return_state` or `state` the tuple (o, l, m), all float32: m (B, Hq, Nq)
        is the row maximum of the scaled scores, l (B, Hq, Nq) the row sum of exp(score - m). The
        log-sum-exp is m + log(l). A row that sees no key has o = 0, l = 0, m = -inf; with sinks l = 1 and m
        = the sink.

    Raises:
        TypeError: an argument of another type.
        ValueError: another shape, dtype, device or value than said above, or two arguments that exclude each
            other.
        RuntimeError: an input requires grad together with `out`, `block_table` or `seqused_k` while grad mode
            is on, or alibi_slopes do, or an input is a dual tensor, or this build has no code for the GPU.
            In each case nothing has been launched.

    Gradients: autograd differentiates o, lse and the state in q, k, v, sinks, `state` and what is added to
    scores (bias or attn_mask). The latter is summed where the bias is broadcast. On Hopper, in half types
    with head dimensions up to 128, that takes up to 4 GB, 2 bytes for each pair of all heads; else no
    memory of Nq x Nk but the gradient's, and on GPUs a pass of its own. Autograd keeps q, k, v, o and the
    log-sum-exp, and calls minimal_attn.backward. m counts as a constant: use l and m as m + log(l), as merge
    and further calls do. There are no second derivatives.
    """
    if unknown or surplus:
        raise wrong_call("forward", "q, k, v", surplus, unknown)
    if return_lse is True or out is not None:
        check_results(state, return_state, return_lse, out)
    if dropout_seed is None and dropout_p is not None:
        dropout_seed = draw_seed(q, dropout_p)
    position, offsets = (None, offset) if isinstance(offset, Tensor) else (offset, None)
    o = l = m = None
    if state is not None:
        o, l, m = _three(state)
    # _ARGUMENTS, in their order
    arguments = (
        *(causal, window_size, softmax_scale, seqlens_k, leftpad_k, position, offsets, backend, key_ranges),
        *(cu_seqlens_q, cu_seqlens_k, prefix_k, softcap, alibi_slopes, attn_mask, bias),
        *(dropout_p, dropout_seed),
        *(o, l, m, sinks, block_table, seqused_k),
    )
    if torch.compiler.is_compiling():  # Dynamo can't look into pybind11, so it gets the operator itself
        operator, options = torch.ops.minimal_attn.forward, dict(zip(_ARGUMENTS, arguments, strict=True))
        if out is not None:
            operator.out(q, k, v, **options, result=out)  # Dynamo has rules of its own for a name of out
            return out
        if return_lse:
            return operator.lse(q, k, v, **options)
        if return_state or state is not None:
            return operator.state(q, k, v, **options)
        return operator.default(q, k, v, **options)
    # A subclass of Tensor, or a TorchFunctionMode. The class torch.Tensor itself has __torch_function__, too.
    if has_torch_function_variadic(q, k, v) and not any(isinstance(x, type) for x in (q, k, v)):
        given = locals()
        given = {x: given[x] for x, default in forward.__kwdefaults__.items() if given[x] is not default}
        return handle_torch_function(forward, (q, k, v), q, k, v, **given)
    try:
        return _C.forward(q, k, v, *arguments, return_state, return_lse, out)
    except (TypeError, NotImplementedError) as error:
        raise clearer(error, forward, locals()) from None


def forward_into(q, k, v, o, l=None, m=None, lse=None, state=None, **options) -> None:
    """forward, for rings: the results go to tensors that the caller has, unchecked: o, l, m, or o and lse."""
    given = _DEFAULTS | dict(zip("olm", state or [None] * 3, strict=True)) | options
    _C.forward_into(q, k, v, *given.values(), o, l, m, lse)


_DEFAULTS = {name: forward.__kwdefaults__.get(name) for name in _ARGUMENTS}


def _three(state):
    if error := wrong_type(forward, {"state": state}):
        raise error
    return state


def autocast_dtype(x):
    """The dtype to which autocast casts on x's device, None where it is off."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast_by_autocast(*tensors):
    """The tensors in autocast's dtype, if it is on for their device: as forward casts q, k and v."""
    dtype, casts = autocast_dtype(tensors[0]), (torch.float32, torch.float16, torch.bfloat16)
    return tensors if dtype is None else tuple(x.to(dtype) if x.dtype in casts else x for x in tensors)


@dataclass(frozen=True)
class Explanation:
    """What a call of `forward` or `backward` does. `print` shows it as text."""

    backend: str  #: the backend taken
    kernel: str  #: which of its kernels, or on the CPU which instructions
    Br: int  #: queries of a tile
    Bc: int  #: keys of a tile
    d: int  #: columns of a tile: the larger of d and d_v, rounded up
    grid: int  #: blocks that are launched; on the CPU, tiles of queries
    threads: int  #: of a block; on the CPU, of the process
    shared_memory: int  #: bytes of a block
    workspace: int  #: bytes in the device's memory, besides the result
    copied: list[str]  #: which of q, k, v are copied first: the backend can't read their strides or pages
    others: dict[str, str]  #: why each other backend isn't taken, also those that this build lacks

    def __str__(self) -> str:
        lines = [
            f"{self.backend}: {self.kernel}, tile {self.Br} x {self.Bc} x {self.d}",
            f"  grid {self.grid}, {self.threads} threads, {self.shared_memory} bytes of shared memory, "
            f"{self.workspace} bytes of workspace",
        ]
        lines += [f"  copied first: {', '.join(self.copied)}"] * bool(self.copied)
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.others.items()])


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *surplus: Never,
    backward: bool = False,
    **options: Unpack[_AllOptions],
) -> Explanation:
    """Which backend, kernel and tile `forward` takes for these arguments, and why not each other one.

    The arguments and their errors are those of `forward`. With backward=True the answer is about the call of
    `backward` that gives the gradients. Nothing is launched, copied or allocated.
    """
    defaults = forward.__kwdefaults__
    unknown = {name: None for name in options if name not in defaults}
    if surplus or unknown:
        raise wrong_call("explain", "q, k, v", surplus, unknown)
    given = dict(q=q, k=k, v=v, backward=backward) | defaults | options
    if error := wrong_type(forward, given) or wrong_type(explain, given):
        raise error
    if given["dropout_p"] and given["dropout_seed"] is None:
        given["dropout_seed"] = q.new_empty((1,), dtype=torch.int64)  # which nothing reads
    returns = [given[name] for name in ("return_state", "return_lse", "out")]
    check_results(given["state"], *returns)
    is_tensor = isinstance(given["offset"], Tensor)
    given |= dict(offset=None, offsets=given["offset"]) if is_tensor else dict(offsets=None)
    given |= zip("olm", given["state"] or [None] * 3, strict=True)
    return Explanation(**_C.explain(q, k, v, *(given[name] for name in _ARGUMENTS), *returns, backward))
