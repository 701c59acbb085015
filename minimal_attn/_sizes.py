"""Arithmetic of sizes. While a graph is traced they may be symbols, whose values may depend on data."""

import torch
from torch.compiler import is_compiling


def known(*conditions):
    """Whether one of the conditions is known to hold. What symbols leave open is checked by the operator."""
    if is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return any([guard_or_false(x) for x in conditions])
    return True in conditions


def smaller(x, y):
    return torch.sym_min(x, y) if _is_symbol(x, y) else min(x, y)


def larger(x, y):
    return torch.sym_max(x, y) if _is_symbol(x, y) else max(x, y)


def divide_up(x, y):
    return (x + y - 1) // y


def _is_symbol(x, y):
    return isinstance(x, torch.SymInt) or isinstance(y, torch.SymInt)
