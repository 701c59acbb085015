"""key_ranges: each query sees a range of keys of its own. Values and gradients against float64."""

import pytest
import torch
from conftest import DTYPES, SHAPES_OF_MASKS
from test_backward import check, forms, grads

import minimal_attn


def documents(b, B, Nq, Nk):
    """Packed: each query sees the keys of its own document. Lengths of 0 to 100."""
    ranges = []
    for _ in range(B):
        ends = [0]
        while ends[-1] < max(Nq, Nk):
            ends.append(ends[-1] + b.random.choice([0, 1, 2, 15, 16, 17, 33, 64, 100]))
        bounds = list(zip(ends, ends[1:], strict=False))
        ranges.append([next((x, y) for x, y in bounds if i < y) for i in range(Nq)])
    return torch.tensor(ranges)


def chunks(b, B, Nq, Nk):
    i = torch.arange(Nq)
    return torch.stack([i // 48 * 48, i + 1], -1).expand(B, -1, -1)


def prefixes(b, B, Nq, Nk):
    prefix = torch.tensor([b.random.randint(0, Nk) for _ in range(B)])
    end = torch.maximum(torch.arange(Nq) + 1, prefix[:, None])
    return torch.stack([torch.zeros_like(end), end], -1)


def in_any_order(b, B, Nq, Nk):
    """Neither sorted nor within bounds; some end before they begin."""
    far = [-(2**31), -5, 0, Nk, Nk + 3, 2**31 - 1]
    draw = lambda: b.random.choice(far) if b.random.random() < 0.1 else b.random.randint(0, Nk)  # noqa: E731
    return torch.tensor([[[draw(), draw()] for _ in range(Nq)] for _ in range(B)])


def falling(b, B, Nq, Nk):
    begin = (Nq - 1 - torch.arange(Nq)) * Nk // Nq
    return torch.stack([begin, begin + 9], -1)[None]


def far_apart(b, B, Nq, Nk):
    """Neighbouring tiles of queries see the first or the last keys: gaps that no query sees."""
    is_last = torch.arange(Nq) // 64 % 2
    begin = is_last * max(Nk - 5, 0)
    return torch.stack([begin, begin + 5], -1)[None]


def every_second_tile(b, B, Nq, Nk):
    """128 queries see the first keys, the next 128 the last ones: a walk of queries skips tiles."""
    begin = torch.arange(Nq) // 128 % 2 * max(Nk - 5, 0)
    return torch.stack([begin, begin + 5], -1)[None]


def one_in_a_tile(b, B, Nq, Nk):
    """Most tiles of queries have a single query that sees anything."""
    seen = torch.arange(Nq) % 64 == b.random.randrange(64)
    return torch.stack([torch.zeros(Nq, dtype=torch.long), seen * Nk], -1)[None]


def with_gaps(b, B, Nq, Nk):
    """They grow, and some queries see nothing: a few, or all of several tiles."""
    ranges, begin, end = [], 0, 0
    while len(ranges) < Nq:
        begin, end = end, min(end + b.random.choice([1, 16, 50]), Nk)
        ranges += [(begin, end)] * b.random.choice([1, 16, 50]) + [(end, end)] * b.random.choice([0, 3, 150])
    return torch.tensor(ranges[:Nq])[None]


def nothing(b, B, Nq, Nk):
    return torch.zeros(B, Nq, 2, dtype=torch.long)


def nothing_behind(b, B, Nq, Nk):
    """Empty ranges behind the last key."""
    return torch.full((B, Nq, 2), Nk)


RANGES = documents, chunks, prefixes, in_any_order, falling, far_apart, every_second_tile, one_in_a_tile
RANGES += with_gaps, nothing, nothing_behind
SHAPES = [  # B, Hq, Hkv, Nq, Nk, d
    *SHAPES_OF_MASKS,
    (1, 6, 1, 3, 400, 80),
    (1, 4, 2, 420, 300, 180),
]
OPTIONS = {
    "alone": lambda b, B: {},
    "causal": lambda b, B: dict(causal=True),
    "window": lambda b, B: dict(window_size=(20, 3), offset=5),
    "lengths": lambda b, B: dict(seqlens_k=b.ints(*b.random.choices(range(80), k=B)), causal=True),
    "left padding": lambda b, B: dict(leftpad_k=b.ints(*b.random.choices(range(30), k=B))),
    "negative scale": lambda b, B: dict(softmax_scale=-0.2),
}


def drawn(backend, make, shape, dtype, options="alone"):
    B, Hq, Hkv, Nq, Nk, d = shape
    ranges = make(backend, B, Nq, Nk).to(backend.device)
    dtype_of_ranges = backend.random.choice([torch.int32, torch.int64])
    qkv = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    return qkv, dict(key_ranges=ranges.to(dtype_of_ranges)) | OPTIONS[options](backend, B)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", RANGES)
def test_values_and_gradients(backend, dtype, make, shape):
    qkv, options = drawn(backend, make, shape, dtype)
    found = backend.explain(*qkv, **options)
    assert found.kernel.endswith(", ranges") and "decode" not in found.kernel and found.workspace > 0
    backend.check(*qkv, **options)
    for _ in forms(backend, dtype):
        check(backend, torch.randn_like(qkv[0]), *qkv, **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", RANGES)
def test_with_other_options(backend, dtype, make, options):
    qkv, options = drawn(backend, make, SHAPES[0], dtype, options)
    backend.check(*qkv, **options)
    check(backend, torch.randn_like(qkv[0]), *qkv, **options)


def test_sinks_and_dlse(backend, dtype):
    qkv, options = drawn(backend, documents, SHAPES[0], dtype)
    backend.check(*qkv, sinks=backend.randn(4), **options)
    check(backend, torch.randn_like(qkv[0]), *qkv, dlse=backend.randn(2, 4, 70), **options)


def test_long(backend):
    """More keys than a backend sums at once, and more steps of a block of keys (kTilesOfRegisterSum)."""
    Hq = 2 if backend.name == "cpu" else 8
    for make in documents, prefixes, far_apart:
        qkv, options = drawn(backend, make, (1, Hq, 1, 700, 4200, 64), torch.float32)
        backend.check(*qkv, **options)
        check(backend, torch.randn_like(qkv[0]), *qkv, **options)


def test_flushed_sums(backend):
    """More keys than hopper sums at once (kKeysInSum); its consumers begin at other keys."""
    for d, step in (64, 60), (256, 1):
        q, k, v = backend.qkv(1, 1, 1, 130, 17500, d)
        begin = 30 + step * torch.arange(130, device=backend.device)
        backend.check(q, k, v, key_ranges=torch.stack([begin, begin + 8500], -1)[None])


def test_large_scores(backend):
    """Rows are normalised again over the keys that they see."""
    (q, k, v), options = drawn(backend, documents, (1, 2, 1, 200, 300, 64), torch.float32)
    check(backend, torch.randn_like(q), (100 * q).detach(), k, v, causal=True, offset=9, **options)


@pytest.mark.parametrize("band", [{"causal": True}, {"window_size": (30, 2)}, {"seqlens_k": (70, 0)}])
def test_ranges_that_are_a_band(backend, dtype, band):
    """Within rounding: the sums may begin elsewhere."""
    q, k, v = backend.qkv(Nq=140, Nk=140, dtype=dtype)
    i = torch.arange(140)
    if "causal" in band:
        ranges = torch.stack([torch.zeros_like(i), i + 1], -1)[None]
    elif "window_size" in band:
        ranges = torch.stack([i - 30, i + 3], -1)[None]
    else:
        ends = torch.tensor(band["seqlens_k"])[:, None].expand(-1, 140)
        ranges = torch.stack([torch.zeros_like(ends), ends], -1)
        band = {"seqlens_k": backend.ints(*band["seqlens_k"])}
    ranges = ranges.to(backend.device)
    o, expected = backend.forward(q, k, v, key_ranges=ranges), backend.forward(q, k, v, **band)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(o, expected, rtol=tolerance, atol=tolerance)


def test_strides(backend):
    """Of any layout, and one range for all batches in each of its forms."""
    q, k, v = backend.qkv()
    ranges = documents(backend, 1, 70, 90).to(backend.device)
    expected = backend.forward(q, k, v, key_ranges=ranges)
    wide = torch.zeros(2, 70, 6, dtype=torch.int32, device=backend.device)
    wide[..., 1:5:3] = ranges.int()
    for same in (
        ranges.expand(2, -1, -1),
        ranges.repeat(2, 1, 1).to(torch.int16),
        ranges.mT.contiguous().mT.int(),
        wide[..., 1:5:3],
        ranges.int().expand(2, -1, -1),
    ):
        assert torch.equal(backend.forward(q, k, v, key_ranges=same), expected)


@pytest.mark.parametrize("d", [64, 256])
def test_what_no_query_sees_may_be_nan(backend, dtype, d):
    """Outside leftpad_k and seqlens_k, whatever the ranges say, in both passes."""
    q, k, v = backend.qkv(d=d, dtype=dtype)
    lengths = dict(seqlens_k=backend.ints(50, 33), leftpad_k=backend.ints(3, 20))
    ranges = in_any_order(backend, 2, 70, 90).to(backend.device)
    dirty = [x.clone() for x in (k, v)]
    for x in dirty:
        x[0, :, 50:] = x[0, :, :3] = x[1, :, 33:] = x[1, :, :20] = torch.nan
    do = torch.randn_like(q)
    for x, y in zip(
        grads(backend, do, q, *dirty, key_ranges=ranges, **lengths),
        grads(backend, do, q, k, v, key_ranges=ranges, **lengths),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("d", [64, 256])
def test_queries_without_keys_may_be_nan(backend, dtype, d):
    """Rows of q and do that see nothing are read as zeros by the backward pass; o there is 0."""
    q, k, v = backend.qkv(Nq=200, Nk=200, d=d, dtype=dtype)
    ranges = documents(backend, 2, 200, 200)
    ranges[:, 130:] = 0
    ranges[:, 7] = 0
    ranges = ranges.to(backend.device)
    do, dirty = torch.randn_like(q), q.clone()
    dirty[:, :, 130:] = torch.nan
    dirty[:, :, 7] = torch.nan
    dirty_do = do.where(~dirty.isnan(), torch.nan)
    assert not backend.forward(dirty, k, v, key_ranges=ranges)[:, :, 130:].any()
    for x, y in zip(
        grads(backend, dirty_do, dirty, k, v, key_ranges=ranges),
        grads(backend, do, q, k, v, key_ranges=ranges),
        strict=True,
    ):  # float32 rows beside a NaN in q are computed by hopper's fallback, or without AMX
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("make", RANGES)
def test_same_bits_on_every_run(backend, make, d):
    """Blocks add to dq in an order that doesn't depend on what the ranges leave out."""
    for dtype in DTYPES:
        qkv, options = drawn(backend, make, (2, 4, 2, 400, 500, d), dtype)
        do = torch.randn_like(qkv[0])
        first, *others = (grads(backend, do, *qkv, **options) for _ in range(3))
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_state_and_pages(backend):
    """A state of other keys joins; pages are gathered or read."""
    (q, k, v), options = drawn(backend, documents, SHAPES[0], torch.float32)
    state = minimal_attn.forward(q, k, v, return_state=True)
    o, l, m = backend.forward(q, k, v, state=state, **options)
    alone = backend.forward(q, k, v, return_state=True, **options)
    for x, y in zip((o, l, m), minimal_attn.merge(state, alone), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    pages = [x.unflatten(2, (5, 18)).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
    table = torch.arange(10, device=backend.device).view(2, 5)
    paged = backend.forward(q, *pages, block_table=table, **options)
    torch.testing.assert_close(paged, backend.forward(q, k, v, **options), rtol=1e-5, atol=1e-5)


def test_empty_shapes(backend):
    for B, Nq, Nk in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = (x.requires_grad_() for x in backend.qkv(B=B, Nq=Nq, Nk=Nk))
        ranges = torch.zeros(B, Nq, 2, dtype=torch.int32, device=backend.device)
        o = backend.forward(q, k, v, key_ranges=ranges)
        o.sum().backward()
        assert "ranges" not in backend.explain(q, k, v, key_ranges=ranges).kernel or Nk == 0
        assert o.shape == q.shape and not o.any() and not q.grad.any() and not k.grad.any()


@pytest.mark.parametrize(
    "ranges, error",
    [
        (lambda: torch.zeros(3, 70, 2, dtype=torch.int32), r"have shape \(B or 1, Nq, 2\) = \(2 or 1, 70"),
        (lambda: torch.zeros(2, 69, 2, dtype=torch.int32), "key_ranges must have shape"),
        (lambda: torch.zeros(2, 70, 3, dtype=torch.int32), "key_ranges must have shape"),
        (lambda: torch.zeros(70, 2, dtype=torch.int32), "key_ranges must have shape"),
        (lambda: torch.zeros(2, 70, 2), "key_ranges must be int32 or another integer type"),
        (lambda: torch.zeros(2, 70, 2, dtype=torch.bool), "key_ranges must be int32 or another integer type"),
        (lambda: torch.zeros(2, 70, 2, dtype=torch.int32, device="meta"), "key_ranges must be on q's device"),
        (lambda: [[0, 1]], "key_ranges must be a dense tensor or None"),
    ],
)
def test_errors(backend, ranges, error):
    q, k, v = backend.qkv()
    ranges = ranges()
    if isinstance(ranges, torch.Tensor) and ranges.device.type == "cpu":
        ranges = ranges.to(backend.device)
    for call in (backend.forward, backend.explain):
        with pytest.raises((ValueError, TypeError), match=error) as raised:
            call(q, k, v, key_ranges=ranges)
        assert "\n" not in str(raised.value)


def test_vmap_checks_other_batches(backend):
    """It repeats one row of key_ranges for all batches, and of nothing else."""
    q, k, v = (x[None] for x in backend.qkv())
    ranges = documents(backend, 1, 70, 90).to(backend.device)
    mapped = torch.vmap(lambda q, k, v: backend.forward(q, k, v, key_ranges=ranges))(q, k, v)
    assert torch.equal(mapped[0], backend.forward(q[0], k[0], v[0], key_ranges=ranges))
    for wrong in {"seqlens_k": backend.ints(5)}, {"seqlens_k": backend.ints(5, 5, 5)}:
        with pytest.raises(ValueError, match=r"seqlens_k must have shape \(B,\)"):
            torch.vmap(lambda q, k, v, wrong=wrong: backend.forward(q, k, v, **wrong))(q, k, v)


def test_backward_by_hand(backend):
    """minimal_attn.backward takes them as autograd does."""
    (q, k, v), options = drawn(backend, chunks, SHAPES[0], torch.float32)
    do = torch.randn_like(q)
    state = backend.forward(q, k, v, return_state=True, **options)
    by_hand = minimal_attn.backward(do, q, k, v, *state, backend=backend.name, complete=True, **options)
    for x, y in zip(by_hand, grads(backend, do, q, k, v, **options), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_ranges_of_another_call(backend):
    """The tables belong to a call: new contents count, and so do those of other threads' calls."""
    q, k, v = backend.qkv()
    ranges = documents(backend, 2, 70, 90).to(backend.device)
    first = backend.forward(q, k, v, key_ranges=ranges)
    new = chunks(backend, 2, 70, 90).to(backend.device)
    ranges.copy_(new)
    other = backend.forward(q, k, v, key_ranges=ranges)
    assert torch.equal(other, backend.forward(q, k, v, key_ranges=new.contiguous()))
    assert not torch.equal(first, other)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("Nq", [64, 200])
def test_kernels_of_hopper(cuda_backend, dtype, d, Nq):
    """Its own, but for gradients of float32, or of half types with at most 64 queries and d up to 128."""
    if cuda_backend.name != "hopper":
        pytest.skip("a kernel of hopper")
    (q, k, v), options = drawn(cuda_backend, documents, (1, 2, 2, Nq, 200, d), dtype)
    forward, backward = (cuda_backend.explain(q, k, v, backward=x, **options).kernel for x in (False, True))
    assert forward == ("float32, ranges" if dtype == torch.float32 else "half, ranges")
    if dtype == torch.float32:
        assert backward == "float32 backward on tensor cores, ranges"
    elif d > 128:
        assert backward == "half backward, two kernels, ranges"
    elif Nq <= 64:
        assert backward == "half backward, two passes, ranges"
    else:
        assert backward == "half backward, fused, in order, ranges"
