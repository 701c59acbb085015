"""torch.onnx.export: the exported model's values by onnxruntime, beside float64 and eager's."""

import subprocess
import sys

import pytest
import torch
from conftest import Backend, check_o
from reference import attention

import minimal_attn
from minimal_attn import flash_attn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore")


def options_of(lengths, pads, positions, sinks):
    """Each option of a call, alone and with others."""
    return [
        {},
        {"causal": True},
        {"causal": True, "offset": 0},
        {"causal": True, "offset": -3},
        {"window_size": (4, 1)},
        {"window_size": (0, 2**62), "offset": 2**40},
        {"causal": True, "seqlens_k": lengths},
        {"seqlens_k": lengths - 3, "leftpad_k": pads},
        {"causal": True, "window_size": (7, 5), "leftpad_k": pads},
        {"causal": True, "offset": positions},
        {"softmax_scale": 0.3},
        {"softmax_scale": -0.2, "causal": True},
        {"softmax_scale": 0.0, "causal": True},
        {"sinks": sinks, "causal": True, "seqlens_k": lengths},
        {"sinks": sinks[None].expand(len(lengths), -1) + 1.0},
    ]


class Model(torch.nn.Module):
    """Every option; o, the log-sum-exp and the state."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, q, k, v, lengths, pads, positions, sinks):
        q, results = q * self.weight, []
        for options in options_of(lengths, pads, positions, sinks):
            results.append(minimal_attn.forward(q, k, v, **options))
        causal = {"causal": True, "seqlens_k": lengths}
        results += minimal_attn.forward(q, k, v, return_lse=True, **causal)
        results += minimal_attn.forward(q, k, v, return_state=True, **causal)
        return tuple(results)


def inputs_of(backend, B, dtype=torch.float32, **sizes):
    q, k, v = backend.qkv(B=B, d=16, dtype=dtype, **sizes)
    ints = [backend.integers(low, k.shape[2] + 2, B, dtype=torch.int32) for low in (0, 0, -20)]
    ints[0][:1] = 0  # this batch sees no key
    return q, k, v, *ints, backend.randn(4)


def export(model, inputs, path, opset, **options):
    torch.onnx.export(
        model.eval(),
        inputs,
        path,
        dynamo=True,
        opset_version=opset,
        verbose=False,
        external_data=False,
        **options,
    )
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(*inputs):
        names = [x.name for x in session.get_inputs()]
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, feed)]

    return run


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("opset", [18, 20, 23, 24])
def test_every_option(seed, tmp_path, opset):
    """Also for other sizes than those that were exported."""
    backend, path, model = Backend("cpu", seed), str(tmp_path / "model.onnx"), Model()
    dynamic = torch.export.Dim.DYNAMIC
    keys, of_batches = {0: dynamic, 2: dynamic}, {0: dynamic}
    shapes = {
        "q": keys,
        "k": keys,
        "v": keys,
        "lengths": of_batches,
        "pads": of_batches,
        "positions": of_batches,
    }
    run = export(model, inputs_of(backend, 2), path, opset, dynamic_shapes=shapes | {"sinks": None})
    # With sinks, without a positive scale, with lse or state the scores are computed by steps.
    assert operators(path).count("Attention") == (11 if opset >= 23 else 0)
    for sizes in dict(B=2), dict(B=1, Nq=1, Nk=1), dict(B=3, Nq=40, Nk=9), dict(B=2, Nq=3, Nk=300):
        inputs = inputs_of(backend, **sizes)
        q, k, v, *others = inputs
        results = run(*inputs)
        for o, options in zip(results, options_of(*others), strict=False):
            check_o(o, attention(q, k, v, **options), q.dtype)
        with torch.no_grad():
            for actual, expected in zip(results, model(*inputs), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [20, 23])
def test_half(seed, tmp_path, opset):
    """The softmax is computed in float32."""
    backend = Backend("cpu", seed)
    inputs = inputs_of(backend, 2, torch.float16)
    model = Model().to(torch.float16)
    results = export(model, inputs, str(tmp_path / "model.onnx"), opset)(*inputs)
    for actual, expected in zip(results, model(*inputs), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=4e-3, atol=4e-3)


def test_causal_without_a_mask(seed, tmp_path):
    """Where ONNX's is_causal means the same, no mask is made."""
    backend = Backend("cpu", seed)
    for sizes, options in (dict(Nq=9, Nk=9), {}), (dict(Nq=9, Nk=5), {"offset": 0}):

        class Causal(torch.nn.Module):
            def forward(self, q, k, v, options=options):
                return minimal_attn.forward(q, k, v, causal=True, **options)

        path, inputs = str(tmp_path / "model.onnx"), backend.qkv(**sizes)
        [o] = export(Causal(), inputs, path, 23)(*inputs)
        assert operators(path) == ["Attention"]
        check_o(o, attention(*inputs, causal=True, **options), o.dtype)


@pytest.mark.parametrize("opset", [18, 23])
def test_key_ranges(seed, tmp_path, opset):
    """One row for all batches, or one for each; with other parts of the mask; rows that see no key."""
    backend = Backend("cpu", seed)

    class Ranges(torch.nn.Module):
        def forward(self, q, k, v, ranges, of_all):
            alone = minimal_attn.forward(q, k, v, key_ranges=ranges)
            return alone, minimal_attn.forward(q, k, v, key_ranges=of_all, causal=True, window_size=(9, 0))

    dynamic = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    rows = {1: torch.export.Dim.DYNAMIC}
    shapes = dict(q=dynamic, k=dynamic, v=dynamic, ranges={0: torch.export.Dim.DYNAMIC} | rows, of_all=rows)

    def inputs(B, Nq, Nk):
        ranges = [backend.integers(-9, Nk + 9, n, Nq, 2, dtype=torch.int32) for n in (B, 1)]
        return *backend.qkv(B=B, Nq=Nq, Nk=Nk, d=16), *ranges

    path = str(tmp_path / "model.onnx")
    run = export(Ranges(), inputs(2, 70, 90), path, opset, dynamic_shapes=shapes)
    assert operators(path).count("Attention") == (2 if opset >= 23 else 0)
    for sizes in (2, 70, 90), (3, 5, 40):
        q, k, v, ranges, of_all = inputs(*sizes)
        alone, banded = run(q, k, v, ranges, of_all)
        check_o(alone, attention(q, k, v, key_ranges=ranges), q.dtype)
        check_o(banded, attention(q, k, v, key_ranges=of_all, causal=True, window_size=(9, 0)), q.dtype)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_model_of_transformers(seed, tmp_path, name):
    """Each layer keeps one operator. Without an attention_mask packed position_ids count."""
    pytest.importorskip("transformers")
    from test_huggingface import Logits, decoder, sizes_of_any_kind

    from minimal_attn.huggingface import register

    register()
    model = decoder(name, seed, use_cache=False)
    model.set_attn_implementation("minimal_attn")

    logits = Logits(model, "position_ids")

    def inputs(B, N, first):  # two documents
        positions = torch.cat((torch.arange(first), torch.arange(N - first)))
        return torch.randint(0, 90, (B, N)), positions[None].expand(B, -1).contiguous()

    path = str(tmp_path / "model.onnx")
    sizes = dict.fromkeys(("ids", "other"), sizes_of_any_kind())
    with torch.no_grad():
        run = export(logits, inputs(2, 20, 8), path, 23, dynamic_shapes=sizes)
        assert operators(path).count("Attention") == model.config.num_hidden_layers
        for given in inputs(2, 20, 8), inputs(3, 33, 33), inputs(4, 9, 1):
            torch.testing.assert_close(run(*given)[0], logits(*given), rtol=1e-4, atol=1e-5)


def test_drop_ins(seed, tmp_path):
    """flash_attn's function, with and without gradients of the same bits, PyTorch's function, merge."""
    backend = Backend("cpu", seed)

    class DropIns(torch.nn.Module):
        def forward(self, q, k, v):
            tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
            state = minimal_attn.forward(q, k, v, return_state=True)
            return (
                flash_attn.flash_attn_func(*tokens_first, causal=True),
                flash_attn.flash_attn_func(*tokens_first, deterministic=True),
                minimal_attn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                minimal_attn.merge(state, state)[0],
            )

    inputs = backend.qkv()
    results = export(DropIns(), inputs, str(tmp_path / "model.onnx"), 23)(*inputs)
    for actual, expected in zip(results, DropIns()(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["state", "block_table"])
def test_what_has_no_translation(seed, tmp_path, name):
    backend = Backend("cpu", seed)
    tensors = backend.qkv()
    table = torch.zeros(2, 1, dtype=torch.int32)
    state = minimal_attn.forward(*tensors, return_state=True)

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return minimal_attn.forward(
                q, k, v, **({"state": state} if name == "state" else {"block_table": table})
            )

    with pytest.raises(Exception, match=f"{name} must be None in an export to ONNX, but was given"):
        export(Module(), tensors, str(tmp_path / "model.onnx"), 23)


def test_exporter_imported_before():
    code = """
import torch, io
class Module(torch.nn.Module):
    def forward(self, q, attend=None):
        return q.relu() if attend is None else attend(q, q, q)
x = torch.ones(1, 1, 2, 4)
torch.onnx.export(Module(), (x,), dynamo=True, verbose=False)
import minimal_attn
class Module(torch.nn.Module):
    def forward(self, q):
        return minimal_attn.forward(q, q, q)
torch.onnx.export(Module(), (x,), dynamo=True, verbose=False)
from minimal_attn.onnx import translation_table
table = translation_table()
torch.onnx.export(Module(), (x,), dynamo=True, verbose=False, custom_translation_table=table)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
