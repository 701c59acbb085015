"""Attention as the contract's words define it: float64, plain, slow, and sharing nothing with flash.h."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy
import pytest
import torch

from minimal_attn import _C


class Attention(NamedTuple):
    o: torch.Tensor
    l: torch.Tensor
    m: torch.Tensor
    size: torch.Tensor  # P |V|: what o would be if nothing cancelled, the yardstick of o's rounding errors


def visible_keys(
    B,
    Nq,
    Nk,
    *,
    causal=False,
    window_size=(-1, -1),
    seqlens_k=None,
    leftpad_k=None,
    offset=None,
    key_ranges=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    prefix_k=None,
    seqused_k=None,
):
    """Which keys each query sees, (B, 1, Nq, Nk); rows are told in Python's ints, which can't overflow."""
    if cu_seqlens_q is not None:
        seen = torch.zeros(B, 1, Nq, Nk, dtype=torch.bool)
        bounds = list(zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True))
        for n, ((q0, k0), (q1, k1)) in enumerate(pairwise(bounds)):
            if seqused_k is not None:
                k1 = min(k1, k0 + int(seqused_k[n]))
            ranges = None if key_ranges is None else key_ranges[:, q0:q1] - k0
            prefix = None if prefix_k is None else prefix_k[n : n + 1]
            options = dict(causal=causal, window_size=window_size, key_ranges=ranges, prefix_k=prefix)
            seen[:, :, q0:q1, k0:k1] = visible_keys(B, q1 - q0, k1 - k0, **options)
        return seen
    left, right = window_size
    if causal:
        right = 0
    seen = torch.zeros(B, 1, Nq, Nk, dtype=torch.bool)
    for b in range(B):
        n = Nk if seqlens_k is None else min(max(int(seqlens_k[b]), 0), Nk)
        begin = 0 if leftpad_k is None else min(max(int(leftpad_k[b]), 0), Nk)
        if offset is None:
            position = n - Nq
        else:
            position = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
        for i in range(Nq):
            first = begin if left == -1 else max(begin, i + position - left)
            last = n - 1 if right == -1 else min(n - 1, i + position + right)
            low, high = 0, Nk
            if key_ranges is not None:
                low, high = key_ranges[b if len(key_ranges) > 1 else 0, i].tolist()
            seen[b, 0, i, max(first, low) : max(min(last + 1, high), 0)] = True
            if prefix_k is not None:
                last = min(last, begin + int(prefix_k[b]) - 1)
                seen[b, 0, i, max(begin, low) : max(min(last + 1, high), 0)] = True
    return seen


def positions(
    B, Nq, Nk, *, seqlens_k=None, offset=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, **_
):
    """Where each query is among the keys, (B, 1, Nq): where causal would end."""
    p = torch.zeros(B, 1, Nq, dtype=torch.float64)
    if cu_seqlens_q is not None:
        bounds = list(zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True))
        for n, ((q0, k0), (q1, k1)) in enumerate(pairwise(bounds)):
            end = k1 if seqused_k is None else min(k1, k0 + int(seqused_k[n]))
            p[:, :, q0:q1] = torch.arange(q0, q1) + end - q1
        return p
    for b in range(B):
        n = Nk if seqlens_k is None else min(max(int(seqlens_k[b]), 0), Nk)
        first = n - Nq if offset is None else int(offset[b]) if isinstance(offset, torch.Tensor) else offset
        p[b] = torch.arange(Nq) + first
    return p


def philox2x32(x, y, key):
    """Random123's function (Salmon et al. 2011) of 7 rounds, of NumPy's uint64 arrays that hold 32 bits."""
    word = numpy.uint64(0xFFFFFFFF)
    for n in range(7):
        product = x * numpy.uint64(0xD256D193)
        step = numpy.uint64((key + n * 0x9E3779B9) % 2**32)
        x, y = (product >> numpy.uint64(32)) ^ step ^ y, product & word
    return x, y


def weights_of_dropout(p, seed, B, Hq, Nq, Nk):
    """Z (B, Hq, Nq, Nk), float64: 0 or 1 / (1 - p), with p in steps of 2^-16."""
    of_65536 = math.floor(p * 65536 + 0.5)
    of_65536 -= of_65536 == 65535  # the largest below all
    if of_65536 == 65536:
        return torch.zeros(B, Hq, Nq, Nk, dtype=torch.float64)
    seed = int(seed) % 2**64
    of_heads = [(seed + n * 0x9E3779B97F4A7C15) % 2**64 for n in range(B * Hq)]
    x, y = (
        numpy.array([w // 2**32 if is_x else w % 2**32 for w in of_heads], numpy.uint64).reshape(B, Hq, 1, 1)
        for is_x in (True, False)
    )
    key = (seed % 2**32) ^ (seed // 2**32 * 0x85EBCA6B % 2**32)
    i, j = numpy.arange(Nq, dtype=numpy.uint64)[:, None], numpy.arange(Nk, dtype=numpy.uint64)
    eight, lower = numpy.uint64(8), numpy.uint64(0xFFFF)
    words = philox2x32((i // eight // 2 * 16 + i % eight) ^ x, (j // eight // 2 * 16 + j % eight) ^ y, key)
    word = numpy.where(i // eight % 2 == 1, words[1], words[0])
    number = numpy.where(j // eight % 2 == 1, word >> numpy.uint64(16), word) & lower
    kept = torch.from_numpy((number >= of_65536).astype(numpy.float64))
    return kept * (65536 / (65536 - of_65536))


# What alibi_slopes add by the distance of query and key, for each score that a build may have (setup.py:
# MINIMAL_ATTN_SCORE). examples/own_score/test.py adds its own.
TERMS = {"": lambda slopes, distance: -slopes * distance.abs()}


def term_of_distance(slopes, distance):
    if _C.score() not in TERMS:
        pytest.skip(f"alibi_slopes mean {_C.score()} in this build, which no reference knows")
    return TERMS[_C.score()](slopes, distance)


def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    softcap=None,
    alibi_slopes=None,
    attn_mask=None,
    bias=None,
    sinks=None,
    dropout_p=None,
    dropout_seed=None,
    dtype=torch.float64,
    **band,
):
    """Manual attention in `dtype`, and the softmax state (l, m) of each row."""
    (B, Hq, Nq, d), (_, Hkv, Nk, _) = q.shape, k.shape
    seen = visible_keys(B, Nq, Nk, **band).to(q.device)
    # No query may see a key outside leftpad_k..seqlens_k, whatever is there: NaN times 0 isn't 0.
    limits = {name: band[name] for name in ("seqlens_k", "leftpad_k") if name in band}
    inside = visible_keys(B, 1, Nk, **limits).to(q.device).mT
    if "cu_seqlens_q" in band:  # nor one of no document; a query of none may be anything, too
        in_document = [
            (torch.arange(N) >= cu[0]) & (torch.arange(N) < cu[-1])
            for cu, N in ((band["cu_seqlens_q"].cpu(), Nq), (band["cu_seqlens_k"].cpu(), Nk))
        ]
        if band.get("seqused_k") is not None:
            in_document[1] = seen.any(dim=(0, 1, 2)).cpu()
        q = q.masked_fill(~in_document[0][:, None].to(q.device), 0)
        inside = in_document[1][:, None].to(q.device)
    k, v = (t.to(dtype).masked_fill(~inside, 0).repeat_interleave(Hq // max(Hkv, 1), dim=1) for t in (k, v))
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    s = scale * (q.to(dtype) @ k.mT)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        distance = positions(B, Nq, Nk, **band)[..., None] - torch.arange(Nk)
        s = s + term_of_distance(alibi_slopes.to(dtype)[..., None, None], distance.to(s.device, dtype))
    for x in attn_mask, bias:
        if x is not None and x.dtype == torch.bool:
            seen = seen & x
        elif x is not None:
            s, seen = s + x.to(dtype), seen & (x != -torch.inf)
    s = s.masked_fill(~seen, -torch.inf)
    sink = s.new_tensor(-torch.inf) if sinks is None else sinks.to(dtype)[..., None]  # of a value that is 0
    m = torch.maximum(s.amax(-1) if Nk else s.new_full(s.shape[:-1], -torch.inf), sink)
    finite = m.masked_fill(m == -torch.inf, 0)
    p = torch.exp(s - finite[..., None])
    l = p.sum(-1) + torch.exp(sink - finite)
    blind = ~seen.any(-1)[..., None]
    if dropout_p:
        p = p * weights_of_dropout(dropout_p, dropout_seed, B, Hq, Nq, Nk).to(p.device, dtype)
    divisor = l[..., None].masked_fill(blind, 1)  # or autograd makes NaN of 0 / 0
    o = (p @ v / divisor).masked_fill(blind, 0)
    size = (p @ v.abs() / divisor).masked_fill(blind, 0)
    return Attention(o, l, m, size)


def gradients(do, q, k, v, dlse=None, wanted=(), **options):
    """Those in q, k, v and the options named, by float64 autograd of the attention above."""
    named = dict(q=q, k=k, v=v) | {name: options[name] for name in wanted}
    named = {name: t.detach().double().requires_grad_() for name, t in named.items()}
    o, l, m, _ = attention(**options | named)
    loss = (o * do.double()).nan_to_num(0).sum()
    if dlse is not None:
        seen = l > 0
        loss = loss + ((m + l.log())[seen] * dlse.double()[seen]).sum()
    return torch.autograd.grad(loss, list(named.values()))


def gradient_sizes(do, q, k, v, dlse=None, *, sinks=None, softmax_scale=None, **options):
    """The norms that dq, dk and dv would have if every product had a random sign: roots of sums of squares.

    Rounding is measured by them where the gradient itself cancels, such as dq of a row of one key.
    """
    (B, Hq, _, d), (_, Hkv, Nk, _) = q.shape, k.shape
    options |= dict(sinks=sinks, softmax_scale=softmax_scale)
    identity = torch.eye(Nk, device=q.device).expand(B, Hkv, Nk, Nk)
    p2 = attention(q, k, identity, **options).o.square()  # P I = P
    o = attention(q, k, v, **options).o
    do2, o2, q2, k2, v2 = (t.double().nan_to_num(0).square() for t in (do, o, q, k, v))
    k2, v2 = (t.repeat_interleave(Hq // Hkv, dim=1) for t in (k2, v2))
    ds2 = do2 @ v2.mT + (do2 * o2).sum(-1, keepdim=True)
    if dlse is not None:
        ds2 = ds2 + dlse.double().square()[..., None]
    ds2 = ds2 * p2 * (1 / d if softmax_scale is None else softmax_scale**2)
    return [t.sum().sqrt() for t in (ds2 @ k2, ds2.mT @ q2, p2.mT @ do2)]


def relative_error(x, expected, dim=None):
    """Frobenius norm of the error over that of the expected values, of the whole or along one dimension."""
    norm = torch.linalg.vector_norm
    return norm(x - expected, dim=dim) / norm(expected, dim=dim)


def worst_error(x, expected):
    """The largest relative error of the whole tensor, of a row and of a channel."""
    return max(relative_error(x, expected, dim).max() for dim in (None, -1, -2))
