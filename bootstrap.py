"""Find or make the Python that builds and runs minimal_attn: what the Makefile does before anything else.

    python3 bootstrap.py build|test|lint

writes build/python, a script that runs the Python found, and build/configuration, what the compiled extension
depends on besides the sources (rewritten only when it changes).

The Python on PATH is used if it has what the goal needs; then nothing is installed. Otherwise .venv is:
where that Python has torch, as an addition to it, else with all of PINS, the versions that were tested. An
nvcc that fits torch is installed there, too, if CUDA code is wanted and the machine has none.

It is a script of its own because a fresh machine has just some Python 3: this file runs on any, without
packages, and setup.py on the Python that is chosen here. Both share what it says about the machine.
"""

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

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
PINS = {
    "torch": "torch==2.11.*",
    "setuptools": "setuptools>=70.1,<82",
    "ninja": "ninja==1.13.*",
    "numpy": "numpy==2.*",
    "pytest": "pytest==9.*",
    "hypothesis": "hypothesis==6.*",
    "ruff": "ruff==0.17.*",
}
NEEDS = {"build": ["torch", "setuptools", "ninja"], "lint": ["ruff"]}
NEEDS["test"] = NEEDS["build"] + ["pytest", "hypothesis"]
OPTIONAL = ["hypothesis"]  # its tests skip where it is missing
NVCC = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"]


def say(line):
    print("minimal_attn: " + line, flush=True)


def die(line):
    sys.exit("minimal_attn: " + line)


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
    if where("torch"):
        facts["torch_home"] = os.path.dirname(where("torch"))
        about = runpy.run_path(os.path.join(facts["torch_home"], "version.py"))
        facts["torch"], facts["cuda"] = str(about["__version__"]), about["cuda"]
        if two_numbers(facts["torch"]) < OLDEST_TORCH:
            facts["has"].remove("torch")
    if not find_ninja():
        facts["has"] = [name for name in facts["has"] if name != "ninja"]
    elif "ninja" not in facts["has"]:
        facts["has"].append("ninja")
    return facts


def where(package):
    """None also for what is only a folder of that name, as an uninstalled package may leave."""
    return getattr(importlib.util.find_spec(package), "origin", None)


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
    entries = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").replace(",", " ").split()
    if entries == ["none"]:
        return []
    return gpus() if entries in ([], ["native"]) else entries


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
    except OSError:
        return None
    return json.loads(run.stdout.decode()) if run.returncode == 0 else None


def is_new_enough(facts):
    return tuple(facts["version"]) >= OLDEST_PYTHON


def on_path():
    """The Pythons on PATH that are new enough, or the one that PYTHON names."""
    named = os.environ.get("PYTHON")
    found = list(filter(None, map(probe, [named] if named else ["python3", "python"])))
    if not named and not any(map(is_new_enough, found)):
        found += filter(None, map(probe, [f"python3.{minor}" for minor in (12, 11, 10, 13, 14)]))
    if not any(map(is_new_enough, found)):
        was = ", ".join("{} is {}.{}".format(facts["python"], *facts["version"]) for facts in found)
        die(
            f"needs Python 3.10 or newer, but {was or 'found none'}: install one, or name it: make PYTHON=..."
        )
    return list(filter(is_new_enough, found))


def choose(needs):
    found = on_path()
    own = probe(os.path.join(VENV, "bin", "python"))
    for facts in found + [own] * bool(own):
        if set(needs) <= set(facts["has"]):
            return facts
    base = next((facts for facts in found if "torch" in facts["has"]), found[0])
    if "torch" in needs and "torch" not in base["has"]:
        check_headers(base)  # before the long download
        names = [name for name in PINS if name != "ruff"]
        what = "torch 2.11 or newer: installing one into .venv (2 to 3 GB)"
    else:
        names = [name for name in needs if name not in base["has"]]
        what = f"{', '.join(names)}: installing into .venv"
    essential = set(names) & set(needs) - set(OPTIONAL)
    quickly = [] if essential else ["--retries", "0"]  # pip takes its time to find that there is no network
    if essential or base["venv"]:
        own = make_venv(base)
        say(f"{base['python']} has no {what}")
        if install(own, quickly + [PINS[name] for name in names]):
            return probe(own["python"])
    names = ", ".join(names)
    if essential:
        die(f"couldn't install {names} (see above): without network, put a Python with all of it on PATH")
    say(f"couldn't install {names}: going on without")
    return base


def make_venv(base):
    """.venv, made by `base`, whose packages it sees if torch is among them."""
    python = os.path.join(VENV, "bin", "python")
    own = probe(python)
    sees_base = "torch" in base["has"]
    if own and own["version"] == base["version"] and (not sees_base or own.get("torch") == base["torch"]):
        return own
    if not base["venv"]:
        name = "python{}.{}-venv".format(*base["version"])
        die(
            f"{base['python']} can't make a virtual environment, having no venv or ensurepip: install {name} "
            f"(Debian, Ubuntu: sudo apt install {name})"
        )
    if subprocess.call([base["python"], "-m", "venv", "--clear", VENV]):
        die("couldn't make .venv (see above)")
    if sees_base:
        # --system-site-packages wouldn't do: a base that is itself a virtual environment isn't "the system"
        packages = glob.glob(os.path.join(VENV, "lib", "python*", "site-packages"))[0]
        with open(os.path.join(packages, "base.pth"), "w") as file:
            file.writelines(f"import site; site.addsitedir({folder!r})\n" for folder in base["sites"])
    return probe(python)


def install(own, requirements):
    environment = dict(os.environ, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return subprocess.call([own["python"], "-m", "pip", "install"] + requirements, env=environment) == 0


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


def write(name, text):
    path = os.path.join(HERE, "build", name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path):
        with open(path) as file:
            if file.read() == text:
                return
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o755)


def main(goal):
    compiler = find_compiler()
    if goal != "lint" and not compiler:
        die(no_compiler())
    facts = choose(NEEDS[goal])
    if goal != "lint":
        check_headers(facts)
        targets, home = cuda_targets() if facts["cuda"] else [], None
        if targets:
            facts, home = with_nvcc(facts)
        depends_on = [facts["suffix"], facts["torch_home"], facts["torch"], compiler, targets, home]
        write("configuration", json.dumps(depends_on) + "\n")
    write("python", f'#!/bin/sh\nexec {shlex.quote(facts["python"])} "$@"\n')


if __name__ == "__main__":
    if sys.argv[1:] == ["describe"]:
        print(json.dumps(describe()))
    else:
        main(*sys.argv[1:])
