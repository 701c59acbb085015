#!/bin/sh
# One ONNX file with an Attention node gives other values in onnxruntime 1.24.1, 1.27.0 and 1.32.0.
#
# Versions   onnxruntime 1.24.1, 1.27.0, 1.32.0 on a CPU; onnx 1.23.2; numpy 2.4.6
# Behaviour  The operator's version in the file stays 24. What changed in the kernel, without an error or a warning:
#            softcap with a bias: 1.24 caps (score + bias), the later ones cap the score and add the bias. So 1.24
#              lets a masked key through: -inf becomes -softcap.
#            is_causal, 1 query, 5 keys, no past: all keys in 1.24 and 1.27, the first alone in 1.32.
#            is_causal with nonpad_kv_seqlen 4, 2 queries: top-left until 1.27, bottom-right in 1.32.
#            a row without keys: the mean of V for a bool mask and NaN for -inf until 1.27, then 0.
# Output     1.24.1: softcap last, key behind a -inf seen; one query sees 5 keys; with 4 of 5 keys 1 2; mean; NaN
#            1.27.0: softcap first; one query sees 5 keys; with 4 of 5 keys 1 2; mean; NaN
#            1.32.0: softcap first; one query sees 1 keys; with 4 of 5 keys 3 4; 0; 0
# Surprise   An opset is read as the promise that a file keeps its meaning. Here a decode step that was right by luck
#            (one query, all keys) attends to the first token alone after an upgrade, and a padded row's NaN that a
#            test watched for is gone.

. "$(dirname "$0")/packages.sh"
for version in 1.24.1 1.27.0 1.32.0; do
    packages onnxruntime==$version onnx==1.23.2 numpy==2.4.6
    "$PYTHON" - <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

KINDS = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "int64": TensorProto.INT64}
NAMES = ["q", "k", "v", "mask", "past_k", "past_v", "nonpad"]
onnxruntime.set_default_logger_severity(4)


def attend(q, k, v, mask=None, nonpad=None, **attributes):
    feed = {name: x for name, x in dict(q=q, k=k, v=v, mask=mask, nonpad=nonpad).items() if x is not None}
    node = helper.make_node("Attention", [n if n in feed else "" for n in NAMES], ["o"], **attributes)
    inputs = [helper.make_tensor_value_info(n, KINDS[str(x.dtype)], x.shape) for n, x in feed.items()]
    outputs = [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one node", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0][0, 0]


def softmax(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


rng = np.random.default_rng()
said = []
q, k, v = (2 * rng.standard_normal((1, 1, n, 8)).astype(np.float32) for n in (3, 5, 5))
bias = 3 * rng.standard_normal((3, 5)).astype(np.float32)
s = 0.7 * (q @ k.swapaxes(2, 3))[0, 0]
o = attend(q, k, v, bias, scale=0.7, softcap=2.0)
first, last = softmax(2 * np.tanh(s / 2) + bias) @ v[0, 0], softmax(2 * np.tanh((s + bias) / 2)) @ v[0, 0]
is_first, is_last = np.allclose(o, first, atol=1e-4), np.allclose(o, last, atol=1e-4)
assert is_first != is_last
zeros = lambda n: np.zeros((1, 1, n, 8), np.float32)
keys = np.eye(5, 8, dtype=np.float32)[None, None]  # a row of o shows the weight of each key
hidden = np.zeros((1, 5), np.float32)
hidden[0, 4] = -np.inf
leaks = attend(zeros(1), zeros(5), keys, hidden, softcap=2.0)[0, 4] > 0.01
said.append("softcap first" if is_first else "softcap last, key behind a -inf seen" if leaks else "softcap last")
said.append(f"one query sees {np.count_nonzero(attend(zeros(1), zeros(5), keys, is_causal=1))} keys")
o = attend(zeros(2), zeros(5), keys, nonpad=np.array([4]), is_causal=1)
said.append("with 4 of 5 keys " + " ".join(str(np.count_nonzero(row)) for row in o))
mask = np.zeros((1, 5), bool)
for m in mask, np.where(mask, 0, -np.inf).astype(np.float32):
    row = attend(zeros(1), zeros(5), v, m)[0]
    mean = np.allclose(row, v.mean((0, 1, 2)), atol=1e-5)
    said.append("NaN" if np.isnan(row).all() else "0" if not row.any() else "mean" if mean else "other")
line = f"{onnxruntime.__version__}: {'; '.join(said)}"
print(line)
assert line in {
    "1.24.1: softcap last, key behind a -inf seen; one query sees 5 keys; with 4 of 5 keys 1 2; mean; NaN",
    "1.27.0: softcap first; one query sees 5 keys; with 4 of 5 keys 1 2; mean; NaN",
    "1.32.0: softcap first; one query sees 1 keys; with 4 of 5 keys 3 4; 0; 0",
}
END
done
