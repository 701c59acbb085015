#!/bin/sh
# A row that a mask hides is 0 in PyTorch; exported it is 0, the mean of V or NaN, by opset and by converter.
#
# Versions   torch 2.11.0, onnxscript 0.7.0, onnx 1.23.2, onnxruntime 1.32.0, openvino 2026.4.1; a CPU
# Behaviour  From opset 23 on, torch.onnx.export writes an Attention node for scaled_dot_product_attention, which keeps
#            the 0. Before, it writes MatMul, Add and Softmax. For a bool mask it then writes IsNaN and Where, too, to
#            get the 0 back, but no NaN comes and the row is the mean. For a floating-point mask there is no such
#            guard: NaN. OpenVINO's converter of torch models gives NaN for both.
# Output     mask    torch   opset 18   opset 20   opset 23   OpenVINO from torch
#            bool    0       mean       mean       0          NaN
#            -inf    0       NaN        NaN        0          NaN
# Surprise   The guard is there, so the exporter means to keep the 0. Example inputs of an export seldom have such a
#            row, so a comparison of values with them shows nothing.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0 onnxscript==0.7.0 onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1
"$PYTHON" -W ignore - <<'END'
import logging

import onnxruntime
import openvino
import torch
from torch.nn.functional import scaled_dot_product_attention

logging.disable(logging.WARNING)
exact = {"INFERENCE_PRECISION_HINT": "f32"}


class Model(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, mask)


def name(o):
    row = torch.as_tensor(o)[:, :, 1]
    if row.isnan().any():
        return "NaN"
    return "0" if not row.any() else "mean" if torch.allclose(row, v.mean(2), atol=1e-5) else "other"


q, k, v = (torch.randn(1, 2, n, 16) for n in (3, 5, 5))
seen = torch.ones(3, 5, dtype=torch.bool)
seen[1] = False
lines = []
for mask in seen, torch.zeros(3, 5).masked_fill(~seen, -torch.inf):
    inputs = q, k, v, mask
    line = [name(Model()(*inputs))]
    for opset in 18, 20, 23:
        program = torch.onnx.export(Model(), inputs, dynamo=True, opset_version=opset, verbose=False)
        program.save("model.onnx")
        session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
        feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs)}
        line.append(name(session.run(None, feed)[0]))
    converted = openvino.convert_model(Model(), example_input=inputs)
    line.append(name(openvino.Core().compile_model(converted, "CPU", exact)([x.numpy() for x in inputs])[0]))
    lines.append(line)
print("mask    torch   opset 18   opset 20   opset 23   OpenVINO from torch")
for kind, line in zip(("bool", "-inf"), lines):
    print("{:<8}{:<8}{:<11}{:<11}{:<11}{}".format(kind, *line))
assert lines == [["0", "mean", "mean", "0", "NaN"], ["0", "NaN", "NaN", "0", "NaN"]]
END
