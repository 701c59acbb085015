"""Paged caches: block_table says which pages hold a batch's keys."""

import pytest
import torch

import minimal_attn

PAGE_SIZES = [16, 32, 64, 128, 256]
CASES = {  # of the drawing, and options of the call
    "decode": dict(Nq=1),
    "decode with GQA": dict(Nq=1, Hq=8),
    "decode of padded rows": dict(Nq=1, d=40),
    "few queries": dict(Nq=3, causal=True),
    "chunked prefill": dict(Nq=70, causal=True),
    "prefill of an odd d": dict(Nq=33, d=37, causal=True, window_size=(50, 0)),
    "full": dict(Nq=130, Hq=2),
}


class Paged:
    """A cache with NaN in all pages and rows without a key, garbage in the entries behind them."""

    def __init__(self, backend, page_size=16, lengths=(150, 0, 97), n=None, Hkv=2, d=64, dtype=torch.float32):
        most = n or -(-max(lengths) // page_size) + 1
        pages = backend.random.sample(range(most * len(lengths) + 2), most * len(lengths) + 2)
        garbage = [-1, -(2**31), 2**31 - 1, len(pages), 10**6]
        table = [[backend.random.choice(garbage) for _ in range(most)] for _ in lengths]
        layout = (len(pages), page_size, Hkv, d) if backend.random.random() < 0.7 else None
        self.k, self.v = (
            backend.randn(*layout, dtype=dtype).transpose(1, 2)
            if layout
            else backend.randn(len(pages), Hkv, page_size, d, dtype=dtype)
            for _ in "kv"
        )
        hidden = torch.ones(len(pages), page_size, dtype=torch.bool)
        first = pages[0]  # a prompt that all batches have in common
        for b, length in enumerate(lengths):
            for p in range(-(-length // page_size)):
                table[b][p] = first if p == 0 and min(filter(None, lengths)) >= page_size else pages.pop()
                hidden[table[b][p], : min(page_size, length - p * page_size)] = False
        for x in self.k, self.v:
            x.masked_fill_(hidden.to(backend.device)[:, None, :, None], torch.nan)
        self.table, self.lengths = backend.ints(*table), backend.ints(*lengths)

    def dense(self):
        """k and v as they are without pages, NaN where no key is."""
        table = self.table.long().clamp(0, len(self.k) - 1)
        return (x[table].transpose(1, 2).flatten(2, 3) for x in (self.k, self.v))

    def options(self):
        return dict(block_table=self.table, seqlens_k=self.lengths)


def reads_pages(backend, q, k, v, **options):
    return not {"k", "v"} & set(backend.explain(q, k, v, **options).copied)


@pytest.mark.parametrize("page_size", [*PAGE_SIZES, 1, 24])
@pytest.mark.parametrize("case", CASES)
def test_values(backend, dtype, case, page_size):
    options = dict(CASES[case])
    Nq, Hq, d = options.pop("Nq"), options.pop("Hq", 2), options.pop("d", 64)
    cache = Paged(backend, page_size, d=d, dtype=dtype)
    q = backend.randn(3, Hq, Nq, d, dtype=dtype)
    k, v = cache.dense()
    dense = backend.check(q, k, v, seqlens_k=cache.lengths, **options)
    paged = backend.forward(q, cache.k, cache.v, **cache.options(), **options)
    how = [backend.explain(q, k, v, seqlens_k=cache.lengths, **options)]
    if backend.name in ("cpu", "paper") or (how[0].kernel.startswith("decode") and page_size % 16 == 0):
        assert reads_pages(backend, q, cache.k, cache.v, **cache.options(), **options)
    how += [backend.explain(q, cache.k, cache.v, **cache.options(), **options)]
    assert how[0].kernel == how[1].kernel
    assert torch.equal(paged, dense)


def test_results(backend, dtype):
    """The log-sum-exp, the state, out, sinks and other options have the bits that they have without pages."""
    cache = Paged(backend, 32, dtype=dtype)
    q, (k, v) = backend.randn(3, 4, 5, 64, dtype=dtype), cache.dense()
    state = backend.forward(q, *backend.qkv(B=3, Nk=20, dtype=dtype)[1:], return_state=True)
    options = dict(causal=True, leftpad_k=backend.ints(3, 0, 40), offset=backend.ints(140, 2, 60))
    for more in (
        dict(return_lse=True, sinks=backend.randn(4)),
        dict(return_state=True, window_size=(40, 0)),
        dict(state=state, softmax_scale=0.3),
        dict(out=torch.empty_like(q)),
    ):
        paged = backend.forward(q, cache.k, cache.v, **cache.options(), **options, **more)
        paged = [t.clone() for t in (paged if isinstance(paged, tuple) else (paged,))]
        dense = backend.forward(q, k, v, seqlens_k=cache.lengths, **options, **more)
        assert all(map(torch.equal, paged, dense if isinstance(dense, tuple) else (dense,)))


def test_without_lengths(backend, dtype):
    """Then Nk is what the table has room for. Numbers out of range are the nearest page."""
    k, v = (backend.randn(5, 2, 16, 64, dtype=dtype) for _ in "kv")
    table = backend.ints([-3, 4, 2, -(2**31)], [2**31 - 1, 5, 0, 1])
    nearest = torch.tensor([[0, 4, 2, 0], [4, 4, 0, 1]])
    q = backend.randn(2, 4, 9, 64, dtype=dtype)
    dense = (x[nearest].transpose(1, 2).flatten(2, 3) for x in (k, v))
    expected = backend.check(q, *dense, causal=True)
    for ints in table, table.long() + (table > 4) * 2**40, torch.stack([table, table], -1)[..., 0]:
        assert torch.equal(backend.forward(q, k, v, causal=True, block_table=ints), expected)
    rows = torch.cat([table, table], 1)[:, 4:]  # of a larger table
    assert torch.equal(backend.forward(q, k, v, causal=True, block_table=rows), expected)


def test_expanded_table(backend, dtype):
    """One row for all batches: copied once, where the backend copies."""
    k, v = (backend.randn(5, 2, 16, 64, dtype=dtype) for _ in "kv")
    row, q = backend.ints([3, 1, 4]), backend.randn(6, 4, 9, 64, dtype=dtype)
    table, options = row.expand(6, -1), dict(leftpad_k=backend.ints(0, 1, 16, 30, 47, 48))
    expected = backend.forward(q, k, v, block_table=table.contiguous(), **options)
    assert torch.equal(backend.forward(q, k, v, block_table=table, **options), expected)


def test_strides_that_are_copied(backend):
    """Only the pages in the table are, once."""
    cache = Paged(backend)
    q = backend.randn(3, 4, 1, 64)
    expected = backend.forward(q, cache.k, cache.v, **cache.options())
    k = cache.k.mT.contiguous().mT
    assert backend.explain(q, k, cache.v, **cache.options()).copied == ["k", "v"]
    assert torch.equal(backend.forward(q, k, cache.v, **cache.options()), expected)


def test_empty(backend):
    k, q = backend.randn(3, 2, 16, 64), backend.randn(2, 4, 5, 64)
    table = backend.ints([7], [-1])
    assert not backend.forward(q, k, k, block_table=table[:, :0]).any()
    assert not backend.forward(q, k, k, block_table=table, seqlens_k=backend.ints(0, -3)).any()
    assert backend.forward(q[:0], k, k, block_table=table[:0]).shape == (0, 4, 5, 64)


def test_explain(backend):
    cache = Paged(backend)
    q = backend.randn(3, 4, 1, 64)
    plan = backend.explain(q, cache.k, cache.v, **cache.options())
    assert plan.copied in ([], ["k", "v"])
    dense = backend.explain(q, *cache.dense(), seqlens_k=cache.lengths)
    assert (plan.kernel, plan.Br, plan.Bc, plan.grid) == (dense.kernel, dense.Br, dense.Bc, dense.grid)


def test_compiled(backend):
    """Other pages, and more of them, compile nothing."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def decode(q, k, v, **options):
        o = minimal_attn.forward(q, k, v, causal=True, **options)
        return o, *minimal_attn.forward(q, k, v, causal=True, return_lse=True, **options)

    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (70, 33), (1, 90), (300, 2):
            cache, q = Paged(backend, lengths=lengths), backend.randn(2, 4, 3, 64)
            cache.k, cache.v = cache.k.contiguous(), cache.v.contiguous()  # strides that change would compile
            o, again, lse = decode(q, cache.k, cache.v, **cache.options())
            options = dict(causal=True, **cache.options())
            assert torch.equal(o, minimal_attn.forward(q, cache.k, cache.v, **options))
            expected = minimal_attn.forward(q, cache.k, cache.v, return_lse=True, **options)
            assert torch.equal(again, expected[0]) and torch.equal(lse, expected[1])
    torch.compiler.reset()


def test_graph(cuda_backend, dtype):
    """Captured once, replayed with other pages, lengths and contents."""
    backend = cuda_backend
    for Nq in 1, 40:
        q, lengths = backend.randn(2, 4, Nq, 64, dtype=dtype), ((300, 0), (17, 80), (0, 16))
        caches = [Paged(backend, lengths=these, n=20, dtype=dtype) for these in lengths]
        first = Paged(backend, lengths=(1, 2), n=20, dtype=dtype)
        backend.forward(q, first.k, first.v, causal=True, **first.options())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = backend.forward(q, first.k, first.v, causal=True, **first.options())
        for cache in caches:
            for name in "k", "v", "table", "lengths":
                getattr(first, name).copy_(getattr(cache, name))
            graph.replay()
            expected = backend.forward(q, cache.k, cache.v, causal=True, **cache.options())
            assert torch.equal(o, expected)


def test_no_synchronisation(cuda_backend):
    cache, q = Paged(cuda_backend), cuda_backend.randn(3, 4, 1, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda_backend.forward(q, cache.k, cache.v, **cache.options())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_vmap(backend):
    """Elements that share the pages, and elements with pages of their own."""
    k, v = (backend.randn(2, 5, 2, 16, 64) for _ in "kv")
    q, table = backend.randn(2, 3, 4, 2, 64), backend.integers(-2, 7, 2, 3, 4, dtype=torch.int32)

    def forward(q, k, v, table):
        return backend.forward(q, k, v, block_table=table, causal=True)

    for mapped in (1, 0, 0, 1), (1, 1, 1, 1), (1, 1, 1, 0), (1, 1, 0, 1):
        tensors = [t if m else t[0] for t, m in zip((q, k, v, table), mapped, strict=True)]
        elements = [[t[i] if m else t for t, m in zip(tensors, mapped, strict=True)] for i in range(2)]
        actual = torch.vmap(forward, tuple(0 if m else None for m in mapped))(*tensors)
        assert torch.equal(actual, torch.stack([forward(*element) for element in elements]))


@pytest.mark.parametrize("function", [minimal_attn.forward, minimal_attn.explain])
def test_errors(backend, function):
    k, q = backend.randn(3, 2, 16, 8), backend.randn(2, 4, 5, 8)
    table = backend.ints([0, 1], [2, 1])
    wrong_tables = [
        (table[0], r"must have shape \(B, n\) = \(2, n\), but has shape \[2\]"),
        (table[:1], r"must have shape \(B, n\) = \(2, n\), but has shape \[1, 2\]"),
        (table.float(), "must be int32 or another .*[Ff]loat"),
        (table.bool(), "must be int32 or another .*[Bb]ool"),
        (table.to("meta"), f"must be on q's device {k.device}, but is on meta"),
        (table[:, :1].expand(2, 2**25), "must have pages for fewer than 268435456 keys .* pages of 16"),
        ([[0, 1]], r"must be a dense tensor or None, but was \[\[0, 1\]\]"),
    ]
    pages = "k must be pages of q's head dimension with block_table"
    calls = [(dict(block_table=t), f"block_table {pattern}") for t, pattern in wrong_tables] + [
        (dict(k=k[:0], v=k[:0]), rf"{pages}, .* at least 1 page .*\[0, 2, 16, 8\]"),
        (dict(k=k[:, :, :0], v=k[:, :, :0]), rf"{pages}, .*\[3, 2, 0, 8\]"),
        (dict(k=k[..., :7]), rf"{pages}, .*page_size, 8\).*\[3, 2, 16, 7\]"),
        (dict(v=k[:2]), "v must have k's shape"),
        (dict(k=k[0]), "k must have 4 dimensions"),
        (dict(block_table=None), "k must have q's batch size"),
    ]
    for changes, pattern in calls:
        call = dict(q=q, k=k, v=k, block_table=table) | changes
        with pytest.raises((ValueError, TypeError), match="^" + pattern) as caught:
            function(**call, backend=backend.name)
        assert "\n" not in str(caught.value)


def test_overlap_with_out(backend):
    k, q, out = backend.randn(3, 1, 16, 8), backend.randn(1, 1, 1, 8), backend.randn(1, 1, 1, 8)
    with pytest.raises(ValueError, match="^out must not overlap block_table in memory"):
        backend.forward(q, k, k, block_table=out[0, 0].view(torch.int32), out=out)
