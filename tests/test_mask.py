"""Which keys a query sees, by every argument that says so; hidden keys have no influence."""

import pytest
import torch
from conftest import check_l_m, check_o
from reference import Attention, attention

BANDS = [
    dict(causal=True),
    dict(window_size=(5, 0)),
    dict(window_size=(0, 0)),
    dict(window_size=(-1, 3)),
    dict(window_size=(17, -1)),
    dict(window_size=(64, 64)),
    dict(window_size=(0, 200)),
    dict(window_size=(5, 40), causal=True),
    dict(window_size=(10**9, 2**62)),
]


def name(options):
    return ",".join(f"{name}={value}" for name, value in options.items())


@pytest.mark.parametrize("band", BANDS, ids=name)
def test_band(backend, dtype, band):
    for Nq, Nk in ((1, 1), (1, 100), (100, 1), (65, 64), (130, 130), (40, 150), (150, 40)):
        backend.check(*backend.qkv(Nq=Nq, Nk=Nk, d=24, dtype=dtype), **band)


@pytest.mark.parametrize("band", BANDS, ids=name)
@pytest.mark.parametrize(
    "offset",
    [0, 1, -1, 63, -64, 70, -70, 1000, -1000, 2**31, -(2**31) - 1, 2**62, -(2**62), -(2**63), 2**63 - 1],
)
def test_offset(backend, band, offset):
    backend.check(*backend.qkv(d=16, Nq=66, Nk=70), **band, offset=offset)


@pytest.mark.parametrize("band", BANDS, ids=name)
def test_offset_of_each_batch(backend, dtype, band):
    offset = backend.ints(0, 30, -20, 1000, -1000, 2**31 - 1, -(2**31))
    backend.check(*backend.qkv(B=7, d=16, dtype=dtype), **band, offset=offset)


@pytest.mark.parametrize("band", [dict(), *BANDS], ids=name)
def test_seqlens_and_leftpad(backend, dtype, band):
    """Both are clamped to 0..Nk; positions stay, and queries align with the last key that counts."""
    seqlens_k = backend.ints(0, 1, 37, 64, 90, 91, 2**31 - 1, -1, -(2**31))
    leftpad_k = backend.ints(0, 1, 36, 64, 65, 12, -5, 3, 2**31 - 1)
    q, k, v = backend.qkv(B=9, Hq=2, Hkv=1, d=16, dtype=dtype)
    backend.check(q, k, v, **band, seqlens_k=seqlens_k)
    backend.check(q, k, v, **band, leftpad_k=leftpad_k)
    backend.check(q, k, v, **band, seqlens_k=seqlens_k, leftpad_k=leftpad_k)
    backend.check(q, k, v, **band, seqlens_k=seqlens_k, leftpad_k=leftpad_k, offset=20)
    offset = backend.integers(-90, 90, 9, dtype=torch.int32)
    backend.check(q, k, v, **band, seqlens_k=seqlens_k, leftpad_k=leftpad_k, offset=offset)


def test_causal_overrides_the_right_window(backend):
    q, k, v = backend.qkv()
    windowed = backend.forward(q, k, v, window_size=(9, 0))
    assert torch.equal(backend.forward(q, k, v, window_size=(9, 5), causal=True), windowed)


def test_default_offset_aligns_last_with_last(backend):
    q, k, v = backend.qkv(Nq=30, Nk=75)
    assert torch.equal(
        backend.forward(q, k, v, causal=True), backend.forward(q, k, v, causal=True, offset=75 - 30)
    )


@pytest.mark.parametrize("band", [dict(), dict(causal=True), dict(window_size=(3, 7), offset=-2)], ids=name)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_padding_does_not_leak(backend, dtype, band, poison):
    """Keys outside leftpad_k..seqlens_k influence no query, even where no query sees a key."""
    seqlens_k = backend.ints(90, 70, 64, 33, 1, 0)
    leftpad_k = backend.ints(1, 64, 40, 33, 0, 0)
    clean = backend.qkv(B=6, Nq=70, d=40, dtype=dtype)
    expected = backend.check(*clean, seqlens_k=seqlens_k, leftpad_k=leftpad_k, **band)
    for poisoned in (1,), (2,), (1, 2):
        tensors = [t.clone() for t in clean]
        for t in poisoned:
            for b in range(6):
                tensors[t][b, :, : leftpad_k[b]] = poison
                tensors[t][b, :, seqlens_k[b] :] = poison
        actual = backend.check(*tensors, seqlens_k=seqlens_k, leftpad_k=leftpad_k, **band)
        assert torch.equal(actual, expected)


def test_hidden_finite_values_harm_nobody(backend, dtype):
    """However large, when causal or the window hides them."""
    largest = torch.finfo(dtype).max
    for band, left, right in (dict(causal=True), 90, 0), (dict(window_size=(20, 3)), 20, 3):
        q, k, v = backend.qkv(Nq=90, Nk=90, dtype=dtype)
        expected = attention(q, k, v, **band)
        for j in (5, 40, 89):
            k_large, v_large = k.clone(), v.clone()
            k_large[:, :, j] = largest
            v_large[:, :, j] = -largest
            i = torch.arange(90, device=backend.device)
            blind = (i < j - right) | (i > j + left)
            o = backend.forward(q, k_large, v_large, **band)[:, :, blind]
            check_o(o, Attention(*(t[:, :, blind] for t in expected)), dtype)


def test_rows_without_keys(backend, dtype):
    """o = 0, l = 0, m = -inf, bit for bit, even when NaN and Inf are all there is."""
    q, k, v = backend.qkv(B=2, Nq=70, Nk=70, dtype=dtype)
    k[1], v[1], q[1, :, 3] = torch.inf, torch.nan, torch.nan
    o, l, m = backend.forward(q, k, v, seqlens_k=backend.ints(10, 0), causal=True, return_state=True)
    alone = backend.forward(q, k, v, seqlens_k=backend.ints(10, 0), causal=True)
    for b, rows in ((0, slice(0, 60)), (1, slice(0, 70))):
        assert not o[b, :, rows].any() and not alone[b, :, rows].any()
        assert not l[b, :, rows].any() and (m[b, :, rows] == -torch.inf).all()
    assert o[0, :, 60:].any()


def test_seen_special_values(backend, dtype):
    """A query that sees an Inf or a NaN gets what manual attention gives."""
    for tensor in "qkv":
        for value in (torch.inf, -torch.inf, torch.nan):
            q, k, v = backend.qkv(Nq=40, Nk=70, dtype=dtype)
            dict(q=q, k=k, v=v)[tensor][:, :, 33, 5] = value
            backend.check(q, k, v)


def test_scores_of_minus_infinity(backend, dtype):
    """One of them is a key that counts for nothing; where all that is seen is -inf, softmax is 0 / 0."""
    q, k, v = backend.qkv(B=1, Hq=1, Hkv=1, Nq=80, Nk=80, d=16, dtype=dtype)
    q, k = q.abs(), k.clone()
    k[:, :, :50] = -torch.inf
    backend.check(q, k, v)
    backend.check(q, k, v, causal=True)
    o, l, m = backend.forward(q, k, v, causal=True, return_state=True)
    assert o[:, :, :50].isnan().all() and not o[:, :, 50:].isnan().any()
    assert not l[:, :, :50].any() and (m[:, :, :50] == -torch.inf).all()


@pytest.mark.parametrize("name", ["seqlens_k", "leftpad_k", "offset"])
def test_numbers_of_each_batch_in_any_form(backend, name):
    """int32 or int64, dense or not, far beyond int32 or not: the same bits."""
    q, k, v = backend.qkv(B=4)
    values = {"seqlens_k": [33, 90, 0, 1], "leftpad_k": [0, 12, 90, 3], "offset": [20, -5, 90, 0]}[name]
    expected = backend.check(q, k, v, causal=True, **{name: backend.ints(*values)})
    strided = backend.ints(*(x for value in values for x in (value, 77)))[::2]
    for numbers in strided, strided.long(), backend.ints(*values).long():
        assert torch.equal(backend.forward(q, k, v, causal=True, **{name: numbers}), expected)
    far = torch.tensor([2**40, -(2**40), 2**63 - 1, -(2**63)], device=backend.device)
    near = backend.ints(2**31 - 1, -(2**31) + 1, 2**31 - 1, -(2**31) + 1)
    near, far = (backend.forward(q, k, v, causal=True, **{name: numbers}) for numbers in (near, far))
    assert torch.equal(near, far)


def test_most_tokens(backend):
    """Nk just below 2^28, and the last keys of them: positions need every bit of an int."""
    N, dtype = 2**28 - 1, torch.float32
    if backend.name == "hopper":  # which copies expanded keys
        if torch.cuda.mem_get_info()[0] < 20 << 30:
            pytest.skip("needs 20 GB of a GPU's memory")
        dtype = torch.float16
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=3, Nk=1, d=8, dtype=dtype)
    k, v = (t.expand(1, 1, N, 8) for t in (k, v))
    few = (t[:, :, :100] for t in (k, v))
    expected = attention(q, *few, window_size=(40, 0))
    o, l, m = backend.forward(q, k, v, window_size=(40, 0), return_state=True)
    check_o(o, expected, dtype)
    check_l_m(l, m, expected)
    offset = backend.ints(N - 1000)
    o, l, m = backend.forward(q, k, v, window_size=(40, 0), offset=offset, return_state=True)
    check_o(o, expected, dtype)
    check_l_m(l, m, expected)
