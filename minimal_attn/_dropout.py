"""Dropout: the seed of a call, and which weights it drops. dropout.h has the kernels' form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minimal_attn._errors import in_words

_WORD = 0xFFFFFFFF


def draw_seed(q: Tensor, dropout_p: object) -> Tensor | None:
    """One number of PyTorch's generator of q's device: manual_seed, graphs and checkpoints hold for it.

    None where nothing is dropped, and for a q or a dropout_p that will be refused.
    """
    if not isinstance(q, Tensor) or q.layout != torch.strided or q.is_nested:
        return None
    try:
        if not dropout_p:
            return None
    except (RuntimeError, ValueError):  # several numbers, or one of a meta tensor
        return None
    return torch.randint_like(q.new_empty((1,), dtype=torch.int64), 1 << 62)


def dropout_mask(dropout_seed: Tensor, dropout_p: float, shape: tuple[int, int, int, int]) -> Tensor:
    """Which weights minimal_attn.forward keeps with this seed, on every device and backend.

    Args:
        dropout_seed: int64, of one element, as forward takes it.
        dropout_p: from 0 to 1.
        shape: (B, Hq, Nq, Nk) of the call.

    Returns:
        bool, of this shape, on the seed's device: True where a weight is kept.

    Raises:
        TypeError, ValueError: dropout_seed is not one int64, dropout_p is not from 0 to 1, or shape not of 4.

    Source: Philox2x32 (Salmon, Moraes, Dror, Shaw 2011) of 7 rounds, four weights a call (docs/dropout.md).
    """
    check_p(dropout_p)
    check_seed(dropout_seed)
    if len(shape) != 4:
        raise ValueError(f"shape must be (B, Hq, Nq, Nk), but was {tuple(shape)}")
    B, Hq, Nq, Nk = shape
    seed = dropout_seed.reshape(())
    heads, i, j = (torch.arange(n, device=seed.device) for n in (B * Hq, Nq, Nk))
    of_head = seed + heads * (0x9E3779B97F4A7C15 - (1 << 64))  # int64 wraps
    x, y = of_head >> 32 & _WORD, of_head & _WORD
    x, y = ((i & ~8) ^ x[:, None])[..., None], ((j & ~8) ^ y[:, None])[:, None]
    x, y = _philox(x, y, (seed ^ (seed >> 32 & _WORD) * 0x85EBCA6B) & _WORD)
    words = torch.where((i & 8 != 0)[:, None], y, x)
    numbers = torch.where(j & 8 != 0, words >> 16, words & 0xFFFF)
    return (numbers >= dropped_of(dropout_p)).unflatten(0, (B, Hq))


def check_p(dropout_p: float) -> None:
    """Raises TypeError, ValueError in forward's words, for what computes by itself. So does check_seed."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a number or None, but was {in_words(dropout_p)}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be from 0 to 1, but was {dropout_p}")


def check_seed(dropout_seed: Tensor) -> None:
    if not isinstance(dropout_seed, Tensor) or dropout_seed.layout != torch.strided:
        raise TypeError(f"dropout_seed must be a dense tensor, but was {in_words(dropout_seed)}")
    if dropout_seed.dtype != torch.int64 or dropout_seed.numel() != 1:
        was = f"{dropout_seed.dtype}, of shape {tuple(dropout_seed.shape)}"
        raise ValueError(f"dropout_seed must be one int64, but is {was}")


def dropped_of(p: float) -> int:
    """Of 65536 weights, how many are dropped on average (binding/call.cpp: set_dropout)."""
    whole = math.floor(p * 65536)
    steps = whole + (p * 65536 - whole >= 0.5)
    return steps if steps == 65536 else min(steps, 65534)


def _philox(x, y, key):
    for _ in range(7):
        product = 0xD256D193 * x
        x, y = (product >> 32 & _WORD) ^ key ^ y, product & _WORD
        key = (key + 0x9E3779B9) & _WORD
    return x, y
