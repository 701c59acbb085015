#!/bin/sh
# com.microsoft.MultiHeadAttention with unidirectional=1 hides nothing from the last query of a longer key sequence.
#
# Versions   onnxruntime 1.32.0 (1.24.1 and 1.27.0 do the same), OpenVINO 2026.4.1, onnx 1.23.2, numpy 2.4.6; a CPU
# Behaviour  Rows 0 to Nq - 2 are aligned top-left: row i sees i + 1 keys. The last row sees all Nk. With Nq = Nk no
#            difference shows. OpenVINO gives the last row of the same file Nq keys.
# Output     keys that each row sees    onnxruntime    OpenVINO
#            3 x 5                      1 2 5          1 2 3
#            2 x 5                      1 5            1 2
#            1 x 5                      5              1
# Surprise   It is neither top-left nor bottom-right, and a row's result depends on how many rows come after it: a
#            prompt in chunks of 2 gives other values than in chunks of 3, and both are wrong in every row but the last.
#            One query, the usual test of a decode step, looks like bottom-right alignment.

. "$(dirname "$0")/packages.sh"
packages onnxruntime==1.32.0 openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
"$PYTHON" - <<'END'
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper


def model(Nq, Nk):
    names = dict(q=Nq, k=Nk, v=Nk)
    node = helper.make_node(
        "MultiHeadAttention", list(names), ["o"], domain="com.microsoft", num_heads=1, unidirectional=1
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, n, 8]) for name, n in names.items()]
    outputs = [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one node", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


print("keys that each row sees    onnxruntime    OpenVINO")
for Nq, Nk, of_onnxruntime, of_openvino in (3, 5, "1 2 5", "1 2 3"), (2, 5, "1 5", "1 2"), (1, 5, "5", "1"):
    q, k = (np.random.default_rng().standard_normal((1, n, 8)).astype(np.float32) for n in (Nq, Nk))
    v = np.eye(Nk, 8, dtype=np.float32)[None]  # a row of o shows the weight of each key
    session = onnxruntime.InferenceSession(model(Nq, Nk), providers=["CPUExecutionProvider"])
    compiled = openvino.Core().compile_model(
        openvino.Core().read_model(model(Nq, Nk)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    results = session.run(None, dict(q=q, k=k, v=v))[0], compiled([q, k, v])[0]
    seen = [" ".join(str(np.count_nonzero(row)) for row in o[0]) for o in results]
    print(f"{f'{Nq} x {Nk}':<27}{seen[0]:<15}{seen[1]}")
    assert seen == [of_onnxruntime, of_openvino]
END
