"""Threads, fork, spawn, and memory that runs out: no call disturbs another one, or the next."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Backend, cuda_backends

import minimal_attn

THREADS = 8


def test_threads(backend, dtype):
    """Calls of eight threads at once, on a GPU each on its own stream: the bits of calls one by one."""
    shapes = [dict(Nq=Nq, Nk=200, d=d) for Nq, d in ((100, 16), (1, 64), (70, 80), (5, 128))] * 2
    inputs = [backend.qkv(dtype=dtype, **shape) for shape in shapes]
    options = {"causal": True, "return_state": True}
    expected = [backend.forward(*tensors, **options) for tensors in inputs]
    barrier = threading.Barrier(THREADS)

    def run(i):
        stream = torch.cuda.Stream() if backend.device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream())
        barrier.wait()
        with torch.cuda.stream(stream):
            results = [backend.forward(*inputs[j % THREADS], **options) for j in range(i, i + 2 * THREADS)]
        if stream is not None:
            stream.synchronize()
        return results

    with ThreadPoolExecutor(THREADS) as pool:
        for i, results in enumerate(pool.map(run, range(THREADS))):
            for j, result in enumerate(results):
                assert all(map(torch.equal, result, expected[(i + j) % THREADS]))


# ------------------------------------------------------------------------------------ in a fresh process

FIRST_CALLS = """
import threading, torch, minimal_attn
threads, names, found = 8, {names}, []
for name in names:
    device = "cpu" if name == "cpu" else "cuda"
    inputs = [torch.randn(2, 4, n, 64, device=device) for n in range(60, 60 + threads)]
    barrier, results = threading.Barrier(threads), [None] * threads

    def run(i):
        barrier.wait()
        results[i] = minimal_attn.forward(inputs[i], inputs[i], inputs[i], backend=name)
        if device == "cuda":
            torch.cuda.synchronize()

    pool = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in pool: thread.start()
    for thread in pool: thread.join()
    found += [torch.equal(minimal_attn.forward(x, x, x, backend=name), r) for x, r in zip(inputs, results)]
print(found.count(True), len(found))
"""


def test_first_calls_of_a_process_at_once():
    """What a first call sets up once for all, eight threads ask for at the same time."""
    names = ["cpu", *cuda_backends()]
    program = FIRST_CALLS.replace("{names}", repr(names))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{8 * len(names)} {8 * len(names)}\n", done


IMPORT_AGAIN = """
import importlib, sys, torch, minimal_attn
from torch.utils.flop_counter import FlopCounterMode

def use():
    import minimal_attn
    from minimal_attn.flash_attn import flash_attn_func
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    o = minimal_attn.forward(x, x, x, causal=True)
    o.sum().backward()
    many = torch.vmap(minimal_attn.forward)(*[x[:, None]] * 3)[:, 0]
    with minimal_attn.activate() as activation, FlopCounterMode(display=False) as count:
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        minimal_attn.forward(x, x, x)
    heads_last = flash_attn_func(*[x.transpose(1, 2)] * 3, deterministic=True)
    equal = torch.allclose(many, y) and torch.allclose(heads_last.transpose(1, 2), y)
    print(equal, activation.calls, count.get_total_flops() > 0)

use()
importlib.reload(minimal_attn)
use()
for name in [name for name in sys.modules if name.partition(".")[0] == "minimal_attn"]:
    del sys.modules[name]
use()
"""


def test_imports_of_a_process():
    """importlib.reload, and an import after a removal from sys.modules: operators are registered once."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", IMPORT_AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True {'minimal_attn': 1} True\n" * 3, done


FORK = """
import os, signal, torch, minimal_attn
import torch.nn.functional as F
q = torch.randn(2, 8, 200, 64)
torch.set_num_threads(2)
expected = minimal_attn.forward(q, q, q)
child = os.fork()
if child == 0:
    signal.alarm(20)
    results = [minimal_attn.forward(q, q, q) for _ in range(3)]
    # torch.equal would wait for its threads, too.
    equal = all((result.numpy() == expected.numpy()).all() for result in results)
    x = torch.randn(2, 8, 64, 4000).mT  # forward copies it
    minimal_attn.forward(x, x, x)
    with minimal_attn.activate():
        F.scaled_dot_product_attention(q, q, q)
    print(equal, minimal_attn.explain(q, q, q).threads, flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
print(status, torch.equal(minimal_attn.forward(q, q, q), expected), minimal_attn.explain(q, q, q).threads)
"""


def test_fork_after_threads_were_used():
    """GCC's OpenMP would wait forever for threads that the child doesn't have: it computes on one."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True 1\n0 True 2\n", done


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_fork_with_a_gpu(cuda_backend):
    """CUDA doesn't survive fork(): an error in the child, neither a crash nor a wrong result."""
    q, k, v = cuda_backend.qkv()
    expected = cuda_backend.forward(q, k, v)
    torch.cuda.synchronize()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            cuda_backend.forward(q, k, v)
            os.write(write, b"no error")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    status = os.waitpid(child, 0)[1]
    said = os.read(read, 10000).decode()
    os.close(read)
    assert status == 0 and "Error" in said, (status, said)
    assert torch.equal(cuda_backend.forward(q, k, v), expected)


def in_child(name, seed, results):
    backend = Backend(name, seed)
    results.put(backend.forward(*backend.qkv()).cpu().numpy())


def test_spawn(backend, seed):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=in_child, args=(backend.name, seed, results))
    child.start()
    try:
        found = torch.from_numpy(results.get(timeout=60))
    finally:
        child.join(30)
        child.kill()
    assert child.exitcode == 0
    assert torch.equal(found, backend.forward(*backend.qkv()).cpu())


# ------------------------------------------------------------------------------------ memory

ABSURD = 2**27  # heads of 2^20 queries: 2^47 elements, more than any machine has


def test_result_that_is_too_large(backend):
    """An error of PyTorch's allocator; the next call is right, and no memory is kept."""
    q = torch.zeros(1, 1, 1, 1, device=backend.device).expand(1, ABSURD, 2**20, 1)
    k = q[:, :1, :5]
    tensors = backend.qkv()
    backend.check(*tensors)  # what PyTorch allocates once for all
    used = torch.cuda.memory_allocated() if backend.device.type == "cuda" else 0
    wrong = torch.OutOfMemoryError if backend.device.type == "cuda" else RuntimeError
    for options in {}, {"return_state": True}, {"return_lse": True}:
        with pytest.raises(wrong, match="memory"):
            minimal_attn.forward(q, k, k, **options)
        assert used == (torch.cuda.memory_allocated() if backend.device.type == "cuda" else 0)
        backend.check(*tensors)


def test_copy_that_is_too_large(backend):
    """Of keys whose last dimension isn't contiguous."""
    H = 2**20
    q = torch.zeros(1, H, 1, 2, device=backend.device)
    k = torch.zeros(2 * H, device=backend.device).as_strided((1, H, 2**27, 2), (1, 1, 0, 2))
    wrong = torch.OutOfMemoryError if backend.device.type == "cuda" else RuntimeError
    with pytest.raises(wrong, match="memory"):
        backend.forward(q, k, k)
    backend.check(*backend.qkv())


LITTLE_MEMORY = """
import re, resource, torch, minimal_attn

torch.set_num_threads(4)
q, k = torch.randn(1, 1, 100_000, 16, requires_grad=True), torch.randn(1, 1, 256, 16)
bias = torch.zeros(100_000, 256, requires_grad=True)  # a thread's sums of its gradient take 51 MB
ends = set()
for megabytes in 1000, 120, 165, 210, 255, 300:
    o = minimal_attn.forward(q, k, k, bias=bias)
    kilobytes = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (kilobytes * 2**10 + megabytes * 2**20, before[1]))
    try:
        torch.autograd.grad(o.sum(), [q, bias])
        ends.add("right")
    except (RuntimeError, MemoryError):
        ends.add("memory")
    resource.setrlimit(resource.RLIMIT_AS, before)
print(*sorted(ends))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_threads_that_find_no_memory():
    """In the gradient of a bias threads wait for each other, but not for one that found no memory."""
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["memory", "right"]


def test_workspace_that_is_too_large(cuda_backend):
    backend = cuda_backend
    H, Nk = 2**14, 2**18
    q = backend.randn(1, H, 70, 8)
    k = backend.randn(1, 1, Nk, 8).expand(1, H, Nk, 8)
    if backend.explain(q, k, k).workspace < 2**40:
        pytest.skip("this backend has no workspace that grows with the keys")
    used = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward(q, k, k)
    assert torch.cuda.memory_allocated() == used
    backend.check(*backend.qkv())


def fill_gaps():
    """Tensors in all that is free of the memory that PyTorch has reserved: earlier tests may leave gaps."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    tensors = []
    for megabytes in (256, 64, 16, 4, 2):
        try:
            while True:
                tensors.append(torch.empty(megabytes * 2**20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    return tensors


def test_memory_that_is_nearly_used_up(cuda_backend, dtype):
    """Less and less is free: each call is right or raises OutOfMemoryError, wherever it runs out."""
    backend = cuda_backend
    q, k, v = backend.qkv(B=1, Hq=8, Hkv=8, Nq=4096, Nk=4096, dtype=dtype)
    q = q.mT.contiguous().mT  # so that it is copied, too
    expected = backend.forward(q, k, v, return_lse=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    errors = 0
    try:
        gaps = fill_gaps()
        for megabytes in (0, 2, 6, 10, 14, 20, 24, 30, 40, 60, 100):
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(
                (torch.cuda.memory_reserved() + megabytes * 2**20) / total
            )
            try:
                result = backend.forward(q, k, v, return_lse=True)
            except torch.OutOfMemoryError:
                errors += 1
                continue
            assert all(map(torch.equal, result, expected))
            del result
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 0 < errors < 11, len(gaps)
    assert all(map(torch.equal, backend.forward(q, k, v, return_lse=True), expected))
