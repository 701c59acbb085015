"""What only a GPU has: streams, graphs, other devices, shared memory, calls that don't synchronise."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import check_l_m, check_o
from reference import attention


@pytest.mark.parametrize("kilobytes", [1, 64, 99, 163])
@pytest.mark.parametrize("d", [32, 64, 80, 128, 192, 256])
def test_smaller_shared_memory(cuda_backend, shared_memory_limit, dtype, d, kilobytes):
    """The tiles that smaller GPUs get: Turing has 64 KB, Ada 99, Ampere 163. 1 KB: the smallest there are."""
    shared_memory_limit(1024 * kilobytes)
    backend = cuda_backend
    backend.check(*backend.qkv(d=d, dtype=dtype, Nq=200, Nk=300), causal=True)
    backend.check(*backend.qkv(B=1, d=d, dtype=dtype, Nq=1, Nk=1000), window_size=(700, -1))
    tensors = backend.qkv(d=d + 1, dtype=dtype)
    backend.check(
        *(t[..., 1:] for t in tensors), seqlens_k=backend.ints(50, 90), leftpad_k=backend.ints(0, 33)
    )


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 30)}], ids=str)
def test_more_tiles_than_multiprocessors(cuda_backend, dtype, d, options):
    """A block that stays takes several tiles, of different lengths, some without a key."""
    backend = cuda_backend
    B, Hq, Nq = 6, 20, 400
    tensors = backend.qkv(B=B, Hq=Hq, Hkv=10, Nq=Nq, Nk=300, d=d, dtype=dtype)
    backend.check(*tensors, **options)
    limits = {
        "seqlens_k": backend.ints(300, 0, 17, 128, 299, 1),
        "leftpad_k": backend.ints(0, 3, 16, 0, 250, 1),
    }
    for name in "kv":  # outside of the visible keys
        for b in range(B):
            t = tensors["qkv".index(name)][b]
            t[:, limits["seqlens_k"][b] :] = t[:, : limits["leftpad_k"][b]] = torch.nan
    backend.check(*tensors, **options, **limits)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_some_tiles_with_scores_far_from_zero(cuda_backend, dtype, d, causal):
    """Blocks take several work tiles each, in any order: the bits of a tile don't depend on the order."""
    backend = cuda_backend
    q, k, v = backend.qkv(B=6, Hq=30, Hkv=10, Nq=500, Nk=500, d=d, dtype=dtype)
    k[1::3, ::4, 290] = 0
    k[1::3, ::4, 290, 0] = 1e4
    first = backend.check(q, k, v, causal=causal)
    for _ in range(3):
        assert torch.equal(backend.forward(q, k, v, causal=causal), first)


@pytest.mark.parametrize("d, N", [(40, 321), (64, 145), (64, 1042), (124, 500), (128, 700), (252, 270)])
@pytest.mark.parametrize("zeros", [0, 0.5, 0.9])
def test_same_bits_of_float32_whoever_splits_it(cuda_backend, zeros, d, N):
    """On hopper, splitter groups of one, two or four warps split tiles of K and V, whichever is free. Above
    d 64 a group has one or four warps for N 500, two or four for N 700. Tiles with zeros, few rows or
    growing numbers are read more than once. The hi/lo operands must not depend on the group.
    """
    q, k, v = cuda_backend.qkv(B=4, Hq=32, Hkv=32, Nq=N, Nk=N, d=d)
    k[:, 8:16] /= 8
    k[:, 8:16, 7::37] *= 8
    v[:, 8:16, 9::29] *= 30
    v[:, 16:, :, 3] *= 2.0**-13 * torch.rand(N, generator=cuda_backend.generator).to(v.device)
    for t in k, v:
        t *= torch.rand(t.shape, generator=cuda_backend.generator).to(t.device) >= zeros
    first = cuda_backend.check(q, k, v, causal=True)
    for _ in range(5):
        assert torch.equal(cuda_backend.forward(q, k, v, causal=True), first)
    if cuda_backend.name == "hopper" and d in (40, 124, 252):
        # With one more channel of zeros, groups of four don't take part: they need d % 4 = 0. The state,
        # since it is stored alike whatever d is.
        options = {"causal": True, "softmax_scale": d**-0.5, "return_state": True}
        o = cuda_backend.forward(q, k, v, **options)[0]
        q, k, v = (torch.nn.functional.pad(t, (0, 1)) for t in (q, k, v))
        assert torch.equal(cuda_backend.forward(q, k, v, **options)[0][..., :d], o)


@pytest.mark.parametrize("Hkv", [4, 16])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_few_tiles_a_block(cuda_backend, dtype, d, Hkv):
    """Two to four work tiles a block, the longest first; in a fixed order if K and V are small."""
    backend = cuda_backend
    tensors = backend.qkv(B=4, Hq=16, Hkv=Hkv, Nq=900, Nk=900, d=d, dtype=dtype)
    first = backend.check(*tensors, causal=True)
    results = [backend.forward(*tensors, causal=True) for _ in range(5)]
    assert all(torch.equal(result, first) for result in results)
    backend.check(*tensors, causal=True, seqlens_k=backend.ints(900, 100, 0, 500))


def test_many_small_work_tiles(cuda_backend, dtype):
    """More than two work tiles a multiprocessor; every second one sees no key, then all."""
    backend = cuda_backend
    B = 700
    tensors = backend.qkv(B=B, Hq=1, Hkv=1, Nq=64, Nk=64, d=64, dtype=dtype)
    backend.check(*tensors, seqlens_k=backend.ints(*(b % 2 * (1 + b % 64) for b in range(B))))
    backend.check(*backend.qkv(B=B, Hq=1, Hkv=1, Nq=64, Nk=0, d=64, dtype=dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("Nq, Nk", [(128, 30), (192, 30), (256, 160), (330, 330)])
def test_work_tiles_in_quick_succession(cuda_backend, dtype, d, Nq, Nk, causal):
    """O is staged in a later Qi's or Vj's place, unless its 64 rows overlap another work tile's."""
    backend = cuda_backend
    tensors = backend.qkv(B=10, Hq=40, Hkv=40, Nq=Nq, Nk=Nk, d=d, dtype=dtype)
    first = backend.check(*tensors, causal=causal)
    for _ in range(5):
        assert torch.equal(backend.forward(*tensors, causal=causal), first)


@pytest.mark.parametrize("of", ["keys", "values", "both"])
def test_many_small_work_tiles_of_mixed_sizes(cuda_backend, of):
    """One channel of the keys, or of the values, is too small beside the others for two float16s."""
    backend = cuda_backend
    B = 900
    q, k, v = backend.qkv(B=B, Hq=1, Hkv=1, Nq=64, Nk=64, d=64)
    every = 3 if of == "both" else 1
    if of != "values":
        k[::every, :, 5] *= 1e-7
    if of != "keys":
        v[1 % every :: every, :, 7] *= 1e-7
    backend.check(q, k, v)
    backend.check(q, k, v, causal=True, seqlens_k=backend.ints(*(b % 5 * 16 for b in range(B))))


@pytest.mark.parametrize("d", [64, 256])
def test_tiles_of_queries_that_see_no_key(cuda_backend, dtype, d):
    """Memory that no thread writes may hold anything: here -0, since a NaN would hide an error."""
    backend = cuda_backend
    tensors = backend.qkv(B=8, Hq=32, Hkv=32, Nq=600, Nk=600, d=d, dtype=dtype)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.full((1 << 27,), -0.0, device=backend.device)
    backend.check(*tensors, causal=True, leftpad_k=backend.ints(*[500] * 8))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_same_bits_of_long_queries_and_few_keys(cuda_backend, dtype, d):
    """Few tiles of k and v are split while many products run, in tiles of different sizes."""
    backend = cuda_backend
    q, k, v = backend.qkv(B=2, Hq=16, Hkv=4, Nq=2048, Nk=130, d=d, dtype=dtype)
    k[:, :, ::97] *= 30
    v[:, :, :64] *= 2**11
    v[:, :, 64:80, 5] *= 1e-5
    first = backend.forward(q, k, v)
    for _ in range(60):
        assert torch.equal(backend.forward(q, k, v), first)


def test_current_stream(cuda_backend, dtype):
    """Work queued before on the same stream is seen, however long it takes; two streams don't interfere."""
    backend = cuda_backend
    inputs = [backend.qkv(dtype=dtype, Nq=300, Nk=500) for _ in range(2)]
    empty = [[torch.zeros_like(t) for t in tensors] for tensors in inputs]
    seqlens = [backend.ints(0, 0), backend.ints(0, 0)]
    results = [None, None]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for n, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for late, t in zip(empty[n], inputs[n], strict=True):
                late.copy_(t)
            seqlens[n].fill_(450 + n)
            results[n] = backend.forward(*empty[n], causal=True, seqlens_k=seqlens[n], return_state=True)
    torch.cuda.synchronize()
    for n, (o, l, m) in enumerate(results):
        expected = attention(*inputs[n], causal=True, seqlens_k=[450 + n] * 2)
        check_o(o, expected, dtype)
        check_l_m(l, m, expected)


def test_other_gpu(cuda_backend, dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    backend = cuda_backend
    tensors = [t.to("cuda:1") for t in backend.qkv(dtype=dtype)]
    assert torch.cuda.current_device() == 0
    o, l, m = backend.forward(*tensors, causal=True, return_state=True)
    assert o.device == l.device == m.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    expected = attention(*tensors, causal=True)
    check_o(o, expected, dtype)
    check_l_m(l, m, expected)


def test_does_not_synchronize(cuda_backend, dtype):
    backend = cuda_backend
    q, k, v = backend.qkv(dtype=dtype)
    counts, padding = backend.ints(50, 90), backend.ints(0, 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = backend.forward(q, k, v, causal=True, seqlens_k=counts, leftpad_k=padding, return_state=True)
        backend.forward(q.mT.contiguous().mT, k, v, offset=counts, state=state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("own_stream", [False, True])
def test_threads_and_shapes_in_turn(cuda_backend, dtype, own_stream):
    """A call finds no counter as an earlier one set it: three threads, together or each with a stream."""
    inputs = [
        cuda_backend.qkv(B=B, Hq=4, Hkv=2, Nq=N, Nk=N + 50, d=64, dtype=dtype)
        for B, N in ((2, 300), (200, 70), (1, 70))
    ]
    expected = [cuda_backend.forward(*tensors, causal=True) for tensors in inputs]
    torch.cuda.synchronize()

    def calls(_):
        with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.default_stream()):
            results = [[cuda_backend.forward(*tensors, causal=True) for tensors in inputs] for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(o, e) for each in results for o, e in zip(each, expected, strict=True))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(calls, range(3))) == [True] * 3


def test_graph(cuda_backend, dtype):
    """Captured once, replayed on new contents, lengths and positions included."""
    backend = cuda_backend
    tensors = backend.qkv(dtype=dtype, Nq=65, Nk=300)
    state = backend.forward(*backend.qkv(dtype=dtype, Nq=65, Nk=20), return_state=True)
    limits = {name: backend.ints(0, 0) for name in ("seqlens_k", "leftpad_k", "offset")}
    for warm_up in {}, {"state": state}:
        backend.forward(*tensors, causal=True, **limits, **warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = backend.forward(*tensors, causal=True, **limits)
        with_state = backend.forward(*tensors, causal=True, **limits, state=state)
    for counts in ((300, 70), (5, 17), (70, 300)), ((0, 0), (0, 0), (0, 0)), ((299, 128), (0, 0), (100, 200)):
        for t, new in zip(tensors, backend.qkv(dtype=dtype, Nq=65, Nk=300), strict=True):
            t.copy_(new)
        for limit, new in zip(limits.values(), counts, strict=True):
            limit.copy_(backend.ints(*new))
        graph.replay()
        check_o(o, attention(*tensors, causal=True, **limits), dtype)
        eager = backend.forward(*tensors, causal=True, **limits, state=state)
        assert all(map(torch.equal, with_state, eager))


@pytest.mark.parametrize("captured", [False, True])
def test_neighbours(cuda_backend, dtype, captured):
    """A kernel may begin before the last one ends, but sees all it wrote, and nothing of what comes after."""
    backend = cuda_backend
    small = {"B": 4, "Hq": 12, "Hkv": 12, "Nq": 64, "Nk": 64, "dtype": dtype}
    large = {"B": 4, "Hq": 12, "Hkv": 12, "Nq": 1000, "Nk": 1000, "dtype": dtype}
    sources, larger = backend.qkv(**small), backend.qkv(**large)
    q, k, v = (torch.zeros_like(t) for t in sources)
    unused, other = torch.zeros_like(q), torch.cuda.Stream()

    def neighbours():
        results = [backend.forward(*sources)]
        stream = torch.cuda.current_stream()
        other.wait_stream(stream)
        with torch.cuda.stream(other):
            k.copy_(sources[1])
            v.copy_(sources[2])
        q.copy_(sources[0])
        stream.wait_stream(other)
        results.append(backend.forward(q, k, v))
        unused.zero_()
        results.append(backend.forward(results[-1], k, v))
        after_larger = backend.forward(*larger, causal=True)
        results.append(backend.forward(results[-1], k, v))
        results.append(backend.forward(results[-1], k, v))
        for t in (q, k, v):
            t.fill_(torch.nan)
        return after_larger, results

    found = neighbours()
    run = neighbours
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = neighbours()
        run = graph.replay
    for _ in range(3):
        for old, new in zip((*sources, *larger), (*backend.qkv(**small), *backend.qkv(**large)), strict=True):
            old.copy_(new)
        after_larger, results = found = run() or found
        check_o(after_larger, attention(*larger, causal=True), dtype)
        for query, o in zip((sources[0], sources[0], *results[1:]), results, strict=False):
            check_o(o, attention(query, *sources[1:]), dtype)


@pytest.mark.parametrize("misaligned", [False, True])
def test_extra_memory(cuda_backend, dtype, misaligned):
    """At most a few times the inputs, where the scores would be hundreds of times as large."""
    backend, N = cuda_backend, 16384
    tensors = backend.qkv(B=1, Hq=2, Hkv=2, Nq=N, Nk=N, d=65, dtype=dtype)
    tensors = [t[..., 1:] if misaligned else t[..., :64].contiguous() for t in tensors]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backend.forward(*tensors, causal=True, return_state=True)
    extra = torch.cuda.max_memory_allocated() - before
    results = 4 * 2 * N * (64 + 2)
    assert extra <= results + 3 * sum(t.numel() * t.element_size() for t in tensors)
