#!/bin/sh
# torch.take_along_dim with an index that is broadcast fixes all sizes of a graph; gather with the same index expanded doesn't.
#
# Versions   torch 2.11.0, a CPU
# Behaviour  take_along_dim computes the common shape in plain ints. While torch.export or torch.compile(dynamic=True)
#            traces, that reads each symbolic size, so the graph holds for the example's batch and length alone. It
#            does so if only one dimension is broadcast, as where keys of all heads get one order. Export with dynamic
#            sizes refuses the model, and compiled code is compiled again for each new length.
# Output     take_along_dim: export refused, 3 graphs for 3 lengths; gather: exported, 1 graph for 3 lengths
# Surprise   Both are documented as the same selection, take_along_dim as the convenient one. Nothing names the line: the
#            error of export speaks of "your code", and compiled code is right, only slow at each new length, until
#            the limit of recompilations, from where on it is eager.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0
"$PYTHON" -W ignore - <<'END'
import torch


class Reorder(torch.nn.Module):
    """k (B, H, N, d) by one order (B, N) for all heads."""

    def __init__(self, select):
        super().__init__()
        self.select = select

    def forward(self, k, order):
        return self.select(k, order[:, None, :, None])


def gather(k, index):
    return k.gather(2, index.expand(-1, k.shape[1], -1, k.shape[3]))


def take(k, index):
    return k.take_along_dim(index, 2)


def inputs(n):
    return torch.randn(2, 4, n, 8), torch.rand(2, n).argsort(1)


def exports(model):
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=3, max=512)
    sizes = {"k": {0: batch, 2: length}, "order": {0: batch, 1: length}}
    try:
        torch.export.export(model, inputs(20), dynamic_shapes=sizes, strict=False)
    except Exception as error:
        assert "specialized" in str(error) or "Constraints violated" in str(error), error
        return "export refused"
    return "exported"


def graphs(model):
    count = 0

    def backend(graph, _):
        nonlocal count
        count += 1
        return graph

    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=True, backend=backend)
    for n in 20, 33, 47:
        k, order = inputs(n)
        assert torch.equal(compiled(k, order), model(k, order))
    return f"{count} graph{'s' * (count > 1)} for 3 lengths"


seen = {f.__name__: f"{exports(Reorder(f))}, {graphs(Reorder(f))}" for f in (take, gather)}
print(f"take_along_dim: {seen['take']}; gather: {seen['gather']}")
assert seen["take"] == "export refused, 3 graphs for 3 lengths"
assert seen["gather"] == "exported, 1 graph for 3 lengths"
END
