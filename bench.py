"""Measure minimal_attn, on the GPU if there is one and the build has code for it, else on the CPU.

  bench.py             profile manual attention and minimal_attn on (B, H, N, d) = (16, 12, 64, 64), float32,
                       then compare their values and their times; exit code 1 if the values differ
  bench.py --sweep     compare minimal_attn with manual attention, PyTorch's scaled_dot_product_attention
                       (SDPA) and, if it is installed (pip install fa3_fwd, bfloat16 only), FlashAttention-3
  bench.py --ladder    the README's table: every backend on one workload, and its share of the machine's limit
  bench.py --backward  the backward pass on a few workloads; --sweep --backward: on many
  bench.py --step      as --backward, the forward and the backward pass
                       With --softcap 50 the peers are manual attention, FlexAttention and FlashAttention-3
  bench.py --decode    one query a head over long caches of keys, beside SDPA, and how fast K and V are read
  bench.py --packed    causal documents in one batch, by cu_seqlens, beside PyTorch's varlen_attn and, if they
                       are installed, FlashAttention-3 and -4, or beside SDPA for each document; also with
                       --backward and --step. TFLOP/s count what is seen; errors are those of o or dq
  bench.py --masks     ALiBi, bool masks, biases and dropout beside SDPA's kernels and FlexAttention; also
                       with --backward and --step. Errors are those of one head; dropout has none
  bench.py --serving   packed queries over caches of keys, contiguous and in pages, beside FlashAttention-3 if
                       it is installed. GB/s count the keys that are seen
  bench.py --overhead  host time of one call, on an input so small that little else counts

The extension is built first if it is missing or older than its sources.

How all modes but the first and the last measure: the inputs are new random numbers in every run. For each
workload all peers take turns in six rounds. Each round begins with another peer, and a turn is about 7 ms of
calls. The time is the median of the rounds. A slow peer stops after 3 seconds. On a GPU the L2 cache is
cleared before each call. With --graph a CUDA graph of the calls is replayed, without clearing the cache.
  TFLOP/s  4 B H N^2 d floating point operations a call, half of that if causal; --backward 10, --step 14
  GB/s     bytes of K and V a call, for --decode
  error    relative Frobenius error against float64, over all rows of 3 random heads: of o, or of the worst of
           dq, dk and dv
  ratio    time of the fastest peer / time of minimal_attn: above 1, minimal_attn is faster. A peer counts if
           its error is within 10 times the smallest one ("manual TF32" never counts). A minimal_attn backend
           beyond that is "wrong", and the exit code is 1
A peer that fails (out of memory, not supported) shows as "-", with the reason below the table.

The limits of --ladder are measured in the same run, as the speed of a large matrix multiplication.
"""

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import bootstrap

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------------ options
DTYPES = ["float32", "bfloat16", "float16"]
USED_BY = {
    "dtype": ["sweep", "ladder", "decode", "packed", "serving", "masks", "overhead"]
}  # the modes that an option needs
USED_BY |= dict.fromkeys(["shape", "causal", "full"], ["sweep", "ladder"])
USED_BY |= {"graph": ["sweep", "ladder", "decode", "serving"]}
USED_BY |= dict.fromkeys(["d", "n", "quick", "json", "load", "plot", "softcap"], ["sweep"])


class Parser(ArgumentParser):
    def error(self, message: str):
        print(f"bench.py: {message} (bench.py --help lists the options)", file=sys.stderr)
        sys.exit(2)


def parse() -> Namespace:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add, mode = parser.add_argument, parser.add_mutually_exclusive_group()
    for name in "sweep", "ladder", "decode", "packed", "serving", "masks", "overhead":
        mode.add_argument(f"--{name}", action="store_const", dest="mode", const=name, help="see above")
    part = parser.add_mutually_exclusive_group()
    for name in "backward", "step":
        part.add_argument(f"--{name}", action="store_const", dest="part", const=name, help="see above")
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
    add("--softcap", type=float, metavar="CAP", help="--sweep: a score s becomes CAP * tanh(s / CAP)")
    add("--json", metavar="FILE", help="--sweep: write the numbers there after every workload")
    add("--load", metavar="FILE", help="--sweep: take the numbers that --json wrote and measure nothing")
    add("--plot", metavar="FILE.png", help="--sweep: draw TFLOP/s over N there (needs matplotlib)")
    args = parser.parse_args()
    args.workloads = args.mode
    if args.part:
        args.workloads = "sweep backward" if args.mode else "backward"
        args.mode = args.mode or "sweep"
    args.mode, args.part = args.mode or "profile", args.part or "forward"
    for name, modes in USED_BY.items():
        if getattr(args, name) and args.mode not in modes:
            parser.error(f"--{name} needs {' or '.join(f'--{mode}' for mode in modes)}")
    if args.part != "forward" and (args.mode not in ("sweep", "packed", "masks") or args.graph):
        parser.error(f"--{args.part} takes none of --ladder, --decode, --overhead and --graph")
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
    from benchmarks.run import main  # only now: it needs torch, and build() may go on in another Python

    sys.exit(main(OPTIONS))
