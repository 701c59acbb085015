"""The two passes around a ring: blocks of keys and values travel, and in the second their gradients, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import minimal_attn
from minimal_attn._forward import State
from minimal_attn._peers import Peers
from minimal_attn._zigzag import length, segments


@dataclass
class Ring:
    """One call, seen from a rank: its peers, and where the queries and keys of all ranks are.

    Query i of the whole sequence is at position i + offset among the Nk keys. With band = (left, right) it
    sees the keys from `left` before this position to `right` behind it; -1 is no bound.
    """

    peers: Peers
    Nq: int
    Nk: int
    offset: int
    band: tuple[int, int]
    options: dict  # of minimal_attn.forward and backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """o and the log-sum-exp of this rank's queries, after all blocks have come by."""
        parts = self._parts(q)
        states: list[State | None] = [None] * len(parts)
        block = self._own_block(k, v)
        for step in range(self.peers.ranks):
            next_block = self._next_block(block, step)
            self.peers.start([(block, next_block)])
            for i, (rows, first) in enumerate(parts):
                for keys, mask in self._seen(rows, first, step):
                    tensors = q[:, :, rows], *(x[:, :, keys] for x in block)
                    options = dict(mask, **self.options, state=states[i], return_state=True)
                    states[i] = minimal_attn.forward(*tensors, **options)
            self.peers.finish()
            block = next_block
        o, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for (rows, _), state in zip(parts, states, strict=True):
            if state is not None:
                o[:, :, rows] = state[0]
                lse[:, :, rows] = state[2] + state[1].log()
        return o, lse

    def backward(self, do, dlse, q, k, v, o, lse) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of this rank's q, k and v, summed in float32.

        A block's gradients follow it one step later: a rank computes its own part of them while the sum of
        the earlier ranks' parts arrives. The last step brings them to the block's own rank.
        """
        dq = torch.zeros_like(q, dtype=torch.float32)
        block, total = self._own_block(k, v), None
        for step in range(self.peers.ranks):
            next_block = self._next_block(block, step)
            coming = None if total is None else self._block_at(k, step, torch.float32)
            self.peers.start([(block, next_block), (total, coming)])
            dk_dv = self._block_at(k, step, torch.float32).zero_()
            for rows, first in self._parts(q):
                do_, q_, o_, lse_, dlse_ = (x[:, :, rows] for x in (do, q, o, lse, dlse))
                for keys, mask in self._seen(rows, first, step):
                    some = (x[:, :, keys] for x in block)
                    options = dict(mask, **self.options, dlse=dlse_, out_dtype=torch.float32)
                    dq_, *dk_dv_ = minimal_attn.backward(do_, q_, *some, o_, lse_, None, **options)
                    dq[:, :, rows] += dq_
                    for x, more in zip(dk_dv, dk_dv_, strict=True):
                        x[:, :, keys] += more
            self.peers.finish()
            block, total = next_block, dk_dv if coming is None else dk_dv.add_(coming)
        if self.peers.ranks > 1:
            coming = self._block_at(k, self.peers.ranks, torch.float32)
            self.peers.start([(total, coming)])
            self.peers.finish()
            total = coming
        return dq.to(q.dtype), *(x.to(k.dtype) for x in total)

    def _own_block(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        return torch.stack((k, v)) if self.peers.ranks > 1 else (k, v)

    def _next_block(self, block, step: int) -> Tensor | None:
        """Room for the block of the next step; none at the last one."""
        return None if step == self.peers.ranks - 1 else self._block_at(block[0], step + 1, block[0].dtype)

    def _block_at(self, k: Tensor, step: int, dtype: torch.dtype) -> Tensor:
        return k.new_empty(2, *k.shape[:2], length(self._keys(step)), k.shape[3], dtype=dtype)

    def _keys(self, step: int) -> list[tuple[int, int]]:
        """The positions of the block that this rank has at a step."""
        return segments(self.Nk, (self.peers.rank - step) % self.peers.ranks, self.peers.ranks)

    def _parts(self, q: Tensor) -> list[tuple[slice, int]]:
        """This rank's queries: neighbours, and the position of the first of them among the keys."""
        if self.band == (-1, -1):  # positions don't matter, and all queries are one part
            return [(slice(0, q.shape[2]), 0)]
        parts, at = [], 0
        for begin, end in segments(self.Nq, self.peers.rank, self.peers.ranks):
            parts.append((slice(at, at + end - begin), begin + self.offset))
            at += end - begin
        return parts

    def _seen(self, rows: slice, first: int, step: int) -> Iterator[tuple[slice, dict]]:
        """Which of the step's keys the queries at positions first, first + 1, ... see, and the mask."""
        (left, right), last = self.band, first + rows.stop - rows.start - 1
        keys = self._keys(step)
        if all(
            (right == -1 or end - 1 <= first + right) and (left == -1 or begin >= last - left)
            for begin, end in keys
        ):  # every query sees every key, so their order doesn't matter
            yield slice(None), {}
            return
        at = 0
        for begin, end in keys:
            if (right == -1 or begin <= last + right) and (left == -1 or end - 1 >= first - left):
                yield slice(at, at + end - begin), dict(window_size=self.band, offset=first - begin)
            at += end - begin
