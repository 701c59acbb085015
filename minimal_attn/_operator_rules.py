"""What PyTorch's tools ask besides the dispatcher: vmap's rule, FLOPs, DTensor's sharding, ONNX."""

import math
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from itertools import combinations

import torch
from torch import library

# The operators' tensors that have a row for each batch and head. Others have one for each batch, or one for
# the heads of all.
_BY_HEAD = ("do", "q", "k", "v", "o", "l", "m", "lse", "dlse")
_OF_HEADS = ("sinks", "alibi_slopes")
_OF_PAIRS = ("attn_mask", "bias")  # broadcast to (B, Hq, Nq, Nk)


def _by_batch(operator):
    others = _OF_HEADS + _OF_PAIRS + ("dropout_seed",)
    return [a.name for a in operator._schema.arguments if "Tensor" in str(a.type) and a.name not in others]


def _vmap_rule(operator):
    """torch.vmap of `operator`: one call in which the mapped dimension is part of the batch."""
    names, by_batch = [argument.name for argument in operator._schema.arguments], _by_batch(operator)

    def rule(info, in_dims, *args):
        arguments = dict(zip(names, args, strict=False))
        dims = dict(zip(names, in_dims, strict=False))
        shapes = {name: _shape_of_element(arguments[name], dims[name], name) for name in "qkv"}
        B = shapes["q"][0]
        if (
            arguments.get("cu_seqlens_q") is not None
            or arguments.get("dropout_p")
            or operator is _backward_and_bias()
        ):
            return _one_by_one(operator, info.batch_size, arguments, dims)

        def in_front(name):  # (mapped, ...), expanded where it isn't mapped
            t, dim = arguments[name], dims[name]
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        pages = []
        if arguments.get("block_table") is not None:
            if info.batch_size == 0:  # the operator wants pages even then
                for name in "kv":
                    arguments[name], dims[name] = arguments[name].new_zeros(shapes[name]), None
            if dims["k"] is None and dims["v"] is None:  # all elements read the same pages
                pages = ["k", "v"]
            else:
                table, n_pages = in_front("block_table"), shapes["k"][0]
                first_page = torch.arange(info.batch_size, device=table.device) * n_pages
                table = table.long().clamp(0, n_pages - 1) + first_page[:, None, None]
                arguments["block_table"], dims["block_table"] = table, 0
        for name in by_batch:
            if arguments.get(name) is not None and name not in pages:
                t = in_front(name)
                if name == "key_ranges" and t.dim() == 4 and t.shape[1] == 1:  # one row for all batches
                    t = t.expand(-1, B, -1, -1)
                arguments[name] = t.flatten(0, 1)
        for name in _OF_HEADS:
            if arguments.get(name) is not None:
                t = in_front(name)
                arguments[name] = (t if t.dim() == 3 else t.unsqueeze(1).expand(-1, B, -1)).flatten(0, 1)
        for name in _OF_PAIRS:
            t = arguments.get(name)
            if t is None or (dims[name] is None and (t.dim() < 4 or t.shape[0] == 1)):
                continue  # broadcast to the mapped dimension, too
            t = in_front(name)
            if t.dim() > 5 or (t.dim() == 5 and t.shape[1] not in (1, B)):
                shape = list(t.shape[1:])
                raise ValueError(f"{name} must broadcast to (B, Hq, Nq, Nk), B {B}, but has shape {shape}")
            t = t[(slice(None), *[None] * (5 - t.dim()))]
            arguments[name] = t.expand(-1, B, -1, -1, -1).flatten(0, 1)
        results = operator(**arguments)
        split = (info.batch_size, B)
        if isinstance(results, torch.Tensor):
            return results.unflatten(0, split), 0
        return tuple(t.unflatten(0, split) for t in results), (0,) * len(results)

    return rule


def _one_by_one(operator, n, arguments, dims):
    """A call for each element: packed documents are one batch, and dropout depends on the batch's number."""

    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    mapped = {name: t.movedim(dims[name], 0) for name, t in tensors.items() if dims[name] is not None}

    def element(i):
        return arguments | {name: t[i] if n else t.new_zeros(t.shape[1:]) for name, t in mapped.items()}

    results = [operator(**element(i)) for i in range(max(n, 1))]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)[:n], 0
    return tuple(torch.stack(x)[:n] for x in zip(*results, strict=True)), (0,) * len(results[0])


def _shape_of_element(t, dim, name):
    """The shape of one of the elements that are mapped over, of which there may be none."""
    shape = [size for i, size in enumerate(t.shape) if i != dim]
    if len(shape) != 4:
        raise ValueError(f"{name} must have 4 dimensions, (B, H, N, d), but has shape {shape}")
    return shape


def _flops(q, k, v, *args, out_shape=None, **kwargs):
    """As PyTorch counts scaled_dot_product_attention: two matrix products, whatever the mask hides."""
    names = [argument.name for argument in _functional()[0]._schema.arguments]
    table = (dict(zip(names[3:], args, strict=False)) | kwargs).get("block_table")
    (B, Hq, Nq, d), Nk = q, k[2] if table is None else table[1] * k[2]
    return 2 * B * Hq * Nq * Nk * (d + v[3])


def _backward_flops(do, q, k, v, *args, out_shape=None, **kwargs):
    """Five products: the scores are computed again."""
    (B, Hq, Nq, d), Nk = q, k[2]
    return 2 * B * Hq * Nq * Nk * (3 * d + 2 * v[3])


def _register_flops(flop_counter):
    flop_counter.register_flop_formula(torch.ops.minimal_attn.forward)(_flops)
    for operator in torch.ops.minimal_attn.backward, torch.ops.minimal_attn.backward_and_bias:
        flop_counter.register_flop_formula(operator)(_backward_flops)


def _sharding_rule(operator):
    """How DTensors may be sharded over one dimension of a mesh: by batches, by heads, or not at all.

    The rule has the operator's arguments, with a DTensorSpec for each tensor, and returns pairs:
    placements of the results and of the arguments. DTensor redistributes arguments that fit no pair.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = [argument.name for argument in operator._schema.arguments]
    returns, whole = len(operator._schema.returns), Replicate()

    def rule(*args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        k = given["k"]
        by_batch = dict.fromkeys(_by_batch(operator), Shard(0))
        by_head = dict.fromkeys(_BY_HEAD, Shard(1))
        if given.get("block_table") is not None:  # any batch may read any page
            by_batch |= {"k": whole, "v": whole}
        ranges = given.get("key_ranges")
        if ranges is not None and ranges.shape[0] != k.shape[0]:  # one row for all batches
            by_batch["key_ranges"] = whole
        for name in _OF_HEADS:
            if (t := given.get(name)) is not None:
                by_batch[name] = Shard(0) if t.ndim == 2 else whole
                by_head[name] = Shard(t.ndim - 1)
        for name in _OF_PAIRS:
            if (t := given.get(name)) is not None:
                is_of = [t.ndim >= n and t.shape[-n] > 1 for n in (4, 3)]  # else it is broadcast
                by_batch[name], by_head[name] = (
                    Shard(t.ndim - n) if own else whole for n, own in zip((4, 3), is_of, strict=True)
                )
        Hkv, sizes = k.shape[1], k.mesh.shape
        # This rule is for any one dimension of the mesh: others may shard the heads, too. DTensor itself
        # refuses more parts than there are heads.
        parts = [math.prod(some) for n in range(len(sizes)) for some in combinations(sizes, n + 1)]
        if Hkv == 1:  # each query head reads the one key head
            by_head |= {"k": whole, "v": whole}
        elif any(Hkv % n for n in parts if n <= Hkv):
            by_head = {}

        # Each query head has a part of the gradients of the key head that it reads.
        of_heads = [Shard(1), Partial(), Partial()] if Hkv == 1 and "do" in given else [Shard(1)] * returns

        def placements(of, results):
            is_tensor = {name: hasattr(x, "placements") for name, x in given.items()}
            inputs = [of.get(name, whole) if is_tensor[name] else None for name in given]
            return results, inputs

        choices = [placements({}, [whole] * returns)]
        if given.get("dropout_p"):  # dropout depends on the numbers of batches and heads
            return choices
        if operator is _backward_and_bias():  # whatever the bias is broadcast to
            return choices
        if given.get("cu_seqlens_q") is None:  # else there is one batch
            choices.append(placements(by_batch, [Shard(0)] * returns))
        return choices + [placements(by_head, of_heads)] * bool(by_head)

    return rule


def _register_sharding(tensor):
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    for operator in _functional():
        register_sharding(operator)(_sharding_rule(operator))
        # All arguments behind q, k and v belong to the key of DTensor's cache.
        propagator = tensor.DTensor._op_dispatcher.sharding_propagator
        propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(3, needs_pytree=True)


def _register_onnx(ops):
    from torch.onnx._internal.exporter._torchlib._torchlib_registry import onnx_impl

    from minimal_attn.onnx import translation_table

    for operator, translation in translation_table().items():
        onnx_impl(operator, no_compile=True)(translation)


def _try(function, module):
    """The function uses details of PyTorch, which may change. PyTorch's module must still be importable."""
    try:
        function(module)
    except Exception as error:
        warnings.warn(f"minimal_attn: {module.__name__} will not know its operator: {error}", stacklevel=2)


class _AfterImport(MetaPathFinder):
    """Calls a function with a module when others import it. Importing it here would take too long."""

    def __init__(self, functions):
        self.functions = functions

    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in self.functions else None
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module):
                execute(module)
                if function := self.functions.pop(name, None):
                    _try(function, module)

            spec.loader.exec_module = execute_and_call
        return spec


def _functional():
    """The operators that return new tensors."""
    forward = torch.ops.minimal_attn.forward
    gradients = torch.ops.minimal_attn.backward.default, _backward_and_bias()
    return [forward.default, forward.lse, forward.state, *gradients]


def _backward_and_bias():
    return torch.ops.minimal_attn.backward_and_bias.default


def register():
    """Once a process: the package may be imported again, by importlib.reload or after a removal."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("minimal_attn::forward", "FuncTorchBatched"):
        return
    for operator in _functional():
        library.register_vmap(operator, _vmap_rule(operator))
    functions = {
        "torch.utils.flop_counter": _register_flops,
        "torch.distributed.tensor": _register_sharding,
        "torch.onnx._internal.exporter._torchlib.ops": _register_onnx,
    }
    for name in [name for name in functions if name in sys.modules]:
        _try(functions.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(functions))
