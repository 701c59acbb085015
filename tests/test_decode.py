"""Few queries over many keys: the kernel that splits the keys of a row."""

import pytest
import torch
from conftest import check_l_m, check_o
from reference import attention

import minimal_attn


def is_decode(backend, *tensors, **options):
    """Whether the call is one for decode.cu, on a backend that has it."""
    return backend.name in ("cpu", "paper") or backend.explain(*tensors, **options).kernel.startswith(
        "decode"
    )


def shared_memory():
    """Bytes that a block may use, with pytest's --shared-memory-limit."""
    set_limit = minimal_attn._C.shared_memory_limit
    limit = set_limit(0)
    set_limit(limit)
    return min(limit, torch.cuda.get_device_properties(0).shared_memory_per_block_optin)


def should_be_decode(backend, q, k):
    """Whether a block has the shared memory that decode.cu needs, and the rows are few enough for it."""
    if backend.name in ("cpu", "paper"):
        return True
    rows, d = q.shape[1] // k.shape[1] * q.shape[2], q.shape[3]
    many = backend.explain(*backend.qkv(d=64, Nq=200, dtype=q.dtype)).kernel
    on_fma_units = q.dtype == torch.float32 or many == "bfloat16 on FMA units"  # of a GPU as old as a T4
    D = 64 if d <= 64 else 128 if d <= 128 else 256
    keys, tile = (8, 8 if D <= 128 else 4) if on_fma_units else (16, 16)
    # Four warps have Kj and Vj of a step, and Oi; half types have Qi; all have li and mi.
    needed = 4 * (2 * keys * D * q.element_size() + min(rows, tile) * (4 * D)) + 32 * tile
    needed += 0 if on_fma_units else 16 * D * 2
    return needed <= shared_memory() and rows <= (16 if on_fma_units or k.shape[2] < 2048 else 32)


@pytest.mark.parametrize("d", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("group, Nq", [(1, 1), (4, 1), (8, 2), (1, 5), (3, 3), (16, 1)])
def test_rows(backend, dtype, d, group, Nq):
    """The queries of the heads that share a key head are the rows of a tile."""
    q, k, v = backend.qkv(B=2, Hq=2 * group, Hkv=2, Nq=Nq, Nk=777, d=d, dtype=dtype)
    assert is_decode(backend, q, k, v) == should_be_decode(backend, q, k)
    backend.check(q, k, v, causal=True)


@pytest.mark.parametrize("Nk", [300, 2100])
@pytest.mark.parametrize("group, Nq", [(4, 8), (1, 8), (16, 2), (1, 16)])
def test_several_tiles_of_rows(backend, dtype, group, Nq, Nk):
    q, k, v = backend.qkv(B=1, Hq=2 * group, Hkv=2, Nq=Nq, Nk=Nk, dtype=dtype)
    assert is_decode(backend, q, k, v) == should_be_decode(backend, q, k)
    backend.check(q, k, v, causal=True)


@pytest.mark.parametrize("Nk", [128, 129, 143, 511, 512, 513, 2047, 2049, 9001])
def test_ends_of_chunks(backend, dtype, Nk):
    q, k, v = backend.qkv(B=1, Hq=8, Hkv=2, Nq=1, Nk=Nk, d=128, dtype=dtype)
    assert is_decode(backend, q, k, v) == should_be_decode(backend, q, k)
    backend.check(q, k, v)


MASKS = {
    "causal": {"causal": True},
    "window": {"window_size": (100, 0)},
    "both sides": {"window_size": (301, 7), "offset": 333},
    "no key": {"window_size": (5, 5), "offset": -100},
    "some rows without a key": {"causal": True, "offset": -2},
    "scale": {"softmax_scale": -0.3},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS.keys())
def test_masks(backend, dtype, options):
    q, k, v = backend.qkv(B=2, Hq=8, Hkv=2, Nq=4, Nk=700, dtype=dtype)
    assert is_decode(backend, q, k, v, **options)
    backend.check(q, k, v, **options)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    state = backend.forward(q[:, :, :], k[:, :, :40], v[:, :, :40], return_state=True)
    found = backend.forward(q, k, v, state=state, **options)
    expected = attention(q, k, v, **options)
    o, l, m = (t.double() for t in state)
    m_new = torch.maximum(m, expected.m)
    alpha, beta = l * torch.exp(m - m_new), expected.l * torch.exp(expected.m - m_new)
    o = (alpha[..., None] * o + beta[..., None] * expected.o) / (alpha + beta)[..., None]
    assert (found[0].double() - o).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2)


def ragged(backend, dtype, B=7, Nk=3000, Nq=2, d=64):
    q, k, v = backend.qkv(B=B, Hq=8, Hkv=2, Nq=Nq, Nk=Nk, d=d, dtype=dtype)
    lengths, padding = [Nk, 0, 1, 17, 128, 2999, 700], [0, 0, 1, 16, 5, 2000, 33]
    for b in range(B):  # what no query may see
        for t in k, v:
            t[b, :, lengths[b] :] = t[b, :, : padding[b]] = torch.nan
    return (q, k, v), {"seqlens_k": backend.ints(*lengths), "leftpad_k": backend.ints(*padding)}


def test_ragged(backend, dtype):
    tensors, limits = ragged(backend, dtype)
    assert is_decode(backend, *tensors, **limits)
    backend.check(*tensors, causal=True, **limits)
    backend.check(
        *tensors, offset=backend.ints(5, 0, -1, 20, 127, 2500, 10_000), window_size=(300, 3), **limits
    )


def test_many_batches(backend, dtype):
    """More than a warp has lanes, more chunks than a GPU has places for blocks."""
    B = 70
    q, k, v = backend.qkv(B=B, Hq=16, Hkv=8, Nq=1, Nk=600, dtype=dtype)
    backend.check(q, k, v, window_size=(20, 0))
    lengths = torch.tensor([backend.random.randint(0, 600) for _ in range(B)], dtype=torch.int32)
    backend.check(q, k, v, causal=True, seqlens_k=lengths.to(q.device))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_bits_do_not_depend_on_the_batch(cuda_backend, dtype, d):
    """A row alone, in a batch, with other lengths of the others, in a longer cache: the same bits."""
    backend = cuda_backend
    q, k, v = backend.qkv(B=40, Hq=8, Hkv=2, Nq=1, Nk=2500, d=d, dtype=dtype)
    if not is_decode(backend, q, k, v):
        pytest.skip("another kernel")
    lengths = torch.tensor(
        [backend.random.randint(1, 2500) for _ in range(40)], dtype=torch.int32, device=q.device
    )
    first = backend.check(q, k, v, causal=True, seqlens_k=lengths)
    for b in 0, 17, 39:
        n = int(lengths[b])
        alone = backend.forward(q[b : b + 1], k[b : b + 1], v[b : b + 1], seqlens_k=lengths[b : b + 1])
        assert torch.equal(alone, first[b : b + 1])
        if n >= 128:
            short = backend.forward(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
            assert torch.equal(short, first[b : b + 1])
    others = lengths.flip(0).contiguous()
    others[17] = lengths[17]
    again = backend.forward(q, k, v, causal=True, seqlens_k=others)
    assert torch.equal(again[17], first[17])


# d, keys of a page or none, query heads of a key head, queries, keys, options. A window may hide some chunks.
WHOLE_ROWS = {
    "one chunk": (64, None, 4, 1, 170, {"window_size": (40, 0)}),
    "four chunks": (128, None, 4, 1, 256, {}),
    "nine": (128, None, 2, 2, 530, {"causal": True}),
    "sixteen": (128, 32, 4, 1, 1024, {}),
    "no key": (64, None, 4, 1, 700, {"window_size": (5, 5), "offset": -100}),
    "odd": (80, None, 3, 1, 650, {"window_size": (500, 0)}),
    "pages": (128, 16, 1, 1, 448, {}),
    "eight queries": (128, None, 8, 1, 600, {}),
    "sixteen queries": (128, None, 4, 4, 300, {"causal": True}),
    "two tiles": (128, 64, 8, 3, 2048, {"causal": True}),
}


@pytest.mark.parametrize("d, page_size, group, Nq, Nk, options", WHOLE_ROWS.values(), ids=WHOLE_ROWS.keys())
def test_whole_rows(cuda_backend, dtype, d, page_size, group, Nq, Nk, options):
    """Many batches, whose blocks take whole rows: the same bits as alone, and as in a call with lengths."""
    backend = cuda_backend
    B = torch.cuda.get_device_properties(0).multi_processor_count
    Hkv = 8 if Nk > 1024 else 2  # so that a row has at most sixteen chunks
    q = backend.randn(B, group * Hkv, Nq, d, dtype=dtype)
    k, v = (backend.randn(1, Hkv, Nk, d, dtype=dtype).expand(B, -1, -1, -1) for _ in "kv")
    if backend.name == "paper" or not is_decode(backend, q[:1], k[:1], v[:1]):
        pytest.skip("another kernel")
    if page_size:
        table = backend.ints(*range(Nk // page_size)).expand(B, -1).contiguous()
        k, v = (t[0].unflatten(1, (-1, page_size)).transpose(0, 1).contiguous() for t in (k, v))
        options = options | {"block_table": table}
    kernel = backend.explain(q, k, v, **options).kernel
    if dtype == torch.float32:
        assert kernel == "decode"
    elif shared_memory() > 200 << 10:
        assert kernel == "decode, whole rows"
    sinks = backend.randn(group * Hkv)
    for more in {"return_state": True}, {"sinks": sinks, "return_lse": True}:
        found = backend.forward(q, k, v, **more, **options)
        lengths = backend.ints(*[Nk] * B)
        by_chunks = backend.forward(q, k, v, seqlens_k=lengths, **more, **options)
        assert all(torch.equal(x, y) for x, y in zip(found, by_chunks, strict=True))
        for b in 0, B // 2, B - 1:
            one = slice(b, b + 1)
            of_one = options | ({"block_table": table[one]} if page_size else {})
            cache = (k, v) if page_size else (k[one], v[one])
            assert backend.explain(q[one], *cache, **of_one).kernel == "decode"
            alone = backend.forward(q[one], *cache, **more, **of_one)
            assert all(torch.equal(x[one], y) for x, y in zip(found, alone, strict=True))
    if not page_size:
        backend.check(q[:2], k[:2], v[:2], **options)
        expected = attention(q[-3:], k[-3:], v[-3:], **options)
        check_o(backend.forward(q, k, v, **options)[-3:], expected, dtype)
        check_l_m(*(t[-3:] for t in backend.forward(q, k, v, return_state=True, **options)[1:]), expected)
        state = backend.forward(q, k, v, return_state=True)
        found = backend.forward(q, k, v, state=state, **options)
        by_chunks = backend.forward(q, k, v, state=state, seqlens_k=lengths, **options)
        assert all(torch.equal(x, y) for x, y in zip(found, by_chunks, strict=True))


def test_graph(cuda_backend, dtype):
    """Replayed with other lengths: each replay divides the keys among the blocks anew."""
    backend = cuda_backend
    q, k, v = backend.qkv(B=5, Hq=8, Hkv=2, Nq=1, Nk=4000, dtype=dtype)
    lengths = backend.ints(1, 1, 1, 1, 1)
    backend.forward(q, k, v, causal=True, seqlens_k=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = backend.forward(q, k, v, causal=True, seqlens_k=lengths)
        again = backend.forward(o, k, v, causal=True, seqlens_k=lengths)
    for counts in (4000, 1, 0, 3000, 77), (5, 4, 3, 2, 4000), (0, 0, 0, 0, 0), (128, 1024, 2048, 513, 64):
        lengths.copy_(backend.ints(*counts))
        for t, new in zip((q, k, v), backend.qkv(B=5, Hq=8, Hkv=2, Nq=1, Nk=4000, dtype=dtype), strict=True):
            t.copy_(new)
        for _ in range(3):
            graph.replay()
        check_o(o, attention(q, k, v, causal=True, seqlens_k=lengths), dtype)
        check_o(again, attention(o, k, v, causal=True, seqlens_k=lengths), dtype)


def test_streams(cuda_backend, dtype):
    """Calls of several streams run at once, each with a workspace of its own."""
    backend = cuda_backend
    inputs = [backend.qkv(B=2, Hq=8, Hkv=2, Nq=1, Nk=5000 + 500 * n, dtype=dtype) for n in range(4)]
    expected = [backend.forward(*tensors) for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = [[] for _ in inputs]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(backend.forward(*inputs[n]))
    torch.cuda.synchronize()
    assert all(torch.equal(o, e) for results, e in zip(found, expected, strict=True) for o in results)


def test_state_of_decode(backend, dtype):
    """l and m, and keys in two parts."""
    q, k, v = backend.qkv(B=2, Hq=8, Hkv=2, Nq=1, Nk=1500, dtype=dtype)
    sinks = backend.randn(2, 8)
    state = backend.forward(q, k[:, :, :900], v[:, :, :900], return_state=True)
    o, l, m = backend.forward(q, k[:, :, 900:], v[:, :, 900:], state=state)
    expected = attention(q, k, v)
    check_o(o, expected, dtype)
    check_l_m(l, m, expected)
    expected = attention(q, k, v, sinks=sinks)
    o, lse = backend.forward(q, k, v, sinks=sinks, return_lse=True)
    check_o(o, expected, dtype)
    torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("d", [64, 128])
def test_shared_memory_of_a_t4(cuda_backend, shared_memory_limit, d):
    """The kernel has 512 bytes besides those of the plan: 14 rows once took the whole 64 KB."""
    backend = cuda_backend
    shared_memory_limit(64 << 10)
    for Nq in range(1, 17):
        q, k, v = backend.qkv(B=1, Hq=2, Hkv=2, Nq=Nq, Nk=300, d=d, dtype=torch.float16)
        plan = backend.explain(q, k, v)
        assert not plan.kernel.startswith("decode") or plan.shared_memory + 512 <= 64 << 10
        backend.check(q, k, v)


@pytest.mark.sanitizer
def test_few_chunks(cuda_backend, dtype):
    """For compute-sanitizer."""
    backend = cuda_backend
    q, k, v = backend.qkv(B=3, Hq=4, Hkv=2, Nq=1, Nk=300, dtype=dtype)
    backend.check(q, k, v, causal=True, seqlens_k=backend.ints(300, 5, 130))
    B = torch.cuda.get_device_properties(0).multi_processor_count
    q, k, v = backend.qkv(B=B, Hq=8, Hkv=2, Nq=1, Nk=300, dtype=dtype)  # on large GPUs an item is a whole row
    backend.check(q, k, v)
