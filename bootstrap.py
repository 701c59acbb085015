"""Find or make the Python that builds and runs minimal_attn: what the Makefile does before anything else.

    python3 bootstrap.py build|test|lint
    python3 bootstrap.py clang-format --dry-run

The first writes build/python, a script that runs the Python found, and build/configuration, what the
compiled extension depends on (rewritten only when it changes).

The Python on PATH is used if it has what the goal needs; then nothing is installed. Otherwise .venv is:
where that Python has torch, as an addition to it, else with all of PINS, the versions that were tested. An
nvcc that fits torch is installed there, too, if CUDA code is wanted and the machine has none. While .venv
changes it has a file "unfinished"; if that is still there at the next make, .venv is made again.

It is a script of its own because a fresh machine has just some Python 3: this file runs on any, without
packages, and setup.py on the Python that is chosen here. Both share what it says about the machine.
"""

import contextlib
import ctypes
import glob
import importlib.util
import json
import os
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")
UNFINISHED = os.path.join(VENV, "unfinished")
SOURCE_FOLDERS = ["binding", "cpu", "portable", "hopper"]  # with their folders; beside what is here

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 8)
OLDEST_SETUPTOOLS = (77, 0)  # which knows the licence in pyproject.toml
OLDEST_TRANSFORMERS = (5, 4)  # for its mask functions
PINS = {
    "torch": "torch==2.11.*",
    "setuptools": "setuptools>=77,<82",
    "ninja": "ninja==1.13.*",
    "numpy": "numpy==2.*",
    "pytest": "pytest==9.*",
    "xdist": "pytest-xdist==3.*",
    "hypothesis": "hypothesis==6.*",
    "expecttest": "expecttest==0.3.*",
    "transformers": "transformers>=5.4,<6",
    "ruff": "ruff==0.17.*",
    "clang_format": "clang-format==23.*",
}
NEEDS = {"build": ["torch", "setuptools", "ninja"], "lint": ["ruff", "clang_format"]}
NEEDS["test"] = NEEDS["build"] + ["pytest", "xdist", "hypothesis", "expecttest", "transformers"]
# Without these tests skip or take longer, or C++ isn't checked.
OPTIONAL = ["xdist", "hypothesis", "expecttest", "transformers", "clang_format"]
NVCC = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"]


def say(line):
    print("minimal_attn: " + line, flush=True)


def die(line):
    sys.exit("minimal_attn: " + line)


@contextlib.contextmanager
def without_traceback():
    """One line for what a user can cause: Ctrl-C, a full disk, a folder that can't be written."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nminimal_attn: interrupted; the next make goes on from here", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        die(f"{error.filename or HERE}: {error.strerror or error}")


def one_at_a_time():
    """Waits until no other make changes this folder; returns a lock, which ends when its last owner does.

    Children that inherit it own it, too: after `kill -9 make` its pip and compilers may still be running.
    """
    lock = os.open(os.path.join(HERE, "bootstrap.py"), os.O_RDONLY)
    os.set_inheritable(lock, True)
    for seconds in range(600):  # no longer: a compiler's daemon may have inherited it
        try:
            fcntl and fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if seconds == 0:
                say("waiting for another make in this folder, or for what an interrupted one left running")
            time.sleep(1)
        except OSError:  # a file system without locks
            break
    return lock


def call(command, **options):
    """The exit status of a command, which inherits the lock."""
    return subprocess.call(command, close_fds=False, **options)


# ------------------------------------------------------------------------------ what there is in this folder


def sources(*suffixes):
    """Paths of the C++ and CUDA files with these suffixes, as seen from here."""
    found = os.listdir(HERE)
    for top in SOURCE_FOLDERS:
        for folder, _, names in os.walk(os.path.join(HERE, top)):
            found += [os.path.relpath(os.path.join(folder, name), HERE) for name in names]
    return sorted(path for path in found if path.endswith(suffixes))


def architectures():
    """TORCH_CUDA_ARCH_LIST, or what it was when the build in this folder was last given one."""
    named = " ".join(os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").replace(",", " ").split())
    return named or (read("architectures") or "").strip()


def read(name):
    """A file of build/, None without it."""
    try:
        with open(os.path.join(HERE, "build", name)) as file:
            return file.read()
    except FileNotFoundError:
        return None


def write(name, text):
    """A file of build/, all of it or nothing, and only if it changes."""
    path = os.path.join(HERE, "build", name)
    if read(name) == text:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.chmod(path + ".new", 0o755)
    os.replace(path + ".new", path)


# ------------------------------------------------------------------------------ what there is on this machine


def describe():
    """The Python that runs this, in JSON's types; torch without an import, which would take seconds."""
    facts = {
        "python": sys.executable,
        "version": list(sys.version_info[:2]),
        "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
        "path": sys.path[1:],
        "sites": site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE),
        "headers": os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")),
        "venv": bool(where("venv") and where("ensurepip")),
        "has": [name for name in PINS if where(name)],
    }
    if "torch" in facts["has"]:
        facts["torch_home"] = os.path.dirname(where("torch"))
        version = os.path.join(facts["torch_home"], "version.py")
        about = runpy.run_path(version) if os.path.isfile(version) else {"__version__": "0.0", "cuda": None}
        facts["torch"], facts["cuda"] = str(about["__version__"]), about["cuda"]
        if two_numbers(facts["torch"]) < OLDEST_TORCH:
            facts["has"].remove("torch")
    for name, oldest in (("setuptools", OLDEST_SETUPTOOLS), ("transformers", OLDEST_TRANSFORMERS)):
        if name in facts["has"] and two_numbers(version_of(name)) < oldest:
            facts["has"].remove(name)
    if not find_ninja():
        facts["has"] = [name for name in facts["has"] if name != "ninja"]
    elif "ninja" not in facts["has"]:
        facts["has"].append("ninja")
    return facts


def where(package):
    """None also for what is only a folder of that name, as an uninstalled package may leave."""
    return getattr(importlib.util.find_spec(package), "origin", None)


def version_of(package):
    from importlib import metadata  # not in the oldest Pythons that may run this file

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "999.0"  # as long as it can be imported


def two_numbers(version):
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def find_ninja():
    """Beside this Python, beside its packages (lib/python3.x/site-packages/../../../bin) or on PATH."""
    folders = [os.path.dirname(sys.executable)]
    folders += [os.path.join(folder, "..", "..", "..", "bin") for folder in sys.path]
    return shutil.which("ninja", path=os.pathsep.join(folders + [os.environ.get("PATH", "")]))


def find_compiler():
    """The C++ compiler, in words since CXX may be "ccache g++"; None without one."""
    named = shlex.split(os.environ.get("CXX", ""))
    choices = [named] if named else [["g++"], ["clang++"], ["c++"]]
    return next((words for words in choices if shutil.which(words[0])), None)


def no_compiler():
    named = os.environ.get("CXX")
    return (
        f"no C++ compiler{' ' + named + ', which CXX names' if named else ''}: install one (Debian, Ubuntu: "
        "sudo apt install g++; Fedora: sudo dnf install gcc-c++; macOS: xcode-select --install) or set CXX"
    )


def no_torch(facts):
    """What is wrong with the torch of a Python that hasn't "torch" among what it has."""
    oldest = "{}.{}".format(*OLDEST_TORCH)
    if "torch" in facts:
        return f"{facts['python']} has torch {facts['torch']}, which is too old: it must be {oldest} or newer"
    return f"{facts['python']} has no torch"


def gpus():
    """Compute capabilities of the GPUs here, from the driver, since there may be no torch to ask yet. Hidden
    ones count, too, so that another CUDA_VISIBLE_DEVICES doesn't cause a rebuild."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []

    def ask(function, *arguments):
        answer = ctypes.c_int()
        return 0 if function(ctypes.byref(answer), *arguments) else answer.value

    count = 0 if cuda.cuInit(0) else ask(cuda.cuDeviceGetCount)
    devices = [ask(cuda.cuDeviceGet, i) for i in range(count)]
    # 75 and 76 are CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    found = {tuple(ask(cuda.cuDeviceGetAttribute, which, device) for which in (75, 76)) for device in devices}
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def cuda_targets():
    """What to build CUDA code for: the entries of TORCH_CUDA_ARCH_LIST (see setup.py) or the GPUs here."""
    entries = architectures().split()
    if entries == ["none"]:
        return []
    return gpus() if entries in ([], ["native"]) else entries


def say_if_remembered():
    """That TORCH_CUDA_ARCH_LIST still holds, where it isn't what this machine would get without."""
    entries = architectures().split()
    if os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or entries in ([], ["native"]):
        return
    if ([] if entries == ["none"] else entries) != gpus():
        say(
            f"keeping TORCH_CUDA_ARCH_LIST={shlex.quote(' '.join(entries))} of an earlier build; "
            "TORCH_CUDA_ARCH_LIST=native builds for the GPUs of this machine"
        )


def find_cuda(version, path):
    """The toolkit with the major version of torch's CUDA: the system's, else PyPI's on sys.path `path`."""
    major = two_numbers(version)[0]
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))]
    homes += ["/usr/local/cuda", f"/usr/local/cuda-{version}"]
    homes += [os.path.join(folder, "nvidia", f"cu{major}") for folder in path]
    for home in filter(None, homes):
        nvcc = os.path.join(home, "bin", "nvcc")
        if os.access(nvcc, os.X_OK):
            about = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if f"release {major}." in about.stdout.decode():
                return home
    return None


def no_cuda(version):
    return (
        f"no nvcc that fits torch, which has CUDA {version}: install that toolkit and set CUDA_HOME, or set "
        "TORCH_CUDA_ARCH_LIST=none to build the CPU part alone"
    )


# ------------------------------------------------------------------------------ the Python to use


def probe(command):
    """describe() of another Python, None if it doesn't run."""
    try:
        run = subprocess.run(
            [command, __file__, "describe"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        return json.loads(run.stdout.decode()) if run.returncode == 0 else None
    except (OSError, ValueError):
        return None


def is_new_enough(facts):
    return tuple(facts["version"]) >= OLDEST_PYTHON


def on_path():
    """The Pythons on PATH that are new enough, or the one that PYTHON names."""
    named = os.environ.get("PYTHON")
    if os.path.exists(UNFINISHED):  # if it is activated, then what comes after it on PATH
        folders = os.environ.get("PATH", "").split(os.pathsep)
        inside = os.path.join(VENV, "bin")
        os.environ["PATH"] = os.pathsep.join(folder for folder in folders if folder != inside)
    found = list(filter(None, map(probe, [named] if named else ["python3", "python"])))
    if not named and not any(map(is_new_enough, found)):
        found += filter(None, map(probe, [f"python3.{minor}" for minor in (12, 11, 10, 13, 14)]))
    if named and not found:
        die(f"PYTHON={named} must be a Python 3 that runs here, and doesn't run")
    if not any(map(is_new_enough, found)):
        was = ", ".join("{} is {}.{}".format(facts["python"], *facts["version"]) for facts in found)
        die(
            f"needs Python 3.10 or newer, but {was or 'found none'}: install one, or name it: make PYTHON=..."
        )
    return list(filter(is_new_enough, found))


def choose(needs):
    found = on_path()
    own = probe_venv()
    for facts in found + [own] * bool(own):
        if set(needs) <= set(facts["has"]):
            return facts
    base = next((facts for facts in found if "torch" in facts["has"]), found[0])
    if "torch" in needs and "torch" not in base["has"]:
        check_headers(base)  # before the long download
        names = [name for name in PINS if name not in NEEDS["lint"]]
        smaller = "" if cuda_targets() else "; README.md has a smaller way for the CPU backend alone"
        what = f"{no_torch(base)}: installing one into .venv (2 to 3 GB{smaller})"
    else:
        names = [name for name in needs if name not in base["has"]]
        what = f"{base['python']} has no {', '.join(names)}: installing into .venv"
    essential = set(names) & set(needs) - set(OPTIONAL)
    quickly = [] if essential else ["--retries", "0"]  # pip takes its time to find that there is no network
    if essential or base["venv"]:
        own = make_venv(base)
        say(what)
        if install(own, quickly + [PINS[name] for name in names]):
            return probe(own["python"])
    names = ", ".join(names)
    if essential:
        die(f"couldn't install {names} (see above): without network, put a Python with all of it on PATH")
    say(f"couldn't install {names}: going on without")
    return base


def probe_venv():
    return None if os.path.exists(UNFINISHED) else probe(os.path.join(VENV, "bin", "python"))


def make_venv(base):
    """.venv, made by `base`, whose packages it sees if torch is among them."""
    own = probe_venv()
    sees_base = "torch" in base["has"]
    if own and own["version"] == base["version"] and (not sees_base or own.get("torch") == base["torch"]):
        return own
    if not base["venv"]:
        name = "python{}.{}-venv".format(*base["version"])
        die(
            f"{base['python']} can't make a virtual environment, having no venv or ensurepip: install {name} "
            f"(Debian, Ubuntu: sudo apt install {name})"
        )
    if os.path.exists(UNFINISHED):
        say("an earlier make was interrupted while it installed into .venv: making .venv again")
    begin_change()
    for entry in os.scandir(VENV):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.path != UNFINISHED:
            os.remove(entry.path)
    if call([base["python"], "-m", "venv", VENV]):
        die("couldn't make .venv (see above)")
    if sees_base:
        # --system-site-packages wouldn't do: a base that is itself a virtual environment isn't "the system"
        packages = glob.glob(os.path.join(VENV, "lib", "python*", "site-packages"))[0]
        with open(os.path.join(packages, "base.pth"), "w") as file:
            file.writelines(f"import site; site.addsitedir({folder!r})\n" for folder in base["sites"])
    os.remove(UNFINISHED)
    return probe_venv()


def begin_change():
    os.makedirs(VENV, exist_ok=True)
    with open(UNFINISHED, "w"):
        pass


def install(own, requirements):
    environment = dict(os.environ, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    packages = own["sites"][0]
    before = os.stat(packages).st_mtime_ns
    begin_change()
    failed = call([own["python"], "-m", "pip", "install"] + requirements, env=environment)
    if not failed or os.stat(packages).st_mtime_ns == before:  # without network nothing changes
        os.remove(UNFINISHED)
    return not failed


def check_headers(facts):
    if not facts["headers"]:
        name = "python{}.{}-dev".format(*facts["version"])
        die(
            f"{facts['python']} has no Python.h: install {name} (Debian, Ubuntu: sudo apt install {name}; "
            "Fedora: sudo dnf install python3-devel)"
        )


def with_nvcc(facts):
    """The Python to use and the CUDA toolkit, which comes into .venv if the machine has none that fits."""
    home = find_cuda(facts["cuda"], facts["path"])
    if home:
        return facts, home
    own = make_venv(facts)
    home = find_cuda(own["cuda"], own["path"])
    if not home:
        if two_numbers(own["cuda"]) < (13, 0):  # there PyPI has no nvcc, only its parts
            die(no_cuda(own["cuda"]))
        say(f"no nvcc that fits torch, which has CUDA {own['cuda']}: installing one into .venv (100 MB)")
        requirements = [f"{name}=={own['cuda']}.*" for name in NVCC]
        home = install(own, requirements) and find_cuda(own["cuda"], own["path"])
    return own, home or die(no_cuda(own["cuda"]))


def main(goal):
    if not os.access(HERE, os.W_OK):
        die(f"{HERE} can't be written: copy it to a folder that can, and run make there")
    one_at_a_time()
    compiler = find_compiler()
    if goal != "lint" and not compiler:
        die(no_compiler())
    facts = choose(NEEDS[goal])
    if goal != "lint":
        check_headers(facts)
        targets, home = cuda_targets() if facts["cuda"] else [], None
        if targets:
            facts, home = with_nvcc(facts)
        say_if_remembered()
        depends_on = [facts["suffix"], facts["torch_home"], facts["torch"], compiler, targets, home]
        files = [*sources(".cpp", ".cu", ".cuh", ".h"), "bootstrap.py", "setup.py"]
        files += filter(os.path.isfile, [os.environ.get("MINIMAL_ATTN_SCORE", "")])
        times = {file: os.stat(os.path.join(HERE, file)).st_mtime_ns for file in files}
        depends_on += [architectures(), times]
        names = "SANITIZE", "TILES", "KERNELS", "SCORE"
        depends_on += [os.environ.get(f"MINIMAL_ATTN_{name}") for name in names]
        write("configuration", json.dumps(depends_on) + "\n")
    write("python", f'#!/bin/sh\nexec {shlex.quote(facts["python"])} "$@"\n')


def clang_format(*arguments):
    """Runs clang-format on all C++ and CUDA files."""
    if not where("clang_format"):
        say("there is no clang-format: C++ and CUDA aren't checked")
        return 0
    command = [sys.executable, "-c", "import clang_format; clang_format.clang_format()", *arguments]
    files = sources(".cpp", ".cu", ".cuh", ".h") + glob.glob("examples/*/*.h", root_dir=HERE)
    return call(command + files, cwd=HERE)


if __name__ == "__main__":
    if sys.argv[1:] == ["describe"]:
        print(json.dumps(describe()))
    elif sys.argv[1:2] == ["clang-format"]:
        sys.exit(clang_format(*sys.argv[2:]))
    else:
        with without_traceback():
            main(*sys.argv[1:])
