"""Measure minimal_attn, on the GPU when there is one and the build has CUDA code, else on the CPU.

  bench.py             profile manual attention and minimal_attn on (16, 12, 64, 64) float32, then compare
                       their values: exit code 1 if they differ
  bench.py --sweep     compare it with manual attention, PyTorch's scaled_dot_product_attention (SDPA) and,
                       where it is installed (pip install fa3_fwd, bfloat16 only), FlashAttention-3
  bench.py --overhead  host time a call, on an input so small that little else counts

How --sweep measures: inputs are drawn anew in every run. For each workload all peers take turns, six rounds
of about 7 ms of calls each, every round beginning with another peer; the time is the median of the rounds.
On a GPU the L2 cache is cleared before each call; with --graph calls are replayed as a CUDA graph instead,
without clearing. Columns read "ms / TFLOP/s / error", those of minimal_attn's backends also "/ ratio":
  TFLOP/s  4 B H N^2 d floating point operations, half of it for causal
  error    relative Frobenius error against float64, over 3 random (batch, head) pairs, all their rows
  ratio    time of the fastest peer / time of minimal_attn: above 1 we are faster. Only peers count whose
           error is within 10 times the smallest ("manual TF32" never is); a backend of ours beyond that is
           "wrong", and the exit code 1
A peer that fails (out of memory, not supported) shows as "-", with the reason below the table.
"""

import json
import math
import os
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter, defaultdict, namedtuple
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import product

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import minimal_attn
except ImportError as problem:
    sys.exit(f"bench.py: minimal_attn is not built, `make` builds it ({problem})")

SEED = (16, 12, 64, 64)  # (B, H, N, d) of the project that this one grew from
# As much memory whatever N and d are: 16384 tokens, hidden size 2048.
GPU = [(16384 // n, 2048 // d, n, d) for d in (64, 128, 256) for n in (512, 1024, 2048, 4096, 8192, 16384)]

WORKLOADS = [  # of --sweep: device, dtypes, shapes (B, H, N, d), masks
    ("cpu", ["float32"], [SEED, (4, 8, 512, 64), (1, 8, 2048, 64), (1, 8, 4096, 128)], ["full"]),
    ("cpu", ["float32"], [(1, 8, 8192, 64)], ["full", "causal"]),
    ("cpu", ["float16", "bfloat16"], [(1, 8, 2048, 64)], ["full"]),
    ("cuda", ["float32"], [SEED], ["full"]),
    ("cuda", ["float32"], [s for s in GPU if s[2] in (512, 2048, 8192)], ["full", "causal"]),
    ("cuda", ["float16", "bfloat16"], GPU, ["full", "causal"]),
]
ROUNDS, TURN = 6, 7.5e-3  # a peer's turn in a round takes about so many seconds
Cell = namedtuple("Cell", "dtype B H N d mask")  # one line of the table


def random_qkv(shape, dtype: str, device: str) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=getattr(torch, dtype), device=device) for _ in range(3)]


@lru_cache(maxsize=1)
def hidden(N: int, device) -> torch.Tensor:
    return torch.ones(N, N, dtype=torch.bool, device=device).triu(1)


def manual(q, k, v, causal=False):
    size = 3 * math.prod(q.shape[:3]) * k.size(2) * q.element_size()
    # A GPU says by itself that its memory is full; on the CPU the process would be killed.
    if q.device.type == "cpu" and size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        raise MemoryError("its N x N matrices would take over half of the memory")
    att = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
    if causal:
        att = att.masked_fill(hidden(q.size(2), q.device), -math.inf)
    return F.softmax(att, dim=-1) @ v


def sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def flash_attention_3(q, k, v, causal):
    from fa3_fwd_interface import flash_attn_func  # it takes (B, N, H, d); nothing is copied for that

    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)


@contextmanager
def tf32():
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def serves(backend: str, device: str, dtype: str) -> bool:
    q = torch.zeros(1, 1, 1, 8, dtype=getattr(torch, dtype), device=device)
    try:
        minimal_attn.forward(q, q, q, backend=backend)
    except ValueError:
        return False
    return True


def peers_for(device: str, dtype: str, backends: list[str]) -> dict[str, tuple]:
    """By name: a function of (q, k, v, causal), and the context to call it in, entered once a turn."""
    peers = {"manual": (manual, nullcontext)}
    if device == "cpu":
        peers["SDPA"] = sdpa, nullcontext
    elif dtype == "float32":
        peers["manual TF32"] = manual, tf32
        peers["SDPA efficient"] = sdpa, partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
    else:
        peers["SDPA flash"] = sdpa, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
        peers["SDPA cuDNN"] = sdpa, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
        if dtype == "bfloat16" and find_spec("fa3_fwd_interface"):
            peers["FlashAttention-3"] = flash_attention_3, nullcontext
    ours = [name for name in backends if serves(name, device, dtype)]
    return peers | {name: (partial(minimal_attn.forward, backend=name), nullcontext) for name in ours}


def judge(q, k, v, causal):
    """Returns a function: relative Frobenius error of its argument against float64. Three random heads are
    judged, 1024 queries at a time, so that memory and time stay bounded."""
    heads, rows = [divmod(i, q.size(1)) for i in torch.randperm(q.size(0) * q.size(1))[:3].tolist()], []
    for (b, h), i in product(heads, range(0, q.size(2), 1024)):
        s = q[b, h, i : i + 1024].double() @ k[b, h].double().T / math.sqrt(q.size(3))
        if causal:
            s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(i + 1), -math.inf)
        rows.append(F.softmax(s, dim=-1) @ v[b, h].double())
    truth = torch.cat(rows)
    return lambda o: ((torch.cat([o[b, h] for b, h in heads]).double() - truth).norm() / truth.norm()).item()


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
        if clear_l2:  # meanwhile the host enqueues the call: its own time doesn't show
            more_than_l2().zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def stopwatch(call, device: str, graph_pool):
    """What times one turn of a peer that was called before; given a pool of memory, as a CUDA graph."""
    clock = time_cpu if device == "cpu" else time_gpu
    calls = min(max(1, int(TURN / clock(call, 1))), 1000)
    if graph_pool is None:
        return lambda: clock(call, calls)
    graph = torch.cuda.CUDAGraph()
    # The outer context restores the stream where a capture fails: torch.cuda.graph's own doesn't then.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=graph_pool):
        for _ in range(calls):
            call()
    graph.replay()  # the first uploads it
    return lambda: time_gpu(graph.replay, 1, clear_l2=False) / calls


def progress(text: str = "") -> None:
    if sys.stderr.isatty():
        print("\r\033[K" + text[:110], end="", file=sys.stderr, flush=True)


def measure(cell: Cell, peers: dict, args, bar: str) -> list[dict]:
    q, k, v = random_qkv(cell[1:5], cell.dtype, args.device)
    causal = cell.mask == "causal"
    error_of = judge(q, k, v, causal)
    pool = torch.cuda.graph_pool_handle() if args.graph else None  # one for all: they never run at once
    names, found, watches, times = list(peers), {}, {}, defaultdict(list)
    for i, j in product(range(1 + ROUNDS), range(len(peers))):
        name = names[(i + j) % len(peers)]
        function, context = peers[name]
        progress(f"{bar}: {f'round {i} of {ROUNDS}' if i else 'warming up'}, {name}")
        try:
            with context():
                if i == 0:
                    call = partial(function, q, k, v, causal=causal)
                    found[name] = {"error": error_of(call())}
                    watches[name] = stopwatch(call, args.device, pool)
                elif "failed" not in found[name]:
                    times[name].append(watches[name]())
        except Exception as problem:
            found[name] = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}
    rate(cell, {name: r for name, r in found.items() if "failed" not in r}, times, args.backend)
    return [cell._asdict() | {"peer": name} | found[name] for name in peers]


def rate(cell: Cell, found: dict, times: dict, backends: list[str]) -> None:
    """Adds ms, TFLOP/s, and for ours the ratio: 0 where it is wrong, None where there is no peer."""
    flop = 4 * cell.B * cell.H * cell.N**2 * cell.d / (2 if cell.mask == "causal" else 1)
    for name, r in found.items():
        r["ms"] = statistics.median(times[name]) * 1e3
        r["tflops"] = flop / r["ms"] / 1e9
    bound = 10 * min((r["error"] for r in found.values() if math.isfinite(r["error"])), default=0)
    theirs = [r["ms"] for name, r in found.items() if name not in backends and r["error"] <= bound]
    for r in (r for name, r in found.items() if name in backends):
        r["ratio"] = 0 if not r["error"] <= bound else min(theirs) / r["ms"] if theirs else None  # or NaN


def in_words(r: dict) -> str:
    if "failed" in r:
        return "-"
    ratio = r.get("ratio")
    last = "" if ratio is None else f" / {ratio:.2f}x" if ratio else " / wrong"
    return f"{r['ms']:.4g} / {r['tflops']:.3g} / {r['error']:.1e}{last}"


def print_line(first: str, columns) -> None:
    print("| " + " | ".join([first.ljust(26)] + [column.ljust(33) for column in columns]) + " |", flush=True)


def sweep(args) -> list[dict]:
    records, dtype = [], None
    for i, cell in enumerate(args.cells):
        if cell.dtype != dtype:
            dtype, peers = cell.dtype, peers_for(args.device, cell.dtype, args.backend)
            print(f"\n{dtype}: ms / TFLOP/s / error (/ ratio)\n")
            print_line("(B, H, N, d) mask", peers)
            print_line("---", ["---"] * len(peers))
        shape = f"{cell[1:5]} {cell.mask}"
        bar = f"[{'#' * (20 * i // len(args.cells)):.<20}] {i}/{len(args.cells)} {dtype} {shape}"
        line = measure(cell, peers, args, bar)
        progress()
        print_line(shape, map(in_words, line))
        records += line
        torch.cuda.empty_cache()  # does nothing without a GPU
    print_summary(records)
    return records


def print_summary(records: list[dict]) -> None:
    print()
    failures = Counter(f"{r['peer']}, {r['dtype']}: {r['failed']}" for r in records if "failed" in r)
    for failure, count in failures.items():
        print(f"- on {count} of the workloads: {failure}")
    ratios = defaultdict(list)
    for r in records:
        if r.get("ratio"):
            ratios[f"{r['peer']}, {r['dtype']}, d {r['d']}"].append(r["ratio"])
    for key, values in ratios.items():
        print(f"{key}: ratio {statistics.geometric_mean(values):.2f}x, geometric mean of {len(values)}")


def plot(records: list[dict], path: str) -> None:
    import matplotlib.pyplot

    panels = defaultdict(lambda: defaultdict(list))
    for r in records:
        if "tflops" in r and r.get("ratio") != 0:  # 0: wrong
            panels[f"{r['dtype']}, d {r['d']}, {r['mask']}"][r["peer"]].append((r["N"], r["tflops"]))
    names = list(dict.fromkeys(r["peer"] for r in records))
    shape = max(1, -(-len(panels) // 3)), max(1, min(3, len(panels)))
    figure = matplotlib.pyplot.figure(figsize=(4 * shape[1], 3.5 * shape[0]), layout="constrained")
    for i, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(*shape, i + 1, title=title, xlabel="N", ylabel="TFLOP/s")
        for name, points in lines.items():
            x, y = zip(*sorted(points), strict=True)
            axes.semilogx(x, y, "o-", base=2, color=f"C{names.index(name)}", label=name)
        axes.set_ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
        axes.legend(fontsize="small")
    figure.savefig(path)


def overhead(device: str, dtypes: list[str]) -> None:
    calls = {"minimal_attn": minimal_attn.forward, "SDPA": F.scaled_dot_product_attention}
    for dtype in dtypes:
        (q, k, v), times = random_qkv((1, 1, 1, 64), dtype, device), defaultdict(list)
        for _, (name, call) in product(range(1 + ROUNDS), calls.items()):
            start = time.perf_counter()
            for _ in range(1000):
                call(q, k, v)
            times[name].append((time.perf_counter() - start) * 1e3)  # us a call
            if device == "cuda":
                torch.cuda.synchronize()
        us = [f"{name} {statistics.median(times[name][1:]):.2f} us" for name in calls]  # the first warmed up
        print(f"host time of a call, (1, 1, 1, 64) {dtype}:", ", ".join(us))


def profile(device: str) -> bool:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler complains where there is no GPU
    q, k, v = random_qkv(SEED, "float32", device)
    calls = {"manual attention ===": manual, "minimal flash attention === ": minimal_attn.forward}
    values = []
    for title, call in calls.items():
        call(q, k, v)  # so that the table shows attention, not what a first call sets up
        with torch.profiler.profile(acc_events=True) as prof:  # the keyword only silences a warning
            values.append(call(q, k, v))
        print("=== profiling " + title)
        print(prof.key_averages().table(sort_by=f"{device}_time_total", row_limit=10))
    print("attn values sanity check:", same := torch.allclose(*values, rtol=0, atol=1e-2))
    return same


def selected(args) -> list[Cell]:
    rows = [product(*what) for device, *what in WORKLOADS if device == args.device]
    cells = [Cell(dtype, *shape, mask) for row in rows for dtype, shape, mask in row]
    masks = [mask for mask in ("full", "causal") if getattr(args, mask)]
    for field, only in ("dtype", args.dtype), ("d", args.d), ("N", args.n), ("mask", masks):
        cells = [cell for cell in cells if not only or getattr(cell, field) in only]
    return [cell for cell in cells if not args.quick or cell.N <= 2048 and cell.d <= 128]


def parse(backends: list[str], has_cuda: bool) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sweep", action="store_true", help="compare with the peers")
    add("--overhead", action="store_true", help="host time of minimal_attn and SDPA")
    add("--device", choices=["cpu", "cuda"], default="cuda" if has_cuda else "cpu", help="here: %(default)s")
    add("--threads", type=int, default=torch.get_num_threads(), help="on the CPU; here: %(default)s")
    add("--graph", action="store_true", help="--sweep: time replays of CUDA graphs")
    add("--quick", action="store_true", help="--sweep: only N <= 2048 and d <= 128")
    add("--dtype", nargs="+", choices=["float32", "float16", "bfloat16"], help="only these")
    add("--d", nargs="+", type=int, help="--sweep: only these head sizes")
    add("--n", nargs="+", type=int, help="--sweep: only these sequence lengths")
    add("--causal", action="store_true", help="--sweep: only causal")
    add("--full", action="store_true", help="--sweep: only without a mask")
    add("--backend", nargs="+", choices=backends, default=backends, help="--sweep: only these of ours")
    add("--json", metavar="FILE", help="write the numbers of --sweep there too")
    add("--plot", metavar="FILE.png", help="draw the TFLOP/s of --sweep over N there (needs matplotlib)")
    args = parser.parse_args()
    args.backend = [name for name in args.backend if (name == "cpu") == (args.device == "cpu")]
    args.cells = selected(args)
    for wrong, message in (
        (args.device == "cuda" and not has_cuda, "--device cuda: no GPU here, or no CUDA code in this build"),
        (args.graph and args.device == "cpu", "--graph needs a GPU"),
        (args.threads < 1, "--threads must be at least 1"),
        (args.plot and not find_spec("matplotlib"), "--plot needs matplotlib: pip install matplotlib"),
        (not args.cells, "these filters leave no workload of --sweep"),
    ):
        if wrong:
            parser.error(message)
    return args


def main() -> int:
    has_cuda = torch.cuda.is_available() and minimal_attn._C.cuda_architectures() != ""
    args = parse(minimal_attn._C.backends(), has_cuda)
    torch.set_num_threads(args.threads)
    torch.seed()  # PyTorch starts with the same seed in every process
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"the CPU, {args.threads} threads"
    unused = torch.cuda.is_available() and not has_cuda
    print(f"on {where}, torch {torch.__version__}" + ", as this build has no CUDA code" * unused, flush=True)
    if not (args.sweep or args.overhead):
        return 0 if profile(args.device) else 1
    if args.overhead:
        overhead(args.device, args.dtype or ["float32"])
    records = sweep(args) if args.sweep else []
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"on": where, "torch": torch.__version__, "graph": args.graph, "sweep": records}, file)
    if args.plot and records:
        plot(records, args.plot)
    return any(r.get("ratio") == 0 for r in records)


if __name__ == "__main__":
    sys.exit(main())
