"""One workload: all peers take turns; their times, and their errors against float64."""

import math
import statistics
import time
from collections import Counter, defaultdict
from functools import partial
from itertools import product

import torch
from torch.nn import functional as F

from .clock import progress, stopwatch
from .peers import is_ours
from .workloads import Cell, randn, random_qkv

ROUNDS, MOST = 6, 3  # all turns of a peer take about MOST seconds at most
# Floating point operations are B H N^2 d times these, half of that under a causal mask.
FLOP = {"forward": 4, "backward": 10, "step": 14}


def exact(q, k, v, do, causal, softcap=None):
    """One head in float64, 1024 queries at a time, so that memory stays bounded: (o,), or with do the
    gradients (dq, dk, dv)."""
    q, k, v, scale = q.double(), k.double(), v.double(), 1 / math.sqrt(q.size(-1))
    o, dq, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for i in range(0, q.size(0), 1024):
        rows = slice(i, i + 1024)
        s = q[rows] @ k.T * scale
        slope = 1.0
        if softcap:
            t = torch.tanh(s / softcap)
            s, slope = softcap * t, 1 - t.square()
        if causal:
            s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(i + 1), -math.inf)
        p = F.softmax(s, dim=-1)
        if do is None:
            o.append(p @ v)
            continue
        dp = do[rows].double() @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale * slope
        dq.append(ds @ k)
        dk += ds.T @ q[rows]
        dv += p.T @ do[rows].double()
    return (torch.cat(o),) if do is None else (torch.cat(dq), dk, dv)


def worst(errors: list[float]) -> float:
    """The largest one, or NaN if one of them is."""
    return max(errors, key=lambda error: (math.isnan(error), error), default=0.0)


def judge(q, k, v, do, causal, softcap=None):
    """Returns a function: the relative Frobenius error of its argument, (o,) or the gradients, against
    float64. It looks at three random heads. Of the gradients the worst one counts."""
    heads = [divmod(i, q.size(1)) for i in torch.randperm(q.size(0) * q.size(1))[:3].tolist()]
    shared = q.size(1) // k.size(1)  # query heads that share a key head
    one_by_one = [
        exact(
            q[b, h], k[b, h // shared], v[b, h // shared], None if do is None else do[b, h], causal, softcap
        )
        for b, h in heads
    ]
    truth = [torch.stack(tensors) for tensors in zip(*one_by_one, strict=True)]

    def error_of(results) -> float:
        found = [torch.stack([x[b, h] for b, h in heads]).double() for x in results]
        return worst([((x - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True)])

    return error_of


def call_of(part: str, function, *tensors):
    """What is timed: the forward pass, the backward pass of autograd, or both. The last tensor is do."""
    *inputs, do = tensors
    differentiated = [x for x in inputs if x.requires_grad]
    if part == "forward":
        return lambda: (function(*inputs),)
    if part == "step":
        return lambda: torch.autograd.grad(function(*inputs), differentiated, do)
    o = function(*inputs)
    return lambda: torch.autograd.grad(o, differentiated, do, retain_graph=True)


def take_turns(peers: dict, tensors, error_of, args, bar: str) -> tuple[dict, dict]:
    """Of each peer a record with its error, or why it failed, and its times in seconds. A peer is a function
    of q, k, v and what stands between v and do in `tensors`, and a context. Round 0 warms up: it judges the
    first result and sets the peer's clock."""
    pool = torch.cuda.graph_pool_handle() if args.graph else None  # shared: no two graphs run at once
    names, found, watches, times, spent = list(peers), {}, {}, defaultdict(list), Counter()
    for i, j in product(range(1 + ROUNDS), range(len(peers))):
        name = names[(i + j) % len(peers)]
        if i > 1 and spent[name] > MOST:
            continue
        function, context = peers[name]
        progress(f"{bar}: {f'round {i} of {ROUNDS}' if i else 'warming up'}, {name}")
        start = time.perf_counter()
        try:
            with context():
                if i == 0:
                    call = call_of(args.part, function, *tensors)
                    found[name] = {"error": error_of(call())}
                    watches[name] = stopwatch(call, args.device, pool)
                elif "failed" not in found[name]:
                    times[name].append(watches[name]())
        except Exception as problem:
            found[name] = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}
        spent[name] += time.perf_counter() - start
    return found, times


def measure(cell: Cell, peers: dict, args, bar: str) -> list[dict]:
    """A record for each peer."""
    q, k, v = random_qkv(cell, args.device)
    causal, do = cell.mask == "causal", None
    if args.part != "forward":
        do = randn(q.shape, cell.dtype, args.device)
    error_of = judge(q, k, v, do, causal, args.softcap)
    inputs = [x.requires_grad_(do is not None) for x in (q, k, v)]
    bound = {name: (partial(function, causal=causal), context) for name, (function, context) in peers.items()}
    found, times = take_turns(bound, [*inputs, do], error_of, args, bar)
    flop = FLOP[args.part] * cell.B * cell.H * cell.N**2 * cell.d
    flop /= {"full": 1, "causal": 2, "decode": cell.N}[cell.mask]
    rate(found, times, flop, 2 * k.numel() * k.element_size())
    return [cell._asdict() | {"peer": name} | found[name] for name in peers]


def rate(found: dict, times: dict, flop: float, size: int) -> None:
    """Adds ms, TFLOP/s, GB/s of k and v, and for ours the ratio: 0 if it is wrong, None without a peer."""
    found = {name: r for name, r in found.items() if "failed" not in r}
    for name, r in found.items():
        r["ms"] = statistics.median(times[name]) * 1e3
        r["tflops"], r["gbs"] = flop / r["ms"] / 1e9, size / r["ms"] / 1e6
    bound = 10 * min((r["error"] for r in found.values() if math.isfinite(r["error"])), default=0)
    theirs = [r["ms"] for name, r in found.items() if not is_ours(name) and r["error"] <= bound]
    for r in (r for name, r in found.items() if is_ours(name)):
        is_right = r["error"] <= bound  # False for a NaN
        r["ratio"] = 0 if not is_right else min(theirs) / r["ms"] if theirs else None
