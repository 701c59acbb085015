"""The zigzag: which part of a sequence each rank of a ring has. ring.py draws it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
        if lengths[rank] != length(where):
            raise ValueError(f"shards must have the lengths that ring.shard gives them, but have {lengths}")
        parts |= zip(where, x.split([end - begin for begin, end in where], dim), strict=True)
    return torch.cat([parts[where] for where in sorted(parts)] or list(shards), dim)


def length(parts: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in parts)
