"""merge: the softmax states of the same queries over different keys become one."""

from __future__ import annotations

import functools

import torch

from minimal_attn._errors import check_states
from minimal_attn._forward import State


def merge(*states: State) -> State:
    """The softmax state over all keys, from states (o, l, m) of the same queries over some keys each.

        m = max(m_1, m_2, ...)        w_s = l_s exp(m_s - m)
        l = w_1 + w_2 + ...           o   = (w_1 o_1 + w_2 o_2 + ...) / l

    This is exact but for rounding, whatever the order and however the keys were split: over processes, GPUs
    or pieces of a cache. A state counts for nothing in a row where its l is 0 (no key was seen there). A row
    that is empty in all states stays o = 0, l = 0, m = -inf.

    Args:
        states: two or more, each as forward(..., return_state=True) gives it: o (B, H, N, d_v), l and m
            (B, H, N), float32, of equal shapes and on one device, a CPU or a GPU. They are not changed. Any
            other number of leading dimensions will do as well.

    Returns:
        (o, l, m), float32, new tensors. In the dtype of the inputs: o.to(q.dtype). The log-sum-exp is
        m + log(l).

    Raises:
        TypeError: a state isn't three dense tensors.
        ValueError: fewer than two states, or tensors of another dtype, shape or device than said above.

    Source: step 12 of Algorithm 1, arXiv:2205.14135, with o divided as there.
    """
    check_states(states)
    seen = [l != 0 for _, l, _ in states]
    m = functools.reduce(
        torch.maximum,
        (m.masked_fill(~some, -torch.inf) for (_, _, m), some in zip(states, seen, strict=True)),
    )
    finite = m.masked_fill(m == -torch.inf, 0)
    weights = [
        (l * torch.exp(m - finite)).masked_fill(~some, 0)
        for (_, l, m), some in zip(states, seen, strict=True)
    ]
    l = functools.reduce(torch.add, weights)
    empty = l == 0
    # Where all are empty o is their sum: 0, or NaN where a row's only scores were -inf, as in softmax.
    terms = (
        torch.where((some | empty)[..., None], o, 0) * torch.where(empty, 1, weight / l)[..., None]
        for (o, _, _), some, weight in zip(states, seen, weights, strict=True)
    )
    return functools.reduce(torch.add, terms), l, m
