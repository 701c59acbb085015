#!/bin/sh
# keras.layers.MultiHeadAttention gives a hidden row other values when the attention scores are asked for.
#
# Versions   keras 3.15.1 with jax 0.10.2 (with torch 2.11.0 the same), numpy 2.4.6; a CPU
# Behaviour  A row whose attention_mask is all False gets the mean of the projected values. With
#            return_attention_scores=True it gets 0, and weights of 0. Other rows agree to 1e-6.
# Output     rows that see keys differ by less than 1e-5, the hidden row by 0.83 (it is 0 with the scores)
# Surprise   An argument that asks for one more result chooses another implementation, so looking at the attention of a
#            model changes its output. In a batch with padding this concerns every padded query.

. "$(dirname "$0")/packages.sh"
packages keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax JAX_PLATFORMS=cpu KERAS_HOME=. "$PYTHON" - <<'END'
import keras
import numpy as np

rng = np.random.default_rng()
layer = keras.layers.MultiHeadAttention(2, 8)
x = rng.standard_normal((2, 5, 16)).astype(np.float32)
mask = np.ones((2, 5, 5), bool)
mask[0, 1] = False
alone = np.asarray(layer(x, x, attention_mask=mask))
beside, scores = map(np.asarray, layer(x, x, attention_mask=mask, return_attention_scores=True))
difference = np.abs(alone - beside).max(-1)
hidden = difference[0, 1]
difference[0, 1] = 0
assert difference.max() < 1e-5 and hidden > 1e-3
assert not beside[0, 1].any() and not scores[0, :, 1].any()
print(f"rows that see keys differ by less than 1e-5, the hidden row by {hidden:.2f} (it is 0 with the scores)")
END
