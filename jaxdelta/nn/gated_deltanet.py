"""Gated DeltaNet layer, as in the linear layers of Qwen3.5.

    q | k | v = silu(short_conv(W_qkv x))           q, k l2-normalised; value head h reads key head h // (H / key heads)
    beta = sigmoid(W_b x),    g = -exp(A_log) softplus(W_a x + dt_bias)
    o = gated_delta_rule(q, k, v, g, beta)
    y = W_out (RMSNorm(o) * w * silu(W_z x))

Sources: Yang, Kautz, Hatamizadeh, arXiv 2412.06464; layout of the projections from the Qwen3.5 model of transformers 5.24.
beta, g and S are f32 or wider whatever the model's dtype; transformers rounds beta to the model's dtype.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxdelta.dims import along_last, linear
from jaxdelta.nn.mixer import LayerTap, LinearMixer
from jaxdelta.nn.parameters import constant, normal
from jaxdelta.nn.sizes import LinearSizes
from jaxdelta.ops.delta_rule import bounded
from jaxdelta.ops.norms import gated_rms_norm, l2norm

LARGEST_A_LOG = 80.0  # a rate of 6e34
SHORTEST_STEP = 1e-30  # no visible decay at the rates of a trained layer


class GatedDeltaNet(LinearMixer):
    """Linear layer; weights are [out, in], ``conv`` is [E, W], ``A_log``, ``dt_bias`` and ``norm`` are f32."""

    def __init__(self, sizes: LinearSizes, *, dtype, rngs: nnx.Rngs):
        D, H, V = sizes.width, sizes.num_value_heads, sizes.value_dim
        self.sizes = sizes
        self.in_qkv = normal(rngs, (sizes.conv_channels, D), dtype)
        self.in_z = normal(rngs, (H * V, D), dtype)
        self.in_b = normal(rngs, (H, D), dtype)
        self.in_a = normal(rngs, (H, D), dtype)
        self.conv = normal(rngs, (sizes.conv_channels, sizes.conv_width), dtype, scale=sizes.conv_width**-0.5)
        self.A_log, self.dt_bias = decay_parameters(rngs, H)
        self.norm = constant((V,), 1.0)
        self.out = normal(rngs, (D, H * V), dtype)

    def project(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """q | k | v before the convolution."""
        return linear(x, self.in_qkv[...])

    def filters(self) -> Float[Array, "E W"]:
        """Filters of the convolution."""
        return self.conv[...]

    def heads(self, qkv: Float[Array, "B T E"], tap: LayerTap) -> tuple[Array, Array, Array]:
        """q and k, l2-normalised and repeated to the value heads, [B, T, H, K], and v [B, T, H, V]."""
        c = self.sizes
        at = c.num_key_heads * c.key_dim
        q, k, v = jnp.split(jax.nn.silu(qkv), (at, 2 * at), axis=-1)
        groups = c.num_value_heads // c.num_key_heads
        q, k = (tap(name, a.reshape(*a.shape[:2], -1, c.key_dim)) for name, a in (("q_unnormed", q), ("k_unnormed", k)))
        q, k = (jnp.repeat(l2norm(a), groups, axis=2) for a in (q, k))
        return q, k, v.reshape(*v.shape[:2], -1, c.value_dim)

    def gates(self, x: Float[Array, "B T D"], tap: LayerTap) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """beta in (0, 1) and g <= 0, in f32 or wider."""
        wide = self.A_log[...].dtype
        beta = jax.nn.sigmoid(tap("beta_logit", linear(x, self.in_b[...], dtype=wide)))
        return beta, log_decay(linear(x, self.in_a[...], dtype=wide), self.A_log[...], self.dt_bias[...])

    def normed(self, o: Float[Array, "B T H V"], x: Float[Array, "B T D"], tap: LayerTap) -> Float[Array, "B T H V"]:
        """``o`` of each head after its norm, times the gate."""
        z = tap("z", linear(x, self.in_z[...]).reshape(o.shape))
        return gated_rms_norm(o, self.norm[...], z, eps=self.sizes.norm_eps)


def log_decay(x: Float[Array, "B T H"], A_log: Float[Array, " H"], dt_bias: Float[Array, " H"]) -> Float[Array, "B T H"]:
    """g = -exp(A_log) softplus(x + dt_bias), finite for every finite input.

    In f32 the rate exp(A_log) overflows above A_log = 88 and the softplus is 0 below x = -103: their product would be NaN.
    A rate at its bound empties the state at every token.
    """
    rate = jnp.exp(jnp.minimum(A_log, LARGEST_A_LOG))
    step = jax.nn.softplus(x + along_last(dt_bias, x))
    return bounded(-along_last(rate, x) * jnp.maximum(step, SHORTEST_STEP))


def decay_parameters(rngs: nnx.Rngs, H: int) -> tuple[nnx.Param, nnx.Param]:
    """Fresh A_log and dt_bias, f32, as in Mamba-2 and fla: rates A in (1, 16), steps dt in (1e-3, 1e-1).

    The horizons 1 / (1 - exp(-A dt)) lie between about 1 and 1,000 tokens.
    """
    rate = jax.random.uniform(rngs.params(), (H,), jnp.float32, minval=1.0, maxval=16.0)
    step = jnp.exp(jax.random.uniform(rngs.params(), (H,), jnp.float32, minval=np.log(1e-3), maxval=np.log(1e-1)))
    return nnx.Param(jnp.log(rate)), nnx.Param(jnp.log(jnp.expm1(step)))
