"""The linear layers of flash-linear-attention: DeltaNet, Gated DeltaNet and Gated DeltaProduct in one.

    q, k = activation(short_conv(W x)), normalised per head;   v = silu(short_conv(W x));   n_h keys and values a token
    beta = sigmoid(W_b x), or 1; twice that if negative eigenvalues are allowed
    g = -exp(A_log) softplus(W_a x + dt_bias), or 0
    o = gated_delta_product(q, k, v, g, beta);   y = W_out (RMSNorm(o) * w * gate(W_z x)), or without the gate

Sources: Yang et al., arXiv 2406.06484 (DeltaNet); Yang, Kautz, Hatamizadeh, arXiv 2412.06464 (Gated DeltaNet);
Siems et al., arXiv 2502.10297 (DeltaProduct); layouts and options from flash-linear-attention 0.6. Rows of W_k, W_v and
W_b are step-major: all heads of the first Householder step, then all of the second. Each token has one decay.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxdelta.dims import accumulation_dtype, linear
from jaxdelta.nn.gated_deltanet import decay_parameters, log_decay
from jaxdelta.nn.mixer import LayerTap, LinearMixer
from jaxdelta.nn.parameters import constant, normal
from jaxdelta.nn.sizes import LinearSizes
from jaxdelta.ops.norms import gated_rms_norm, l2norm, rms_norm

ACTIVATIONS = {"silu": jax.nn.silu, "relu": jax.nn.relu, "elu": lambda x: jax.nn.elu(x) + 1, "identity": lambda x: x}
GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class GatedDeltaProduct(LinearMixer):
    """Linear layer; weights are [out, in], filters [channels, W]; ``A_log``, ``dt_bias`` and ``norm`` are f32."""

    def __init__(self, sizes: LinearSizes, *, dtype, rngs: nnx.Rngs):
        D, G, H, K, V = sizes.width, sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim
        n, W = sizes.num_householder, sizes.conv_width
        self.sizes = sizes
        rows = {"q": G * K, "k": n * G * K, "v": n * H * V}
        for name, count in rows.items():
            setattr(self, name, normal(rngs, (count, D), dtype))
            if W > 1:
                setattr(self, "conv_" + name, normal(rngs, (count, W), dtype, scale=W**-0.5))
        if sizes.write_gate:
            self.b = normal(rngs, (n * H, D), dtype)
        if sizes.forget_gate:
            self.a = normal(rngs, (H, D), dtype)
            self.A_log, self.dt_bias = decay_parameters(rngs, H)
        if sizes.output_gate is not None:
            self.z = normal(rngs, (H * V, D), dtype)
        self.norm = constant((V,), 1.0)
        self.out = normal(rngs, (D, H * V), dtype)

    def project(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """q | k | v before the convolution."""
        return jnp.concatenate([linear(x, w[...]) for w in (self.q, self.k, self.v)], axis=-1)

    def filters(self) -> Float[Array, "E W"]:
        """Filters of the convolution; the identity where there is none."""
        if self.sizes.conv_width == 1:
            return jnp.ones((self.sizes.conv_channels, 1), self.q[...].dtype)
        return jnp.concatenate([w[...] for w in (self.conv_q, self.conv_k, self.conv_v)])

    def heads(self, qkv: Float[Array, "B T E"], tap: LayerTap) -> tuple[Array, Array, Array]:
        """q [B, T, H, K] and k [B, P, H, K], normalised and repeated to the value heads, and v [B, P, H, V]."""
        c, n = self.sizes, self.sizes.num_householder
        B, T, _ = qkv.shape
        q, k, v = jnp.split(qkv, (c.num_key_heads * c.key_dim, (1 + n) * c.num_key_heads * c.key_dim), axis=-1)
        q, k = (ACTIVATIONS[c.qk_activation](x).reshape(B, -1, c.num_key_heads, c.key_dim) for x in (q, k))
        q, k = self._normalised(tap("q_unnormed", q)), self._normalised(tap("k_unnormed", k))
        groups = c.num_value_heads // c.num_key_heads
        q, k = (jnp.repeat(x, groups, axis=2) for x in (q, k))
        return q, k, jax.nn.silu(v).reshape(B, T * n, c.num_value_heads, c.value_dim)

    def _normalised(self, x: Float[Array, "B T G K"]) -> Float[Array, "B T G K"]:
        if self.sizes.qk_norm == "l2":
            return l2norm(x)
        x = x.astype(accumulation_dtype(x))
        return x / jnp.maximum(jnp.sum(jnp.abs(x), axis=-1, keepdims=True), 1e-6)

    def gates(self, x: Float[Array, "B T D"], tap: LayerTap) -> tuple[Float[Array, "B P H"], Float[Array, "B T H"]]:
        """beta of every step, in (0, 1) or (0, 2), and g <= 0 of every token, in f32 or wider."""
        c, wide = self.sizes, accumulation_dtype(x, self.norm[...])
        B, T, _ = x.shape
        shape = (B, T * self.sizes.num_householder, c.num_value_heads)
        beta = jnp.ones(shape, wide)
        if c.write_gate:
            beta = jax.nn.sigmoid(tap("beta_logit", linear(x, self.b[...], dtype=wide).reshape(shape)))
        if c.negative_eigenvalues:
            beta = 2 * beta
        if not c.forget_gate:
            return beta, jnp.zeros((B, T, c.num_value_heads), wide)
        return beta, log_decay(linear(x, self.a[...], dtype=wide), self.A_log[...], self.dt_bias[...])

    def normed(self, o: Float[Array, "B T H V"], x: Float[Array, "B T D"], tap: LayerTap) -> Float[Array, "B T H V"]:
        """``o`` of each head after its norm, times the gate if there is one."""
        c = self.sizes
        if c.output_gate is None:
            return rms_norm(o, self.norm[...], eps=c.norm_eps, offset=0.0).astype(x.dtype)
        z = tap("z", linear(x, self.z[...]).reshape(o.shape))
        return gated_rms_norm(o, self.norm[...], z, eps=c.norm_eps, activation=GATES[c.output_gate])
