"""bench.py: what it calls exact is, and --backward runs on a tiny workload."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import attention

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("causal", [False, True])
def test_exact(monkeypatch, seed, causal):
    """Of 1030 queries, which are more than it takes at a time."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.measure import exact, judge

    torch.manual_seed(seed)
    q, k, v, do = torch.randn(4, 1, 1, 1030, 16, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, causal=causal).o
    expected = torch.autograd.grad(o, (q, k, v), do)
    with torch.no_grad():
        torch.testing.assert_close(exact(q[0, 0], k[0, 0], v[0, 0], None, causal)[0], o[0, 0])
        for actual, x in zip(exact(*(x[0, 0] for x in (q, k, v, do)), causal), expected, strict=True):
            torch.testing.assert_close(actual, x[0, 0])
        error_of = judge(q, k, v, do, causal)
        assert error_of(expected) < 1e-12
        for i in range(3):
            wrong = [1.01 * x if i == j else x for j, x in enumerate(expected)]
            assert error_of(wrong) == pytest.approx(0.01)


def test_backward(tmp_path):
    """A line of the table for each mask, and the records of its JSON."""
    file = tmp_path / "sweep.json"
    options = "--backward --device cpu --dtype float32 --shape 1 2 70 16 --json".split()
    done = subprocess.run(
        [sys.executable, ROOT / "bench.py", *options, file],
        capture_output=True,
        text=True,
        env=os.environ | {"MINIMAL_ATTN_BENCH": "built"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| (1, 2, 70, 16) ") == 2
    records = json.loads(file.read_text())["sweep"]
    assert [(r["peer"], r["mask"]) for r in records] == [
        (peer, mask) for mask in ("full", "causal") for peer in ("manual", "SDPA", "minimal_attn (cpu)")
    ]
    assert all(r["error"] < 2e-6 and r["ms"] > 0 for r in records)


def test_nan_is_wrong(monkeypatch):
    """Wherever it stands among the errors of heads or documents."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.measure import rate, worst

    assert worst([]) == 0 and worst([1e-7, 2e-7]) == 2e-7
    for errors in ([math.nan, 1e-7], [1e-7, math.nan]):
        found = {"SDPA": {"error": 1e-7}, "minimal_attn (cpu)": {"error": worst(errors)}}
        assert math.isnan(worst(errors))
        rate(found, {name: [1.0] for name in found}, 1.0, 1)
        assert found["minimal_attn (cpu)"]["ratio"] == 0


@pytest.mark.parametrize(
    "options, first, count, last",
    [
        ("--packed --backward", ("| 4096, ", "| 2048, "), 2, "x"),
        ("--serving", ("| 8 x", "| 7 x"), 6, ""),
        ("--masks --step", "| ", 6, "x"),
    ],
)
def test_packed(options, first, count, last):
    """A line for each kind of documents, and each is right."""
    done = subprocess.run(
        [sys.executable, ROOT / "bench.py", *f"{options} --device cpu".split()],
        capture_output=True,
        text=True,
        env=os.environ | {"MINIMAL_ATTN_BENCH": "built"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(first)]
    assert len(lines) == count and all(line.rstrip(" |").endswith(last) for line in lines), done.stdout
