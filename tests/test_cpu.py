"""What only the CPU has: instruction sets, threads, and memory that the process itself pays for."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import Backend
from reference import attention
from test_backward import check as check_gradients
from torch.nn.functional import scaled_dot_product_attention

import minimal_attn
from minimal_attn import _C


@pytest.fixture(params=_C.cpu_instructions())
def instructions(request):
    """Each instruction set that this machine has."""
    before = _C.limit_cpu_instructions(request.param)
    yield request.param
    _C.limit_cpu_instructions(before)


@pytest.fixture
def cpu(seed):
    return Backend("cpu", seed)


@pytest.fixture
def set_num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("Nq", [1, 200])
@pytest.mark.parametrize(
    "band", [dict(causal=True), dict(window_size=(50, 7)), dict(window_size=(0, 0), offset=31)], ids=str
)
def test_same_bits_on_any_number_of_threads(cpu, instructions, set_num_threads, dtype, Nq, band):
    """And alone as in a batch: tiles of queries differ, tiles of keys don't. NaN in V, which the window
    hides from most rows, reaches the same rows."""
    q, k, v = cpu.qkv(B=3, Nq=Nq, Nk=300, dtype=dtype)
    v[0, 0, 170] = torch.nan
    results = []
    for threads in 1, 2, 3, 8:
        set_num_threads(threads)
        results.append(cpu.forward(q, k, v, **band, return_state=True))
        alone = [cpu.forward(q[b:][:1], k[b:][:1], v[b:][:1], **band, return_state=True) for b in range(3)]
        results.append([torch.cat(t) for t in zip(*alone, strict=True)])
    for result in results:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(30, 5), softcap=3.0)], ids=str)
@pytest.mark.parametrize("d", [257, 320, 500, 512])
def test_large_head_dimensions(cpu, instructions, dtype, d, options):
    """Up to 512: values, with many queries and few, over many keys, and gradients."""
    q, k, v = cpu.qkv(Hq=4, Hkv=2, Nq=70, Nk=150, d=d, dtype=dtype)
    cpu.check(q, k, v, **options)
    check_gradients(cpu, torch.randn_like(q), q, k, v, **options)
    q, k, v = cpu.qkv(B=1, Hq=2, Hkv=1, Nq=2, Nk=2300, d=d, dtype=dtype)
    cpu.check(q, k, v, **options)
    check_gradients(cpu, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("flush", [True, False])
def test_subnormal_numbers_as_the_caller_wants_them(cpu, instructions, flush):
    """Whether they are 0 is a mode of a thread: the threads that share the work take on the caller's."""
    q, k, v = cpu.qkv(B=8, Nq=200, Nk=200, d=16)
    v *= 1e-39
    before = torch.ones(1).mul(1e-40).item() == 0
    torch.set_flush_denormal(flush)
    try:
        results = [cpu.forward(q, k, v) for _ in range(20)]
    finally:
        torch.set_flush_denormal(before)
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] != 0).any() != flush


def relative_errors(o, q, k, v):
    expected = attention(q, k, v).o
    return (o - expected).norm() / expected.norm()


@pytest.mark.parametrize("Nq", [1, 5])
@pytest.mark.parametrize("Nk", [2**17, 2**20])
def test_long_sums(cpu, instructions, Nk, Nq):
    """l and Oi are sums over all keys: of ordinary scores, of equal ones, of one far above the others."""
    q, k, v = cpu.qkv(B=1, Hq=1, Hkv=1, Nq=Nq, Nk=Nk, d=2)
    v = v.abs()  # so that o isn't what cancellation leaves
    for scores in "ordinary", "equal", "one above":
        if scores != "ordinary":
            q, k = torch.ones_like(q), torch.zeros_like(k)
        if scores == "one above":
            k[:, :, 0] = 8 / 2**0.5
        error = relative_errors(cpu.forward(q, k, v), q, k, v)
        assert error < 1.2 * relative_errors(scaled_dot_product_attention(q, k, v), q, k, v) + 1e-7
        assert error < 1.5e-6
        l = cpu.forward(q, k, v, return_state=True)[1]
        torch.testing.assert_close(l.double(), attention(q, k, v).l, rtol=1.5e-6, atol=0)


def test_millions_of_query_heads(cpu, instructions):
    """Of one key head: a bound that is no bound, 2^40, times so many heads exceeds 64 bits. Some heads' first
    query and others' second are in one strip, which is masked for that."""
    heads, Nk = 2**23 + 5, 40
    q = torch.ones(1, 1, 2, 1).expand(1, heads, 2, 1)
    k, v = torch.zeros(1, 1, Nk, 1), cpu.randn(1, 1, Nk, 1)
    for band in dict(causal=True, offset=30), dict(window_size=(20, -1)):
        o = cpu.forward(q, k, v, **band)
        torch.testing.assert_close(
            o[:, :1].double(), attention(q[:, :1], k, v, **band).o, rtol=1e-5, atol=1e-6
        )
        assert (o == o[:, :1]).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 17, 33, 65])
@pytest.mark.parametrize("shared", [True, False], ids=["heads share keys", "one head"])
def test_any_number_of_rows(cpu, instructions, dtype, rows, shared):
    """Of a key head, as query heads or as queries: decode.h has the fewest; the last strip may be thinner."""
    for d, Nk in (1, 1), (3, 70), (16, 65), (64, 200), (100, 130), (256, 64):
        q, k, v = cpu.qkv(
            Hq=2 * rows if shared else 2, Hkv=2, Nq=1 if shared else rows, Nk=Nk, d=d, dtype=dtype
        )
        cpu.check(q, k, v)
        cpu.check(q, k, v, window_size=(40, 3), offset=cpu.ints(Nk - 20, 10))
        limits = {"seqlens_k": cpu.ints(Nk - 1, Nk // 2), "leftpad_k": cpu.ints(0, Nk // 3)}
        k[0, :, Nk - 1 :], v[1, :, Nk // 2 :], v[1, :, : Nk // 3] = torch.nan, torch.inf, torch.nan
        state = cpu.forward(q, k, v, **limits, return_state=True)
        cpu.check(q, k, v, **limits)
        for actual, expected in zip(cpu.forward(q, k, v, **limits, state=state)[1:], state[1:], strict=True):
            assert torch.equal(actual, 2 * expected if expected is state[1] else expected)


def test_explain(cpu, instructions):
    """AMX is for large tiles alone; a decoding call is one tile of queries a key head."""
    q, k, v = cpu.qkv(B=2, Hq=4, Hkv=4, Nq=300, Nk=300)
    found = cpu.explain(q, k, v)
    assert (found.kernel, found.grid, found.workspace) == (instructions, 8 * -(-300 // found.Br), 0)
    found = cpu.explain(q[:, :, :2], k, v)
    assert found.kernel == ("AVX-512" if instructions == "AMX" else instructions)
    assert (found.Br, found.grid) == (2, 8)


@pytest.mark.parametrize("d", [32, 40, 64, 80, 128, 256])
def test_tiles_large_enough_for_any_instructions(cpu, instructions, dtype, d):
    """Of ordinary numbers; of some that have no parts, or too small ones; of keys that nobody may see."""
    q, k, v = cpu.qkv(B=2, Hq=4, Hkv=2, Nq=150, Nk=300, d=d, dtype=dtype)
    cpu.check(q, k, v)
    cpu.check(q, k, v, causal=True)
    limits = {"seqlens_k": cpu.ints(300, 170), "leftpad_k": cpu.ints(0, 70)}
    k[1, :, 170:], v[1, :, 170:], k[1, :, :70], v[1, :, :70] = torch.nan, torch.inf, -torch.inf, torch.nan
    cpu.check(q, k, v, window_size=(100, 20), **limits)
    k[0, 0, 130], v[0, 1, 200] = -torch.inf, torch.inf
    cpu.check(q.abs(), k, v, **limits)
    if dtype == torch.float32:
        k, v = k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)
        for scale in 1e-20, 1e-12, 1e12, 1e20:
            cpu.check(q * scale, k / scale, v * scale)


def test_calls_from_several_threads(cpu, dtype):
    inputs = [cpu.qkv(Nq=100, Nk=200, d=d, dtype=dtype) for d in (16, 64, 80, 128) * 4]
    expected = [cpu.forward(*tensors) for tensors in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert all(
            map(torch.equal, pool.map(lambda tensors: cpu.forward(*tensors), inputs * 4), expected * 4)
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(cpu, dtype, mode):
    """These modes belong to a thread, and the threads that share the work have modes of their own."""
    with mode():
        cpu.check(*cpu.qkv(B=4, Hq=8, Hkv=8, Nq=200, Nk=200, dtype=dtype), causal=True)


def test_extra_memory():
    """Nothing like the scores, which would be 1.6 GB here."""
    program = """
import resource, torch, minimal_attn
q = torch.randn(1, 1, 20000, 16)
minimal_attn.forward(q[:, :, :100], q, q)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
minimal_attn.forward(q, q, q, causal=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    here = Path(minimal_attn.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=here, capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 100 * 1024  # KB
