"""Small inputs: the profile of manual attention and of minimal_attn, and the host time of a call."""

import os
import statistics
import time
from collections import defaultdict
from functools import partial
from itertools import product

import torch
from torch.nn import functional as F

import minimal_attn

from .clock import stopwatch
from .measure import ROUNDS
from .peers import manual, ours
from .workloads import SEED, Cell, random_qkv


def run_overhead(args, about: dict) -> int:
    calls = {"minimal_attn": minimal_attn.forward, "SDPA": F.scaled_dot_product_attention}
    for dtype in args.dtype or ["float32"]:
        (q, k, v), times = random_qkv(Cell(dtype, 1, 1, 1, 64, "full"), args.device), defaultdict(list)
        for _, (name, call) in product(range(1 + ROUNDS), calls.items()):
            start = time.perf_counter()
            for _ in range(1000):
                call(q, k, v)
            times[name].append((time.perf_counter() - start) * 1e3)  # us a call
            if args.device == "cuda":
                torch.cuda.synchronize()
        us = [f"{name} {statistics.median(times[name][1:]):.2f} us" for name in calls]  # the first warms up
        print(f"host time of a call, (1, 1, 1, 64) {dtype}:", ", ".join(us))
    return 0


def run_profile(args, about: dict) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler complains if there is no GPU
    q, k, v = random_qkv(Cell("float32", *SEED, "full"), args.device)
    explanation = minimal_attn.explain(q, k, v, backend=args.backend[0])
    name, forward = ours(explanation.backend), partial(minimal_attn.forward, backend=explanation.backend)
    values, watches, us = [], [], []
    for title, function in ("manual attention", manual), (name, forward):
        call = partial(function, q, k, v)
        call()  # so that the table shows attention, not what a first call sets up
        with torch.profiler.profile(acc_events=True) as prof:  # the keyword only silences a warning
            values.append(call())
        print(f"=== profiling {title} ===")
        print(prof.key_averages().table(sort_by=f"{args.device}_time_total", row_limit=10))
        watches.append(stopwatch(call, args.device))
    for times in zip(*([watch() for watch in watches] for _ in range(ROUNDS)), strict=True):
        us.append(statistics.median(times) * 1e6)
    print(explanation)
    print("attn values sanity check:", same := torch.allclose(*values, rtol=0, atol=1e-5))
    print(f"{SEED} float32: manual attention {us[0]:.4g} us, {name} {us[1]:.4g} us")
    difference = f"{(values[0] - values[1]).abs().max().item():.0e}".replace("e-0", "e-")
    ratio = f"{us[0] / us[1]:.1f}x as fast as manual attention"
    print(f"minimal_attn {ratio}, largest difference {difference}")
    return 0 if same else 1
