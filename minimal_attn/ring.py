"""Ring attention: one sequence over several processes, each with its part of the queries, keys and values.

Every rank computes the attention of its own queries. Blocks of keys and values travel around the ring, while
each rank computes with the block that it has (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers for Near-Infinite Context", arXiv:2310.01889). The softmax state (o, l, m) goes from block to
block in float32, so merging blocks costs no digits. In the backward pass the blocks
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
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

from minimal_attn._forward import cast_by_autocast
from minimal_attn._peers import Disagreement, Peers, RingError
from minimal_attn._ring_arguments import (
    Agreement,
    Arguments,
    check_same,
    fingerprint,
    in_words,
    is_timeout,
    raise_errors,
    totals,
)
from minimal_attn._ring_passes import Ring
from minimal_attn._zigzag import segments, shard, unshard

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

    All ranks of the group call it together, with the same arguments but for `backend`, `timeout`, the
    tensors' values and lengths. Positions, `causal`, `window_size` and `offset` refer to the whole sequence.
    Where q, k or v requires grad, all ranks must also run the backward pass together. A rank's loss is its
    own: the gradients are those of the sum of all ranks' losses.

    Args:
        q: this rank's queries (B, Hq, Nq, d), as `shard` cuts them, float32, float16 or bfloat16. Nq may
            differ from rank to rank, and be 0. On a CPU the group needs gloo, on CUDA NCCL (with
            torch.cuda.set_device called first).
        k, v: this rank's keys and values, both (B, Hkv, Nk, d), cut likewise. Hkv divides Hq. The sequence
            of keys may be longer or shorter than that of the queries.
        group: the process group. None: the default one.
        causal, window_size, softmax_scale, softcap, backend: those of minimal_attn.forward.
        offset: position of the whole sequence's query 0 among its keys. None: the last query sees the last
            key.
        cu_seqlens_q, cu_seqlens_k: packed documents of the whole sequence, as in minimal_attn.forward:
            (documents + 1,) of an integer dtype on q's device, with the same numbers on all ranks (compared
            on a CPU alone). One tensor for both says that queries and keys are the same tokens: then blocks
            that a causal mask hides aren't computed. Not together with offset.
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

    Memory besides the result: up to three blocks of keys and values, a copy of the own ones where they aren't
    contiguous, and float32 o, l and m twice. The backward pass takes such blocks, too, float32 gradients of
    three, and dq twice, with more than two ranks three times. Saved are q, k, v, o and lse.

    On GPUs a CUDA graph may capture the call, in both passes, after a first call: all ranks capture and
    replay it together. A replay compares no arguments, and waits for a lost rank without end.
    """
    if not dist.is_initialized():
        raise RuntimeError("ring.forward needs a process group: call torch.distributed.init_process_group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        was = repr(group).splitlines()[0]
        raise ValueError(f"group must be a process group that has this rank, but was {was}")
    limit = timeout if is_timeout(timeout) else 300.0
    peers = Peers(group, limit, isinstance(q, Tensor) and q.is_cuda, "ring.forward")
    agreements = _agreements.setdefault(group, {})
    known = key = arguments = None
    try:
        if all(isinstance(x, Tensor) for x in (q, k, v)):
            q, k, v = map(_plain, cast_by_autocast(q, k, v))
        mask = dict(causal=causal, window_size=window_size, offset=offset)
        mask |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        scores = dict(softmax_scale=softmax_scale, softcap=softcap)
        arguments = Arguments(q, k, v, group, timeout=timeout, backend=backend, **mask, **scores)
        key = arguments.key()
        known = agreements.get(key)
        mine = None if known else arguments.described()
    except Exception as error:
        mine = in_words(error)
    is_same = peers.handshake(known.fingerprint if known else None)

    def compute(agreement: Agreement, agree: Callable[[], bool] | None = None):
        mask = agreement.mask
        if arguments.documents:
            mask = dataclasses.replace(mask, documents=arguments.documents)
        options = dict(scores, backend=backend)
        o, lse = _compute(q, k, v, Ring(peers, mask, options, agreement.parts), agree)
        return (o, lse) if return_lse else o

    if known and peers.is_cuda:  # a GPU can begin while the ranks still talk
        with contextlib.suppress(Disagreement):
            return compute(known, is_same)
    else:
        with peers:
            all_known = is_same()
        if known and all_known:
            return compute(known)
    with peers:
        everyone = peers.exchange({"call": peers.call, **(mine or arguments.described())})
    lengths = totals(everyone)
    agreement = arguments.agreed(everyone, *lengths)
    if len(agreements) == 64:  # kinds of layers in a model; lengths that change take one each
        agreements.clear()
    if key:
        agreements[key] = agreement
    return compute(agreement)


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Agreement]]
_agreements = weakref.WeakKeyDictionary()


def _compute(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring, agree: Callable[[], bool] | None
) -> tuple[Tensor, Tensor]:
    q, k, v = (x if x.stride(3) == 1 or x.size(3) == 1 else x.contiguous() for x in (q, k, v))
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
        said: dict = {"call": peers.call, "number of the forward call": last.number}
        number = fingerprint(said)
        try:
            tensors, do, dlse = ctx.saved_tensors, _plain(do), _plain(dlse)
        except Exception as error:  # a saved tensor has been changed in place
            number, said = None, said | in_words(error)
        with peers:
            everyone = [said] if peers.handshake(number)() else peers.exchange(said)
        raise_errors(everyone)
        for name in said:
            check_same(everyone, name)
        with peers:
            ring = dataclasses.replace(ctx.ring, peers=peers)
            return *ring.backward(do, dlse, *tensors), None, None


def _plain(x: Tensor) -> Tensor:
    """x with numbers in memory as they are: kernels are called past the dispatcher."""
    return x.clone() if x._is_zerotensor() else x.resolve_neg()
