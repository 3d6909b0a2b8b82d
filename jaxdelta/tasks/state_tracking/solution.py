"""A model that solves the word problem of a group by construction, without training.

For a representation rho, the Householder steps of token x are the reflections whose product is rho(x), and step j writes
v_j = C^T k_j:

    S_t - C = rho(x_t) (S_{t-1} - C),   S_0 = 0,   so   S_t = C - rho(target_t) C,   C = c I

A query q that only the identity fixes reads c (q - rho(target)^T q). This is zero for the identity and has a direction of
its own for every other element, so the largest inner product with these directions names the element. A second head, which
always reads the same number, names the identity. So one layer with n_h = max rank(rho(g) - I) suffices, and for the minimal
rho this is ``predicted_householder(group)``.

The activation of keys and values is never below -0.28, so both are small before the norm, whose eps reduces the squared
length of a key by about 1e-6 / ||.||^2. With beta = 2, which f32 reaches, an eigenvalue is about -1 + 1e-5, and the
solution fades over some ten thousand tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdelta.groups.representations import TOLERANCE, Representation, minimal_representation
from jaxdelta.groups.tables import Group, shortest_words
from jaxdelta.models.config import DeltaLMConfig
from jaxdelta.models.delta_lm import DeltaLM
from jaxdelta.ops.reflections import reflections

SMALL = 0.2  # largest entry of keys and values before their norm; silu takes all values above -0.278
OFF, ON = -200.0, 200.0  # before the sigmoid of beta


def solution(group: Group, representation: Representation | None = None) -> DeltaLM:
    """A one-layer model with two heads that names every prefix product; its n_h is max rank(rho(g) - I).

    Args:
        group: whose alphabet the tokens are from.
        representation: a faithful one of ``generated(group)``; None is the minimal one.

    Raises:
        ValueError: the representation is not faithful, or is of another group.
    """
    elements = np.array(sorted(shortest_words(group)))
    rho = minimal_representation(group) if representation is None else representation
    if len(rho.matrices) != len(elements) or rho.kernel.sum() != 1:
        size, kernel = len(rho.matrices), int(rho.kernel.sum())
        raise ValueError(f"a representation of {size} elements with a kernel of {kernel}; expected {len(elements)} and 1")
    found = reflections(rho.matrices[np.searchsorted(elements, group.alphabet)], tolerance=TOLERANCE)
    letters = {
        x: list(k[:count]) for x, k, count in zip(group.alphabet.tolist(), found.k, found.num_householder, strict=True)
    }
    query, chords = _query(rho)
    model = _blank(_config(len(group), rho.dimension, max(1, *map(len, letters.values())), _shortest(chords)))
    _set_steps(model, letters)
    _set_readout(model, query, chords, elements)
    return model


def _config(elements: int, dimension: int, steps: int, shortest: float) -> DeltaLMConfig:
    """Sizes; the residual stream holds the token, the output of the first head, and that of the second.

    The eps of the norm is the mean square of the shortest output, c ||q - rho^T q|| / sqrt(K), so that rounding errors in
    the output of the identity, which should be zero, stay small.
    """
    return DeltaLMConfig(
        family="gated_deltaproduct",
        vocab_size=elements,
        width=elements + dimension + 1,
        mlp_width=1,
        layer_kinds=("linear",),
        num_key_heads=2,
        num_value_heads=2,
        key_dim=dimension,
        value_dim=dimension,
        conv_width=1,
        num_householder=steps,
        forget_gate=False,
        negative_eigenvalues=True,
        output_gate=None,
        norm_eps=(SMALL * shortest / dimension) ** 2,
    )


def _blank(config: DeltaLMConfig) -> DeltaLM:
    """A model whose matrices are zero and whose norms have scale one."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: DeltaLM(config)))
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.full(x.shape, 1.0 if x.ndim == 1 else 0.0, x.dtype), params))


def _set_steps(model: DeltaLM, letters: dict[int, list[np.ndarray]]) -> None:
    """Set the steps of every token: the reflections of its letter, and in the second head a constant write."""
    c, mixer = model.config, model.layers[0].mixer
    shape = (c.vocab_size, c.num_householder, 2)
    keys, values, beta = np.zeros((*shape, c.key_dim)), np.zeros((*shape, c.value_dim)), np.full(shape, OFF)
    keys[..., 0] = SMALL
    for letter, reflected in letters.items():
        for j, k in enumerate(reflected):
            keys[letter, j, 0] = k * SMALL / np.abs(k).max()
            values[letter, j, 0] = k * SMALL
            beta[letter, j, 0] = ON
    values[:, 0, 1], beta[:, 0, 1] = SMALL, 0.0
    model.embed[...] = jnp.eye(c.vocab_size, c.width)
    for weight, before in ((mixer.k, _before_silu(keys)), (mixer.v, _before_silu(values)), (mixer.b, beta)):
        _set_by_token(model, weight, before)


def _set_readout(model: DeltaLM, query: np.ndarray, chords: np.ndarray, elements: np.ndarray) -> None:
    """Set the queries, the same for every token, and the head's inner products with the output of each element."""
    c, mixer = model.config, model.layers[0].mixer
    q = np.zeros((c.vocab_size, 2, c.key_dim))
    q[:, 0], q[:, 1, 0] = query * SMALL / np.abs(query).max(), SMALL
    _set_by_token(model, mixer.q, _before_silu(q))
    read = slice(c.vocab_size, c.vocab_size + c.value_dim)
    out, head = np.zeros(mixer.out.shape), np.zeros(model.head.shape)
    out[read, : c.value_dim], out[-1, c.value_dim] = np.eye(c.value_dim), 1
    lengths = np.linalg.norm(chords, axis=1, keepdims=True)
    identity = lengths[:, 0] == 0
    head[elements, read] = chords / np.where(identity[:, None], 1, lengths)
    # The shortest reading gives its element sqrt(V / 2), and the second head reads 1 / sqrt(1 + eps V / SMALL^2).
    constant = SMALL / np.sqrt(c.value_dim)
    head[elements[identity], -1] = np.sqrt(c.value_dim / 2) / 2 * np.sqrt(1 + c.norm_eps / constant**2)
    mixer.out[...], model.head[...] = jnp.asarray(out, jnp.float32), jnp.asarray(head, jnp.float32)


def _set_by_token(model: DeltaLM, weight: nnx.Param, before: np.ndarray) -> None:
    """Set a projection so that it gives ``before`` [Y, ...] for the normalised embedding of each token."""
    c = model.config
    length = 1 / np.sqrt(1 / c.width + c.norm_eps)
    columns = before.reshape(c.vocab_size, -1).T / length
    weight[...] = jnp.zeros(weight.shape).at[:, : c.vocab_size].set(jnp.asarray(columns, jnp.float32))


def _query(rho: Representation, candidates: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """The random unit query whose chords q - rho(g)^T q point furthest apart, and its chords, zero for the identity."""

    def chords(q: np.ndarray) -> np.ndarray:
        return np.where(rho.kernel[:, None], 0, q - q @ rho.matrices)

    def nearest(q: np.ndarray) -> float:
        others = chords(q)[~rho.kernel]
        u = others / np.linalg.norm(others, axis=1, keepdims=True)
        return float((u @ u.T - 2 * np.eye(len(u))).max())

    drawn = np.random.default_rng(0).standard_normal((candidates, rho.dimension))
    best = min(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), key=nearest)
    return best, chords(best)


def _shortest(chords: np.ndarray) -> float:
    lengths = np.linalg.norm(chords, axis=1)
    return float(lengths[lengths > 0].min())


def _before_silu(x: np.ndarray) -> np.ndarray:
    """The argument at which silu, on its rising side, equals x; by bisection."""
    low, high = np.full_like(x, -1.27), np.full_like(x, 1.27)
    for _ in range(60):
        middle = (low + high) / 2
        below = middle / (1 + np.exp(-middle)) < x
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2
