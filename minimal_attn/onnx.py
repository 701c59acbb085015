"""torch.onnx.export(dynamo=True) of models that call minimal_attn.forward, or what is built on it.

Opset 23 and newer have an operator Attention, which computes o where softmax_scale is positive and there
are no sinks and no softcap, which runtimes apply before or after the mask. Other calls, and older opsets, get
one operator for each step. Attention aligns the first query with the first key, and runtimes differ in what
a row without keys gets. So other alignments, windows and lengths become a bool mask, and rows that see no key
become 0.

Hidden keys must be finite in the exported model: a runtime multiplies them by 0. Packed sequences can't be
exported yet, but as key_ranges, which transformers' models give. Pass these models position_ids (B, N): the
exporter replaces their rotary embeddings by ONNX's RotaryEmbedding, and onnxruntime doesn't broadcast the
tables of that operator over the batch.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec

import torch

_FAR = 2**40  # beyond all positions; sums of a few stay within int64
_TRANSLATED = {"q", "k", "v", "causal", "window_size", "softmax_scale", "seqlens_k", "leftpad_k", "offset"}
_TRANSLATED |= {"offsets", "backend", "sinks", "key_ranges", "softcap"}
_FLOAT, _INT64 = 1, 7  # onnx.TensorProto's


def translation_table() -> dict[Callable, Callable]:
    """What torch.onnx.export(dynamo=True) does with our operators, at any opset_version.

    `import minimal_attn` adds it to torch.onnx's own list, which is private. Where a later PyTorch refuses
    that, a warning says so: then pass it to the export as `custom_translation_table`.

    The summary of the export's error names an argument that isn't translated, such as `block_table`.
    """
    if find_spec("onnxscript") is None:
        raise ImportError(
            "minimal_attn.onnx needs onnxscript, as torch.onnx.export does: pip install onnxscript"
        )
    forward = torch.ops.minimal_attn.forward
    return {forward.default: _forward, forward.lse: _forward_lse, forward.state: _forward_state}


def _forward(*arguments, **options):
    call = _Call(*arguments, **options)
    op, q, number = call.op, call.q, call.constant
    if op.version < 23 or call.scale <= 0 or call.sinks is not None or call.softcap:
        return op.CastLike(_explicit(call)[0], q)
    visible, how = None, {"scale": call.scale, "softmax_precision": _FLOAT}
    if call.is_top_left():
        how["is_causal"] = 1
    else:
        visible = call.visible()
    o, *_ = op.Attention(q, call.k, call.v, visible, **how)
    if visible is None:
        return o
    is_hidden = op.Equal(op.ReduceMax(op.Cast(visible, to=_INT64), number(-1)), number(0))
    return op.Where(is_hidden, op.CastLike(number(0.0), q), o)


def _forward_lse(*arguments, **options):
    call = _Call(*arguments, **options)
    o, l, m = _explicit(call)
    return call.op.CastLike(o, call.q), call.op.Add(m, call.op.Log(l))


def _forward_state(*arguments, **options):
    return _explicit(_Call(*arguments, **options))


def _explicit(call):
    """o, l, m in float32, by steps. The query heads of a key head are more rows of it."""
    op, number = call.op, call.constant
    q, k, v = (op.Cast(x, to=_FLOAT) for x in (call.q, call.k, call.v))
    B, Hq, Nq, _ = (op.Shape(q, start=i, end=i + 1) for i in range(4))
    _, Hkv, Nk, d = (op.Shape(k, start=i, end=i + 1) for i in range(4))
    rows = op.Div(op.Mul(Hq, Nq), Hkv)

    def product(x, y, columns_of_x, columns):
        grouped = op.Reshape(x, op.Concat(B, Hkv, rows, columns_of_x, axis=0), allowzero=1)
        return op.Reshape(op.MatMul(grouped, y), op.Concat(B, Hq, Nq, columns, axis=0), allowzero=1)

    S = op.Mul(product(q, op.Transpose(k, perm=[0, 1, 3, 2]), d, Nk), number(call.scale))
    if call.softcap:
        cap = number(float(call.softcap))
        S = op.Mul(op.Tanh(op.Div(S, cap)), cap)
    if (visible := call.visible()) is not None:
        S = op.Where(visible, S, number(-math.inf))
    m = op.ReduceMax(S, number(-1))
    if call.sinks is not None:  # (Hq,) or (B, Hq)
        sinks = op.Unsqueeze(op.Cast(call.sinks, to=_FLOAT), number(-2, -1))
        m = op.Max(m, sinks)
    m_finite = op.Where(op.Equal(m, number(-math.inf)), number(0.0), m)
    P = op.Exp(op.Sub(S, m_finite))
    l = op.ReduceSum(P, number(-1))
    if call.sinks is not None:
        l = op.Add(l, op.Exp(op.Sub(sinks, m_finite)))
    is_hidden = op.Equal(l, number(0.0))
    d_v = op.Shape(v, start=3, end=4)
    o = op.Div(product(P, v, Nk, d_v), op.Where(is_hidden, number(1.0), l))
    return o, op.Squeeze(l, number(-1)), op.Squeeze(m, number(-1))


class _Call:
    """A call of the operator, which becomes nodes of the model that is exported."""

    def __init__(self, *arguments, **options):
        import onnxscript

        schema = torch.ops.minimal_attn.forward.default._schema.arguments
        given = {a.name: a.default_value for a in schema} | options
        given |= dict(zip((a.name for a in schema), arguments, strict=False))
        if not given["dropout_p"]:  # then the seed has no meaning
            given["dropout_p"] = given["dropout_seed"] = None
        for name in given.keys() - _TRANSLATED:
            if given[name] is not None:
                name = "state" if name in "olm" else name
                raise NotImplementedError(f"{name} must be None in an export to ONNX, but was given")
        self.op = onnxscript.evaluator.default().opset
        self.q, self.k, self.v, self.sinks = (given[x] for x in ("q", "k", "v", "sinks"))
        scale, (left, right) = given["softmax_scale"], given["window_size"]
        self.scale = float(1 / math.sqrt(self.q.shape[3]) if scale is None else scale)
        self.left, self.right = left, 0 if given["causal"] else right
        self.seqlens_k, self.leftpad_k = given["seqlens_k"], given["leftpad_k"]
        self.offset, self.offsets = given["offset"], given["offsets"]
        self.key_ranges, self.softcap = given["key_ranges"], given["softcap"]

    def constant(self, *values):
        """A node of one float, or of a list of ints, such as axes."""
        is_float = isinstance(values[0], float)
        return self.op.Constant(**{"value_float": values[0]} if is_float else {"value_ints": list(values)})

    def is_top_left(self):
        """Whether query i sees keys 0 to i: ONNX's is_causal."""
        is_square = isinstance(self.q.shape[2], int) and self.q.shape[2] == self.k.shape[2]
        is_aligned = self.offset == 0 if isinstance(self.offset, int) else self.offset is None and is_square
        others = self.seqlens_k, self.leftpad_k, self.offsets, self.key_ranges
        return is_aligned and (self.left, self.right) == (-1, 0) and all(x is None for x in others)

    def visible(self):
        """Which keys a row sees, as band_of in flash.h: (1 or B, 1, Nq, Nk), or None: all."""
        op, number = self.op, self.constant
        Nq, Nk = op.Shape(self.q, start=2, end=3), op.Shape(self.k, start=2, end=3)

        def positions(n):
            scalar = op.Squeeze(n)
            return op.Range(op.Sub(scalar, scalar), scalar, op.Squeeze(number(1)))

        def of_batches(x):
            return op.Unsqueeze(op.Cast(x, to=_INT64), number(1, 2, 3))

        i, j = op.Unsqueeze(positions(Nq), number(1)), positions(Nk)
        end, conditions = Nk, []
        if self.seqlens_k is not None:
            end = op.Max(op.Min(of_batches(self.seqlens_k), Nk), number(0))
            conditions.append(op.Less(j, end))
        if self.leftpad_k is not None:
            conditions.append(op.GreaterOrEqual(j, of_batches(self.leftpad_k)))
        if isinstance(self.offset, int):
            offset = number(max(-_FAR, min(self.offset, _FAR)))
        elif self.offset is not None:
            offset = self.offset
        elif self.offsets is not None:
            offset = op.Max(op.Min(of_batches(self.offsets), number(_FAR)), number(-_FAR))
        else:
            offset = op.Sub(end, Nq)
        position = op.Add(i, offset)
        if self.left >= 0:
            conditions.append(op.GreaterOrEqual(j, op.Sub(position, number(min(self.left, _FAR)))))
        if self.right >= 0:
            conditions.append(op.LessOrEqual(j, op.Add(position, number(min(self.right, _FAR)))))
        if self.key_ranges is not None:
            ranges = op.Unsqueeze(op.Cast(self.key_ranges, to=_INT64), number(1))
            begin, end = (op.Gather(ranges, number(n), axis=-1) for n in (0, 1))
            conditions += [op.GreaterOrEqual(j, begin), op.Less(j, end)]
        if not conditions:
            return None
        visible = conditions[0]
        for condition in conditions[1:]:
            visible = op.And(visible, condition)
        # Conditions on lengths alone have one row for all queries.
        return op.Expand(visible, op.Concat(number(1, 1), Nq, Nk, axis=0))
