"""Ring attention: one sequence over several processes, each with its part of the queries, keys and values.

Every rank computes the attention of its own queries. Blocks of keys and values travel around the ring, while
each rank computes with the block that it has (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers for Near-Infinite Context", arXiv:2310.01889). The softmax state (o, l, m) goes from block to
block in float32, so the result has the same digits on any number of ranks. In the backward pass the blocks
travel again, and their gradients with them.

The sequence is cut into 2n chunks for n ranks, and rank r holds chunks r and 2n - 1 - r ("zigzag"). Under a
causal mask every rank then has the same work at every step (the balance is the aim of striped attention,
Brandon et al., arXiv:2311.09431; this order is the one of Llama 3's context parallelism, arXiv:2407.21783):

    n = 4    chunk   0  1  2  3  4  5  6  7
             rank    0  1  2  3  3  2  1  0

    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = (ring.shard(x, rank, ranks) for x in (q, k, v))
    o = ring.forward(q, k, v, causal=True)
    o.square().mean().backward()           # on all ranks
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

import minimal_attn
from minimal_attn._forward import cast_by_autocast
from minimal_attn._peers import Disagreement, Peers, RingError, named
from minimal_attn._ring_masks import Mask
from minimal_attn._ring_passes import Ring
from minimal_attn._zigzag import length, segments, shard, unshard

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RingError", "forward", "segments", "shard", "unshard"]


class _Options(TypedDict, total=False):
    """forward's keywords that don't change what it returns."""

    group: dist.ProcessGroup | None
    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    offset: int | None
    timeout: float
    backend: str
    softcap: float | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[_Options]
) -> Tensor: ...
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    offset: int | None = None,
    return_lse: bool = False,
    timeout: float = 300.0,
    backend: str = "auto",
    softcap: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """minimal_attn.forward of a sequence that is sharded over the ranks of a process group.

    All ranks of the group call it together, with the same arguments except for the tensors' values and
    lengths. Positions, `causal`, `window_size` and `offset` refer to the whole sequence. Where q, k or v
    requires grad, all ranks must also run the backward pass together. A rank's loss is its own: the gradients
    are those of the sum of all ranks' losses.

    Args:
        q: this rank's queries (B, Hq, Nq, d), as `shard` cuts them, float32, float16 or bfloat16. Nq may
            differ from rank to rank, and be 0. On a CPU the group needs gloo, on CUDA NCCL (with
            torch.cuda.set_device called first).
        k, v: this rank's keys and values (B, Hkv, Nk, d), cut likewise. Hkv divides Hq. The sequence of keys
            may be longer or shorter than that of the queries.
        group: the process group. None: the default one.
        causal, window_size, softmax_scale, softcap, backend: those of minimal_attn.forward.
        offset: position of the whole sequence's query 0 among its keys. None: the last query sees the last
            key.
        cu_seqlens_q, cu_seqlens_k: packed documents of the whole sequence, as minimal_attn.forward takes
        them:
            (documents + 1,) of an integer dtype on q's device, the same numbers on all ranks. One tensor for
            both says that queries and keys are the same tokens: then blocks that a causal mask hides aren't
            computed. Not together with offset. Compared between ranks on a CPU alone.
        return_lse: return the log-sum-exp of the scaled scores, too.
        timeout: seconds that a rank waits for the others: once for their arguments, and once for each block,
            in both passes. It should exceed the time between the first and the last rank's call.

    Returns:
        o (B, Hq, Nq, d) of this rank's queries, in q's dtype and order of strides. With `return_lse` the
        tuple (o, lse), lse (B, Hq, Nq) float32. A query that sees no key has o = 0, lse = -inf.

    Raises:
        TypeError, ValueError: an argument is wrong on some rank, or differs between ranks. Every rank raises
            the same error, nothing was sent, and the group can be used further.
        RingError: a rank died, stalled or raised another error, or did not call, in either pass. The ranks
            that remain raise it, mostly at once, at the latest 4 seconds after `timeout`, with the same text
            if the group's store still answers. A rank that has all blocks already returns its result. The
            group's connections are closed.
        RuntimeError: torch.distributed isn't initialised, or a gradient is differentiated.

    Memory besides the result: up to three blocks of keys and values, and float32 o, l and m twice. The
    backward pass takes three such blocks, float32 gradients of three, and dq twice, with more than two ranks
    three times. Saved are q, k, v, o and lse.

    On GPUs a CUDA graph may capture the call, in both passes, behind a first call: all ranks capture and
    replay it together. A replay compares no arguments, and waits for a lost rank without end.
    """
    if not dist.is_initialized():
        raise RuntimeError("ring.forward needs a process group: call torch.distributed.init_process_group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that has this rank, but was {group!r}")
    limit = timeout if _is_timeout(timeout) else 300.0
    peers = Peers(group, limit, isinstance(q, Tensor) and q.is_cuda, "ring.forward")
    scores = dict(softmax_scale=softmax_scale, softcap=softcap or None)
    documents = None if cu_seqlens_q is cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    others = group, causal, window_size, scores, offset, timeout, backend, documents
    try:
        if all(isinstance(x, Tensor) for x in (q, k, v)):
            q, k, v = (x.resolve_neg() for x in cast_by_autocast(q, k, v))
        key = _key(q, k, v, *others)
        known = _agreements.get(group)
        known = known if known and key and known.key == key else None
        mine = known.mine if known else _described(q, k, v, *others)
    except Exception as error:
        key, known, mine = None, None, {"error": [type(error).__name__, str(error)]}
    greeted = peers.greet(known.greeting if known else None)

    def compute(agreement: _Agreement, agree: Callable[[], None]) -> Tensor | tuple[Tensor, Tensor]:
        mask = dataclasses.replace(agreement.mask, documents=documents) if documents else agreement.mask
        options = dict(softmax_scale=softmax_scale, softcap=softcap, backend=backend)
        o, lse = _compute(q, k, v, Ring(peers, mask, options, agreement.parts), agree)
        return (o, lse) if return_lse else o

    def as_before() -> None:
        if not greeted():
            raise Disagreement

    with contextlib.suppress(Disagreement):
        if known:
            if not peers.is_cuda:
                with peers:
                    as_before()
            # A GPU can begin while the ranks still talk.
            return compute(known, as_before if peers.is_cuda else lambda: None)
        with peers:
            as_before()
    with peers:
        everyone = peers.exchange({"call": peers.call, **mine})
    Nq, Nk = _agreed(everyone)
    if documents and not peers.is_cuda:
        _check_ends(documents, Nq, Nk)
    band = window_size[0], 0 if causal else window_size[1]
    position = 0 if documents else Nk - Nq if offset is None else offset
    agreement = _Agreement(key, mine, _greeting(everyone), Mask(Nq, Nk, position, band, None, peers.ranks))
    if key:
        _agreements[group] = agreement
    return compute(agreement, lambda: None)


def _greeting(said: object) -> int:
    """A number below 2^40 for what was said."""
    return int.from_bytes(hashlib.blake2b(json.dumps(said).encode(), digest_size=5).digest(), "little")


@dataclasses.dataclass
class _Agreement:
    """A group's last call: what decides whether another is like it, and what followed from it."""

    key: tuple | None
    mine: dict
    greeting: int
    mask: Mask  # without the documents, whose numbers change
    parts: dict = dataclasses.field(default_factory=dict)


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreement] = weakref.WeakKeyDictionary()


def _key(q, k, v, group, causal, window_size, scores, offset, timeout, backend, documents) -> tuple | None:
    """All that `_described` looks at, if it can be compared: then a call is like another one."""
    tensors = q, k, v, *(documents or ())
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors):
        return None
    if not isinstance(window_size, (tuple, list)):
        return None
    plain = (*window_size, *scores.values(), causal, offset, timeout, backend)
    if any(type(x) not in (int, float, bool, str, type(None)) for x in plain):
        return None
    is_one = documents and documents[0] is documents[1]
    seen = ((x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad) for x in tensors)
    return torch.is_grad_enabled(), is_one, *plain, *seen


def _compute(q: Tensor, k: Tensor, v: Tensor, ring: Ring, agree: Callable[[], None]) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _RingAttention.apply(q, k, v, ring, agree)
    with torch.no_grad(), ring.peers:
        return ring.forward(q, k, v, agree)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, agree):
        with ring.peers:
            o, lse = ring.forward(q, k, v, agree)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse):
        last = ctx.ring.peers
        peers = Peers(last.group, last.timeout, last.is_cuda, "ring.forward's backward pass")
        said = {"call": peers.call}
        with peers:
            everyone = [said] if peers.greet(_greeting(said))() else peers.exchange(said)
        _check_same(everyone, "call")
        with peers:
            ring = dataclasses.replace(ctx.ring, peers=peers)
            return *ring.backward(do, dlse, *ctx.saved_tensors), None, None


def _is_timeout(x: object) -> bool:
    return isinstance(x, (int, float)) and 0 < x < 1e6


def _described(q, k, v, group, causal, window_size, scores, offset, timeout, backend, documents) -> dict:
    """What the other ranks must know of this one's arguments. Raises what is wrong with them."""
    if not _is_timeout(timeout):
        raise ValueError(f"timeout must be a positive number of seconds below 1e6, but was {timeout!r}")
    if isinstance(offset, Tensor):
        raise TypeError("offset must be an int or None, but was a tensor")
    mask = dict(causal=causal, window_size=window_size, offset=offset)
    minimal_attn.explain(q, k, v, **mask, **scores, backend=backend)  # which raises forward's errors
    if documents:
        _check_documents(q, *documents, offset)
    backends = dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    sender = dict(entry.split(":") for entry in backends.split(",")).get(q.device.type)
    if sender is None or (q.is_cuda and sender == "gloo"):
        needs = "nccl" if q.is_cuda else "gloo"
        raise ValueError(f"group must have {needs} for tensors on {q.device.type}, but has {backends}")
    B, Hq, Nq, d = q.shape
    mine = {"B": B, "Hq": Hq, "Hkv": k.shape[1], "d": d, "q's length": Nq, "k's length": k.shape[2]}
    mine |= {"dtype": str(q.dtype).removeprefix("torch."), "device": q.device.type}
    mine |= {"causal": bool(causal), "window_size": [int(bound) for bound in window_size]}
    mine |= {name: None if x is None else float(x) for name, x in scores.items()}
    mine["offset"] = None if offset is None else int(offset)
    if documents:
        mine["documents"] = len(documents[0]) - 1
        if not q.is_cuda:
            mine["cu_seqlens"] = [zlib.crc32(x.long().numpy().tobytes()) for x in documents]
    mine["requires_grad"] = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return mine


def _check_documents(q: Tensor, cu_q: Tensor, cu_k: Tensor, offset: int | None) -> None:
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor where the other one is given, but was {x!r}")
        if x.dim() != 1 or len(x) < 2 or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            what = f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
            raise ValueError(f"{name} must have shape (documents + 1,) and an integer dtype, but was {what}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, but is on {x.device}")
        if not x.is_cuda and bool((x.diff() < 0).any() or x[0] < 0):
            raise ValueError(f"{name} must be at least 0 and never decrease, but was {x.tolist()[:8]}")
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's length {len(cu_q)}, but has {len(cu_k)}")
    if q.shape[0] != 1:
        raise ValueError(f"q must have one batch with cu_seqlens, but has {q.shape[0]}")
    if offset is not None:
        raise ValueError(f"offset must be None with cu_seqlens, but was {offset}")


def _check_ends(documents: tuple[Tensor, Tensor], Nq: int, Nk: int) -> None:
    for name, x, N in zip(("cu_seqlens_q", "cu_seqlens_k"), documents, (Nq, Nk), strict=True):
        if x[-1] > N:
            raise ValueError(f"{name} must end at the whole length {N} or before, but ends at {int(x[-1])}")


def _agreed(everyone: list[dict]) -> tuple[int, int]:
    """The lengths of the whole sequences of queries and keys, or the error that every rank raises."""
    ranks = len(everyone)
    for rank, its in enumerate(everyone):
        if "error" in its:
            kind, text = its["error"]
            error = {"TypeError": TypeError, "ValueError": ValueError}.get(kind, RuntimeError)
            raise error(f"rank {rank}: {text}" if ranks > 1 else text)
    totals = []
    for name in everyone[0]:
        if name in ("q's length", "k's length"):
            values = [its[name] for its in everyone]
            N = sum(values)
            cut = [length(segments(N, rank, ranks)) for rank in range(ranks)]
            if values != cut:
                raise ValueError(f"{name} must be {cut}, as ring.shard cuts {N}, but was {values}")
            totals.append(N)
        else:
            _check_same(everyone, name)
    return totals[0], totals[1]


def _check_same(everyone: list[dict], name: str) -> None:
    values = [its[name] for its in everyone]
    if any(value != values[0] for value in values):
        different = [value for i, value in enumerate(values) if value not in values[:i]]
        where = [named([rank for rank, its in enumerate(values) if its == value]) for value in different]
        was = " and ".join(f"{value} on {on}" for value, on in zip(different, where, strict=True))
        raise ValueError(f"{name} must be the same on all ranks, but was {was}")
