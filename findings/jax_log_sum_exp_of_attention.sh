#!/bin/sh
# The log-sum-exp of jax.nn.dot_product_attention(return_residual=True) is too coarse to merge with; its gradient is 0.
#
# Versions   jax 0.10.2, numpy 2.4.6; a CPU
# Behaviour  It has the keys' dtype. In bfloat16 a value of 20 has a step of 0.125, so the weight e^lse with which two
#            chunks of keys are merged is off by up to 6 %. Its gradient is 0 without an error, so a loss of merged
#            chunks (ring attention) trains on wrong gradients, in float32, too. A row without keys gets -2.4e38 and the
#            mean of V.
# Output     bfloat16, relative error of o: in one call 2.0e-03, merged of two chunks 7.5e-03
#            float32, relative error of dq: in one call below 1e-5, merged of two chunks 6.3e-01
# Surprise   Such merges are what a log-sum-exp is returned for. Its documentation names neither the dtype nor that the
#            gradient stops; FlashAttention's and PyTorch's are float32 for half inputs.

. "$(dirname "$0")/packages.sh"
packages jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$PYTHON" - <<'END'
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng()
attend = jax.nn.dot_product_attention
inputs = [jnp.asarray(x * rng.standard_normal((2, 64, 4, 64)), jnp.bfloat16) for x in (3, 3, 1)]


def merged(q, k, v):
    chunks = [attend(q, k[:, at], v[:, at], return_residual=True) for at in (slice(0, 32), slice(32, 64))]
    lse = jnp.stack([lse for _, lse in chunks]).astype(jnp.float32)
    weights = jax.nn.softmax(lse, axis=0)[..., None]
    return sum(w * o.astype(jnp.float32) for w, (o, _) in zip(weights, chunks))


def exact(q, k, v):
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / 8
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v, precision="highest")


def error(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(x - y) / np.linalg.norm(y)


expected = exact(*(x.astype(jnp.float32) for x in inputs))
whole, parts = (error(f(*inputs), expected) for f in (attend, merged))
print(f"bfloat16, relative error of o: in one call {whole:.1e}, merged of two chunks {parts:.1e}")
assert parts > 2 * whole
_, lse = attend(*inputs, return_residual=True)
assert lse.dtype == jnp.bfloat16
floats = [x.astype(jnp.float32) for x in inputs]
do = rng.standard_normal(expected.shape)
dq = [jax.grad(lambda q: (f(q, *floats[1:]) * do).sum())(floats[0]) for f in (exact, attend, merged)]
whole, parts = error(dq[1], dq[0]), error(dq[2], dq[0])
print(f"float32, relative error of dq: in one call below 1e-5, merged of two chunks {parts:.1e}")
assert whole < 1e-5 and parts > 0.1
assert not jax.grad(lambda q: attend(q, *floats[1:], return_residual=True)[1].sum())(floats[0]).any()
o, lse = attend(*floats, mask=jnp.zeros((1, 1, 64, 64), bool), return_residual=True)
assert np.allclose(o, floats[2].mean(1, keepdims=True), atol=1e-5) and (np.asarray(lse) < -2e38).all()
assert np.isfinite(np.asarray(lse)).all()
END
