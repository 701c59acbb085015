"""--sweep, --decode, --backward, --step: a line of a table for each workload, a summary, JSON, a plot."""

import json
import os
import statistics
import sys
from collections import Counter, defaultdict

import torch

from .clock import progress
from .measure import measure
from .peers import is_ours, peers_for
from .workloads import SEED, Cell, filtered

TITLES = {"forward": "", "backward": ", backward pass", "step": ", forward and backward pass"}


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
            speed = "GB/s" if cell.mask == "decode" else "TFLOP/s"
            print(f"\n{dtype}{TITLES[args.part]}: ms / {speed} / error (/ ratio)\n")
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
    result = about | {"graph": args.graph, "part": args.part, "workloads": len(args.cells), "sweep": []}
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
        title = TITLES[result.get("part", "forward")]  # files of older sweeps don't have it
        plot(records, args.plot, f"{result['on']}, torch {result['torch']}{title}")
    return status or int(any(r.get("ratio") == 0 for r in records))
