"""The softmax state (o, l, m) that goes in and comes out, so that keys can arrive in chunks."""

import itertools

import pytest
import torch
from conftest import check_l_m, check_o
from reference import attention


@pytest.mark.parametrize(
    "band",
    [
        {},
        dict(causal=True),
        dict(window_size=(40, 30)),
        dict(causal=True, offset=-20),
        dict(window_size=(3, 0), offset=9),
    ],
    ids=str,
)
def test_chunks_in_any_order(backend, dtype, band):
    """Keys in chunks, also empty ones, give what they give together: each chunk has its own position."""
    q, k, v = backend.qkv(Nq=100, Nk=200, dtype=dtype)
    position = band.get("offset", 200 - 100)
    ends = [0, 1, 1, 64, 130, 137, 200]
    chunks = list(itertools.pairwise(ends))
    expected = attention(q, k, v, **band)
    for _ in range(3):
        backend.random.shuffle(chunks)
        state = None
        for begin, end in chunks:
            here = dict(band, offset=position - begin)
            state = backend.forward(
                q, k[:, :, begin:end], v[:, :, begin:end], **here, state=state, return_state=True
            )
        o, l, m = state
        check_o(o, expected, dtype)
        check_l_m(l, m, expected)


def test_chunks_with_their_own_lengths(backend, dtype):
    q, k, v = backend.qkv(B=3, Nk=100, dtype=dtype)
    expected = attention(q, k, v, seqlens_k=torch.tensor([80, 30, 0]), leftpad_k=torch.tensor([60, 10, 0]))
    state = backend.forward(
        q,
        k[:, :, :50],
        v[:, :, :50],
        seqlens_k=backend.ints(80, 30, 0),
        leftpad_k=backend.ints(60, 10, 0),
        return_state=True,
    )
    o, l, m = backend.forward(
        q,
        k[:, :, 50:],
        v[:, :, 50:],
        seqlens_k=backend.ints(30, -20, -50),
        leftpad_k=backend.ints(10, -40, -50),
        state=state,
    )
    check_o(o, expected, dtype)
    check_l_m(l, m, expected)


def random_state(backend, q):
    """Any state, with rows that have seen no key and rows that have seen only -inf."""
    shape = q.shape[:3]
    o, l, m = backend.randn(*q.shape), backend.randn(*shape).exp(), backend.randn(*shape)
    o[:, :, 3], l[:, :, 3], m[:, :, 3] = 0, 0, -torch.inf
    o[:, :, 5], l[:, :, 5], m[:, :, 5] = torch.nan, 0, -torch.inf
    return o, l, m


@pytest.mark.parametrize("case", ["no keys", "seqlens_k 0", "hidden by the band"])
def test_no_key_copies_the_state(backend, dtype, case):
    """Bit for bit, into new tensors."""
    q, k, v = backend.qkv(dtype=dtype)
    state = random_state(backend, q)
    if case == "no keys":
        new = backend.forward(q, k[:, :, :0], v[:, :, :0], state=state)
    elif case == "seqlens_k 0":
        new = backend.forward(q, k, v, seqlens_k=backend.ints(0, -3), state=state)
    else:
        new = backend.forward(q, k, v, offset=-1000, causal=True, state=state)
    for before, after in zip(state, new, strict=True):
        assert after.dtype == torch.float32 and after.data_ptr() != before.data_ptr()
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_some_rows_without_keys(backend, dtype):
    """A causal chunk in the future of the first queries: their state is copied, the rest is merged."""
    q, k, v = backend.qkv(Nq=100, Nk=100, dtype=dtype)
    first = backend.forward(q, k[:, :, :70], v[:, :, :70], causal=True, offset=0, return_state=True)
    both = backend.forward(q, k[:, :, 70:], v[:, :, 70:], causal=True, offset=-70, state=first)
    for before, after in zip(first, both, strict=True):
        assert torch.equal(after[:, :, :70], before[:, :, :70])
    expected = attention(q, k, v, causal=True)
    check_o(both[0], expected, dtype)
    check_l_m(*both[1:], expected)


def test_no_state_is_the_empty_state(backend, dtype):
    """(0, 0, -inf), and others too: o and m count for nothing where l is 0."""
    q, k, v = backend.qkv(dtype=dtype)
    expected = backend.forward(q, k, v, causal=True, return_state=True)
    l = torch.zeros_like(expected[1])
    for no_o, no_m in (0, -torch.inf), (torch.nan, -torch.inf), (0, 0), (0, 1000):
        state = torch.full_like(expected[0], no_o), l, torch.full_like(l, no_m)
        actual = backend.forward(q, k, v, causal=True, state=state)
        assert all(map(torch.equal, actual, expected))


def test_scores_of_minus_infinity(backend, dtype):
    """A chunk of them alone gives NaN, as softmax does, and counts for nothing together with other keys."""
    q, k, v = backend.qkv(d=16, dtype=dtype)
    q = q.abs() + 1  # 0 * inf would be NaN
    sunk = torch.full_like(k, -torch.inf)
    finite = backend.forward(q, k, v, return_state=True)
    o, l, m = sunk_state = backend.forward(q, sunk, v, return_state=True)
    assert o.isnan().all() and not l.any() and (m == -torch.inf).all()
    o, l, m = backend.forward(q, sunk, v, state=sunk_state)
    assert o.isnan().all() and not l.any() and (m == -torch.inf).all()
    for actual in backend.forward(q, k, v, state=sunk_state), backend.forward(q, sunk, v, state=finite):
        for a, b in zip(actual, finite, strict=True):
            torch.testing.assert_close(a, b)


def test_maxima_far_apart(backend, dtype):
    """Whichever chunk has the larger scores wins, without overflow, in either order. Scores are exact."""
    q, k = (backend.integers(-2, 2, 2, 2, N, 16, dtype=dtype) for N in (70, 60))
    v = backend.randn(2, 2, 60, 16, dtype=dtype)
    q[..., 0], k[:, :, :30, 0], k[:, :, 30:, 0] = 40, 30, -30
    expected = attention(q, k, v)
    halves = [(k[:, :, part], v[:, :, part]) for part in (slice(0, 30), slice(30, 60))]
    for (k1, v1), (k2, v2) in (halves, halves[::-1]):
        state = backend.forward(q, k1, v1, return_state=True)
        o, l, m = backend.forward(q, k2, v2, state=state)
        check_o(o, expected, dtype)
        check_l_m(l, m, expected)


def test_state_from_elsewhere(backend):
    """The state is float64's own: what the reference hands over, forward continues."""
    q, k, v = backend.qkv()
    first = attention(q, k[:, :, :33], v[:, :, :33])
    state = tuple(t.float() for t in first[:3])
    o, l, m = backend.forward(q, k[:, :, 33:], v[:, :, 33:], state=state)
    expected = attention(q, k, v)
    check_o(o, expected, q.dtype)
    check_l_m(l, m, expected)


@pytest.mark.parametrize("d", [5, 33, 64, 96, 128, 200, 256])
def test_o_in_the_dtype_of_q(backend, dtype, d):
    """With the log-sum-exp, after a state: as the state form, but for rounding. o may lie anywhere."""
    q, k, v = backend.qkv(Nq=75, Nk=200, d=d, dtype=dtype)
    if backend.random.random() < 0.5:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    state = backend.forward(q, k[:, :, :70], v[:, :, :70], return_state=True)
    apart = torch.empty(2 * state[0].numel() + 1, device=q.device)
    o = apart[backend.random.randrange(2) :][: 2 * state[0].numel()].view(*q.shape[:3], 2 * d)[..., :d]
    o.copy_(state[0])
    rest = k[:, :, 70:], v[:, :, 70:]
    expected, l, m = backend.forward(q, *rest, state=(o, *state[1:]), causal=True)
    found, lse = backend.forward(q, *rest, state=(o, *state[1:]), causal=True, return_lse=True)
    assert found.dtype == dtype and found.stride() == torch.empty_like(q).stride()
    torch.testing.assert_close(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse, m + l.log())
