"""Ring attention: one sequence over several processes, each with its part of the queries, keys and values.

Every rank computes the attention of its own queries. Blocks of keys and values travel around the ring, while
each rank computes with the block that it has (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers for Near-Infinite Context", arXiv:2310.01889). The softmax state (o, l, m) goes from block to
block in float32, so the result has the same digits on any number of ranks.

The sequence is cut into 2n chunks for n ranks, and rank r holds chunks r and 2n - 1 - r ("zigzag"). Under a
causal mask every rank then has the same work at every step (the balance is the aim of striped attention,
Brandon et al., arXiv:2311.09431; this order is the one of Llama 3's context parallelism, arXiv:2407.21783):

    n = 4    chunk   0  1  2  3  4  5  6  7
             rank    0  1  2  3  3  2  1  0

    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = (ring.shard(x, rank, ranks) for x in (q, k, v))
    o = ring.forward(q, k, v, causal=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

import minimal_attn
from minimal_attn._forward import State
from minimal_attn._peers import Peers, RingError, named

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RingError", "forward", "segments", "shard", "unshard"]


# ------------------------------------------------------------------------------------ the zigzag


def segments(N: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Which positions of a sequence of length N belong to a rank: at most two ranges (begin, end), ascending.

    Chunk i of the 2 * ranks is i * N // (2 * ranks) up to (i + 1) * N // (2 * ranks), so lengths differ by at
    most one. Empty chunks are left out; neighbours are one range.
    """
    ends = [i * N // (2 * ranks) for i in range(2 * ranks + 1)]
    last = 2 * ranks - 1 - rank
    if last == rank + 1:
        parts = [(ends[rank], ends[last + 1])]
    else:
        parts = [(ends[rank], ends[rank + 1]), (ends[last], ends[last + 1])]
    return [(begin, end) for begin, end in parts if begin < end]


def shard(x: Tensor, rank: int, ranks: int, dim: int = 2) -> Tensor:
    """The rank's part of a whole sequence: a contiguous copy of x's `segments` along `dim`.

    Position embeddings need the true positions: shard(torch.arange(N), rank, ranks, dim=0).
    """
    parts = [x.narrow(dim, begin, end - begin) for begin, end in segments(x.shape[dim], rank, ranks)]
    return torch.cat(parts or [x.narrow(dim, 0, 0)], dim)


def unshard(shards: Sequence[Tensor], dim: int = 2) -> Tensor:
    """The whole sequence from all ranks' parts, in the order of the ranks: the inverse of `shard`."""
    lengths = [x.shape[dim] for x in shards]
    parts = {}
    for rank, x in enumerate(shards):
        where = segments(sum(lengths), rank, len(shards))
        if lengths[rank] != _length(where):
            raise ValueError(f"shards must have the lengths that ring.shard gives them, but have {lengths}")
        parts |= zip(where, x.split([end - begin for begin, end in where], dim), strict=True)
    return torch.cat([parts[where] for where in sorted(parts)] or list(shards), dim)


def _length(parts: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in parts)


# ------------------------------------------------------------------------------------ the attention


class _Options(TypedDict, total=False):
    """forward's keywords that don't change what it returns."""

    group: dist.ProcessGroup | None
    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    offset: int | None
    timeout: float
    backend: str


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
) -> Tensor | tuple[Tensor, Tensor]:
    """minimal_attn.forward of a sequence that is sharded over the ranks of a process group.

    All ranks of the group call it together, with the same arguments except for the tensors' values and
    lengths. Positions, `causal`, `window_size` and `offset` refer to the whole sequence.

    Args:
        q: this rank's queries (B, Hq, Nq, d), as `shard` cuts them, float32, float16 or bfloat16. Nq may
            differ from rank to rank, and be 0. On a CPU the group needs gloo, on CUDA NCCL (with
            torch.cuda.set_device called first).
        k, v: this rank's keys and values (B, Hkv, Nk, d), cut likewise. Hkv divides Hq. The sequence of keys
            may be longer or shorter than that of the queries.
        group: the process group. None: the default one.
        causal, window_size, softmax_scale, backend: those of minimal_attn.forward.
        offset: position of the whole sequence's query 0 among its keys. None: the last query sees the last
            key.
        return_lse: return the log-sum-exp of the scaled scores, too.
        timeout: seconds that a rank waits for the others: once for their arguments, and once for each block.
            It should exceed the time between the first and the last rank's call.

    Returns:
        o (B, Hq, Nq, d) of this rank's queries, in q's dtype and order of strides. With `return_lse` the
        tuple (o, lse), lse (B, Hq, Nq) float32. A query that sees no key has o = 0, lse = -inf.

    Raises:
        TypeError, ValueError: an argument is wrong on some rank, or differs between ranks. Every rank raises
            the same error, nothing was sent, and the group can be used further.
        RingError: a rank died, stalled or raised another error, or did not call. The ranks that are left
            raise it, mostly at once, at the latest 4 seconds after `timeout`, with the same text if the
            group's store still answers. A rank that has all blocks already returns its result. The group's
            connections are closed.
        RuntimeError: torch.distributed isn't initialised, or an input requires grad while grad mode is on.

    Memory besides the result: two blocks of keys and values, and float32 o, l and m twice.
    """
    if not dist.is_initialized():
        raise RuntimeError("ring.forward needs a process group: call torch.distributed.init_process_group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that has this rank, but was {group!r}")
    peers = Peers(group, timeout if _is_timeout(timeout) else 300.0, isinstance(q, Tensor) and q.is_cuda)
    try:
        mine = _described(q, k, v, group, causal, window_size, softmax_scale, offset, timeout, backend)
    except Exception as error:
        mine = {"error": [type(error).__name__, str(error)]}
    with peers:
        everyone = peers.exchange(mine)
    Nq, Nk = _agreed(everyone)
    with peers, torch.no_grad():
        band = window_size[0], 0 if causal else window_size[1]
        offset = Nk - Nq if offset is None else offset
        o, lse = _around(peers, q, k, v, Nq, Nk, offset, band, softmax_scale=softmax_scale, backend=backend)
    return (o, lse) if return_lse else o


def _is_timeout(x: object) -> bool:
    return isinstance(x, (int, float)) and 0 < x < 1e6


def _described(q, k, v, group, causal, window_size, softmax_scale, offset, timeout, backend) -> dict:
    """What the other ranks must know of this one's arguments. Raises what is wrong with them."""
    if not _is_timeout(timeout):
        raise ValueError(f"timeout must be a positive number of seconds below 1e6, but was {timeout!r}")
    if isinstance(offset, Tensor):
        raise TypeError("offset must be an int or None, but was a tensor")
    mask = dict(causal=causal, window_size=window_size, softmax_scale=softmax_scale, offset=offset)
    minimal_attn.explain(q, k, v, **mask, backend=backend)  # which raises forward's errors
    backends = dist.get_backend_config(group)  # such as cpu:gloo,cuda:nccl
    sender = dict(entry.split(":") for entry in backends.split(",")).get(q.device.type)
    if sender is None or (q.is_cuda and sender == "gloo"):
        needs = "nccl" if q.is_cuda else "gloo"
        raise ValueError(f"group must have {needs} for tensors on {q.device.type}, but has {backends}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError("ring.forward has no backward pass: detach q, k and v, or use torch.no_grad()")
    B, Hq, Nq, d = q.shape
    mine = {"B": B, "Hq": Hq, "Hkv": k.shape[1], "d": d, "q's length": Nq, "k's length": k.shape[2]}
    mine |= {"dtype": str(q.dtype).removeprefix("torch."), "device": q.device.type}
    mine |= {"causal": bool(causal), "window_size": [int(bound) for bound in window_size]}
    mine["softmax_scale"] = None if softmax_scale is None else float(softmax_scale)
    mine["offset"] = None if offset is None else int(offset)
    return mine


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
        values = [its[name] for its in everyone]
        if name in ("q's length", "k's length"):
            N = sum(values)
            cut = [_length(segments(N, rank, ranks)) for rank in range(ranks)]
            if values != cut:
                raise ValueError(f"{name} must be {cut}, as ring.shard cuts {N}, but was {values}")
            totals.append(N)
        elif any(value != values[0] for value in values):
            different = [value for i, value in enumerate(values) if value not in values[:i]]
            where = [named([rank for rank in range(ranks) if values[rank] == value]) for value in different]
            was = " and ".join(f"{value} on {on}" for value, on in zip(different, where, strict=True))
            raise ValueError(f"{name} must be the same on all ranks, but was {was}")
    return totals[0], totals[1]


def _around(peers, q, k, v, Nq, Nk, offset, band, **options) -> tuple[Tensor, Tensor]:
    """o and the log-sum-exp of this rank's queries, after all blocks have come by."""
    # Without a mask positions don't matter, and all queries of the rank are one part.
    parts = [(0, q.shape[2])] if band == (-1, -1) else segments(Nq, peers.rank, peers.ranks)
    sizes = [end - begin for begin, end in parts]
    queries = q.split(sizes, 2) if parts else ()
    states: list[State | None] = [None] * len(parts)
    block = torch.stack((k, v)) if peers.ranks > 1 else (k, v)
    for step in range(peers.ranks):
        source = (peers.rank - step) % peers.ranks  # the rank that the present block came from
        is_last = step == peers.ranks - 1
        if not is_last:
            coming = _length(segments(Nk, (source - 1) % peers.ranks, peers.ranks))
            next_block = k.new_empty(2, *k.shape[:2], coming, k.shape[3])
            peers.start(block, next_block)
        keys = segments(Nk, source, peers.ranks)
        for i, (begin, _) in enumerate(parts):
            states[i] = _attend(queries[i], begin + offset, block, keys, states[i], band, **options)
        if not is_last:
            peers.finish()
            block = next_block
    o, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    for i, state in enumerate(states):
        if state is not None:
            o.split(sizes, 2)[i].copy_(state[0])
            lse.split(sizes, 2)[i].copy_(state[2] + state[1].log())
    return o, lse


def _attend(q, first, block, parts, state, band, **options) -> State | None:
    """The state of the queries at positions first, first + 1, ... after the block's keys, too."""
    left, right = band
    last = first + q.shape[2] - 1
    if all(
        (right == -1 or end - 1 <= first + right) and (left == -1 or begin >= last - left)
        for begin, end in parts
    ):  # every query sees every key, so their order doesn't matter
        return minimal_attn.forward(q, *block, state=state, return_state=True, **options)
    at = 0
    for begin, end in parts:
        k, v = (x[:, :, at : at + end - begin] for x in block)
        at += end - begin
        if (right == -1 or begin <= last + right) and (left == -1 or end - 1 >= first - left):
            mask = dict(window_size=band, offset=first - begin)
            state = minimal_attn.forward(q, k, v, **mask, state=state, return_state=True, **options)
    return state
