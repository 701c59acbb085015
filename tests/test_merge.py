"""minimal_attn.merge: states over different keys, against float64 over all of them."""

import itertools

import pytest
import torch
from conftest import check_l_m, check_o
from reference import attention

import minimal_attn


@pytest.mark.parametrize("ends", [[0, 90], [0, 1, 90], [0, 30, 30, 31, 64, 90]], ids=str)
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window_size": (9, 4), "offset": 3}], ids=str)
def test_split_keys(backend, dtype, band, ends):
    """In any order, empty pieces and rows that some pieces hide included."""
    q, k, v = backend.qkv(Nk=ends[-1] + 20, dtype=dtype)
    position = band.get("offset", k.shape[2] - q.shape[2])
    states = [
        backend.forward(q, k[:, :, i:j], v[:, :, i:j], **{**band, "offset": position - i}, return_state=True)
        for i, j in itertools.pairwise([*ends, k.shape[2]])
    ]
    expected = attention(q, k, v, **band)
    for _ in range(3):
        backend.random.shuffle(states)
        o, l, m = minimal_attn.merge(*states)
        check_o(o, expected, dtype)
        check_l_m(l, m, expected)
        assert {t.dtype for t in (o, l, m)} == {torch.float32}


def test_far_apart(backend):
    """Maxima of +-200: exp alone would overflow."""
    states = [
        (backend.randn(2, 3, 5, 8), backend.randn(2, 3, 5).exp(), backend.randn(2, 3, 5) + far)
        for far in (200, 201, -200)
    ]
    ms, ls, os = (torch.stack([state[i].double() for state in states]) for i in (2, 1, 0))
    m = ms.amax(0)
    weights = ls * (ms - m).exp()
    expected = (weights[..., None] * os).sum(0) / weights.sum(0)[..., None], weights.sum(0), m
    for order in itertools.permutations(states):
        for actual, right in zip(minimal_attn.merge(*order), expected, strict=True):
            torch.testing.assert_close(actual.double(), right, rtol=1e-6, atol=1e-6)


def test_empty_rows(backend):
    """What has l = 0 counts for nothing, whatever its o and m; where all have, the row is 0, 0, -inf."""
    o, l, m = backend.randn(2, 3, 5, 8), backend.randn(2, 3, 5).exp(), backend.randn(2, 3, 5)
    none = torch.zeros_like(o), torch.zeros_like(l), torch.full_like(m, -torch.inf)
    garbage = torch.full_like(o, torch.nan), torch.zeros_like(l), torch.full_like(m, 1000)
    for other in none, garbage:
        for states in ((o, l, m), other), (other, (o, l, m)), (other, (o, l, m), other):
            assert all(map(torch.equal, minimal_attn.merge(*states), (o, l, m)))
    assert all(map(torch.equal, minimal_attn.merge(none, none, none), none))


def test_only_scores_of_minus_infinity(backend):
    """NaN, as softmax gives, unless another piece has a finite score."""
    q, k, v = backend.qkv(Nq=1, Nk=6, d=16)
    hidden = backend.forward(q.abs(), torch.full_like(k, -torch.inf), v, return_state=True)
    assert minimal_attn.merge(hidden, hidden)[0].isnan().all()
    state = backend.forward(q, k, v, return_state=True)
    assert all(map(torch.equal, minimal_attn.merge(hidden, state), state))


def test_nan_stays(backend):
    q, k, v = backend.qkv(Nq=2, Nk=6, d=16)
    state = backend.forward(q, k, v, return_state=True)
    k[:, :, 3] = torch.nan
    o, l, _ = minimal_attn.merge(state, backend.forward(q, k, v, return_state=True))
    assert o.isnan().all() and l.isnan().all()


def test_more_dimensions_and_gradients():
    """Plain PyTorch: any leading dimensions, and autograd."""
    states = [
        tuple(t.double().float().requires_grad_() for t in (torch.randn(7, 4), torch.rand(7), torch.randn(7)))
        for _ in range(3)
    ]
    o, l, m = minimal_attn.merge(*states)
    weights = torch.stack([state[1] * state[2].exp() for state in states]).double()
    expected = (weights[..., None] * torch.stack([state[0] for state in states])).sum(0) / weights.sum(0)[
        ..., None
    ]
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((l.log() + m).double(), weights.sum(0).log(), rtol=1e-5, atol=1e-6)
    o.sum().backward()
    assert all(t.grad.isfinite().all() for state in states for t in state)


o, l = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    "error, message, states",
    [
        (ValueError, "merge must be given at least 2 states (o, l, m), but was given 0", ()),
        (ValueError, "merge must be given at least 2 states (o, l, m), but was given 1", ((o, l, l),)),
        (
            TypeError,
            "states[1] must be three dense tensors (o, l, m), but was of type Tensor",
            ((o, l, l), o),
        ),
        (
            TypeError,
            "states[0] must be three dense tensors (o, l, m), but was of type tuple",
            ((o, l), (o, l, l)),
        ),
        (ValueError, "states[1]'s l must be float32, but is float64", ((o, l, l), (o, l.double(), l))),
        (
            ValueError,
            "states[1]'s o must have shape (1, 2, 3, 4), but has shape (1, 2, 3, 5)",
            ((o, l, l), (torch.zeros(1, 2, 3, 5), l, l)),
        ),
        (
            ValueError,
            "states[0]'s m must have shape (1, 2, 3), but has shape (1, 2, 3, 4)",
            ((o, l, o), (o, l, l)),
        ),
        (
            ValueError,
            "states[1]'s m must be on cpu as the first o, but is on meta",
            ((o, l, l), (o, l, l.to("meta"))),
        ),
    ],
)
def test_errors(error, message, states):
    with pytest.raises(error) as raised:
        minimal_attn.merge(*states)
    assert str(raised.value) == message
