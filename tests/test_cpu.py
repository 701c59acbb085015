"""What only the CPU has: threads, and memory that the process itself pays for."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import Backend

import minimal_attn


@pytest.fixture
def cpu(seed):
    return Backend("cpu", seed)


@pytest.fixture
def set_num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("Nq", [1, 200])
def test_same_bits_on_any_number_of_threads(cpu, set_num_threads, dtype, Nq):
    q, k, v = cpu.qkv(B=2, Nq=Nq, Nk=300, dtype=dtype)
    results = []
    for threads in 1, 2, 3, 8:
        set_num_threads(threads)
        results.append(cpu.forward(q, k, v, causal=True, return_state=True))
    for result in results:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("d", [32, 40, 64, 80, 128, 256])
def test_tiles_large_enough_for_any_instructions(cpu, dtype, d):
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
