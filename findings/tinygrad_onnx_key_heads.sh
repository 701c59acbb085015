#!/bin/sh
# tinygrad gives query head h of an ONNX Attention node the key head h % Hkv; its own attention takes h // group.
#
# Versions   tinygrad 0.14.0 (DEV=CPU, needs clang), onnx 1.23.2 (its reference evaluator beside it), numpy 2.4.6
# Behaviour  The importer of Attention repeats the key heads as a whole (0 1 0 1), the specification and
#            Tensor.scaled_dot_product_attention(enable_gqa=True) repeat each one (0 0 1 1). No error, shapes fit.
# Output     key head of each query head: reference 0 0 0 0 1 1 1 1, tinygrad's own 0 0 0 0 1 1 1 1,
#            tinygrad's importer 0 1 0 1 0 1 0 1
# Surprise   Both kinds of attention are right in one program, and the importer is right for Hkv = 1 and Hkv = Hq, so
#            multi-head and multi-query models import well. Only grouped ones, which most language models are, read
#            wrong keys.

. "$(dirname "$0")/packages.sh"
command -v clang >/dev/null || { echo "not tried: tinygrad's CPU device needs clang"; exit 77; }
packages tinygrad==0.14.0 onnx==1.23.2 numpy==2.4.6
DEV=CPU "$PYTHON" - <<'END'
import numpy as np
from onnx import TensorProto, helper, save
from onnx.reference import ReferenceEvaluator
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner


def key_heads(Hq, Hkv):
    rng = np.random.default_rng()
    feed = {n: rng.standard_normal((1, H, 3, 8)).astype(np.float32) for n, H in dict(q=Hq, k=Hkv, v=Hkv).items()}
    feed["v"][:] = np.arange(Hkv)[:, None, None]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in feed.items()]
    outputs = [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)]
    graph = helper.make_graph([helper.make_node("Attention", list(feed), ["o"])], "one node", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    save(model, "attention.onnx")
    tensors = {name: Tensor(x) for name, x in feed.items()}
    results = [
        ReferenceEvaluator(model).run(None, feed)[0],
        Tensor.scaled_dot_product_attention(*tensors.values(), enable_gqa=True).numpy(),
        OnnxRunner("attention.onnx")(tensors)["o"].numpy(),
    ]
    return [" ".join(str(round(float(x))) for x in o.mean((0, 2, 3))) for o in results]


seen = key_heads(8, 2)
print(f"key head of each query head: reference {seen[0]}, tinygrad's own {seen[1]},")
print(f"tinygrad's importer {seen[2]}")
assert seen == ["0 0 0 0 1 1 1 1", "0 0 0 0 1 1 1 1", "0 1 0 1 0 1 0 1"]
for Hkv in 1, 8:
    reference, _, imported = key_heads(8, Hkv)
    assert reference == imported
END
