#!/bin/sh
# mlx's causal mask with more queries than keys: the rows that may see no key see all of them.
#
# Versions   mlx 0.32.4 (its CPU build), numpy 2.4.6, Linux
# Behaviour  mask="causal" is aligned bottom-right, so of 5 queries over 2 keys the first 3 are before key 0. Each gets
#            the mean of all values, the future ones too, and passes gradients to V. With a sink the same rows are 0. A
#            row hidden by a bool mask gets the mean, one hidden by -inf NaN.
# Output     keys that each row sees: 2 2 2 1 2, with a sink: 0 0 0 1 2
#            dv of row 0 alone: 0.5, dq 0
#            hidden row: bool the mean, -inf NaN, with a sink 0 and 0
# Surprise   Such a row is expected to be 0, NaN or an error. Here a call that asks for a causal mask lets rows see the
#            future, with finite values, and whether it does depends on the sink.

. "$(dirname "$0")/packages.sh"
packages 'mlx[cpu]==0.32.4' numpy==2.4.6
"$PYTHON" - <<'END'
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
attend = mx.fast.scaled_dot_product_attention


def rows(q, k, v, **options):
    return np.array(attend(q, k, v, scale=1.0, **options))[0, 0]


def counts(o):
    return " ".join(str(np.count_nonzero(row)) for row in o)


rng = np.random.default_rng()
q, k = (mx.array(0.1 * rng.standard_normal((1, 1, n, 8)).astype(np.float32)) for n in (5, 2))
v = mx.array(np.eye(2, 8, dtype=np.float32)[None, None])  # a row of o shows the weight of each key
sinks = mx.zeros(1)
seen, with_sink = counts(rows(q, k, v, mask="causal")), counts(rows(q, k, v, mask="causal", sinks=sinks))
print(f"keys that each row sees: {seen}, with a sink: {with_sink}")
assert (seen, with_sink) == ("2 2 2 1 2", "0 0 0 1 2")

do = np.zeros((1, 1, 5, 8), np.float32)
do[:, :, 0] = 1
_, grads = mx.vjp(lambda q, v: attend(q, k, v, scale=1.0, mask="causal"), [q, v], [mx.array(do)])
dq, dv = (float(np.abs(np.array(x)).max()) for x in grads)
print(f"dv of row 0 alone: {dv:g}, dq {dq:g}")
assert np.isclose(dv, 0.5) and dq == 0

v = mx.array(rng.standard_normal((1, 1, 2, 8)).astype(np.float32))
hidden = mx.zeros((5, 2), dtype=mx.bool_)
said = []
for options in {}, {"sinks": sinks}:
    for mask in hidden, mx.full((5, 2), -float("inf")):
        o = rows(q, k, v, mask=mask, **options)
        mean = np.allclose(o, np.array(v)[0, 0].mean(0), atol=1e-5)
        said.append("the mean" if mean else "NaN" if np.isnan(o).all() else "other" if o.any() else "0")
print(f"hidden row: bool {said[0]}, -inf {said[1]}, with a sink {said[2]} and {said[3]}")
assert said == ["the mean", "NaN", "0", "0"]
END
