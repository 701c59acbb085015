"""Measure minimal_attn, on the GPU if there is one and the build has code for it, else on the CPU.

  bench.py             profile manual attention and minimal_attn on (B, H, N, d) = (16, 12, 64, 64), float32,
                       then compare their values and their times; exit code 1 if the values differ
  bench.py --sweep     compare minimal_attn with manual attention, PyTorch's scaled_dot_product_attention
                       (SDPA) and, if it is installed (pip install fa3_fwd, bfloat16 only), FlashAttention-3
  bench.py --ladder    the README's table: every backend on one workload, and its share of the machine's limit
  bench.py --decode    one query a head over long caches of keys, beside SDPA, and how fast K and V are read
  bench.py --overhead  host time of one call, on an input so small that little else counts

The extension is built first if it is missing or older than its sources.

How --sweep, --ladder and --decode measure: the inputs are new random numbers in every run. For each workload
all peers take turns in six rounds. Each round begins with another peer, and a turn is about 7 ms of calls.
The time is the median of the rounds. A slow peer stops after 3 seconds. On a GPU the L2 cache is cleared
before each call. With --graph a CUDA graph of the calls is replayed instead, without clearing the cache.
  TFLOP/s  4 B H N^2 d floating point operations a call, half of that if causal
  GB/s     bytes of K and V a call, for --decode
  error    relative Frobenius error against float64, over all rows of 3 random heads
  ratio    time of the fastest peer / time of minimal_attn: above 1, minimal_attn is faster. A peer counts if
           its error is within 10 times the smallest one ("manual TF32" never counts). A minimal_attn backend
           beyond that is "wrong", and the exit code is 1
A peer that fails (out of memory, not supported) shows as "-", with the reason below the table.

The limits of --ladder are measured in the same run, as the speed of a large matrix multiplication.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter, defaultdict, namedtuple
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import bootstrap

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------------ options
DTYPES = ["float32", "bfloat16", "float16"]
USED_BY = {"dtype": ["sweep", "ladder", "decode", "overhead"]}  # the modes that an option needs
USED_BY |= dict.fromkeys(["shape", "causal", "full"], ["sweep", "ladder"])
USED_BY |= {"graph": ["sweep", "ladder", "decode"]}
USED_BY |= dict.fromkeys(["d", "n", "quick", "json", "load", "plot"], ["sweep"])


class Parser(ArgumentParser):
    def error(self, message: str):
        print(f"bench.py: {message} (bench.py --help lists the options)", file=sys.stderr)
        sys.exit(2)


def parse() -> Namespace:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add, mode = parser.add_argument, parser.add_mutually_exclusive_group()
    for name in "sweep", "ladder", "decode", "overhead":
        mode.add_argument(f"--{name}", action="store_const", dest="mode", const=name, help="see above")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU that the build serves")
    add("--threads", type=int, help="of the CPU; default: PyTorch's choice")
    add("--backend", nargs="+", help="only these of minimal_attn; default: all, paper only with --ladder")
    add("--dtype", nargs="+", choices=DTYPES, help="only these; --ladder: float32, on a GPU bfloat16, too")
    add("--shape", nargs=4, type=int, metavar=tuple("BHNd"), help="this one instead of the usual workloads")
    add("--causal", action="store_true", help="only causal")
    add("--full", action="store_true", help="only without a mask, as --ladder does by default")
    add("--graph", action="store_true", help="time CUDA graphs")
    add("--d", nargs="+", type=int, help="--sweep: only these head dimensions")
    add("--n", nargs="+", type=int, help="--sweep: only these sequence lengths")
    add("--quick", action="store_true", help="--sweep: only N <= 2048 and d <= 128")
    add("--json", metavar="FILE", help="--sweep: write the numbers there after every workload")
    add("--load", metavar="FILE", help="--sweep: take the numbers that --json wrote and measure nothing")
    add("--plot", metavar="FILE.png", help="--sweep: draw TFLOP/s over N there (needs matplotlib)")
    args = parser.parse_args()
    args.mode = args.mode or "profile"
    for name, modes in USED_BY.items():
        if getattr(args, name) and args.mode not in modes:
            parser.error(f"--{name} needs {' or '.join(f'--{mode}' for mode in modes)}")
    for number in [args.threads, *(args.shape or [])]:
        if number is not None and number < 1:
            parser.error(f"numbers must be at least 1, but one is {number}")
    args.error = parser.error
    return args


# ------------------------------------------------------------------------------------------ the build
def is_built() -> bool:
    """Whether this Python has torch and an extension that is newer than the sources."""
    extension = HERE / "minimal_attn" / f"_C{EXTENSION_SUFFIXES[0]}"
    if not find_spec("torch") or not extension.exists():
        return False
    sources = [HERE / path for path in bootstrap.sources(".cpp", ".cu", ".cuh", ".h")]
    built = [
        path for path in (extension, HERE / "build" / "built") if path.exists()
    ]  # make touches the second
    newest_source, newest = (max(path.stat().st_mtime for path in paths) for paths in (sources, built))
    return newest_source <= newest


def build() -> None:
    """Runs `make build`, then this script again in the Python that the build is for."""
    if not shutil.which("make"):
        sys.exit("bench.py: minimal_attn is not built yet: install make, which builds it")
    this_one = {"PYTHON": sys.executable} if find_spec("torch") else {}  # else as make finds one
    try:
        status = subprocess.call(["make", "--silent", "-C", str(HERE), "build"], env=this_one | os.environ)
    except KeyboardInterrupt:
        status = 130
    if status:
        sys.exit(status)
    python = str(HERE / "build" / "python")
    os.execve(python, [python, *sys.argv], os.environ | {"MINIMAL_ATTN_BENCH": "built"})


if __name__ == "__main__":
    OPTIONS = parse()
    # `make bench` has just built.
    if not {"MAKELEVEL", "MINIMAL_ATTN_BENCH"} & set(os.environ) and not is_built():
        build()

import torch  # noqa: E402  # only now: build() may go on in another Python
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

try:
    import minimal_attn
except ImportError as problem:
    sys.exit(f"bench.py: minimal_attn can't be imported, `make` builds it ({problem})")

# ------------------------------------------------------------------------------------------ workloads
SEED = (16, 12, 64, 64)  # (B, H, N, d) of the project that this one grew from
# The same memory for every N and d: 16384 tokens, hidden size 2048.
GPU = [(16384 // n, 2048 // d, n, d) for d in (64, 128, 256) for n in (512, 1024, 2048, 4096, 8192, 16384)]
WORKLOADS = [  # mode, device, dtypes, shapes (B, H, N, d) or (B, H, N, d, Hkv), masks
    ("sweep", "cpu", ["float32"], [SEED, (4, 8, 512, 64), (1, 8, 2048, 64), (1, 8, 4096, 128)], ["full"]),
    ("sweep", "cpu", ["float32"], [(1, 8, 8192, 64)], ["full", "causal"]),
    ("sweep", "cpu", ["float16", "bfloat16"], [(1, 8, 2048, 64)], ["full"]),
    ("sweep", "cuda", ["float32"], [SEED], ["full"]),
    ("sweep", "cuda", ["float32"], [s for s in GPU if s[2] in (512, 2048, 8192)], ["full", "causal"]),
    ("sweep", "cuda", ["float16", "bfloat16"], GPU, ["full", "causal"]),
    ("decode", "cpu", ["float32"], [(1, 8, 2048, 64), (1, 32, 4096, 128, 8)], ["decode"]),
    ("decode", "cpu", ["float32"], [(8, 32, 2048, 64, 8)], ["decode"]),
    ("decode", "cuda", ["bfloat16"], [(1, 32, n, 128, 8) for n in (1024, 4096, 32768)], ["decode"]),
    ("decode", "cuda", ["bfloat16"], [(1, 32, 32768, 128, 32), (8, 32, 8192, 128, 8)], ["decode"]),
    ("decode", "cuda", ["bfloat16"], [(8, 32, 8192, 128, 32), (64, 32, 4096, 128, 8)], ["decode"]),
    ("decode", "cuda", ["float32"], [(8, 32, 8192, 128, 8)], ["decode"]),
    ("ladder", "cpu", DTYPES, [(1, 8, 2048, 64)], ["full", "causal"]),
    ("ladder", "cuda", DTYPES, [(4, 16, 4096, 64), (4, 16, 4096, 128)], ["full", "causal"]),
]
ROUNDS, TURN, MOST = 6, 7.5e-3, 3  # a turn takes about TURN seconds, all turns of a peer about MOST at most
# One line of the table. Hkv None is H. With the mask "decode" one query a head sees the N keys.
Cell = namedtuple("Cell", "dtype B H N d mask Hkv", defaults=[None])


def cells_for(args) -> list[Cell]:
    rows = [row[2:] for row in WORKLOADS if row[:2] == (args.mode, args.device)]
    rows = [product(dtypes, [args.shape] if args.shape else shapes, masks) for dtypes, shapes, masks in rows]
    cells = [Cell(dtype, *shape[:4], mask, *shape[4:]) for row in rows for dtype, shape, mask in row]
    cells = list(dict.fromkeys(cells))
    return filtered(args, cells, cells)


def filtered(args, cells: list[Cell], things: list) -> list:
    """Those of `things` whose cell the options leave, or an error that lists what there is."""
    masks = [mask for mask in ("full", "causal") if getattr(args, mask)]
    only = {"dtype": args.dtype, "d": args.d, "N": args.n, "mask": masks}

    def stays(cell: Cell) -> bool:
        is_quick = cell.N <= 2048 and cell.d <= 128
        return (is_quick or not args.quick) and all(
            not few or getattr(cell, name) in few for name, few in only.items()
        )

    found = [thing for cell, thing in zip(cells, things, strict=True) if stays(cell)]
    if not found:
        has = [
            f"{name} {' '.join(dict.fromkeys(str(getattr(cell, name)) for cell in cells))}" for name in only
        ]
        args.error(f"these filters leave no workload; there are: {', '.join(has)}")
    return found


def randn(shape, dtype: str, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), device=device)


def random_qkv(cell: Cell, device: str) -> list[torch.Tensor]:
    queries, keys = (cell.H, 1 if cell.mask == "decode" else cell.N), (cell.Hkv or cell.H, cell.N)
    return [randn((cell.B, *heads, cell.d), cell.dtype, device) for heads in (queries, keys, keys)]


# ------------------------------------------------------------------------------------------ the peers
@lru_cache(maxsize=1)
def hidden(N: int, device) -> torch.Tensor:
    return torch.ones(N, N, dtype=torch.bool, device=device).triu(1)


def manual(q, k, v, causal=False):
    size = 3 * math.prod(q.shape[:3]) * k.size(2) * q.element_size()
    # On a full GPU PyTorch raises an error; on the CPU the system would kill the process.
    if q.device.type == "cpu" and size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        raise MemoryError("its N x N matrices would take over half of the memory")
    rows = q.unflatten(1, (k.size(1), -1)).flatten(2, 3)  # of all query heads that share a key head
    att = rows @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
    if causal:
        att = att.masked_fill(hidden(q.size(2), q.device), -math.inf)
    return (F.softmax(att, dim=-1) @ v).view(q.shape)


def sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.size(1) != k.size(1))


def flash_attention_3(q, k, v, causal):
    from fa3_fwd_interface import flash_attn_func  # takes (B, N, H, d); transpose copies nothing

    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)


@contextmanager
def tf32():
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def cpu_instructions(name: str):
    before = minimal_attn._C.limit_cpu_instructions(name)
    try:
        yield
    finally:
        minimal_attn._C.limit_cpu_instructions(before)


def ours(backend: str) -> str:
    return f"minimal_attn ({backend})"


def is_ours(name: str) -> bool:
    return name.startswith("minimal_attn")


def serves(backend: str, device: str, dtype: str) -> bool:
    q = torch.zeros(1, 1, 1, 8, dtype=getattr(torch, dtype), device=device)
    try:
        minimal_attn.forward(q, q, q, backend=backend)
    except (ValueError, RuntimeError):
        return False
    return True


def backends_for(args) -> list[str]:
    """The backends to measure, all of this device."""
    here = [name for name in minimal_attn._C.backends() if (name == "cpu") == (args.device == "cpu")]
    for name in args.backend or []:
        if name not in here:
            args.error(f"--backend {name}: on {args.device} this build has {' '.join(here)}")
    if args.mode == "profile":
        return args.backend or ["auto"]
    return args.backend or [name for name in here if args.mode in ("ladder", "overhead") or name != "paper"]


def peers_for(args, dtype: str) -> dict[str, tuple]:
    """By name: a function of (q, k, v, causal), and the context to call it in, entered once a turn."""
    peers = {"manual": (manual, nullcontext)}
    if args.device == "cpu":
        peers["SDPA"] = sdpa, nullcontext
    elif dtype == "float32":
        peers["manual TF32"] = manual, tf32
        peers["SDPA efficient"] = sdpa, partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
    else:
        peers["SDPA flash"] = sdpa, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
        peers["SDPA cuDNN"] = sdpa, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
        if dtype == "bfloat16" and find_spec("fa3_fwd_interface"):
            peers["FlashAttention-3"] = flash_attention_3, nullcontext
    for name in args.backend:
        if serves(name, args.device, dtype):
            peers[ours(name)] = partial(minimal_attn.forward, backend=name), nullcontext
    if args.mode == "ladder" and ours("cpu") in peers:
        function, _ = peers.pop(ours("cpu"))
        for name in reversed(minimal_attn._C.cpu_instructions()):
            peers[f"{ours('cpu')}, {name}"] = function, partial(cpu_instructions, name)
    return peers


# ------------------------------------------------------------------------------------------ one workload
def judge(q, k, v, causal):
    """Returns a function: the relative Frobenius error of its argument against float64. It looks at three
    random heads, 1024 queries at a time, so that memory and time stay bounded."""
    heads, rows = [divmod(i, q.size(1)) for i in torch.randperm(q.size(0) * q.size(1))[:3].tolist()], []
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
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


def measure(cell: Cell, peers: dict, args, bar: str) -> list[dict]:
    q, k, v = random_qkv(cell, args.device)
    causal = cell.mask == "causal"
    error_of = judge(q, k, v, causal)
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
                    call = partial(function, q, k, v, causal=causal)
                    found[name] = {"error": error_of(call())}
                    watches[name] = stopwatch(call, args.device, pool)
                elif "failed" not in found[name]:
                    times[name].append(watches[name]())
        except Exception as problem:
            found[name] = {"failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}
        spent[name] += time.perf_counter() - start
    rate(cell, {name: r for name, r in found.items() if "failed" not in r}, times)
    return [cell._asdict() | {"peer": name} | found[name] for name in peers]


def rate(cell: Cell, found: dict, times: dict) -> None:
    """Adds ms, TFLOP/s, and for ours the ratio: 0 if it is wrong, None without a peer."""
    flop = 4 * cell.B * cell.H * cell.N**2 * cell.d / {"full": 1, "causal": 2, "decode": cell.N}[cell.mask]
    size = 2 * cell.B * (cell.Hkv or cell.H) * cell.N * cell.d * getattr(torch, cell.dtype).itemsize
    for name, r in found.items():
        r["ms"] = statistics.median(times[name]) * 1e3
        r["tflops"], r["gbs"] = flop / r["ms"] / 1e9, size / r["ms"] / 1e6
    bound = 10 * min((r["error"] for r in found.values() if math.isfinite(r["error"])), default=0)
    theirs = [r["ms"] for name, r in found.items() if not is_ours(name) and r["error"] <= bound]
    for r in (r for name, r in found.items() if is_ours(name)):
        is_right = r["error"] <= bound  # False for a NaN
        r["ratio"] = 0 if not is_right else min(theirs) / r["ms"] if theirs else None


# ------------------------------------------------------------------------------------------ --sweep
def in_words(r: dict) -> str:
    if "failed" in r:
        return "-"
    ratio = r.get("ratio")
    last = "" if ratio is None else f" / {ratio:.2f}x" if ratio else " / wrong"
    speed = r["gbs"] if r["mask"] == "decode" else r["tflops"]
    return f"{r['ms']:.4g} / {speed:.3g} / {r['error']:.1e}{last}"


def print_line(first: str, columns) -> None:
    print("| " + " | ".join([first.ljust(26)] + [column.ljust(33) for column in columns]) + " |", flush=True)


def write_json(path: str | None, result: dict) -> None:
    """All of it or nothing: an interruption leaves the file as it was."""
    if not path:
        return
    with open(path + ".new", "w") as file:
        json.dump(result, file)
    os.replace(path + ".new", path)


def sweep(args, result: dict) -> list[dict]:
    records, dtype = result["sweep"], None
    write_json(args.json, result)  # a path that can't be written is known at once
    for i, cell in enumerate(args.cells):
        if cell.dtype != dtype:
            dtype, peers = cell.dtype, peers_for(args, cell.dtype)
            print(f"\n{dtype}: ms / {'GB/s' if cell.mask == 'decode' else 'TFLOP/s'} / error (/ ratio)\n")
            print_line("(B, H, N, d) mask", peers)
            print_line("---", ["---"] * len(peers))
        shape = f"{cell[1:5]} {cell.mask}{f', {cell.Hkv} key heads' if cell.Hkv else ''}"
        bar = f"[{'#' * (20 * i // len(args.cells)):.<20}] {i}/{len(args.cells)} {dtype} {shape}"
        line = measure(cell, peers, args, bar)
        progress()
        print_line(shape, map(in_words, line))
        records += line
        write_json(args.json, result)
        torch.cuda.empty_cache()  # does nothing without a GPU


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


def plot(records: list[dict], path: str, title: str) -> None:
    import matplotlib.pyplot

    panels = defaultdict(lambda: defaultdict(list))
    for r in sorted(records, key=lambda r: (r["dtype"], r["mask"] != "full", r["d"])):
        if "tflops" in r and r.get("ratio") != 0 and (r["B"], r["H"], r["N"], r["d"]) != SEED:  # 0: wrong
            panels[f"{r['dtype']}, d {r['d']}, {r['mask']}"][r["peer"]].append((r["N"], r["tflops"]))
    names = list(dict.fromkeys(r["peer"] for r in records))
    shape = max(1, -(-len(panels) // 3)), max(1, min(3, len(panels)))
    figure = matplotlib.pyplot.figure(figsize=(4 * shape[1], 3.5 * shape[0]), layout="constrained")
    figure.suptitle(title)
    for i, (name, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(*shape, i + 1, title=name, xlabel="N", ylabel="TFLOP/s")
        for peer, points in lines.items():
            x, y = zip(*sorted(points), strict=True)
            width = 2.5 if is_ours(peer) else 1
            axes.semilogx(x, y, "o-", base=2, color=f"C{names.index(peer)}", label=peer, linewidth=width)
        axes.set_ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
        axes.legend(fontsize="small")
    figure.savefig(path)


def run_sweep(args, about: dict) -> int:
    result = about | {"graph": args.graph, "workloads": len(args.cells), "sweep": []}
    if args.load:
        with open(args.load) as file:
            result = json.load(file)
        cells = [Cell(*(r.get(name) for name in Cell._fields)) for r in result["sweep"]]
        result["sweep"] = filtered(args, cells, result["sweep"])
    records, status = result["sweep"], 0
    try:
        if not args.load:
            sweep(args, result)
    except KeyboardInterrupt:
        progress()
        print(f"\nbench.py: interrupted after {len(records)} measurements", file=sys.stderr)
        status = 130
    print_summary(records)
    if args.plot and records:
        plot(records, args.plot, f"{result['on']}, torch {result['torch']}")
    return status or int(any(r.get("ratio") == 0 for r in records))


# ------------------------------------------------------------------------------------------ --ladder
RUNGS = {  # peer: what changed, in the order of the table
    "manual": "S and P are N x N matrices in memory",
    "minimal_attn (paper)": "Algorithm 1 as printed: S and P stay in shared memory; O, l and m in HBM",
    "minimal_attn (portable)": "the loops swapped: O, l, m in registers; float32 as three TF32 products",
    "minimal_attn (hopper)": "wgmma, TMA, producer and consumer warps; float32 as three float16 products",
    "minimal_attn (cpu)": "the loops swapped, vectors, a tile of queries a thread",
    "SDPA": "PyTorch's attention",
    "SDPA efficient": "PyTorch's attention, float32 as three TF32 products",
    "SDPA flash": "PyTorch's FlashAttention-2",
    "SDPA cuDNN": "cuDNN's attention, through PyTorch",
    "FlashAttention-3": "the package fa3_fwd",
    "manual TF32": "as manual, on tensor cores in TF32",
}


@lru_cache
def matmul_tflops(device: str, dtype: str) -> float:
    """The limit: TFLOP/s of a large matrix multiplication; "TF32" is float32 rounded by the tensor cores."""
    n = 2048 if device == "cpu" else 8192
    a, b = (randn((n, n), "float32" if dtype == "TF32" else dtype, device) for _ in range(2))
    with tf32() if dtype == "TF32" else nullcontext():
        torch.mm(a, b)
        watch = stopwatch(partial(torch.mm, a, b), device)
        return 2 * n**3 / statistics.median(watch() for _ in range(ROUNDS)) / 1e12


def limit_of(peer: str, device: str, dtype: str) -> tuple[str, int]:
    """What bounds a peer: the dtype of a matrix multiplication, and how many of them make one product."""
    # The paper's kernel computes in float32 whatever the inputs are. So do CPUs for float16.
    if peer == ours("paper") or device == "cpu" and dtype == "float16":
        return "float32", 1
    if dtype != "float32":
        return dtype, 1
    own = {ours("hopper"): ("float16", 3), "SDPA efficient": ("TF32", 3), "manual TF32": ("TF32", 1)}
    if device == "cuda" and torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= 163 << 10:
        own[ours("portable")] = ("TF32", 3)  # portable/forward.cu
    return own.get(peer, ("float32", 1))


def run_ladder(args, about: dict) -> int:
    wrong = False
    for cell in args.cells:
        peers = peers_for(args, cell.dtype)
        line = {r["peer"]: r for r in measure(cell, peers, args, f"{cell.dtype} {cell[1:5]}")}
        limits = {name: limit_of(name, args.device, cell.dtype) for name in line}
        found = {dtype: matmul_tflops(args.device, dtype) for dtype, _ in dict.fromkeys(limits.values())}
        progress()
        print_ladder(cell, line, limits, found)
        wrong |= any(r.get("ratio") == 0 for r in line.values())
    return int(wrong)


def print_ladder(cell: Cell, line: dict, limits: dict, found: dict) -> None:
    print(f"\n(B, H, N, d) = {cell[1:5]}, {cell.dtype}, {cell.mask}\n")
    print("| rung | what changed | ms | TFLOP/s | % of its limit | error |\n|---|---|---|---|---|---|")
    for rung, name in ((rung, name) for rung in RUNGS for name in line if name.split(", ")[0] == rung):
        r, (dtype, products) = line[name], limits[name]
        numbers = "- | - | - | -"
        if "failed" not in r:
            share = 100 * r["tflops"] * products / found[dtype]
            limit = f"{dtype} / {products}" if products > 1 else dtype
            numbers = f"{r['ms']:.4g} | {r['tflops']:.3g} | {share:.0f} % of {limit} | {r['error']:.1e}"
        print(f"| {name} | {RUNGS[rung]} | {numbers} |")
    speeds = ", ".join(f"{dtype} {tflops:.3g} TFLOP/s" for dtype, tflops in found.items())
    print(f"\nLimits, measured in the same run by multiplying large matrices: {speeds}.")
    for name, r in line.items():
        if "failed" in r:
            print(f"{name} failed: {r['failed']}")


# ------------------------------------------------------------------------------------------ the other modes
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


# ------------------------------------------------------------------------------------------ main
def complete(args) -> str:
    """Fills in what depends on this machine and this build. Returns the device in words."""
    has_cuda = torch.cuda.is_available() and minimal_attn._C.cuda_architectures() != ""
    args.device = args.device or ("cuda" if has_cuda else "cpu")
    if args.device == "cuda" and not has_cuda:
        args.error("--device cuda: no GPU here, or no CUDA code in this build")
    if args.graph and args.device == "cpu":
        args.error("--graph needs a GPU")
    if args.plot and not find_spec("matplotlib"):
        args.error(f"--plot needs matplotlib: {sys.executable} -m pip install matplotlib")
    if args.mode == "ladder":
        args.dtype = args.dtype or (["float32", "bfloat16"] if args.device == "cuda" else ["float32"])
        args.full |= not args.causal
    args.backend = backends_for(args)
    args.cells = [] if args.mode in ("profile", "overhead") or args.load else cells_for(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    on_cpu = f"the CPU, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name() if args.device == "cuda" else on_cpu


def main(args) -> int:
    where = complete(args)
    torch.seed()  # PyTorch starts with the same seed in every process
    unused = torch.cuda.is_available() and args.device == "cpu"
    if not args.load:
        print(f"on {where}, torch {torch.__version__}" + ", not on the GPU" * unused, flush=True)
    runs = {"profile": run_profile, "ladder": run_ladder, "overhead": run_overhead}
    runs |= {"sweep": run_sweep, "decode": run_sweep}
    try:
        return runs[args.mode](args, {"on": where, "torch": torch.__version__})
    except KeyboardInterrupt:
        progress()
        print("\nbench.py: interrupted", file=sys.stderr)
        return 130
    except OSError as problem:  # of --json, --load or --plot
        sys.exit(f"bench.py: {problem.filename}: {problem.strerror}")


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
