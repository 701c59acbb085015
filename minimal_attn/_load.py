"""Imports the compiled extension, or says why it can't be."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # before _C, which needs its libraries

__all__ = ["_C"]
HERE = Path(__file__).resolve().parent


def reason(error):
    """One line on what is wrong and what to do."""
    todo = "install it again (pip install --no-build-isolation)"
    if (HERE.parent / "setup.py").exists():
        todo = f"run make in {HERE.parent}, or Python in another folder if minimal_attn is installed"
    if any((HERE / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        torch_here = f"most often it was built with another torch than this one, {torch.__version__}"
        return f"{HERE}'s extension can't be loaded ({error}); {torch_here}: {todo}"
    if any(HERE.glob("_C.*.so")):
        return f"{HERE} was built for another Python than {sys.executable}: {todo}"
    return f"{HERE} isn't built: {todo}"


try:
    from minimal_attn import _C
except ImportError as error:
    raise ImportError(reason(error)) from None
