"""Imports the compiled extension, or says why it can't be."""

import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # before _C, which needs its libraries

__all__ = ["_C"]
HERE = Path(__file__).resolve().parent


def built_for_another(built_for):
    """What the extension's mark says, if it isn't this torch."""
    version = built_for.split()[-1]
    here = f"but this Python has torch {torch.__version__}"
    return version != torch.__version__ and f"{HERE} was built for torch {version}, {here}: {todo()}"


def todo():
    if (HERE.parent / "setup.py").exists():
        return f"run make in {HERE.parent}, or Python in another folder if minimal_attn is installed"
    return "install it again (pip install --force-reinstall --no-deps, in the folder of its sources)"


def reason(error):
    """One line on what is wrong and what to do."""
    files = [file for suffix in EXTENSION_SUFFIXES if (file := HERE / f"_C{suffix}").exists()]
    if files:
        mark = re.search(rb"minimal_attn for torch [\w.+]+", files[0].read_bytes())
        if mark and (another := built_for_another(mark[0].decode())):
            return another
        torch_here = f"most often it was built with another torch than this one, {torch.__version__}"
        return f"{HERE}'s extension can't be loaded ({error}); {torch_here}: {todo()}"
    if any(HERE.glob("_C.*.so")):
        return f"{HERE} was built for another Python than {sys.executable}: {todo()}"
    return f"{HERE} isn't built: {todo()}"


try:
    from minimal_attn import _C
except ImportError as error:
    raise ImportError(reason(error)) from None
# An extension that was built for another minor version may load without an error.
_built_for = getattr(_C, "built_for", "minimal_attn for an unknown torch")  # older builds don't say
if _built_for.split()[-1].split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(built_for_another(_built_for))
