"""Gradients where scores are large, so that a float32 is too coarse for the log-sum-exp."""

import math

import pytest
import torch
from reference import gradient_sizes, gradients, relative_error
from torch.nn import functional as F

import minimal_attn
from minimal_attn.flash_attn import flash_attn_func, flash_attn_varlen_func

SCALES = {torch.float32: (10, 100, 1e4, 1e8), torch.float16: (10, 100), torch.bfloat16: (10, 100, 1e4, 1e8)}
# What rounding P and dS to the dtype leaves of dv, relative Frobenius error.
ROUNDING = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs_of(backend, dtype, scale, Nq=70, Nk=90, d=64, Hq=4, Hkv=2):
    q, k, v = backend.qkv(B=1, Nq=Nq, Nk=Nk, d=d, Hq=Hq, Hkv=Hkv)
    return [t.to(dtype) for t in (backend.randn(*q.shape), scale * q, scale * k, v)]


def grads(backend, do, q, k, v, dlse=None, **options):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o, lse = backend.forward(*leaves, return_lse=True, **options)
    outputs, wanted = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    return torch.autograd.grad(outputs, leaves, wanted)


def has_exact_scores(backend):
    """Large rows of float32 have float64 scores, wherever that is fast."""
    return backend.name in ("cpu", "paper") or torch.cuda.get_device_capability() in ((8, 0), (9, 0), (10, 0))


def bounds_of(backend, dtype, q, k):
    """Of dv, and of dq and dk, which lose more where all weight is on one key."""
    scores = (q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT).abs().max().item()
    rounding = (
        0 if dtype == torch.float32 and has_exact_scores(backend) else 2**-22 * scores / q.shape[-1] ** 0.5
    )
    return ROUNDING[dtype] + rounding, 10 * (ROUNDING[dtype] + rounding)


def check(backend, do, q, k, v, **options):
    found, expected = grads(backend, do, q, k, v, **options), gradients(do, q, k, v, **options)
    of_dv, of_dq_dk = bounds_of(backend, q.dtype, q, k)
    assert all(t.isfinite().all() for t in found)
    assert relative_error(found[2].double(), expected[2]) <= of_dv
    # Where P is 1, dq and dk are small differences of large numbers: there is no relative error to compare.
    # float16 has no dS below 6e-8.
    least = 1e-4 if q.dtype == torch.float16 else 1e-6
    size = do.double().abs().max() * max(q.abs().max(), k.abs().max()).double() * v.double().abs().max()
    # Of a row that isn't large D is computed from o, which is rounded to the dtype.
    of_D = [torch.finfo(q.dtype).eps * x for x in gradient_sizes(do, q, k, v, **options)]
    for actual, exact, rounding in zip(found[:2], expected[:2], of_D[:2], strict=True):
        if exact.abs().max() > least * size:
            assert (actual.double() - exact).norm() <= of_dq_dk * exact.norm() + rounding


@pytest.mark.parametrize("d", [1, 17, 64, 128, 200])
@pytest.mark.parametrize("scale", [1, 10, 100, 1e4, 1e15])
def test_one_key(backend, dtype, scale, d):
    """Its weight is 1, so dv is the sum of do, whatever the scores are."""
    if dtype == torch.float16 and scale > 100:
        pytest.skip("beyond float16")
    do, q, k, v = inputs_of(backend, dtype, scale, Nq=1, Nk=1, d=d, Hq=2, Hkv=2)
    dv = grads(backend, do, q, k, v)[2]
    # float32 on tensor cores: do as hi + lo, and 1 + 2^-23 undoes a truncation that one term doesn't have.
    factor = 2.5 if dtype == torch.float32 and backend.name in ("portable", "hopper") else 1.5
    assert relative_error(dv.double(), do.double()) <= factor * torch.finfo(dtype).eps


SHAPES = [(70, 90, 64), (3, 200, 64), (150, 50, 128), (65, 8, 200), (100, 100, 40)]
SHAPES += [(130, 1100, 64), (200, 1100, 128)]  # here the fused kernel of hopper fills rows itself


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_large_scores(backend, dtype, shape):
    Nq, Nk, d = shape
    for scale in SCALES[dtype]:
        check(backend, *inputs_of(backend, dtype, scale, Nq, Nk, d))


OPTIONS = {
    "causal": lambda backend: dict(causal=True),
    "window": lambda backend: dict(window_size=(20, 5)),
    "padding": lambda backend: dict(leftpad_k=backend.ints(5), seqlens_k=backend.ints(60), causal=True),
    "negative scale": lambda backend: dict(softmax_scale=-0.3),
    "dlse": lambda backend: dict(dlse=backend.randn(1, 4, 70)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, dtype, name):
    """Rows that see no key and hidden NaN stay apart; D has the gradient of lse."""
    do, q, k, v = inputs_of(backend, dtype, 100)
    options = OPTIONS[name](backend)
    check(backend, do, q, k, v, **options)
    if name == "padding":
        expected = grads(backend, do, q, k, v, **options)
        for t in k, v:
            t[:, :, :5] = t[:, :, 60:] = torch.nan
        for t in q, do:
            t[:, :, :15] = torch.nan  # at positions -10 + i, before the first key
        for actual, before in zip(grads(backend, do, q, k, v, **options), expected, strict=True):
            torch.testing.assert_close(actual, before)


@pytest.mark.parametrize("Nk, d", [(130, 64), (130, 200), (1100, 64), (1100, 128)])
def test_rows_of_every_size(backend, dtype, Nk, d):
    """Large rows beside others, in one tile."""
    do, q, k, v = inputs_of(backend, dtype, 1, Nq=130, Nk=Nk, d=d)
    k *= 10
    q *= 10 ** torch.linspace(-2, 3 if dtype != torch.float16 else 2, 130, device=q.device)[:, None].to(dtype)
    check(backend, do, q, k, v)


def test_equal_keys(backend, dtype):
    """All weights are the same, however large their score is. No score is a small sum of large products."""
    do, q, k, v = inputs_of(backend, dtype, 50)
    q, k = q.abs(), k[:, :, :1].abs().expand_as(k).contiguous()
    dv = grads(backend, do, q, k, v)[2]
    expected = do.double().view(1, 2, 2, 70, 64).sum((2, 3), keepdim=True)[:, :, 0] / 90
    assert relative_error(dv.double(), expected.expand_as(dv)) <= ROUNDING[dtype]


def test_chunks_have_what_a_float32_gives(backend, dtype):
    """lse of all keys is a float32, in autograd's states too: P is off by its rounding."""
    do, q, k, v = inputs_of(backend, dtype, 60)
    o, lse = backend.forward(q, k, v, return_lse=True)
    bound = ROUNDING[dtype] + 2**-21 * lse.abs().max().item()
    expected = gradients(do, q, k, v)[2]
    parts = []
    for part in slice(0, 40), slice(40, 90):
        for n in range(8, 20):  # the workspace holds what is freed here, and no member of it may stay unset
            torch.full((1 << n,), -1e3, device=q.device)
        chunk = k[:, :, part], v[:, :, part]
        parts.append(minimal_attn.backward(do, q, *chunk, o, lse, None, backend=backend.name)[2])
    assert relative_error(torch.cat(parts, 2).double(), expected) <= bound
    assert lse.abs().min() > 1100  # so half of it is large, too


@pytest.mark.parametrize("d, scale", [(64, 60), (128, 3000), (200, 3000)])
@pytest.mark.parametrize("Nk", [90, 1100])
def test_P_is_at_most_1(backend, dtype, d, scale, Nk):
    """Whatever lse is: rounded, too small, or wrong."""
    do, q, k, v = inputs_of(backend, dtype, min(scale, 1000) if dtype == torch.float16 else scale, d=d, Nk=Nk)
    o, lse = backend.forward(q, k, v, return_lse=True)
    largest = do.double().abs().sum(2, keepdim=True).view(1, 2, 2, 1, d).sum(2)
    for wrong in (lse, lse * (1 - 2**-20), lse / 2, -lse, lse.sign() * 1e30, -lse.sign() * 1e30):
        dq, dk, dv = minimal_attn.backward(do, q, k, v, o, wrong, None, backend=backend.name)
        assert (dv.double().abs() <= 1.01 * largest).all()
        assert dtype == torch.float16 or (dq.isfinite().all() and dk.isfinite().all())


def test_complete(backend, dtype):
    """backward by hand, from (o, l, m) of these keys alone, has autograd's bits."""
    if dtype != torch.float32 and backend.name == "hopper":
        torch.use_deterministic_algorithms(True)
    try:
        do, q, k, v = inputs_of(backend, dtype, 100)
        o, lse = backend.forward(q, k, v, return_lse=True)
        by_hand = minimal_attn.backward(do, q, k, v, o, lse, None, backend=backend.name, complete=True)
        assert all(map(torch.equal, by_hand, grads(backend, do, q, k, v)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_sinks_and_states(backend, dtype):
    """A sink far below the scores changes nothing; a state of other keys is not taken for these keys."""
    do, q, k, v = inputs_of(backend, dtype, 10)
    sinks = torch.zeros(4, device=q.device)
    expected = gradients(do, q, k, v, sinks=sinks)
    lse = backend.forward(q, k, v, return_lse=True)[1]
    bound = 2 * ROUNDING[dtype] + 2**-20 * lse.abs().max().item()
    assert relative_error(grads(backend, do, q, k, v, sinks=sinks)[2].double(), expected[2]) <= bound
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    state = None
    for part in slice(0, 40), slice(40, 90):
        chunk = [t[:, :, part] for t in leaves[1:]]
        state = backend.forward(leaves[0], *chunk, state=state, return_state=True)
    dv = torch.autograd.grad(state[0], leaves, do.float())[2]
    assert relative_error(dv.double(), gradients(do, q, k, v)[2]) <= bound


@pytest.mark.parametrize("form", ["as called", "deterministic", "packed"])
def test_flash_attn(backend, form):
    """Its own backward passes know that lse covers these keys alone."""
    do, q, k, v = inputs_of(backend, torch.float32, 10, Nq=90)
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    if form == "packed":
        cu = torch.tensor([0, 90], dtype=torch.int32, device=q.device)
        o = flash_attn_varlen_func(*(t[0] for t in leaves), cu, cu, 90, 90)[None]
    else:
        o = flash_attn_func(*leaves, deterministic=form == "deterministic")
    dv = torch.autograd.grad(o, leaves, do.transpose(1, 2))[2].transpose(1, 2)
    assert relative_error(dv.double(), gradients(do, q, k, v)[2]) <= bounds_of(backend, q.dtype, q, k)[0]


def test_scale_of_0(backend, dtype):
    """A sink alone makes lse large: no score says so."""
    do, q, k, v = inputs_of(backend, dtype, 1)
    sinks = torch.full((4,), 20.0, device=q.device)
    found = grads(backend, do, q, k, v, softmax_scale=0.0, sinks=sinks)
    for actual, exact in zip(found, gradients(do, q, k, v, softmax_scale=0.0, sinks=sinks), strict=True):
        assert (actual.double() - exact).abs().max() <= 1e-6 * do.abs().max()


def test_activated(backend):
    """F.scaled_dot_product_attention keeps one float32 for lse."""
    do, q, k, v = inputs_of(backend, torch.float32, 10, Hkv=4)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with minimal_attn.activate() as activation:
        o = F.scaled_dot_product_attention(*leaves)
        dv = torch.autograd.grad(o, leaves, do)[2]
    assert activation.calls == {"minimal_attn": 1}
    assert relative_error(dv.double(), gradients(do, q, k, v)[2]) <= bounds_of(backend, q.dtype, q, k)[0]


def test_many_keys_of_float16(backend):
    """P is 7.6e-6, where float16 is subnormal: dv must not have its 7 bits."""
    do, q, k, v = inputs_of(backend, torch.float16, 1, Nq=3, Nk=131072, Hq=1, Hkv=1)
    o, lse = backend.forward(q, k, v, return_lse=True)
    out = dict(out_dtype=torch.float32, backend=backend.name, complete=True)
    dv = minimal_attn.backward(do, q, k, v, o, lse, None, **out)[2].double()
    P = torch.exp(q.double() @ k.double().mT / math.sqrt(64) - lse.double()[..., None])
    size = P.mT @ do.double().abs()
    assert ((dv - P.mT @ do.double()).abs() <= 1.5e-3 * size).all()
