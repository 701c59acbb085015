"""Documents that are computed one by one: few queries over many keys. Values against float64."""

import pytest
import torch
from conftest import Backend, check_o
from reference import attention
from test_cu_seqlens import captured_without_synchronising, drawn, same_bits
from test_paged import Paged

import minimal_attn

QUERIES = 0, 1, 1, 1, 2, 3, 4, 5, 17, 70, 200
KEYS = 0, 1, 15, 16, 17, 64, 130, 500, 1100


def serving(b):
    """Documents of one query, of a few, of none, of many; caches of any length."""
    n = b.random.randint(1, 9)
    queries, keys = b.random.choices(QUERIES, k=n), b.random.choices(KEYS, k=n)
    return queries, [*keys[:-1], keys[-1] + 2 * sum(queries) + 20]


def decoding(b):
    n = b.random.randint(1, 70)
    return [1] * n, b.random.choices(KEYS, k=n)


def alike(b):
    return [b.random.choice([1, 3])] * 40, [b.random.choice([300, 1024])] * 40


MAKE = serving, decoding, alike
OPTIONS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(40, 3)),
    "causal window": dict(causal=True, window_size=(130, 0), softmax_scale=-0.1),
}
SHAPES = [dict(), dict(Hq=3, Hkv=1, d=40), dict(Hq=2, Hkv=2, d=128), dict(d=200), dict(Hq=24, Hkv=1)]


def is_by_sequence(backend, q, k, v, **options):
    """explain names the tables on hopper and portable. On cpu and paper it always says ranges."""
    kernel = backend.explain(q, k, v, **options).kernel
    return kernel.endswith(", by sequence" if backend.name in ("hopper", "portable") else ", ranges")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", MAKE)
def test_values(backend, dtype, make, options):
    qkv, options = drawn(
        backend, make, dtype, front=3, behind=2, **backend.random.choice(SHAPES), **OPTIONS[options]
    )
    if qkv[1].shape[2] > 2 * qkv[0].shape[2]:
        assert is_by_sequence(backend, *qkv, **options)
    backend.check(*qkv, **options)


def used(b, options):
    """Of each document, how many keys are in use."""
    lengths = options["cu_seqlens_k"].diff().tolist()
    return b.ints(*[b.random.choice([0, 1, n // 2, n, n + 9]) for n in lengths])


@pytest.mark.parametrize("make", MAKE)
def test_seqused_k(backend, dtype, make):
    """Keys that are not in use may be NaN."""
    (q, k, v), options = drawn(backend, make, dtype, behind=2, causal=True, **backend.random.choice(SHAPES))
    options["seqused_k"] = used(backend, options)
    begins = options["cu_seqlens_k"].tolist()
    inside = torch.zeros(k.shape[2], dtype=torch.bool)
    for begin, end, n in zip(begins, begins[1:], options["seqused_k"].tolist(), strict=False):
        inside[begin : min(begin + n, end)] = True
    assert is_by_sequence(backend, q, k, v, **options)
    expected = attention(q, k, v, **options).o
    k, v = (x.masked_fill(~inside.to(x.device)[:, None], torch.nan) for x in (k, v))
    o = backend.forward(q, k, v, **options)
    check_o(o, attention(q, k, v, **options), dtype)
    assert expected.isfinite().all() and o.isfinite().all()


@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 64, 256])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_pages(backend, dtype, page_size, shape):
    """One row of pages for all documents: pages and rows without a key are NaN."""
    b, shape = backend, dict(Hq=4, Hkv=2, d=64) | SHAPES[shape]
    queries = b.random.choices([0, 1, 1, 1, 2, 40], k=7)
    lengths = b.random.choices([0, 1, 15, 130, 500], k=7)
    cache = Paged(b, page_size, (*lengths, 70), Hkv=shape["Hkv"], d=shape["d"], dtype=dtype)
    q = b.randn(1, shape["Hq"], sum(queries) + 2, shape["d"], dtype=dtype)
    room = cache.table.shape[1] * page_size
    documents = dict(
        cu_seqlens_q=torch.tensor([0, *queries, 2]).cumsum(0).to(b.device),
        cu_seqlens_k=torch.arange(9, device=b.device) * room,
        seqused_k=cache.lengths,
    )
    if b.random.random() < 0.5:  # documents that begin within a page, behind rows of NaN
        front = b.random.choice([1, 5])
        first_pages = cache.table[cache.lengths > 0, 0].long()
        cache.k[first_pages, :, :front] = cache.v[first_pages, :, :front] = torch.nan
        documents["cu_seqlens_k"] = documents["cu_seqlens_k"] + front
        documents["cu_seqlens_k"][-1] = 8 * room
        documents["seqused_k"] = (cache.lengths - front).clamp(min=0)
    options = b.random.choice([dict(), dict(causal=True), dict(causal=True, window_size=(50, 0))])
    paged = b.forward(q, cache.k, cache.v, **documents, **options, block_table=cache.table.view(1, -1))
    k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in cache.dense())
    check_o(paged, attention(q, k, v, **documents, **options), dtype)
    how = b.explain(q, cache.k, cache.v, **documents, block_table=cache.table.view(1, -1))
    if b.name in ("cpu", "paper") or (b.name == "hopper" and dtype != torch.float32 and page_size % 16 == 0):
        assert not {"k", "v"} & set(how.copied)


@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_a_batch_of_pages(backend, dtype, page_size):
    """Without documents, too, many queries read pages."""
    cache = Paged(
        backend, page_size, (400, 0, 70), d=backend.random.choice([64, 96, 128, 192, 256]), dtype=dtype
    )
    q = backend.randn(3, 4, 90, cache.k.shape[-1], dtype=dtype)
    for options in dict(causal=True), dict(window_size=(33, 5)), dict(leftpad_k=backend.ints(37, 0, 5)):
        o = backend.forward(q, cache.k, cache.v, **cache.options(), **options)
        check_o(o, attention(q, *cache.dense(), seqlens_k=cache.lengths, **options), dtype)
    if backend.name == "hopper" and dtype != torch.float32:
        assert not backend.explain(q, cache.k, cache.v, **cache.options()).copied


@pytest.mark.parametrize("n, length", [(3, 200), (66, 1024), (5, 3000), (64, 1025)])
def test_same_bits_as_a_batch(backend, dtype, n, length):
    """Whether items are chunks or whole rows. Documents begin at a multiple of 16."""
    b = backend
    q, k, v = b.qkv(n, 8, 2, 1, length // 16 * 16 + 16, 128, dtype=dtype)
    alone = b.forward(q, k, v, seqlens_k=b.ints(*[length] * n))
    packed = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v)]
    options = dict(
        cu_seqlens_q=torch.arange(n + 1, device=b.device),
        cu_seqlens_k=torch.arange(n + 1, device=b.device) * k.shape[2],
        seqused_k=b.ints(*[length] * n),
    )
    o = b.forward(*packed, **options).transpose(1, 2)[0][:, :, None]
    if b.name in ("hopper", "portable"):
        assert torch.equal(o, alone)
    else:
        torch.testing.assert_close(o, alone, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=2e-3)


def test_results(backend, dtype):
    """State, log-sum-exp, sinks, prefix_k: few queries and many in one call."""
    qkv, options = drawn(backend, serving, dtype, front=3, behind=2, causal=True)
    documents = len(options["cu_seqlens_q"]) - 1
    b, sinks = backend, backend.randn(4)
    expected = attention(*qkv, sinks=sinks, **options)
    o, lse = b.forward(*qkv, sinks=sinks, return_lse=True, **options)
    check_o(o, expected, dtype)
    torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), rtol=1e-4, atol=1e-4)
    prefix = dict(window_size=(9, 0), prefix_k=b.integers(0, 5, documents, dtype=torch.int32), **options)
    b.check(*qkv, **prefix)
    state = minimal_attn.forward(*qkv, return_state=True)
    joined = b.forward(*qkv, state=state, **options)
    for x, y in zip(
        joined, minimal_attn.merge(state, b.forward(*qkv, return_state=True, **options)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("d", [64, 256])
def test_any_values_on_a_gpu(cuda_backend, d):
    """Nothing is read or written out of bounds, and no call hangs."""
    b = cuda_backend
    for dtype in torch.float16, torch.float32:
        q, k, v = b.qkv(1, 4, 2, 100, 280, d, dtype=dtype)
        pages = [x.view(1, 2, 35, 8, d)[0].transpose(0, 1).contiguous() for x in (k, v)]
        for low, high in (0, 300), (-(2**31), 2**31 - 1), (-9, 400):
            cu = [b.integers(low, high, 40, dtype=torch.int32) for _ in "qk"]
            options = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=True)
            assert b.forward(q, k, v, **options).isfinite().all()
            options["seqused_k"] = b.integers(low, high, 39, dtype=torch.int32)
            assert b.forward(q, k, v, **options).isfinite().all()
            table = b.integers(low, high, 1, 35, dtype=torch.int32)
            assert b.forward(q, *pages, block_table=table, **options).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replay_with_other_lengths(cuda_backend, dtype):
    b = cuda_backend
    (q, k, v), options = drawn(b, lambda b: ([1, 1, 30, 4], [300, 100, 200, 7]), dtype, causal=True)
    options = {x: y.int() if "cu" in x else y for x, y in options.items()}
    assert is_by_sequence(b, q, k, v, **options)

    def step():
        return (b.forward(q, k, v, **options),)

    graph, captured = captured_without_synchronising(step)
    for cu_q, cu_k in ([0, 1, 2, 3, 4], [0, 10, 20, 150, 607]), ([0, 0, 36, 36, 36], [5, 5, 600, 600, 600]):
        options["cu_seqlens_q"].copy_(torch.tensor(cu_q)), options["cu_seqlens_k"].copy_(torch.tensor(cu_k))
        graph.replay()
        assert same_bits(captured, step())


def test_a_document_of_nan_stays_alone(backend, dtype):
    """Each document's keys end within a tile of another's."""
    qkv, options = drawn(backend, lambda b: ([1, 1, 70, 3, 1], [333, 77, 501, 100, 130]), dtype, causal=True)
    clean = backend.forward(*qkv, **options)
    for n in range(5):
        q, k, v = (x.clone() for x in qkv)
        begin, end = options["cu_seqlens_k"][n : n + 2].tolist()
        first, last = options["cu_seqlens_q"][n : n + 2].tolist()
        v[:, :, begin:end] = torch.nan
        o = backend.forward(q, k, v, **options)
        assert o[:, :, first:last].isnan().all()
        o[:, :, first:last] = clean[:, :, first:last]
        torch.testing.assert_close(o, clean, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, error",
    [
        (dict(cu_seqlens_q=None, cu_seqlens_k=None), "seqused_k must be None without cu_seqlens_q"),
        (dict(seqused_k=torch.ones(3).int()), r"seqused_k must have shape \(documents,\) with"),
        (dict(seqused_k=torch.ones(1)), "seqused_k must be int32 or"),
    ],
)
def test_errors(backend, change, error):
    q, k, v = backend.qkv(1, 2, 2, 1, 9)
    bounds = [torch.tensor(x, device=backend.device) for x in ([0, 1], [0, 9])]
    options = dict(cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], seqused_k=bounds[1][1:]) | change
    options = {x: y if y is None else y.to(backend.device) for x, y in options.items()}
    for call in backend.forward, backend.explain:
        with pytest.raises(ValueError, match=error):
            call(q, k, v, **options)


def test_negative_seqused_k_on_a_cpu():
    b = Backend("cpu", 0)
    q, k, v = b.qkv(1, 2, 2, 1, 9)
    with pytest.raises(ValueError, match="seqused_k must be at least 0, but has -1"):
        b.forward(q, k, v, cu_seqlens_q=b.ints(0, 1), cu_seqlens_k=b.ints(0, 9), seqused_k=b.ints(-1))
    with pytest.raises(RuntimeError, match="seqused_k"):
        b.forward(
            *(x.requires_grad_() for x in (q, k, v)),
            cu_seqlens_q=b.ints(0, 1),
            cu_seqlens_k=b.ints(0, 9),
            seqused_k=b.ints(3),
        )
