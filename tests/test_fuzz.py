"""Random calls of the binding (fuzz.py), in a process of their own, since one might crash."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minimal_attn

SECONDS = 8


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_calls(device, tmp_path):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    seed = random.SystemRandom().getrandbits(32)
    command = [sys.executable, Path(__file__).parent / "fuzz.py", "--device", device, "--seed", str(seed)]
    log = tmp_path / "log"
    done = subprocess.run(
        [*command, "--seconds", str(SECONDS), "--log", log],
        env=os.environ | {"PYTHONPATH": str(Path(minimal_attn.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=20 * SECONDS,
    )
    call = log.read_text().strip() if log.exists() else "0"
    assert done.returncode == 0, (
        f"call {call} of tests/fuzz.py --device {device} --seed {seed}, exit status {done.returncode}:\n"
        f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    assert int(call) > 100, done.stdout
