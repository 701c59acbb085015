"""What PyTorch's tools ask besides the dispatcher: torch.vmap's rule and the count of FLOPs."""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder

import torch

# The operator's tensors, in its order, that have a row for each batch. Sinks have one for each head.
_BY_BATCH = ("q", "k", "v", "seqlens_k", "leftpad_k", "offsets", "o", "l", "m")
_FLOP_COUNTER = "torch.utils.flop_counter"


def _vmap_rule(operator):
    """torch.vmap of `operator`: one call in which the mapped dimension is part of the batch."""
    names = [argument.name for argument in operator._schema.arguments]

    def rule(info, in_dims, *args):
        arguments = dict(zip(names, args, strict=False))
        dims = dict(zip(names, in_dims, strict=False))
        B = next(_without(arguments[name], dims[name]).shape[0] for name in ("q", "k", "v"))

        def in_front(name):  # (mapped, ...), expanded where it isn't mapped
            t, dim = arguments[name], dims[name]
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        for name in _BY_BATCH:
            if arguments.get(name) is not None:
                arguments[name] = in_front(name).flatten(0, 1)
        if arguments.get("sinks") is not None:
            sinks = in_front("sinks")
            sinks = sinks if sinks.dim() == 3 else sinks.unsqueeze(1).expand(-1, B, -1)
            arguments["sinks"] = sinks.flatten(0, 1)
        results = operator(**arguments)
        split = (info.batch_size, B)
        if isinstance(results, torch.Tensor):
            return results.unflatten(0, split), 0
        return tuple(t.unflatten(0, split) for t in results), (0,) * len(results)

    return rule


def _without(t, dim):
    """The first of the elements that are mapped over."""
    return t if dim is None else t.select(dim, 0)


def _flops(q, k, *args, out_shape=None, **kwargs):
    """As PyTorch counts scaled_dot_product_attention: two matrix products, whatever the mask hides."""
    (B, Hq, Nq, d), Nk = q, k[2]
    return 4 * B * Hq * Nq * Nk * d


class _AfterFlopCounter(MetaPathFinder, Loader):
    """Registers the formula once torch.utils.flop_counter is imported: that takes 0.2 s, for triton."""

    def find_spec(self, name, path, target=None):
        if name != _FLOP_COUNTER:
            return None
        sys.meta_path.remove(self)
        self.spec = importlib.util.find_spec(name)
        return self.spec and importlib.util.spec_from_loader(name, self, origin=self.spec.origin)

    def create_module(self, spec):
        return importlib.util.module_from_spec(self.spec)

    def exec_module(self, module):
        module.__spec__, module.__loader__ = self.spec, self.spec.loader
        self.spec.loader.exec_module(module)
        register_flops(module)


def register_flops(flop_counter):
    flop_counter.register_flop_formula(torch.ops.minimal_attn.forward)(_flops)


def register():
    for overload in "default", "lse", "state":
        operator = getattr(torch.ops.minimal_attn.forward, overload)
        torch.library.register_vmap(operator, _vmap_rule(operator))
    if _FLOP_COUNTER in sys.modules:
        register_flops(sys.modules[_FLOP_COUNTER])
    else:
        sys.meta_path.insert(0, _AfterFlopCounter())
