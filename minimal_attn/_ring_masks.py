"""What a rank of a ring computes of a block: which queries see which of its keys, under which mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minimal_attn._zigzag import segments


@dataclass(frozen=True)
class Part:
    """One call of a kernel: `rows` of the rank's queries, and `keys` of the block.

    `band` are forward's arguments for both. Where no band says who sees whom, it is None, and key_ranges are
    of these chunks of queries and of keys.
    """

    rows: slice
    keys: slice
    band: dict | None
    queries_in: list[tuple[int, int]]
    keys_in: list[tuple[int, int]]


@dataclass(frozen=True)
class Mask:
    """Who sees whom in the whole sequence, on any rank.

    Query i is at position i + offset among the Nk keys. With band = (left, right) it sees the keys from
    `left` before this position to `right` behind it; -1 is no bound. With documents, (cu_seqlens_q,
    cu_seqlens_k), it sees those of its document alone, whose last query is at the last key.
    """

    Nq: int
    Nk: int
    offset: int
    band: tuple[int, int]
    documents: tuple[Tensor, Tensor] | None
    ranks: int

    def part(self, rank: int, owner: int) -> Part | None:
        """What `rank` computes of the block of `owner`; None where it sees no key of it.

        A kernel computes what lies between the first and the last chunk that are visible. Chunks that a rank
        or a block has aren't neighbours. So the mask is none, one band if chunks are neighbours or if both
        sides have the same gap, and else ranges of keys.
        """
        queries, keys = (segments(N, on, self.ranks) for N, on in ((self.Nq, rank), (self.Nk, owner)))
        sees = [[self._sees(*q, *k) for k in keys] for q in queries]
        rows = [i for i, row in enumerate(sees) if any(row)]
        columns = [j for j in range(len(keys)) if any(row[j] for row in sees)]
        if not rows:
            return None
        rows, columns = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        places = _neighbours(queries, rows), _neighbours(keys, columns)
        queries, keys = queries[rows], keys[columns]
        return Part(*places, self._band_of(queries, keys), queries, keys)

    def _band_of(self, queries: list[tuple[int, int]], keys: list[tuple[int, int]]) -> dict | None:
        if self.documents:
            return None
        if all(self._sees_all(*q, *k) for q in queries for k in keys):
            return {}
        if abs(self.offset) > 1 << 31:  # an int of 64 bits would wrap
            return None
        if len(queries) == len(keys) == 1:
            return dict(window_size=self.band, offset=queries[0][0] + self.offset - keys[0][0])
        positions = [(begin + self.offset, end + self.offset) for begin, end in queries]
        if self.band == (-1, 0) and positions == keys:
            return dict(window_size=self.band, offset=0)
        return None

    def _sees(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Whether one of the queries i0 <= i < i1 may see one of the keys j0 <= j < j1."""
        left, right = self._bounds()
        first, last = i0 + self.offset, i1 - 1 + self.offset
        return (right == -1 or j0 <= last + right) and (left == -1 or j1 - 1 >= first - left)

    def _sees_all(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Whether all of these queries see all of these keys."""
        (left, right), first, last = self.band, i0 + self.offset, i1 - 1 + self.offset
        return (right == -1 or j1 - 1 <= first + right) and (left == -1 or j0 >= last - left)

    def _bounds(self) -> tuple[int, int]:
        """The band, if it holds for positions in the whole sequence, and not within each document alone."""
        return (-1, -1) if self.documents and self.documents[0] is not self.documents[1] else self.band

    def key_ranges(self, part: Part, device: torch.device) -> Tensor:
        """Which keys of a part each of its queries sees, (1, queries, 2), as forward takes them.

        Neighbouring keys of the whole sequence are neighbours in a block, too, so a range stays one.
        """
        at = torch.cat([torch.arange(begin, end, device=device) for begin, end in part.queries_in])
        begin, end = torch.zeros_like(at), torch.full_like(at, self.Nk)
        position, offset = at, self.offset
        if self.documents:
            cu_q, cu_k = (
                x.long().clamp(0, N) for x, N in zip(self.documents, (self.Nq, self.Nk), strict=True)
            )
            n = (torch.searchsorted(cu_q, at, right=True) - 1).clamp(0, len(cu_q) - 2)
            begin, end = cu_k[n], cu_k[n + 1]
            position, offset = end - (cu_q[n + 1] - at), 0
            end = torch.where((at < cu_q[n]) | (at >= cu_q[n + 1]), begin, end)
        (left, right), most = self.band, self.Nq + self.Nk + 1
        if left != -1:
            begin = torch.maximum(begin, position + min(max(offset - left, -most), most))
        if right != -1:
            end = torch.minimum(end, position + min(max(offset + right + 1, -most), most))
        ranges = torch.stack((begin, torch.maximum(begin, end)), -1)
        before = sum((ranges - first).clamp(0, last - first) for first, last in part.keys_in)
        return before[None].int()


def _neighbours(parts: list[tuple[int, int]], some: slice) -> slice:
    """Where parts[some] are in a tensor that has all parts."""
    sizes = [end - begin for begin, end in parts]
    return slice(sum(sizes[: some.start]), sum(sizes[: some.stop]))
