"""The build: what bootstrap.py says about a machine, the wheel, and the machine code that was compiled."""

import glob
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minimal_attn

ROOT = Path(__file__).parent.parent


def run(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


# ------------------------------------------------------------------------------------ bootstrap.py


@pytest.fixture
def bootstrap(tmp_path):
    """Runs a copy of bootstrap.py as on a machine whose only Python is the one described."""
    shutil.copy(ROOT / "bootstrap.py", tmp_path)
    fake = {"python": "/fake/python", "version": [3, 12], "has": [], "headers": True, "venv": True}

    def run_it(PATH=os.environ["PATH"], **described):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho '{json.dumps(fake | described)}'\n")
        python.chmod(0o755)
        environment = {"PATH": PATH, "PYTHON": str(python)}
        return run(sys.executable, tmp_path / "bootstrap.py", "build", env=environment)

    return run_it


@pytest.mark.parametrize(
    "backend, named",
    [
        ({"PATH": "/nowhere"}, "g++"),
        ({"version": [3, 8]}, "Python 3.10"),
        ({"headers": False}, "python3.12-dev"),
        ({"venv": False}, "python3.12-venv"),
    ],
)
def test_what_is_missing_is_said_in_a_line(bootstrap, backend, named):
    done = bootstrap(**backend)
    assert done.returncode == 1
    assert named in done.stderr and done.stderr.count("\n") == 1


def test_a_complete_python_is_used_as_it_is(tmp_path):
    shutil.copy(ROOT / "bootstrap.py", tmp_path)
    environment = os.environ | {"PYTHON": sys.executable, "TORCH_CUDA_ARCH_LIST": "none"}
    configuration = tmp_path / "build" / "configuration"
    times = []
    for _ in range(2):
        done = run(sys.executable, tmp_path / "bootstrap.py", "build", env=environment)
        assert done.returncode == 0 and done.stdout == "", done
        times.append(configuration.stat().st_mtime_ns)
    assert times[0] == times[1]
    assert not (tmp_path / ".venv").exists()
    assert run(tmp_path / "build" / "python", "-c", "print(6 * 7)").stdout == "42\n"


# ------------------------------------------------------------------------------------ setup.py


@pytest.fixture(scope="session")
def setup():
    spec = importlib.util.spec_from_file_location("minimal_attn_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "entry, name, codes",
    [
        ("7.5", "7.5", ["arch=compute_75,code=sm_75"]),
        ("9.0", "9.0a", ["arch=compute_90a,code=sm_90a"]),
        ("9.0a", "9.0a", ["arch=compute_90a,code=sm_90a"]),
        ("9.0+PTX", "9.0a+PTX", ["arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90"]),
        ("12.0", "12.0", ["arch=compute_120,code=sm_120"]),
        ("compute_80", "compute_80", ["arch=compute_80,code=compute_80"]),
        ("6.1", "6.1", []),
    ],
)
def test_entry_of_the_architecture_list(setup, entry, name, codes):
    assert setup.target(entry) == (name, codes)


@pytest.mark.parametrize("entry", ["", "hopper", "9", "8.0+ptx", "compute_80+PTX"])
def test_bad_entry_of_the_architecture_list(setup, entry):
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST must have"):
        setup.target(entry)


def test_wheel_works_elsewhere(tmp_path):
    """Built, installed into another folder, used from a third one."""
    if not importlib.util.find_spec("pip"):
        pytest.skip("this Python has no pip")
    if not importlib.util.find_spec("wheel") and not importlib.util.find_spec(
        "setuptools.command.bdist_wheel"
    ):
        pytest.skip("this Python's setuptools can't build wheels: it needs 70.1, or the package wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path / "dist", ROOT]
    done = run(*build)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (tmp_path / "dist").iterdir()
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    done = run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    elsewhere.mkdir()
    program = """
import torch, minimal_attn
q, k, v = torch.randn(3, 2, 3, 50, 40)
o = minimal_attn.forward(q, k, v)
torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, k, v))
print(minimal_attn.__file__, minimal_attn._C.cuda_architectures(), sep="\\n")
"""
    done = run(sys.executable, "-c", program, cwd=elsewhere, env=os.environ | {"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    file, architectures = done.stdout.splitlines()
    assert Path(file).is_relative_to(site)
    assert architectures == minimal_attn._C.cuda_architectures()


# ------------------------------------------------------------------------------------ machine code


def find_tool(name):
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda")]
    homes += [folder for path in sys.path for folder in glob.glob(f"{path}/nvidia/cu*")]
    folders = [os.environ["PATH"], *(f"{home}/bin" for home in homes)]
    return shutil.which(name, path=os.pathsep.join(folders))


def test_no_kernel_spills():
    """Where registers don't suffice values go to the stack: slow, and nothing else would show it.

    Up to 8 words are let pass: so many ptxas leaves in float_kernel's largest tile for d = 64 on some GPUs.
    """
    built = minimal_attn._C.cuda_architectures().split()
    if not built:
        pytest.skip("this build has no CUDA code")
    if not (cuobjdump := find_tool("cuobjdump")):
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    done = run(cuobjdump, "-res-usage", minimal_attn._C.__file__)
    assert done.returncode == 0, done.stderr
    found, spilling = set(), []
    for line in done.stdout.splitlines():
        if match := re.match(r"arch = sm_(\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (.*):$", line):
            function = match[1]
        elif match := re.match(r"\s*REG:\d+ STACK:(\d+) .*LOCAL:(\d+)", line):
            found.add(architecture)
            if sum(map(int, match.groups())) > 32:
                spilling.append(f"sm_{architecture} {function}: {line.strip()}")
    with_machine_code = [name for name in built if not name.startswith("compute_")]
    assert found == {name.removesuffix("+PTX").replace(".", "") for name in with_machine_code}
    assert not spilling, "\n".join(spilling)


def test_hopper_kernels_multiply_by_wgmma(monkeypatch):
    """And keep everything in registers; where ptxas serialises wgmma, only a warning would say so."""
    if "9.0a" not in minimal_attn._C.cuda_architectures().split():
        pytest.skip("this build has no code for compute capability 9.0")
    if not ((cuobjdump := find_tool("cuobjdump")) and (nvdisasm := find_tool("nvdisasm"))):
        pytest.skip("no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    monkeypatch.setenv("NVDISASM_PATH", os.path.dirname(nvdisasm))
    done = run(cuobjdump, "-sass", "-arch", "sm_90a", minimal_attn._C.__file__)
    assert done.returncode == 0, done.stderr
    kernels = {
        name: code
        for name, code in re.findall(r"Function : (\S+)\n(.*?)(?=Function :|\Z)", done.stdout, re.S)
    }
    kernels = {name: code for name, code in kernels.items() if "hopper_kernel" in name}
    assert kernels
    for name, code in kernels.items():
        loops = [code[int(a) : int(b)] for a, b in backward_branches(code)]
        assert any("HGMMA" in loop and "MUFU.EX2" in loop for loop in loops), f"{name} has no loop with HGMMA"
        assert not re.search(r"\b(LDL|STL)\b", code), f"{name} uses local memory"


def backward_branches(code):
    """Where in the text loops begin and end: from a branch's target to the branch."""
    at = {int(m[1], 16): m.start() for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/ ", code)}
    for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/ [^\n]*\bBRA (?:\w+, )?0x([0-9a-f]+)", code):
        begin, end = int(m[2], 16), int(m[1], 16)
        if begin < end and begin in at:
            yield at[begin], at[end]
