"""Processes that are the ranks of a ring, for test_ring.py and test_ring_lost.py.

A rank is a forked child of one server process, which has imported torch already.
"""

import multiprocessing
import os
import time
import traceback

import pytest
import torch
import torch.distributed as dist

SERVER = multiprocessing.get_context("forkserver")
# The last one is what use_deterministic_algorithms imports, in a second.
SERVER.set_forkserver_preload(["torch.distributed", "minimal_attn.ring", "pytest", "torch._inductor.config"])
LIMIT = 30  # seconds for a test's processes to end


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    """The calls are in other processes, where `run_rank` does it."""


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


def needs_gpus(transport, ranks):
    if transport == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip("there are fewer GPUs")
