"""The two passes around a ring: blocks of keys and values travel, and in the second their gradients, too.

On a GPU transfers have a stream of their own, and the host queues all before it waits. An attention kernel
takes all multiprocessors, so a transfer that becomes ready while one runs begins when that one ends, beside
the next kernel. A transfer that becomes ready together with a kernel might wait for it. So the own block is
computed in two parts, and there is room for more blocks than two:

    forward      own     | own | step 1 | ...         backward     own | own | step 1 | step 2 | own
    transfers            | block 1 | block 2          transfers        | block 1 | block 2 | gradients
                 ^ meanwhile the ranks compare their arguments
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minimal_attn._backward import backward_into
from minimal_attn._forward import State, forward_into
from minimal_attn._peers import Disagreement, Peers, Transfer
from minimal_attn._ring_masks import Mask, Part
from minimal_attn._zigzag import length, segments

BUFFERS = 3  # for blocks of other ranks: one is computed with, one has come, one is coming


@dataclass
class Ring:
    """One call, seen from a rank. At step s it has the block of the rank that is s places before it."""

    peers: Peers
    mask: Mask
    options: dict  # of minimal_attn.forward and backward
    parts: dict[tuple[int, int], Part | None] = field(default_factory=dict)
    key_ranges: dict[int, Tensor] = field(default_factory=dict)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, agree: Callable[[], bool] | None = None):
        """o and the log-sum-exp of this rank's queries, after all blocks have come by.

        `agree` waits for the other ranks, and says whether their arguments are what this call relies on.
        """
        states, blocks = _States(self, q), _Blocks(self, k, v)
        own = self._calls(states, 0, q, blocks)
        _run(own[:-1])
        if agree and not agree():
            raise Disagreement
        blocks.start(1)
        _run(own[-1:])
        for step in range(1, self.peers.ranks):
            blocks.wait(step)
            blocks.start(step + 1)
            _run(self._calls(states, step, q, blocks))
            blocks.release(step)
        results = states.results()
        self.peers.finish()
        return results

    def backward(self, do, dlse, q, k, v, o, lse) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of this rank's q, k and v, summed in float32.

        The sum of a block's gradients follows it, one step later: it grows while the block travels from rank
        to rank, and comes home in the end. What the own queries add to the own block stays here.
        """
        rows = do.contiguous() if 0 in do.stride() else do, q, o, lse, dlse  # one copy for all steps
        blocks, gradients = _Blocks(self, k, v), _Gradients(self, q, k)
        own = self._gradient_calls(rows, gradients.own, 0, blocks)
        _run(own[:-2])
        blocks.start(1)
        _run(own[-2:-1])
        for step in range(1, self.peers.ranks):
            blocks.wait(step)
            blocks.start(step + 1)
            found = gradients.of_step(step)
            _run(self._gradient_calls(rows, found, step, blocks))
            blocks.release(step)
            gradients.add(step, found)
        _run(own[-1:])
        gradients.wait()
        results = gradients.results()
        self.peers.finish()
        return results

    def part(self, step: int) -> Part | None:
        return self._part_of(self.peers.rank, self.owner(step))

    def _part_of(self, rank: int, owner: int) -> Part | None:
        if (rank, owner) not in self.parts:
            self.parts[rank, owner] = self.mask.part(rank, owner)
        return self.parts[rank, owner]

    def owner(self, step: int) -> int:
        return (self.peers.rank - step) % self.peers.ranks

    def block_length(self, owner: int) -> int:
        return length(segments(self.mask.Nk, owner, self.peers.ranks))

    def is_seen(self, owner: int, steps: range) -> bool:
        """Whether a rank that has the block of `owner` at one of the steps sees one of its keys."""
        return any(self._part_of((owner + step) % self.peers.ranks, owner) for step in steps)

    def _calls(self, states: _States, step: int, q: Tensor, blocks: _Blocks) -> list[Callable[[], None]]:
        """What computes a step's block: one call; for the own block two, the larger one first."""
        if (part := self.part(step)) is None:
            return []
        earlier, results = states.of_step(step)
        q, k, v = _taken(q, part.rows), *(_taken(x, part.keys) for x in blocks[step])
        options = dict(self._mask_of(part, step, q.device), **self.options, state=earlier)

        def call(of_q, of_k):
            some = {name: _narrowed(x, of_q) for name, x in results.items()}
            forward_into(_narrowed(q, of_q), _narrowed(k, of_k), _narrowed(v, of_k), **some, **options)

        return self._in_slices(call, q, k, step, (0.75, 1))

    def _gradient_calls(self, rows, found, step: int, blocks: _Blocks) -> list[Callable[[], None]]:
        """Likewise, own in three. `rows` are do, q, o, lse, dlse; `found` dq of the step's rows, dk, dv."""
        if (part := self.part(step)) is None:
            return []
        do, q, o, lse, dlse = (_taken(x, part.rows) for x in rows)
        dq, (k, v, dk, dv) = found[0], (_taken(x, part.keys) for x in (*blocks[step], *found[1:]))
        options = dict(self._mask_of(part, step, q.device), **self.options)

        def call(of_q, of_k):
            of_rows = [_narrowed(x, of_q) for x in (do, q, o, lse, dlse, dq)]
            of_keys = [_narrowed(x, of_k) for x in (k, v, dk, dv)]
            do_, q_, o_, lse_, dlse_, dq_ = of_rows
            k_, v_, dk_, dv_ = of_keys
            backward_into(do_, q_, k_, v_, o_, lse_, dlse_, dq=dq_, dk=dk_, dv=dv_, **options)

        return self._in_slices(call, q, k, step, (0.25, 0.5, 1))

    def _in_slices(self, call, q: Tensor, k: Tensor, step: int, ends: tuple[float, ...]) -> list:
        """One call, or one for each slice of the own block where there are transfers to hide on a GPU."""
        if step > 0 or self.peers.ranks == 1 or not q.is_cuda:
            return [lambda: call(None, None)]
        return [functools.partial(call, *some) if some else _nothing for some in slices_of_heads(q, k, ends)]

    def _mask_of(self, part: Part, step: int, device: torch.device) -> dict:
        """The part's mask as arguments of minimal_attn.forward."""
        if part.band is not None:
            return part.band
        if step not in self.key_ranges:
            self.key_ranges[step] = self.mask.key_ranges(part, device)
        return dict(key_ranges=self.key_ranges[step])


def _run(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _nothing() -> None:
    pass


def slices_of_heads(q: Tensor, k: Tensor, ends: tuple[float, ...]) -> list[tuple | None]:
    """The heads of q and of k for each of some calls, or the batches, as Tensor.narrow takes them.

    `ends` are shares of all, ascending. No slice is larger than it must be for the last one to have a head.
    """
    dim, begin, slices = 0 if q.shape[0] > 1 else 1, 0, []
    count, group = k.shape[dim], q.shape[dim] // max(k.shape[dim], 1)
    for end in ends:
        stop = count if end == 1 else min(max(round(end * count), 1), count - 1)
        some = (dim, begin * group, (stop - begin) * group), (dim, begin, stop - begin)
        slices.append(some if begin < stop else None)
        begin = max(begin, stop)
    return slices


def _narrowed(x: Tensor, some: tuple[int, int, int] | None) -> Tensor:
    return x if some is None else x.narrow(*some)


def _taken(x: Tensor, some: slice) -> Tensor:
    return x if _is_all(some, x) else x[:, :, some]


class _Blocks:
    """The blocks of keys and values as they come by: blocks[step]."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor):
        self.ring, self.peers, self.shape = ring, ring.peers, k.shape
        ranks = ring.peers.ranks
        self.blocks = {0: (k.contiguous(), v.contiguous()) if ranks > 1 else (k, v)}
        longest = max(ring.block_length(owner) for owner in range(ranks))
        numbers = k.shape[0] * k.shape[1] * longest * k.shape[3]
        self.buffers = [k.new_empty(2, numbers) for _ in range(min(BUFFERS, ranks - 1))]
        self.transfers: dict[int, Transfer] = {}
        self.ready = ring.peers.event()  # after the buffers: their memory may be in use until now
        self.read: dict[int, torch.cuda.Event | None] = {}

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self.blocks[step]

    def start(self, step: int) -> None:
        """Begins to send the block of the last step, and to receive that of this one.

        A block that no rank will need any more goes as an empty tensor: NCCL needs all ranks.
        """
        ring, ranks = self.ring, self.peers.ranks
        if step >= ranks:
            return
        going, coming = self.blocks[step - 1], self._buffer(step)
        if not ring.is_seen(ring.owner(step - 1), range(step, ranks)):
            going = [x[:0] for x in going]
        self.blocks[step] = coming
        events = self.ready, self.read.get(step - BUFFERS)
        self.transfers[step] = self.peers.start(list(zip(going, coming, strict=True)), *events)

    def wait(self, step: int) -> None:
        self.peers.wait(self.transfers.pop(step))

    def release(self, step: int) -> None:
        """The step's kernels are queued: the block before it is needed no more, and its own buffer soon."""
        self.read[step] = self.peers.event()
        del self.blocks[step - 1]

    def _buffer(self, step: int) -> tuple[Tensor, Tensor]:
        ring, ranks, (B, Hkv, _, d) = self.ring, self.peers.ranks, self.shape
        owner = ring.owner(step)
        N = ring.block_length(owner) if ring.is_seen(owner, range(step, ranks)) else 0
        k, v = (x[: B * Hkv * N * d].view(B, Hkv, N, d) for x in self.buffers[(step - 1) % BUFFERS])
        return k, v


class _States:
    """The softmax states of this rank's queries: of all, or of a chunk by itself. The last call gives o and
    lse.
    """

    def __init__(self, ring: Ring, q: Tensor):
        parts = (ring.part(step) for step in range(ring.peers.ranks))
        self.q, self.rows = q, [None if part is None else part.rows for part in parts]
        self.found: dict[tuple[int, int], State] = {}
        self.ended: set[tuple[int, int]] = set()  # the rows of which o and lse are written

    @functools.cached_property
    def last(self) -> tuple[Tensor, Tensor]:
        """o and lse of all rows. The first kernel doesn't need them, and needn't wait for the host to make
        them.
        """
        return torch.empty_like(self.q), self.q.new_empty(self.q.shape[:3], dtype=torch.float32)

    def of_step(self, step: int) -> tuple[State | None, dict[str, Tensor]]:
        """The earlier state of a step's rows, and where its results go."""
        rows = self.rows[step]
        earlier = self._earlier(rows)
        if not any(later and _overlap(rows, later) for later in self.rows[step + 1 :]):
            self.ended.add((rows.start, rows.stop))
            return earlier, {name: _taken(x, rows) for name, x in zip(("o", "lse"), self.last, strict=True)}
        o = torch.empty_like(_taken(self.q, rows), dtype=torch.float32)
        l, m = o.new_empty(o.shape[:3]), o.new_empty(o.shape[:3])
        self.found[rows.start, rows.stop] = o, l, m
        return earlier, dict(o=o, l=l, m=m)

    def _earlier(self, rows: slice) -> State | None:
        """The state of these rows, or None; what other rows have stays."""
        inside = {}
        for (begin, end), state in list(self.found.items()):
            first, last = max(begin, rows.start), min(end, rows.stop)
            if first >= last:
                continue
            del self.found[begin, end]
            for at, stop, to in (begin, first, self.found), (first, last, inside), (last, end, self.found):
                if at < stop:
                    to[at, stop] = tuple(x[:, :, at - begin : stop - begin] for x in state)
        if not inside:
            return None
        pieces = [inside.get(gap) or self._empty(*gap) for gap in _pieces_and_gaps(inside, rows)]
        return pieces[0] if len(pieces) == 1 else tuple(torch.cat(x, 2) for x in zip(*pieces, strict=True))

    def _empty(self, begin: int, end: int) -> State:
        """The state of rows that have seen no key."""
        o = torch.zeros_like(self.q[:, :, begin:end], dtype=torch.float32)
        return o, o.new_zeros(o.shape[:3]), o.new_full(o.shape[:3], -torch.inf)

    def results(self) -> tuple[Tensor, Tensor]:
        o, lse = self.last
        for begin, end in _pieces_and_gaps({*self.found, *self.ended}, slice(0, self.q.shape[2])):
            if (begin, end) not in self.ended:
                state_o, l, m = self.found.get((begin, end)) or self._empty(begin, end)
                o[:, :, begin:end], lse[:, :, begin:end] = state_o, m + l.log()
        return o, lse


class _Gradients:
    """Sums in float32: what the own block adds, dq of all others, and dk and dv of the block here."""

    def __init__(self, ring: Ring, q: Tensor, k: Tensor):
        self.ring, self.peers, self.q, self.k = ring, ring.peers, q, k
        part, is_alone = ring.part(0), ring.peers.ranks == 1
        sees_all = part and _is_all(part.rows, q) and _is_all(part.keys, k)
        new = torch.empty_like if sees_all else torch.zeros_like
        self.dq, *self.dk_dv = (new(x, dtype=x.dtype if is_alone else torch.float32) for x in (q, k, k))
        self.own = part and (self.dq[:, :, part.rows], *self.dk_dv)
        self.of_rows: dict[tuple[int, int], Tensor] = {}
        self.coming: list[Tensor] = []
        self.transfer: Transfer | None = None

    def of_step(self, step: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where a step's gradients go: dq of its rows, dk and dv of the whole block."""
        if (part := self.ring.part(step)) is None:
            return None
        dq = torch.empty_like(self.q[:, :, part.rows], dtype=torch.float32)
        dk, dv = self._of_block(self.ring.owner(step))
        if not _is_all(part.keys, dk):
            dk.zero_(), dv.zero_()
        return dq, dk, dv

    def add(self, step: int, found: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Adds what came with the block to a step's gradients, and begins to send the sum on."""
        ring, total = self.ring, found[1:] if found else self.coming
        if step > 1:
            self.wait()
            if found and self.coming[0].numel():
                for x, more in zip(total, self.coming, strict=True):
                    x.add_(more)
        came_by = range(1, step + 1)
        if not total:
            total = self._of_block(None)
        owner = ring.owner(step + 1)
        self.coming = self._of_block(owner if ring.is_seen(owner, came_by) else None)
        self.transfer = self.peers.start(list(zip(total, self.coming, strict=True)), self.peers.event())
        if found:  # beside the transfer
            rows = ring.part(step).rows
            dq = self.of_rows.setdefault((rows.start, rows.stop), found[0])
            if dq is not found[0]:
                dq.add_(found[0])

    def wait(self) -> None:
        """For the sum that comes with, or after, the block that this rank has next."""
        if self.transfer:
            self.peers.wait(self.transfer)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        pieces = list(self.of_rows.items())
        for (begin, end), more in pieces[:-1]:
            self.dq[:, :, begin:end] += more
        coming = self.coming if self.coming and self.coming[0].numel() else [None, None]
        dk_dv = (_sum(own, more, self.k.dtype) for own, more in zip(self.dk_dv, coming, strict=True))
        (begin, end), more = pieces[-1] if pieces else ((0, 0), None)
        return _sum(self.dq, more, self.q.dtype, begin, end), *dk_dv

    def _of_block(self, owner: int | None) -> list[Tensor]:
        B, Hkv, _, d = self.k.shape
        N = 0 if owner is None else self.ring.block_length(owner)
        return [self.k.new_empty(B, Hkv, N, d, dtype=torch.float32) for _ in "kv"]


def _overlap(one: slice, other: slice) -> bool:
    return one.start < other.stop and other.start < one.stop


def _is_all(some: slice, x: Tensor) -> bool:
    return some.stop - some.start == x.shape[2]


def _pieces_and_gaps(pieces: Iterable[tuple[int, int]], rows: slice) -> list[tuple[int, int]]:
    """The pieces, which lie within the rows, and the gaps between them, in order."""
    ends = sorted({rows.start, rows.stop, *(end for piece in pieces for end in piece)})
    return list(zip(ends, ends[1:], strict=False))


def _sum(
    x: Tensor, more: Tensor | None, dtype: torch.dtype, begin: int = 0, end: int | None = None
) -> Tensor:
    """x in a dtype, with `more` added to the rows from `begin` to `end`."""
    if more is None:
        return x.to(dtype)
    result, end = torch.empty_like(x, dtype=dtype), x.shape[2] if end is None else end
    for some in slice(0, begin), slice(end, None):
        result[:, :, some] = x[:, :, some]
    torch.add(x[:, :, begin:end], more, out=result[:, :, begin:end])
    return result
