"""The build: what bootstrap.py says about a machine, the wheel, and the machine code that was compiled."""

import fcntl
import glob
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minimal_attn

ROOT = Path(__file__).parent.parent


def run(*command, **options):
    """Also where the tests run in the background of a script: there children would ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------ bootstrap.py


class Machine:
    """A checkout in `folder`, with a Python of shell script: what bootstrap.py would do there."""

    facts = {"python": "/fake/python", "version": [3, 12], "has": [], "headers": True, "venv": True}
    complete = {"has": ["torch", "setuptools", "ninja"], "torch": "2.11.0", "torch_home": "/", "cuda": None}

    def __init__(self, folder):
        self.folder = folder
        self.python = folder / "python"
        self.environment = {"PATH": os.environ["PATH"], "PYTHON": str(self.python)}
        for name in "bootstrap.py", "setup.py":
            shutil.copy(ROOT / name, folder)

    def describe(self, **facts):
        self.python.write_text(f"#!/bin/sh\necho '{json.dumps(self.facts | facts)}'\n")
        self.python.chmod(0o755)

    def bootstrap(self, **environment):
        command = sys.executable, self.folder / "bootstrap.py", "build"
        return run(*command, env=self.environment | environment, timeout=60)

    def module(self):
        spec = importlib.util.spec_from_file_location("bootstrap_elsewhere", self.folder / "bootstrap.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def check_one_line(done, *words):
    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("minimal_attn: "), done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    "facts, environment, named",
    [
        ({}, {"PATH": "/nowhere"}, "g++"),
        ({"version": [3, 8]}, {}, "Python 3.10"),
        ({"headers": False}, {}, "python3.12-dev"),
        ({"venv": False}, {}, "python3.12-venv"),
        ({}, {"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python"),
        ({}, {"PYTHON": "/bin/true"}, "PYTHON=/bin/true"),
    ],
)
def test_what_is_missing_is_said_in_a_line(machine, facts, environment, named):
    machine.describe(**facts)
    check_one_line(machine.bootstrap(**environment), named)


def test_folder_that_cannot_be_written_is_said_in_a_line(machine):
    machine.describe(**machine.complete, suffix=".so")
    (machine.folder / "build").touch()  # since root may write anywhere
    check_one_line(machine.bootstrap(), str(machine.folder / "build"))


def test_missing_torch_and_old_torch_are_told_apart(machine):
    no_torch = machine.module().no_torch
    assert no_torch({"python": "/bin/python", "has": []}) == "/bin/python has no torch"
    old = no_torch({"python": "/bin/python", "has": [], "torch": "2.4.0"})
    assert "torch 2.4.0" in old and "too old" in old and "2.8" in old
    machine.describe(torch="2.4.0", torch_home="/", cuda=None, venv=False)
    assert "couldn't" not in machine.bootstrap().stderr


def test_a_complete_python_is_used_as_it_is(machine):
    environment = {"PYTHON": sys.executable, "TORCH_CUDA_ARCH_LIST": "none"}
    configuration = machine.folder / "build" / "configuration"
    times = []
    for _ in range(2):
        done = machine.bootstrap(**environment)
        assert done.returncode == 0 and done.stdout == "", done
        times.append(configuration.stat().st_mtime_ns)
    assert times[0] == times[1]
    assert not (machine.folder / ".venv").exists()
    assert run(machine.folder / "build" / "python", "-c", "print(6 * 7)").stdout == "42\n"
    (machine.folder / "portable").mkdir()
    (machine.folder / "portable" / "new.h").touch()
    machine.bootstrap(**environment)
    assert configuration.stat().st_mtime_ns > times[0]


@pytest.mark.parametrize("end", ["kill -9 $$", "kill -9 $PPID", "kill -INT $PPID; sleep 1"])
def test_unfinished_environment_is_made_again(machine, end):
    """pip, or bootstrap.py above it, ends while torch is unpacked, and the next make begins anew."""
    site = machine.folder / ".venv/lib/python3.12/site-packages"
    nothing = machine.facts | {"python": "ITSELF", "sites": [str(site)]}
    machine.python.write_text(
        """#!/bin/sh
site=SITE
case "$*" in
*describe) if [ -e $site/torch ] && [ $0 != FOLDER/python ]; then echo 'COMPLETE'; else echo 'NOTHING'; fi ;;
"-m venv "*) mkdir -p FOLDER/.venv/bin $site; cp FOLDER/python FOLDER/.venv/bin ;;
"-m pip install "*)
    mkdir $site/torch
    if [ ! -e FOLDER/was_ended ]; then touch FOLDER/was_ended; END; fi
    touch $site/torch/last ;;
esac
""".replace("END", end)
        .replace("SITE", str(site))
        .replace("FOLDER", str(machine.folder))
        .replace("NOTHING", json.dumps(nothing))
        .replace("COMPLETE", json.dumps(nothing | machine.complete | {"suffix": ".so"}))
        .replace("ITSELF", "'$0'")
    )
    machine.python.chmod(0o755)
    first = machine.bootstrap()
    assert first.returncode != 0 and "Traceback" not in first.stderr, first
    assert (machine.folder / ".venv" / "unfinished").exists()
    second = machine.bootstrap()
    assert second.returncode == 0 and "making .venv again" in second.stdout, second
    assert (site / "torch" / "last").exists()
    third = machine.bootstrap()
    assert third.returncode == 0 and third.stdout == "", third


def test_one_make_waits_for_another(machine):
    machine.describe(**machine.complete, suffix=".so")
    with open(machine.folder / "bootstrap.py") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, machine.folder / "bootstrap.py", "build"]
        with subprocess.Popen(command, env=machine.environment, stdout=subprocess.PIPE, text=True) as other:
            assert "waiting for another make" in other.stdout.readline()
            assert other.poll() is None
            fcntl.flock(file, fcntl.LOCK_UN)
    assert other.returncode == 0


def test_architecture_list_holds_until_the_next(machine, monkeypatch, capsys):
    bootstrap = machine.module()
    monkeypatch.setattr(bootstrap, "gpus", lambda: ["8.6"])
    for environment, architectures, targets, line in [
        ("", "", ["8.6"], ""),
        ("9.0;8.0", "9.0 8.0", ["9.0", "8.0"], ""),
        ("", "9.0 8.0", ["9.0", "8.0"], "keeping TORCH_CUDA_ARCH_LIST='9.0 8.0'"),
        ("none", "none", [], ""),
        ("", "none", [], "keeping TORCH_CUDA_ARCH_LIST=none"),
        ("8.6", "8.6", ["8.6"], ""),
        ("", "8.6", ["8.6"], ""),
        ("native", "native", ["8.6"], ""),
        ("", "native", ["8.6"], ""),
    ]:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", environment)
        assert bootstrap.architectures() == architectures
        assert bootstrap.cuda_targets() == targets
        bootstrap.say_if_remembered()
        said = capsys.readouterr().out
        assert line in said and (line or not said)
        done = run(sys.executable, "setup.py", "--version", cwd=machine.folder)  # which remembers
        assert done.returncode == 0, done.stderr


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


def test_wheels_with_cuda_say_what_they_are_built_for(setup, monkeypatch):
    monkeypatch.setitem(setup.HERE, "torch", "2.11.0+cu130")
    monkeypatch.setitem(setup.HERE, "cuda", "13.0")
    monkeypatch.setattr(setup.Build, "targets", {"9.0": []})
    assert setup.local_version() == ""
    monkeypatch.setenv("MINIMAL_ATTN_WHEEL", "1")
    assert setup.local_version() == "+torch2.11.cu130"
    monkeypatch.setattr(setup.Build, "targets", {})
    assert setup.local_version() == ""


def test_own_score(machine, setup, monkeypatch):
    """The header's name and its changes are a part of the configuration; one that is missing is named."""
    environment = {"PYTHON": sys.executable, "TORCH_CUDA_ARCH_LIST": "none"}
    header = machine.folder / "score.h"
    found = []
    for text in None, "", "changed":
        if text is not None:
            header.write_text(text)
            environment["MINIMAL_ATTN_SCORE"] = str(header)
        for _ in range(2):
            machine.bootstrap(**environment)
            found.append((machine.folder / "build" / "configuration").read_text())
    assert found[0::2] == found[1::2] and len(set(found)) == 3
    monkeypatch.setenv("MINIMAL_ATTN_SCORE", "no/such.h")
    with pytest.raises(SystemExit, match="MINIMAL_ATTN_SCORE=no/such.h must be a header"):
        setup.own_score()


OF_ONE_PAIR = """
#include <cstdio>
#include "scores.h"
int main() {
    const float slope = 2.f;
    minimal_attn::Attention a{};
    a.Nq = a.Nk = 10, a.terms.alibi_slopes = &slope;
    const minimal_attn::TermsOfRow row(a, 0, 0, 1);
    std::printf("%g %g %s", row.of_position(8), row.of_position(0), minimal_attn::kScore);
}
"""


@pytest.mark.parametrize("score", ["", "examples/own_score/log_distance.h"])
def test_scores_of_a_header(setup, monkeypatch, tmp_path, score):
    """Compiled as setup.py tells compilers."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MINIMAL_ATTN_SCORE", score)
    (tmp_path / "pair.cpp").write_text(OF_ONE_PAIR)
    flags = ["-std=c++17", "-I.", *setup.own_score(), tmp_path / "pair.cpp", "-o", tmp_path / "pair"]
    done = run(*setup.bootstrap.find_compiler(), *flags)
    assert done.returncode == 0, done.stderr
    expected = "-4.15888 -1.38629" if score else "-14 -2"
    assert run(tmp_path / "pair").stdout.split() == [*expected.split(), *[score] * bool(score)]


@pytest.mark.parametrize("entry", ["", "hopper", "9", "8.0+ptx", "compute_80+PTX"])
def test_bad_entry_of_the_architecture_list(setup, entry):
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST must have"):
        setup.target(entry)


def test_clang_gets_no_openmp_on_linux(setup):
    """It succeeded, and then the import failed: undefined symbol __kmpc_fork_call."""
    if sys.platform != "linux":
        pytest.skip("this isn't Linux")
    cxx = setup.bootstrap.find_compiler()
    assert setup.openmp([*cxx, "-D__clang__"]) == []


def test_source_distribution_is_complete(tmp_path):
    """Unpacked elsewhere it builds. It gets the objects of this build, so that ninja compiles only what
    differs and what depends on a missing header."""
    done = run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    assert run("tar", "-xf", archive, "-C", tmp_path).returncode == 0
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    kinds = "*.cpp", "*.cu", "*.cuh", "*.h", "*.py", "*.pyi", "Makefile", "py.typed"
    out_of = {ROOT / name for name in ("build", "dist", ".venv")}
    wanted = {file for kind in kinds for file in ROOT.rglob(kind) if not out_of & set(file.parents)}
    assert len(wanted) > 30
    assert [file for file in wanted if not (unpacked / file.relative_to(ROOT)).exists()] == []
    assert (unpacked / "CHANGELOG.md").exists() and (unpacked / "LICENSE").exists()
    assert not (unpacked / "findings").exists()
    for objects in (ROOT / "build").glob("temp.*"):
        shutil.copytree(objects, unpacked / "build" / objects.name)
    targets = minimal_attn._C.cuda_architectures() or "none"
    command = sys.executable, "setup.py", "-q", "build_ext", "--inplace"
    done = run(*command, cwd=unpacked, env=os.environ | {"TORCH_CUDA_ARCH_LIST": targets})
    assert done.returncode == 0, done.stdout + done.stderr
    program = "import minimal_attn; print(minimal_attn.__file__, minimal_attn.__version__)"
    done = run(sys.executable, "-c", program, cwd=unpacked, env=os.environ | {"PYTHONPATH": ""})
    assert done.stdout.split() == [str(unpacked / "minimal_attn/__init__.py"), minimal_attn.__version__], done


ISOLATION = """
import sys
sys.path = [folder for folder in sys.path if not folder.endswith("-packages")] + [OVERLAY]
"""


@pytest.fixture
def isolated(tmp_path):
    """The environment of pip's isolated build: build requirements in a folder, all other packages hidden."""
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    for name in "setuptools", "_distutils_hack", "packaging", "wheel":
        if (spec := importlib.util.find_spec(name)) and spec.origin:
            package = Path(spec.origin).parent
            for path in package, *package.parent.glob(f"{name}-*.dist-info"):
                (overlay / path.name).symlink_to(path)
    (tmp_path / "sitecustomize.py").write_text(ISOLATION.replace("OVERLAY", repr(str(overlay))))
    return os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1", "TORCH_CUDA_ARCH_LIST": ""}


def test_isolated_build_finds_the_torch_of_this_python(tmp_path, isolated):
    if not run(sys.executable, "-E", "-c", "import torch").returncode == 0:
        pytest.skip("torch is on PYTHONPATH")
    assert run(sys.executable, "-c", "import torch", env=isolated).returncode != 0
    command = sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path
    done = run(*command, cwd=ROOT, env=isolated)
    assert done.returncode == 0, done.stderr
    major, minor = torch.__version__.split(".")[:2]
    requires = (tmp_path / "minimal_attn.egg-info" / "requires.txt").read_text()
    assert requires == f"torch=={major}.{minor}.*\n"


def test_without_torch_only_the_source_distribution_is_made(setup, monkeypatch):
    monkeypatch.setattr(setup, "HERE", {"python": "/bin/python", "has": ["setuptools"]})
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist"])
    setup.check_packages()
    assert setup.requirement() == "torch>=2.8"
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    with pytest.raises(SystemExit, match="/bin/python has no torch: pip install torch setuptools ninja"):
        setup.check_packages()


def test_old_setuptools_is_said_in_a_line(setup, monkeypatch):
    """It knows no SPDX licence, and said so in 20 lines."""
    monkeypatch.setattr(setup.bootstrap, "version_of", lambda package: "76.1.0")
    monkeypatch.setattr(setup, "HERE", setup.bootstrap.describe())
    with pytest.raises(SystemExit, match="setuptools is too old: pip install 'setuptools>=77,<82'"):
        setup.check_packages()


def test_places_that_contributing_names_are_there():
    """Each `file`: `name`, `name` of CONTRIBUTING.md."""
    places = re.findall(r"`([\w./]+)`:((?:[,\s]+`[\w-]+`)+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(places) > 20
    for file, names in places:
        text = (ROOT / file).read_text()
        for name in re.findall(r"`([\w-]+)`", names):
            assert re.search(rf"\b{name}\b", text), f"{file} has no {name}"


@pytest.mark.parametrize("torch_of_build", ["2.8.0", "2.99.0"])
def test_import_under_another_torch_names_both(tmp_path, torch_of_build):
    """An extension that can't be loaded, and one that can: PyTorch promises nothing for either."""
    shutil.copytree(ROOT / "minimal_attn", tmp_path / "minimal_attn", ignore=shutil.ignore_patterns("_C*"))
    built_for = f"minimal_attn for torch {torch_of_build}"
    if torch_of_build == "2.8.0":
        (tmp_path / "minimal_attn" / "_C.abi3.so").write_text(f"not loadable\0{built_for}\0")
    else:
        (tmp_path / "minimal_attn" / "_C.py").write_text(f"built_for = {built_for!r}")
    done = run(sys.executable, "-c", "import minimal_attn", cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    for words in (
        f"was built for torch {torch_of_build}",
        f"this Python has torch {torch.__version__}",
        "pip install",
    ):
        assert words in last


@pytest.mark.parametrize(
    "file, words",
    [
        (None, ["isn't built", "make"]),
        ("_C.cpython-31-x86_64-linux-gnu.so", ["another Python", "make"]),
        ("_C.abi3.so", ["another torch", "make", "file too short"]),
    ],
)
def test_import_says_why_the_extension_is_missing(tmp_path, file, words):
    shutil.copytree(ROOT / "minimal_attn", tmp_path / "minimal_attn", ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "setup.py").touch()
    if file:
        (tmp_path / "minimal_attn" / file).touch()
    done = run(sys.executable, "-c", "import minimal_attn", cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and all(word in last for word in words), done.stderr


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


LARGER = [  # GPUs, kernels, bytes
    # LargeScores, for rows that are rarely there.
    ("", "tf32_backward_kernelINS0_12BackwardTileILi64E", 256 + 64),
    ("", "tf32_backward_kernelINS0_12BackwardTile", 128 + 64),
    # Tables of ranges.
    ("100", "tf32_backward_kernelINS0_12BackwardTileILi64E.*6Ranges", 336),
    ("120", "GradientTileILNS0_4PassE0ELi64ELi128ELi64E.*6Ranges", 40),
    ("90a", "FusedTileILi64E.*13GrowingRangesELb0E", 48),
    ("90a", "FusedTileILi64E.*6RangesELb1E", 56),
    # General kernels (scores.h) hold what changes scores.
    ("90a", "FusedTileILi64E.*7General", 128),
    ("90a", "FusedTileILi64E.*9WithTerms", 168),
    ("90a", "FusedTileILi128E.*9WithTerms", 80),
    ("90a", "half_hopper_kernel.*9WithTerms", 72),
    ("", "GradientTileILNS0_4PassE0ELi64ELi128ELi64E.*7General", 64),
    ("86|89", "GradientTileILNS0_4PassE0ELi128E.*7General", 40),
    ("86|89", "tf32_backward_kernelINS0_12BackwardTileILi64E.*7General", 328),
    ("100", "tf32_backward_kernelINS0_12BackwardTileILi64E.*7General", 352),
    ("", "HalfTileILi128ELi128ELi64E.*7General", 112),
    ("", "HalfTileILi64ELi128ELi64E.*7General", 40),
    ("", "large_rows_kernel.*7General", 48),
    ("120", "large_rows_kernelIf.*7General", 96),
    # The producer that reads pages, and blocks that read their sequence's mask from memory.
    ("90a", "PagedBand", 72),
    ("90a", "TileILi192E.*ELi128EEENS0_9PagedBand", 96),
    ("", "HalfTile.*SequenceBand", 72),
    # Rows that isolate.cu computes alone are rarely there.
    ("100", "isolate_rows", 48),
    ("120", "isolate_rows", 56),
    # The largest tiles, which sm_75's GPUs are too small for.
    ("75", "HalfTileILi128ELi128ELi64E|HalfTileILi256ELi64ELi64E", 72),
    ("75", "GradientTileILNS0_4PassE0E(Li64ELi128ELi64E|Li128ELi64E|Li128ELi128E)", 72),
    ("75", "GradientTileILNS0_4PassE1E(Li128ELi128E|Li256ELi128E)", 72),
    ("75", "HalfTile.*7General", 128),
    ("75", "GradientTile.*7General", 48),
    ("75", "decode_kernelI6__halfNS0_10DecodeTileILi256E", 72),
    ("75", "decode_sequences_kernelI6__halfNS0_10DecodeTileILi256E", 40),
    ("75", "bias_gradient_kernelI13__nv_bfloat16", 104),
]


def test_no_kernel_spills():
    """Where registers don't suffice values go to the stack: slow, and nothing else would show it.

    Up to 8 words are let pass: so many ptxas leaves in float_kernel's largest tile for d = 64 on some GPUs.
    LARGER has the kernels that need more, by the GPU, the kernel, and bytes.
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
            limits = [
                n
                for sm, kernel, n in LARGER
                if re.fullmatch(sm or ".*", architecture) and re.search(kernel, function)
            ]
            if sum(map(int, match.groups())) > max(limits, default=32):
                spilling.append(f"sm_{architecture} {function}: {line.strip()}")
    with_machine_code = [name for name in built if not name.startswith("compute_")]
    assert found == {name.removesuffix("+PTX").replace(".", "") for name in with_machine_code}
    assert not spilling, "\n".join(spilling)


def test_hopper_kernels_multiply_by_wgmma(monkeypatch):
    """And keep each loop over tiles in registers; where ptxas serialises wgmma, only a warning would say so.

    Outside these loops test_no_kernel_spills limits local memory. The fused backward kernel may read a word
    in its loop, and so may the one that reads pages, the one of dQ where scores change, and the forward one
    with terms: most of its words are spilled where a mask or bias has any strides.
    """
    if "9.0a" not in minimal_attn._C.cuda_architectures().split():
        pytest.skip("this build has no code for compute capability 9.0")
    if not ((cuobjdump := find_tool("cuobjdump")) and (nvdisasm := find_tool("nvdisasm"))):
        pytest.skip("no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    monkeypatch.setenv("NVDISASM_PATH", os.path.dirname(nvdisasm))
    sources = [p.relative_to(ROOT) for p in (ROOT / "hopper").rglob("*.cu") if "__global__" in p.read_text()]
    objects = [path for source in sources for path in (ROOT / "build").glob(f"temp.*/torch-*/{source}.o")]
    if not objects:
        pytest.skip("the objects of hopper/ aren't here")
    for path in objects:
        done = run(cuobjdump, "-sass", "-arch", "sm_90a", path)
        assert done.returncode == 0, done.stderr
        kernels = re.findall(r"Function : (\S+)\n(.*?)(?=Function :|\Z)", done.stdout, re.S)
        assert kernels, f"{path} has no kernel"
        for name, code in kernels:
            loops = {(int(a), int(b)) for a, b in backward_branches(code)}
            loops = [(a, b) for a, b in loops if "HGMMA" in code[a:b]]
            innermost = [
                code[a:b]
                for a, b in loops
                if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)
            ]
            exponential = [loop for loop in innermost if "MUFU.EX2" in loop]
            assert exponential or re.search("split|sum_dS", name), (
                f"{name} has no loop with HGMMA and MUFU.EX2"
            )
            local = any(re.search(r"\b(LDL|STL)\b", loop) for loop in innermost)
            may_spill = re.search("fused_backward|PagedBand|dQ_kernel.*7General|9WithTerms", name)
            assert not local or may_spill, f"{name} uses local memory in its loop"


def test_cache_policies_are_in_even_registers():
    """ptxas of CUDA 13.0 may choose an odd one: an illegal instruction."""
    if not minimal_attn._C.cuda_architectures().strip():
        pytest.skip("this build has no machine code for GPUs")
    if not (cuobjdump := find_tool("cuobjdump")):
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    for path in (ROOT / "build").glob("temp.*/torch-*/portable/decode.cu.o"):
        done = run(cuobjdump, "-sass", path)
        assert done.returncode == 0, done.stderr
        assert not re.findall(r"desc\[UR\d*[13579]\]", done.stdout)


def backward_branches(code):
    """Where in the text loops begin and end: from a branch's target to the branch."""
    at = {int(m[1], 16): m.start() for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/ ", code)}
    for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/ [^\n]*\bBRA (?:\w+, )?0x([0-9a-f]+)", code):
        begin, end = int(m[2], 16), int(m[1], 16)
        if begin < end and begin in at:
            yield at[begin], at[end]
