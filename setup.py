"""Builds minimal_attn and its extension minimal_attn._C, of every .cpp and, with CUDA, every .cu.

    pip install .                          into a Python that has torch, which is the one it is built for
    python setup.py build_ext --inplace    here, beside the sources (make does this)

TORCH_CUDA_ARCH_LIST says what GPUs to build for, entries separated by spaces, commas or semicolons:
    9.0           machine code for that compute capability; 9.0 always means 9.0a, all that Hopper has
    9.0+PTX       that, and PTX, which the driver compiles for a newer GPU
    compute_80    PTX alone, for any GPU from 8.0 on
    native        the GPUs of this machine; the same as an empty or unset variable
    none          the CPU part alone, which is also what a machine without a GPU gets
It holds in this folder until it is set to something else or `make clean`.
MINIMAL_ATTN_SANITIZE=address,undefined builds the C++ files with GCC's sanitizers, for tests of the CPU part;
Python then needs their library first, by LD_PRELOAD, as .ci/run gives it.
MINIMAL_ATTN_WHEEL=1 adds a local version to wheels with CUDA code: 0.1.0+torch2.11.cu130.
MINIMAL_ATTN_TILES=all builds for 9.0 also the tiles that smaller GPUs use, for tests of them on a Hopper GPU.
With MINIMAL_ATTN_KERNELS=plain general GPU kernels (softcap, masks, dropout) are not built, which is faster.
MINIMAL_ATTN_SCORE=examples/own_score/log_distance.h gives alibi_slopes the term of distance in that header.
The CUDA toolkit is the one of CUDA_HOME, of nvcc on PATH or /usr/local/cuda, whichever first has the major
version that torch was built with, else the one of PyPI's packages. CXX names the C++ compiler. VERBOSE=1
shows the commands.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # where pip runs this, it isn't there
import bootstrap  # noqa: E402
from bootstrap import die, say  # noqa: E402

OLDEST_GPU = (7, 5)


def describe():
    """The Python that runs this, and its torch. pip's isolated build hides it, but not from python -E."""
    here = bootstrap.describe()
    if "torch" not in here:
        command = [sys.executable, "-E", bootstrap.__file__, "describe"]
        outside = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        if "torch" in outside:
            here |= {name: outside[name] for name in ("torch", "torch_home", "cuda", "path")}
            here["has"] += ["torch"] * ("torch" in outside["has"])
    return here


HERE = describe()


def check_packages():
    """All commands need torch but those of the source distribution."""
    if "setuptools" not in HERE["has"]:
        die(f"{HERE['python']}'s setuptools is too old: pip install 'setuptools>=77,<82'")
    if "torch" not in HERE["has"] and not {"sdist", "egg_info", "--version"} & set(sys.argv):
        todo = "pip install torch setuptools ninja, then pip install --no-build-isolation ."
        die(f"{bootstrap.no_torch(HERE)}: {todo}")


def requirement():
    """torch promises no binary compatibility between its versions: what one built needs that one."""
    if "torch" in HERE["has"]:
        return "torch=={}.{}.*".format(*bootstrap.two_numbers(HERE["torch"]))
    return "torch>={}.{}".format(*bootstrap.OLDEST_TORCH)


def local_version():
    """The local version of a wheel with CUDA code: wheels for several torches have different names."""
    if os.environ.get("MINIMAL_ATTN_WHEEL") != "1" or not Build.targets:
        return ""
    return "+torch{}.{}.cu{}{}".format(
        *bootstrap.two_numbers(HERE["torch"]), *bootstrap.two_numbers(HERE["cuda"])
    )


def cuda_targets():
    """What CUDA code to build, {name: [values of -gencode]}, empty for none; a line says why."""
    entries = bootstrap.cuda_targets()
    if not HERE.get("cuda"):
        why = f"torch {HERE.get('torch')} has no CUDA"
        entries = []
    elif bootstrap.architectures() == "none":
        why = "TORCH_CUDA_ARCH_LIST=none"
    else:
        why = "no GPU of compute capability 7.5 or more, here or in TORCH_CUDA_ARCH_LIST"
    targets = {name: codes for name, codes in map(target, entries) if codes}
    if not targets:
        say(f"building the CPU part alone: {why}")
    return targets


def target(entry):
    match = re.fullmatch(r"(compute_)?(\d+)\.?(\d)([af]?)(\+PTX)?", entry)
    if not match or (match[1] and match[5]):
        die(f"TORCH_CUDA_ARCH_LIST must have entries like 8.0, 8.0+PTX or compute_80, but has {entry}")
    ptx_alone, major, minor, feature, ptx = match.groups(default="")
    if (int(major), int(minor)) < OLDEST_GPU:
        say(f"leaving out {entry}: it needs compute capability 7.5 or more")
        return entry, []
    arch = major + minor
    feature = "a" if arch == "90" else feature
    as_code = f"arch=compute_{arch}{feature},code=sm_{arch}{feature}"
    as_ptx = f"arch=compute_{arch},code=compute_{arch}"
    if ptx_alone:
        return f"compute_{arch}", [as_ptx]
    return f"{major}.{minor}{feature}{ptx}", [as_code] + [as_ptx] * bool(ptx)


# ------------------------------------------------------------------------------------ the commands
# As lists of words; $in and $out are ninja's. `cuda` is the toolkit's folder, or None.

COMPILE = ["-MMD", "-MF", "$out.d", "-c", "$in", "-o", "$out"]


def cpp(cxx, cuda, targets):
    torch = HERE["torch_home"]
    standard = "c++20" if bootstrap.two_numbers(HERE["torch"]) >= (2, 12) else "c++17"  # what torch needs
    defines = ["-DTORCH_EXTENSION_NAME=_C", f'-DMINIMAL_ATTN_TORCH="{HERE["torch"]}"']
    includes = [f"{torch}/include", f"{torch}/include/torch/csrc/api/include", sysconfig.get_path("include")]
    if cuda:
        defines += kernel_choice()
        defines += ["-DWITH_CUDA", f'-DMINIMAL_ATTN_ARCHS="{" ".join(targets)}"']
        includes += [*cuda_includes(cuda), *package_includes()]
    flags = ["$optimize", f"-std={standard}", "-Wall", "-fPIC", "-fvisibility=hidden", *openmp(cxx)]
    flags += [*sanitize(), *own_score()]
    flags += ["-I."]  # where setup.py is
    flags += [f"-isystem{folder}" for folder in includes]  # not -I: warnings in there aren't ours
    return [*cxx, *flags, *defines, *COMPILE]


def cu(cxx, cuda, targets):
    codes = [code for codes in targets.values() for code in codes]
    flags = ["-O1"]  # of host code; device code has -O3 anyway
    flags += ["-std=c++17", "--expt-relaxed-constexpr", "-I."]
    flags += ["-diag-suppress=177"]  # functions that aren't called: Hopper's, when compiled for other GPUs
    flags += ["-Xcompiler=-Wall,-Wno-unused-function,-fPIC,-fvisibility=hidden", "-ccbin", cxx[-1]]
    flags += [*kernel_choice(), *own_score()]
    flags += ["--threads", str(min(os.cpu_count(), len(codes))), *(f"-gencode={code}" for code in codes)]
    if not any(os.path.isfile(f"{folder}/cuda_runtime.h") for folder in cuda_includes(cuda)):
        # nvcc of PyPI in .venv, while torch and with it these headers are somewhere else
        flags += [f"-I{folder}" for folder in package_includes()]
    return [f"{cuda}/bin/nvcc", *flags, *COMPILE]


def link(cxx, cuda):
    torch = HERE["torch_home"]
    flags = ["-shared", "-Wl,--as-needed"]
    if platform.system() == "Darwin":
        flags = ["-bundle", "-undefined", "dynamic_lookup"]
    libraries = [f"-L{torch}/lib", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    # A g++ with nothing but a static libstdc++ would bring a second one, whose streams crash inside torch.
    libstdcpp = ["-l:libstdc++.so.6"]
    test = [*cxx, *flags, "-x", "c++", os.devnull, "-o", os.devnull, *libstdcpp]
    libraries += libstdcpp if subprocess.run(test, stderr=subprocess.DEVNULL).returncode == 0 else []
    # torch's own OpenMP: another one would be another pool of threads
    libraries += (glob(f"{torch}/lib/libgomp*") + glob(f"{torch}.libs/libgomp*"))[:1]
    if cuda:
        # Named by its file, since PyPI's package has only libcudart.so.13, which -lcudart doesn't find.
        cudart = [f"{package}/lib/libcudart.so.{cuda_major()}" for package in packages()]
        cudart += [f"{cuda}/lib64/libcudart.so", *glob(f"{cuda}/targets/*/lib/libcudart.so")]
        libraries += ["-ltorch_cuda", "-lc10_cuda", next(filter(os.path.isfile, cudart), "-lcudart")]
    return [*cxx, *flags, *sanitize(), "$in", "-o", "$out", *libraries]


def sanitize():
    """Flags that end the program at the first error, for what MINIMAL_ATTN_SANITIZE names."""
    names = os.environ.get("MINIMAL_ATTN_SANITIZE")
    # After -O3, which it replaces: the same checks in half of the compile time.
    return (
        [f"-fsanitize={names}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]
        if names
        else []
    )


def kernel_choice():
    flags = ["-DMINIMAL_ATTN_ALL_TILES"] * (os.environ.get("MINIMAL_ATTN_TILES") == "all")
    return flags + ["-DMINIMAL_ATTN_PLAIN"] * (os.environ.get("MINIMAL_ATTN_KERNELS") == "plain")


def own_score():
    header = os.environ.get("MINIMAL_ATTN_SCORE")
    if header and not os.path.isfile(header):
        die(f"MINIMAL_ATTN_SCORE={header} must be a header, seen from this folder, but there is none")
    return [f'-DMINIMAL_ATTN_SCORE="{header}"'] if header else []


def cuda_major():
    return bootstrap.two_numbers(HERE["cuda"])[0]


def cuda_includes(cuda):
    return [f"{cuda}/include", *glob(f"{cuda}/targets/*/include")]


def packages():
    """Where pip puts CUDA's parts: nvidia/cu13, or nvidia/cuda_runtime, nvidia/cublas, ..."""
    return [folder for path in HERE["path"] for folder in sorted(glob(f"{path}/nvidia/*"))]


def package_includes():
    return [f"{package}/include" for package in packages() if os.path.isdir(f"{package}/include")]


def openmp(cxx):
    """The flag without which at::parallel_for is serial.

    Not for Clang on Linux: there torch has GCC's OpenMP. Clang's code needs a second one, LLVM's, and both
    have functions of the same names, such as omp_get_thread_num.
    """
    test = [*cxx, "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    program = b"#include <omp.h>\n#if defined __clang__ && defined __linux__\n#error\n#endif"
    if subprocess.run(test, input=program, stderr=subprocess.DEVNULL).returncode == 0:
        return ["-fopenmp"]
    say(f"{cxx[-1]} has no OpenMP that fits torch's: the CPU part will run on one thread (with g++ on all)")
    return []


# ------------------------------------------------------------------------------------ the build


class Build(build_ext):
    """By ninja, which compiles only what has changed: its source, a header or the command."""

    targets = {}

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # else what an interrupted copy left in minimal_attn/ would count as new

    def get_source_files(self):
        """For the source distribution: all, whatever this machine would build."""
        return bootstrap.sources(".cpp", ".cu", ".cuh", ".h")

    def build_extension(self, extension):
        ninja = bootstrap.find_ninja() or die("no ninja: pip install ninja")
        cxx = bootstrap.find_compiler() or die(bootstrap.no_compiler())
        cuda = None
        rules = {}
        if self.targets:
            cuda = bootstrap.find_cuda(HERE["cuda"], HERE["path"]) or die(bootstrap.no_cuda(HERE["cuda"]))
            say(f"building for the CPU and CUDA {', '.join(self.targets)}, with {cuda}/bin/nvcc")
            rules["cu"] = cu(cxx, cuda, self.targets)
        rules["cpp"] = cpp(cxx, cuda, self.targets)
        rules["link"] = link(cxx, cuda)
        # A folder for each torch, whose headers are too many to watch one by one.
        folder = os.path.join(self.build_temp, "torch-" + HERE["torch"])
        output = self.get_ext_fullpath(extension.name)
        objects = {os.path.dirname(os.path.join(folder, source)) for source in extension.sources}
        lock = bootstrap.one_at_a_time()
        for needed in *objects, os.path.dirname(output):
            os.makedirs(needed, exist_ok=True)
        file = os.path.join(folder, "build.ninja")
        with open(file, "w") as stream:
            stream.write(ninja_file(folder, output, extension.sources, rules))
        # In a terminal ninja names what it compiles; in a log what is done: the rules say what begins.
        begins = os.open(os.devnull, os.O_WRONLY) if sys.stdout.isatty() else os.dup(1)
        os.set_inheritable(begins, True)
        environment = os.environ | {"BEGINS": str(min(begins, 9)), "NINJA_STATUS": "[%f/%t, %es] "}
        options = ["-v"] * bool(os.environ.get("VERBOSE"))
        # ninja's own choice for two cores is three jobs, which slow each other down: 10 % longer in all.
        options += ["-j2"] * (os.cpu_count() == 2)
        if bootstrap.call([ninja, "-f", file, *options], env=environment):
            die("the build failed (see above)")
        os.close(begins)
        os.close(lock)


# They only call the backends. -O3 takes a fifth more to compile, and saves nothing in a call.
OPTIMIZE = {"main.cpp": "-O2", "binding/call.cpp": "-O2"}

# What takes longest to compile, in this order. ninja starts with it, so that the last are short ones.
LONGEST = ["main.cpp", "hopper/float32/forward.cu", "hopper/half.cu", "portable/tf32.cu", "portable/half.cu"]
LONGEST += ["portable/decode.cu", "portable/half_backward.cu", "portable/tf32_backward.cu"]
LONGEST += ["hopper/backward_dk_dv.cu", "hopper/backward_fused.cu", "hopper/backward_dq.cu"]
LONGEST += ["binding/call.cpp", "cpu/forward.cpp", "cpu/backward.cpp"]


def longest_first(source):
    return LONGEST.index(source) if source in LONGEST else len(LONGEST)


def ninja_file(folder, output, sources, rules):
    def escape(path):
        return re.sub(r"([$ :])", r"$\1", path)

    def quote(word):
        return word if word.startswith("$") else shlex.quote(word).replace("$", "$$")

    text = f"builddir = {escape(folder)}\n"  # where ninja keeps its log
    for name, words in rules.items():
        what = "linking" if name == "link" else "$in"
        begins = f"echo begin: {what} >&$${{BEGINS:-1}}; "
        text += f"rule {name}\n  command = {begins}{' '.join(map(quote, words))}\n"
        text += f"  description = {what}\n" + "  depfile = $out.d\n  deps = gcc\n" * (name != "link")
    objects = {source: escape(os.path.join(folder, source + ".o")) for source in sources}
    for source, object in objects.items():
        text += f"build {object}: {source.split('.')[-1]} {escape(source)}\n"
        text += f"  optimize = {OPTIMIZE.get(source, '-O3')}\n"
    return text + f"build {escape(output)}: link {' '.join(objects.values())}\n"


def main():
    check_packages()
    Build.targets = cuda_targets() if "torch" in HERE["has"] else {}
    if os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
        bootstrap.write("architectures", bootstrap.architectures())
    suffixes = (".cpp", ".cu") if Build.targets else (".cpp",)
    setup(
        packages=["minimal_attn"],
        package_data={"minimal_attn": ["py.typed", "*.pyi"]},
        ext_modules=[Extension("minimal_attn._C", sorted(bootstrap.sources(*suffixes), key=longest_first))],
        cmdclass={"build_ext": Build},
        install_requires=[requirement()],
        options={"egg_info": {"tag_build": local_version()}},
    )


if __name__ == "__main__":
    with bootstrap.without_traceback():
        main()
