"""What bench.py's options mean on this machine, and the mode that they name."""

import sys
from importlib.util import find_spec

import torch

try:
    import minimal_attn
except ImportError as problem:
    sys.exit(f"bench.py: minimal_attn can't be imported, `make` builds it ({problem})")

from .clock import progress
from .ladder import run_ladder
from .masks import run_masks
from .packed import run_packed
from .peers import backends_for
from .serving import run_serving
from .small import run_overhead, run_profile
from .sweep import run_sweep
from .workloads import cells_for

RUNS = {"profile": run_profile, "ladder": run_ladder, "overhead": run_overhead, "packed": run_packed}
RUNS |= {"serving": run_serving, "masks": run_masks}
RUNS |= {"sweep": run_sweep, "decode": run_sweep}


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
    args.cells = (
        []
        if args.mode in ("profile", "packed", "serving", "masks", "overhead") or args.load
        else cells_for(args)
    )
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
    try:
        return RUNS[args.mode](args, {"on": where, "torch": torch.__version__})
    except KeyboardInterrupt:
        progress()
        print("\nbench.py: interrupted", file=sys.stderr)
        return 130
    except OSError as problem:  # of --json, --load or --plot
        sys.exit(f"bench.py: {problem.filename}: {problem.strerror}")
