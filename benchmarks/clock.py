"""Times of a call, and a line that says how far the measurement is."""

import statistics
import sys
import time
from functools import lru_cache

import torch

TURN = 7.5e-3  # seconds that a turn takes, about


def time_cpu(call, calls: int) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@lru_cache
def more_than_l2() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def time_gpu(call, calls: int, clear_l2: bool = True) -> float:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in events:
        if clear_l2:  # while the GPU clears it the host enqueues the call, so host time doesn't show
            more_than_l2().zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def stopwatch(call, device: str, graph_pool=None):
    """A function that times one turn of a call that has run before; with a memory pool, as a CUDA graph."""
    clock = time_cpu if device == "cpu" else time_gpu
    calls = min(max(1, int(TURN / clock(call, 1))), 1000)
    if graph_pool is None:
        return lambda: clock(call, calls)
    graph = torch.cuda.CUDAGraph()
    # The outer context restores the stream if a capture fails, which torch.cuda.graph's own doesn't.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=graph_pool):
        for _ in range(calls):
            call()
    graph.replay()  # the first replay uploads the graph
    return lambda: time_gpu(graph.replay, 1, clear_l2=False) / calls


def progress(text: str = "") -> None:
    if sys.stderr.isatty():
        print("\r\033[K" + text[:110], end="", file=sys.stderr, flush=True)
