"""Arithmetic of sizes. While a graph is traced they may be symbols, whose values may depend on data."""

from torch.compiler import is_compiling


def known(*conditions):
    """Whether one of the conditions is known to hold. What symbols leave open is checked by the operator."""
    if is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return any([guard_or_false(x) for x in conditions])
    return True in conditions


def divide_up(x, y):
    return (x + y - 1) // y
