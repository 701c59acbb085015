#!/bin/sh
# OpenVINO reads an ONNX Attention node without its window, and a scale of 0 as 1 / sqrt(d).
#
# Versions   openvino 2026.4.1, onnx 1.23.2 (its reference evaluator beside it), numpy 2.4.6; a CPU
# Behaviour  left_window_size and right_window_size of Attention-25 are not read: each query sees every key, or every
#            earlier one with is_causal. scale=0.0, whose softmax is uniform, gives the default scale. With static
#            shapes and an empty cache, GroupQueryAttention gives zeros and an empty cache; with dynamic shapes it is
#            right. None of this raises an error.
# Output     keys that 6 queries see      reference      OpenVINO
#            causal, left window 2        1 2 3 3 3 3    1 2 3 4 5 6
#            windows 1 and 1              2 3 3 3 3 2    6 6 6 6 6 6
#            scale 0 is the default scale
#            GroupQueryAttention, dynamic: 1 2 3 4 5, static: 0 0 0 0 0
# Surprise   An attribute of a new opset that an importer does not know is usually refused. A model with sliding windows
#            is right on every input that is shorter than the window, so a smoke test passes.

. "$(dirname "$0")/packages.sh"
packages openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
"$PYTHON" - <<'END'
import numpy as np
import openvino
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

KINDS = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}


def model(op, feed, outputs, opsets, shapes=None, **attributes):
    domain = "com.microsoft" if "com.microsoft" in opsets else ""
    node = helper.make_node(op, list(feed), list(outputs), domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, KINDS[str(x.dtype)], (shapes or {}).get(name, x.shape))
        for name, x in feed.items()
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    graph = helper.make_graph([node], "one node", inputs, outputs)
    imports = [helper.make_opsetid(*item) for item in opsets.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def run(onnx_model, feed):
    core = openvino.Core()
    read = core.read_model(onnx_model.SerializeToString())
    return core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(list(feed.values()))[0]


def counts(rows):
    return " ".join(str(np.count_nonzero(row > 1e-6)) for row in rows)


rng = np.random.default_rng()
q, k = 0.1 * rng.standard_normal((2, 1, 1, 6, 8)).astype(np.float32)
v = np.eye(6, 8, dtype=np.float32)[None, None]  # a row of o shows the weight of each key
feed = dict(q=q, k=k, v=v)
print("keys that 6 queries see      reference      OpenVINO")
for name, attributes, there, here in [
    ("causal, left window 2", dict(is_causal=1, left_window_size=2), "1 2 3 3 3 3", "1 2 3 4 5 6"),
    ("windows 1 and 1", dict(left_window_size=1, right_window_size=1), "2 3 3 3 3 2", "6 6 6 6 6 6"),
]:
    node = model("Attention", feed, {"o": None}, {"": 25}, **attributes)
    seen = counts(ReferenceEvaluator(node).run(None, feed)[0][0, 0]), counts(run(node, feed)[0, 0])
    print(f"{name:<29}{seen[0]:<15}{seen[1]}")
    assert seen == (there, here)

q, k, v = 2 * rng.standard_normal((3, 1, 1, 6, 8)).astype(np.float32)
feed = dict(q=q, k=k, v=v)
zero, default = (run(model("Attention", feed, {"o": None}, {"": 24}, **a), feed) for a in (dict(scale=0.0), {}))
assert np.array_equal(zero, default) and not np.allclose(zero, v.mean(2, keepdims=True), atol=0.1)
print("scale 0 is the default scale")

x = np.zeros((1, 5, 16), np.float32)
empty = np.zeros((1, 1, 0, 16), np.float32)
feed = dict(q=x, k=x, v=np.eye(5, 16, dtype=np.float32)[None], past_k=empty, past_v=empty)
feed |= dict(seqlens_k=np.array([4], np.int32), total=np.array(5, np.int32))
opsets = {"": 21, "com.microsoft": 1}
seen = []
for past in "past", 0:
    shapes = dict.fromkeys(["past_k", "past_v"], [1, 1, past, 16])
    outputs = {"o": [1, 5, 16], "new_k": [1, 1, "all", 16], "new_v": [1, 1, "all", 16]}
    node = model("GroupQueryAttention", feed, outputs, opsets, shapes, num_heads=1, kv_num_heads=1)
    seen.append(counts(run(node, feed)[0]))
print(f"GroupQueryAttention, dynamic: {seen[0]}, static: {seen[1]}")
assert seen == ["1 2 3 4 5", "0 0 0 0 0"]
END
