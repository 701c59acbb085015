#!/bin/sh
# ggml's flash attention on a CPU sums values in float16 for fewer than 64 queries, whatever precision is asked.
#
# Versions   ggml-python 0.0.45 (its own build of ggml), numpy 2.4.6, x86-64
# Behaviour  ggml_flash_attn_ext with a float16 V: at 64 queries and more each row is right to 1e-6. With 1 to 63,
#            so in every decode step, the running sum of P V is a float16 that no rescaling lowers. Weights e^(s - m)
#            are at most 1, so the sum stops to grow where a weight is below half of its last place.
#            ggml_flash_attn_ext_set_prec(GGML_PREC_F32) changes no bit of it.
# Output     4096 keys, V = 1 + 0.1 randn, relative error of o
#            1 query: 1.3e-01, with GGML_PREC_F32 1.3e-01
#            63 queries: 1.2e-01, with GGML_PREC_F32 1.2e-01
#            64 queries: 9.2e-07, with GGML_PREC_F32 9.2e-07
# Surprise   The name GGML_PREC_F32 and a float32 result suggest float32 sums. Prefill and decode of the same token
#            differ by 13 %, and a test of prefill, or of V with mean 0, shows nothing: there the terms cancel.

. "$(dirname "$0")/packages.sh"
packages ggml-python==0.0.45 numpy==2.4.6
"$PYTHON" - <<'END'
import ctypes

import ggml
import numpy as np

N, d = 4096, 64
rng = np.random.default_rng(0)


def attend(q, k, v, precision):
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=64 << 20, mem_buffer=None, no_alloc=False))
    tensors = []
    for x, kind in (q, ggml.GGML_TYPE_F32), (k, ggml.GGML_TYPE_F16), (v, ggml.GGML_TYPE_F16):
        tensors.append(ggml.ggml_new_tensor_4d(context, kind, d, len(x), 1, 1))
        ctypes.memmove(ggml.ggml_get_data(tensors[-1]), x.ctypes.data, x.nbytes)
    result = ggml.ggml_flash_attn_ext(context, *tensors, None, d**-0.5, 0.0, 0.0)
    if precision is not None:
        ggml.ggml_flash_attn_ext_set_prec(result, precision)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, result)
    ggml.ggml_graph_compute_with_ctx(context, graph, 1)
    o = np.empty(q.shape, np.float32)
    ctypes.memmove(o.ctypes.data, ggml.ggml_get_data(result), o.nbytes)
    ggml.ggml_free(context)
    return o


k = rng.standard_normal((N, d)).astype(np.float16)
v = (1 + 0.1 * rng.standard_normal((N, d))).astype(np.float16)
errors = {}
for queries in 1, 63, 64:
    q = rng.standard_normal((queries, d)).astype(np.float16).astype(np.float32)
    p = np.exp(q.astype(np.float64) @ k.astype(np.float64).T * d**-0.5)
    exact = p / p.sum(1, keepdims=True) @ v.astype(np.float64)
    by_default, in_float32 = (attend(q, k, v, precision) for precision in (None, ggml.GGML_PREC_F32))
    assert np.array_equal(by_default, in_float32)
    errors[queries] = np.linalg.norm(by_default - exact) / np.linalg.norm(exact)
    error = f"{errors[queries]:.1e}"
    print(f"{queries} quer{'y' if queries == 1 else 'ies'}: {error}, with GGML_PREC_F32 {error}")
assert errors[1] > 0.05 and errors[63] > 0.05 and errors[64] < 1e-5
END
