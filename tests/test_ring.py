"""ring.py with one to four processes: what it computes against float64, and that it ends when a rank doesn't.

A rank is a forked child of one server process, which has imported torch already.
"""

import itertools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import DTYPES, check_o
from reference import Attention, attention, gradients

import minimal_attn
from minimal_attn import _ring_passes, ring

SERVER = multiprocessing.get_context("forkserver")
# The last one is what use_deterministic_algorithms imports, in a second.
SERVER.set_forkserver_preload(["torch.distributed", "minimal_attn.ring", "pytest", "torch._inductor.config"])
TIMEOUT = 1.0  # seconds that a rank waits for another one that is gone
BACKWARD = "ring.forward's backward pass"  # as errors name it
LIMIT = 30  # seconds for a test's processes to end


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    """The calls are in other processes, where `run_rank` does it."""


@pytest.fixture(params=["gloo", "nccl"])
def transport(request):
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    return request.param


def run_rank(function, rank, ranks, transport, port, host, results, arguments):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # new tensors start as NaN
    device = torch.device("cuda", rank) if transport == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == host, wait_for_workers=False)
    dist.init_process_group(transport, store=store, rank=rank, world_size=ranks)
    try:
        results.put((rank, function(rank, ranks, device, *arguments)))
    except BaseException as error:
        traceback.print_exc()
        results.put((rank, error))
    results.close()
    results.join_thread()
    os._exit(0)  # without waiting for ranks that are gone


def run(function, ranks, *arguments, transport="gloo", gone=(), host=None):
    """What function(rank, ranks, device, *arguments) returned or raised on each rank that isn't `gone`.

    The store is here, or in the rank `host`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if host is not None:
        del store
    results = SERVER.Queue()
    common = ranks, transport, port, host, results, arguments
    processes = [SERVER.Process(target=run_rank, args=(function, rank, *common)) for rank in range(ranks)]
    for process in processes:
        process.start()
    got = {}
    end = time.monotonic() + LIMIT
    try:
        while len(got) < ranks - len(gone):
            rank, result = results.get(timeout=max(end - time.monotonic(), 0.01))
            got[rank] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [got.get(rank) for rank in range(ranks)]


def raise_first(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result


# ------------------------------------------------------------------------------------ the zigzag


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("N", [0, 1, 5, 12, 100])
def test_shard_and_unshard(ranks, N):
    x = torch.randn(2, 3, N, 4)
    shards = [ring.shard(x, rank, ranks) for rank in range(ranks)]
    assert torch.equal(ring.unshard(shards), x)
    assert torch.equal(ring.unshard([s.mT for s in shards], dim=3), x.mT)
    lengths = [s.shape[2] for s in shards]
    assert sum(lengths) == N and max(lengths) - min(lengths) <= 2
    for rank, s in enumerate(shards):
        positions = ring.shard(torch.arange(N), rank, ranks, dim=0)
        assert torch.equal(s, x[:, :, positions]) and (positions.diff() > 0).all()


def test_rank_has_chunks_from_both_ends():
    assert [ring.segments(80, rank, 4) for rank in range(4)] == [
        [(0, 10), (70, 80)],
        [(10, 20), (60, 70)],
        [(20, 30), (50, 60)],
        [(30, 50)],
    ]


def test_unshard_refuses_other_lengths():
    with pytest.raises(ValueError, match=r"shards must have .* but have \[3, 9\]"):
        ring.unshard([torch.ones(1, 1, 3, 1), torch.ones(1, 1, 9, 1)])


# ------------------------------------------------------------------------------------ the attention

BANDS = [
    {},
    dict(causal=True),
    dict(causal=True, softmax_scale=-0.3),
    dict(causal=True, softcap=1.5),
    dict(window_size=(30, 0)),
    dict(window_size=(7, 12), offset=11),
    dict(causal=True, offset=-20),
]
SIZES = [  # B, Hq, Hkv, Nq, Nk, d
    (2, 4, 2, 128, 128, 32),
    (1, 2, 2, 131, 131, 64),
    (1, 6, 1, 77, 150, 40),
    (2, 2, 1, 150, 33, 16),
    (1, 2, 1, 5, 5, 16),
    (1, 2, 1, 1, 0, 16),
    (1, 2, 1, 0, 9, 16),
]


def check_all(rank, ranks, device, seed, transposed):
    """Each size with each band, in one of the dtypes."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = itertools.cycle(DTYPES[seed % 3 :] + DTYPES[: seed % 3] + DTYPES[:1])
    for (B, Hq, Hkv, Nq, Nk, d), band in itertools.product(SIZES, BANDS):
        dtype = next(dtypes)
        shapes = (B, Hq, Nq, d), (B, Hkv, Nk, d), (B, Hkv, Nk, d)
        whole = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        expected = Attention(*(ring.shard(x, rank, ranks) for x in attention(*whole, **band)))
        shards = [ring.shard(x, rank, ranks) for x in whole]
        if transposed:  # (B, N, H, d) in memory
            shards = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shards]
        o, lse = ring.forward(*shards, **band, return_lse=True)
        try:
            assert o.dtype == dtype and lse.dtype == torch.float32
            assert o.stride() == torch.empty_like(shards[0]).stride()
            check_o(o, expected, dtype)
            is_approximate = device.type == "cuda" and dtype == torch.bfloat16 and "softcap" in band  # docs/scores.md
            close = dict(rtol=2e-6, atol=1e-4 if is_approximate else 2e-6)
            torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), **close)
            assert torch.equal(ring.forward(*shards, **band), o)
        except AssertionError as error:
            case = f"{ranks} ranks, {(B, Hq, Hkv, Nq, Nk, d)}, {dtype}, {band}"
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_against_float64(ranks, transport, seed):
    if transport == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip("there are fewer GPUs")
    raise_first(run(check_all, ranks, seed, ranks == 3, transport=transport))


def check_gradients(rank, ranks, device, seed):
    """Each size with one of the bands; the loss depends on o, or on o and the log-sum-exp."""
    generator = torch.Generator().manual_seed(seed)
    cases = zip(SIZES[:-1] + SIZES[:2], itertools.cycle(BANDS[seed % 6 :] + BANDS[: seed % 6]), strict=False)
    for number, ((B, Hq, Hkv, Nq, Nk, d), band) in enumerate(cases):
        dtype = DTYPES[(seed + number) % 3]
        shapes = (B, Hq, Nq, d), (B, Hq, Nq, d), (B, Hkv, Nk, d), (B, Hkv, Nk, d)
        do, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        dlse = torch.randn(B, Hq, Nq, generator=generator).to(device) if number % 2 else None
        expected = gradients(do, q, k, v, dlse, **band)
        inputs = [ring.shard(x, rank, ranks).requires_grad_() for x in (q, k, v)]
        outputs = ring.forward(*inputs, **band, return_lse=True)[: 1 if dlse is None else 2]
        above = [ring.shard(x, rank, ranks) for x in (do, dlse)[: len(outputs)]]
        found = torch.autograd.grad(outputs, inputs, above)
        for name, x, whole in zip("qkv", found, expected, strict=True):
            mine = ring.shard(whole, rank, ranks)
            size = max(whole.norm(), whole.numel() ** 0.5 / 10)  # where each row sees one key dq is 0
            error = (x.double() - mine).norm() / max(size, 1e-9)
            bound = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}[dtype]
            assert x.dtype == dtype and error < bound, f"d{name}, case {number}, {dtype}, {band}: {error:.1e}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients(ranks, transport, seed):
    if transport == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip("there are fewer GPUs")
    raise_first(run(check_gradients, ranks, seed, transport=transport))


def bounds_of_documents(N, generator):
    """Five documents, some of them maybe empty, and maybe tokens of none before and behind."""
    return torch.randint(0, N + 1, (6,), generator=generator).sort().values.int()


def check_documents(rank, ranks, device, seed):
    """Packed documents of the whole sequence: values and gradients."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}, dict(causal=True), dict(window_size=(9, 4)), dict(causal=True, window_size=(30, -1))
    for number, (mask, is_self) in enumerate(itertools.product(masks, (True, False))):
        dtype, (Nq, Nk) = DTYPES[(seed + number) % 3], (200, 200) if is_self else (150, 230)
        cu_q = bounds_of_documents(Nq, generator).to(device)
        cu_k = cu_q if is_self else bounds_of_documents(Nk, generator).to(device)
        options = dict(mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        shapes = (1, 4, Nq, 32), (1, 4, Nq, 32), (1, 2, Nk, 32), (1, 2, Nk, 32)
        do, q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        expected = Attention(*(ring.shard(x, rank, ranks) for x in attention(q, k, v, **options)))
        inputs = [ring.shard(x, rank, ranks).requires_grad_() for x in (q, k, v)]
        o, lse = ring.forward(*inputs, **options, return_lse=True)
        check_o(o, expected, dtype)
        torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), rtol=2e-6, atol=2e-6)
        found = torch.autograd.grad(o, inputs, ring.shard(do, rank, ranks))
        for x, whole in zip(found, gradients(do, q, k, v, **options), strict=True):
            size = max(whole.norm(), whole.numel() ** 0.5 / 10)
            bound = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}[dtype]
            error = (x.double() - ring.shard(whole, rank, ranks)).norm() / size
            assert error < bound, f"{ranks} ranks, {dtype}, {options}: {error:.1e}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_documents(ranks, transport, seed):
    if transport == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip("there are fewer GPUs")
    raise_first(run(check_documents, ranks, seed, transport=transport))


WRONG_DOCUMENTS = [
    ((dict(cu_seqlens_q=[0, 4])), TypeError, "cu_seqlens_k must be a tensor"),
    (dict(cu_seqlens_q=[0, 4, 8], cu_seqlens_k=[0, 8]), ValueError, "cu_seqlens_k must have .* length 3, but has 2"),
    (dict(cu_seqlens_q=[0, 9], cu_seqlens_k=[0, 8]), ValueError, "cu_seqlens_q must end at the whole length 8"),
    (dict(cu_seqlens_q=[0, 4, 3], cu_seqlens_k=[0, 4, 8]), ValueError, "cu_seqlens_q must .* never decrease"),
    (dict(cu_seqlens_q=[0.0, 8], cu_seqlens_k=[0, 8]), ValueError, "cu_seqlens_q must .* an integer dtype, but was"),
    (dict(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8], offset=1), ValueError, "offset must be None with cu_seqlens"),
]


def wrong_documents(rank, ranks, device):
    x = torch.randn(1, 1, 8 // ranks, 16)
    for wrong, kind, text in WRONG_DOCUMENTS:
        options = {name: torch.tensor(value) if name != "offset" else value for name, value in wrong.items()}
        with pytest.raises(kind, match=text) as error:
            ring.forward(x, x, x, timeout=20, **options)
        assert "\n" not in str(error.value)
    cu = torch.tensor([0, 3 + rank, 8])
    with pytest.raises(ValueError, match="cu_seqlens must be the same on all ranks"):
        ring.forward(x, x, x, timeout=20, cu_seqlens_q=cu, cu_seqlens_k=cu)


def test_wrong_documents():
    raise_first(run(wrong_documents, 2))


def check_autocast(rank, ranks, device):
    """Results and gradients are those of inputs that were cast before."""
    q, k, v = torch.randn(3, 1, 2, 60, 32, generator=torch.Generator().manual_seed(5)).to(device)
    inputs = [ring.shard(4 * x, rank, ranks).requires_grad_() for x in (q, k, v)]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o = ring.forward(*inputs, causal=True)
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = ring.forward(*rounded, causal=True)
    assert torch.equal(o, expected)
    results = torch.autograd.grad(o.sum(), inputs), torch.autograd.grad(expected.sum(), rounded)
    assert all(torch.equal(x, y.float()) for x, y in zip(*results, strict=True))
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(ValueError, match="q must be"):
        ring.forward(*(x.detach().double() for x in inputs))


def test_autocast():
    raise_first(run(check_autocast, 2))


def count_digits(rank, ranks, device, seed):
    """How many bfloat16 elements aren't the nearest ones: of one process, and of this rank."""
    q, k, v = torch.randn(3, 1, 1, 300, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    nearest = attention(q, k, v).o.bfloat16()
    alone = minimal_attn.forward(q, k, v) != nearest
    o = ring.forward(*(ring.shard(x, rank, ranks) for x in (q, k, v)))
    return int(alone.sum()), int((o != ring.shard(nearest, rank, ranks)).sum())


def test_merging_loses_no_digits(seed):
    """Where blocks are rounded to bfloat16 and then merged, every second element of o is another one."""
    results = run(count_digits, 4, seed)
    raise_first(results)
    alone, parts = zip(*results, strict=True)
    print(f"not the nearest of {300 * 64}: {alone[0]} of one process, {sum(parts)} of four ranks")
    assert sum(parts) <= alone[0] + 0.02 * 300 * 64


def sizes_of_calls(rank, ranks, device):
    """(queries, keys) of each call of a kernel, under a causal mask and under a short window."""
    sizes = []
    plain = _ring_passes.forward_into

    def counting(q, k, *arguments, **options):
        sizes.append((q.shape[2], k.shape[2]))
        plain(q, k, *arguments, **options)

    _ring_passes.forward_into = counting
    x = torch.randn(1, 1, 800 // ranks, 16)
    ring.forward(x, x, x, causal=True)
    causal = list(sizes)
    sizes.clear()
    ring.forward(x, x, x, window_size=(10, 0))
    return causal, sizes


def test_hidden_blocks_are_not_computed():
    """A block is one call. Each rank has the same causal work; a short window needs a chunk and the one before."""
    results = run(sizes_of_calls, 4)
    raise_first(results)
    causal, window = zip(*results, strict=True)
    for rank, sizes in enumerate(causal):  # half of the queries see a later rank's keys, and half of an earlier one's
        assert sizes == [(200, 200)] + [(200, 100)] * rank + [(100, 200)] * (3 - rank)
    own, chunk = (200, 200), (100, 100)  # rank 3's chunks are neighbours, and count as one
    assert window == ([own, chunk], [own, chunk, chunk], [own, chunk, (100, 200)], [own, (200, 100)])


def in_a_subgroup(rank, ranks, device):
    group = dist.new_group([1, 2])
    x = torch.randn(1, 1, 10, 16)
    if rank in (1, 2):
        time.sleep(0.4 * (rank - 1))  # the other one waits
        return ring.forward(x, x, x, group=group).shape
    with pytest.raises(ValueError, match="group must be a process group that has this rank"):
        ring.forward(x, x, x, group=group)


def test_subgroup():
    assert run(in_a_subgroup, 3) == [None, (1, 1, 10, 16), (1, 1, 10, 16)]


def test_needs_a_process_group():
    x = torch.randn(1, 1, 10, 16)
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group"):
        ring.forward(x, x, x)


def captured(rank, ranks, device):
    """A graph of both passes is replayed with other values."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(3, 1, 4, 500, 64, generator=generator).to(device, torch.bfloat16)
    inputs = [ring.shard(x, rank, ranks).requires_grad_() for x in whole]

    def both():
        o = ring.forward(*inputs, causal=True)
        return o, *torch.autograd.grad(o, inputs, torch.ones_like(o))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = both()
    for x, change in zip(inputs, torch.randn(3, 1, 4, 500, 64, generator=generator), strict=True):
        x.data += ring.shard(change, rank, ranks).to(x)
    graph.replay()
    for found, expected in zip(results, both(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # dq may vary in its last bits


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_graph():
    raise_first(run(captured, 2, transport="nccl"))


def changing_shapes(rank, ranks, device, seed):
    """Many calls, with a few arguments that return: values, and memory that doesn't grow."""
    generator = torch.Generator().manual_seed(seed)
    kept = 0
    for number in range(100):
        Nq, Nk = (int(x) for x in torch.randint(20, 300, (2,), generator=generator)) if number % 3 else (100, 100)
        whole = [torch.randn(1, 2, N, 32, generator=generator).to(device) for N in (Nq, Nk, Nk)]
        o = ring.forward(*(ring.shard(x, rank, ranks) for x in whole), causal=bool(number % 2))
        expected = minimal_attn.forward(*whole, causal=bool(number % 2))
        torch.testing.assert_close(o, ring.shard(expected, rank, ranks), rtol=1e-4, atol=1e-5)
        del o, expected, whole
        if device.type == "cuda":
            kept = max(kept, torch.cuda.memory_allocated()) if number < 20 else kept
            assert torch.cuda.memory_allocated() <= kept


def test_changing_shapes(transport, seed):
    raise_first(run(changing_shapes, 2, seed, transport=transport))


# ------------------------------------------------------------------------------------ odd ranks

ODD = {  # what rank 1 does differently, the error on all ranks
    "dtype": (lambda q, k, v: (q.half(), k.half(), v.half()), {}, ValueError, "dtype .* float16 on rank 1"),
    "heads": (
        lambda q, k, v: (q, k[:, :2], v[:, :2]),
        {},
        ValueError,
        "Hkv .* 4 on ranks? 0.* and 2 on rank 1",
    ),
    "d": (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), {}, ValueError, "^d must be the same"),
    "length": (
        lambda q, k, v: (q, k[:, :, 2:], v[:, :, 2:]),
        {},
        ValueError,
        r"k's length must be \[.*shard",
    ),
    "causal": (lambda *qkv: qkv, dict(causal=True), ValueError, "causal .* True on rank 1"),
    "window": (lambda *qkv: qkv, dict(window_size=(5, 0)), ValueError, r"window_size .* \[5, 0\] on rank 1"),
    "scale": (lambda *qkv: qkv, dict(softmax_scale=0.5), ValueError, "softmax_scale .* 0.5 on rank 1"),
    "softcap": (lambda *qkv: qkv, dict(softcap=2), ValueError, "softcap .* 2.0 on rank 1"),
    "timeout": (lambda *qkv: qkv, dict(timeout=0), ValueError, "rank 1: timeout must be a positive number"),
    "shape": (lambda q, k, v: (q, k, v[:, :, 1:]), {}, ValueError, "rank 1: v must have k's shape"),
    "type": (lambda q, k, v: (q, None, v), {}, TypeError, "rank 1: k must be a dense tensor"),
    "offset": (lambda *qkv: qkv, dict(offset=torch.tensor([1])), TypeError, "rank 1: offset must be an int"),
    "grad": (lambda q, k, v: (q.requires_grad_(), k, v), {}, ValueError, "requires_grad .* True on rank 1"),
    "backend": (lambda *qkv: qkv, dict(backend="best"), ValueError, "rank 1: "),
}


def odd_rank(rank, ranks, device):
    """All errors in one go: the group stays usable."""
    q, k, v = torch.randn(3, 1, 4, 20, 16, device=device)
    errors = {}
    for name, (change, options, *_) in ODD.items():
        arguments, here = ((q, k, v), {}) if rank != 1 else (change(q.clone(), k, v), options)
        try:
            ring.forward(*arguments, **{"timeout": 20, **here})
        except Exception as error:
            errors[name] = type(error), str(error)
    assert ring.forward(q, k, v).isfinite().all()
    return errors


@pytest.mark.parametrize("ranks", [2, 3])
def test_odd_ranks(ranks, transport):
    if transport == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip("there are fewer GPUs")
    results = run(odd_rank, ranks, transport=transport)
    raise_first(results)
    assert all(result == results[0] for result in results)
    for name, (*_, kind, text) in ODD.items():
        was, said = results[0][name]
        assert was is kind and "\n" not in said, name
        with pytest.raises(kind, match=text):
            raise was(said)


def different_passes(rank, ranks, device):
    x = torch.randn(1, 1, 8, 16, requires_grad=True)
    loss = ring.forward(x, x, x, timeout=20).sum()
    with pytest.raises(ValueError, match="^call must be .* pass on rank 0 and ring.forward on rank 1$"):
        loss.backward() if rank == 0 else ring.forward(x, x, x, timeout=20)
    ring.forward(x, x, x, timeout=20).sum().backward()


def test_different_passes():
    raise_first(run(different_passes, 2))


# ------------------------------------------------------------------------------------ lost ranks


def lose_a_rank(rank, ranks, device, lost, when, how, timeout, within="forward"):
    """The error of a call in which a rank is lost before the call, or within its `when`th product."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, device=device).requires_grad_(within == "backward")
    o = ring.forward(q, k, v, timeout=20 if within == "forward" else timeout)
    calls = []
    plain = getattr(_ring_passes, f"{within}_into")

    def last(*arguments, **options):
        calls.append(0)
        if len(calls) == when:
            if how == "raises":
                raise MemoryError("there is none")
            os.kill(os.getpid(), how)
        return plain(*arguments, **options)

    if rank == lost:
        setattr(_ring_passes, f"{within}_into", last)
        if when == 0:
            os.kill(os.getpid(), how)
    start = time.monotonic()
    try:
        ring.forward(q, k, v, timeout=timeout) if within == "forward" else o.sum().backward()
    except (ring.RingError, MemoryError) as error:
        return type(error), str(error), time.monotonic() - start


def names_rank(text, lost):
    """A rank may not know which of its two neighbours is gone: "rank 2 or 0"."""
    return re.search(rf"\b(rank|or) {lost}\b", text)


@pytest.mark.parametrize(
    "how, lost, when",
    [
        (signal.SIGKILL, 1, 1),
        (signal.SIGKILL, 0, 2),
        (signal.SIGKILL, 2, 0),
        (signal.SIGSTOP, 1, 1),
        (signal.SIGSTOP, 0, 2),
        (signal.SIGSTOP, 3, 0),
    ],
)
def test_lost_rank(how, lost, when):
    """The others raise one error, within the time that was set. Who has all keys already may return."""
    results = run(lose_a_rank, 4, lost, when, how, TIMEOUT, gone=[lost])
    others = [result for result in results if result is not None]
    assert others, "no rank raised"
    kinds, texts, seconds = zip(*others, strict=True)
    assert set(kinds) == {ring.RingError} and len(set(texts)) == 1, texts
    assert names_rank(texts[0], lost) and "\n" not in texts[0]
    assert max(seconds) < TIMEOUT + 4
    if when < 2:
        assert len(others) == 3
    if how == signal.SIGSTOP:
        assert f"{TIMEOUT:g} s" in texts[0]


@pytest.mark.parametrize("how, when", [(signal.SIGKILL, 2), (signal.SIGSTOP, 0)])
def test_lost_rank_of_the_backward_pass(how, when):
    results = run(lose_a_rank, 3, 1, when, how, TIMEOUT, "backward", gone=[1])
    kinds, texts, seconds = zip(*(result for result in results if result is not None), strict=True)
    assert set(kinds) == {ring.RingError} and len(set(texts)) == 1, texts
    assert texts[0].startswith(f"{BACKWARD} ended on all ranks") and names_rank(texts[0], 1)
    assert max(seconds) < TIMEOUT + 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
@pytest.mark.parametrize("within", ["forward", "backward"])
@pytest.mark.parametrize(
    "how, lost, when", [(signal.SIGKILL, 1, 1), (signal.SIGKILL, 0, 0), (signal.SIGSTOP, 1, 1), (signal.SIGSTOP, 1, 0)]
)
def test_lost_rank_on_gpus(how, lost, when, within):
    """The other one raises an error in time."""
    (result,) = [x for x in run(lose_a_rank, 2, lost, when, how, TIMEOUT, within, transport="nccl", gone=[lost]) if x]
    kind, text, seconds = result
    assert kind is ring.RingError and names_rank(text, lost) and "\n" not in text
    assert seconds < TIMEOUT + 5


@pytest.mark.parametrize("within, name", [("forward", "ring.forward"), ("backward", BACKWARD)])
def test_rank_that_raises(within, name):
    """It raises its own error, and the others name it at once, long before the timeout."""
    results = run(lose_a_rank, 4, 2, 1, "raises", 1000, within)
    assert results[2][:2] == (MemoryError, "there is none")
    for kind, text, seconds in results[:2] + results[3:]:
        assert (kind, text) == (
            ring.RingError,
            f"{name} ended on all ranks: rank 2 raised MemoryError: there is none",
        )
        assert seconds < 10


def test_host_of_the_store_stops():
    """Then the store answers nobody, and its own limits don't hold."""
    results = run(lose_a_rank, 3, 0, 0, signal.SIGSTOP, TIMEOUT, gone=[0], host=0)
    for kind, text, seconds in results[1:]:
        assert kind is ring.RingError and "store (most often rank 0 is its host)" in text
        assert seconds < TIMEOUT + 5


def fail_twice(rank, ranks, device):
    x = torch.randn(1, 1, 8, 16)
    if rank == 2:
        time.sleep(20)
    errors = []
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(ring.RingError) as error:
            ring.forward(x, x, x, timeout=1)
        errors.append((str(error.value), time.monotonic() - start))
    return errors


def test_group_stays_broken():
    """Later calls raise the first failure, and don't wait for the timeout."""
    for (first, _), (second, seconds) in run(fail_twice, 3, gone=[2])[:2]:
        assert first == second and "s for rank 2 to call ring.forward" in first
        assert seconds < 1


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none")
def test_example():
    root = Path(__file__).resolve().parent.parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command += [root / "examples/ring.py", "--length=333"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and "error against float64" in done.stdout
