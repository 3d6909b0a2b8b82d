"""Small f64 models, and their loss worked out by hand: ``jd.forward`` a segment at a time, and a softmax in numpy.

Call with f64 switched on. Nothing of reverse mode is used here, so that its derivatives have something to be held against.
"""

from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxdelta as jd
from jaxdelta.models import build
from jaxdelta.runs.reverse import Tape, record
from jaxdelta.runs.segments import text_of

SEGMENT = 5
EPS = 1e-5  # of central differences; in f64 both their errors are below 1e-9
WORLDS = 16  # rows of a run by hand, at least: one program serves all
QWEN = jd.Qwen3_5Config.tiny(
    vocab_size=17,
    width=14,
    mlp_width=19,
    layer_kinds=("linear", "attention", "linear"),
    num_key_heads=1,
    num_value_heads=2,
    key_dim=5,
    value_dim=3,
    conv_width=3,
    num_query_heads=2,
    num_kv_heads=1,
    head_dim=6,
    rotary_dim=4,
)
PRODUCT = jd.DeltaLMConfig.tiny(  # n_h = 2, and K < V
    vocab_size=13,
    width=12,
    mlp_width=11,
    layer_kinds=("linear", "attention"),
    num_key_heads=2,
    num_value_heads=2,
    key_dim=3,
    value_dim=4,
    attention=(jd.AttentionSizes(num_query_heads=2, num_kv_heads=1, head_dim=4),),
)
DECAYS = (-5.0, -0.05, -1e-12, -0.5)  # of head after head; with the weights of ``in_a`` this varies from token to token

# layer, head, then matrices
Change = Callable[[int, jax.Array], jax.Array]


def recorded(model: jd.Decoder, tokens: np.ndarray, *, lengths: np.ndarray | None = None, **options) -> Tape:
    """A tape of texts [B, N] in segments of SEGMENT tokens."""
    return record(model, text_of(model, tokens, segment=SEGMENT, lengths=lengths), **options)


def fresh(config, seed: int = 0) -> jd.Decoder:
    """A model of one's own, all of it f64; decays from strong to none, states and logits of order one."""
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(config, dtype=jnp.float64)))
    offset = nnx.merge(graphdef, state).NORM_OFFSET
    decays = iter(np.tile(DECAYS, 3))

    def random(path, leaf):
        name, noise = path[-1], rng.standard_normal(leaf.shape)
        if name == "dt_bias":
            return np.log(np.expm1([-next(decays) for _ in noise]))
        if name == "A_log":
            return 0 * noise
        middle = 1.0 if name == "norm" else 1 - offset if name.endswith("_norm") else 0.0
        return middle + noise * (0.3 if leaf.ndim == 1 else leaf.shape[-1] ** -0.5)

    leaves = [(path, leaf.replace(jnp.asarray(random(path, leaf)))) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


@cache
def model(config=QWEN) -> jd.Decoder:
    """As :func:`fresh`; not to be changed."""
    return fresh(config)


def linear_layers(model: jd.Decoder) -> list:
    """The linear layers in depth order."""
    return [model.layers[i] for i in model.config.linear_layers]


def tokens(length: int, seed: int = 0, words: int = 13) -> np.ndarray:
    """A random text."""
    return np.random.default_rng(seed).integers(0, words, length)


def logits(model: jd.Decoder, text: np.ndarray, change: Change = lambda boundary, S: S, worlds: int = 1) -> np.ndarray:
    """Logits [worlds, N, Y] of a text in several worlds; ``change(boundary, S)`` gives the states [L, worlds, H, K, V]."""
    total = max(worlds, WORLDS)
    carry, found = jd.init_carry(model, total, max_length=40), []
    padded = np.pad(text, (0, -len(text) % SEGMENT))  # one shape, one program; what comes later changes nothing
    rows = np.repeat(padded[None], total, axis=0)
    for begin in range(0, len(text), SEGMENT):
        if begin:
            S = jnp.stack(jd.states(carry))
            changed = change(begin // SEGMENT - 1, S[:, :worlds])
            carry = jd.with_states(carry, list(S.at[:, :worlds].set(changed)))
        out, carry = jd.forward(model, rows[:, begin : begin + SEGMENT], carry)
        found.append(np.asarray(out))
    return np.concatenate(found, axis=1)[:worlds, : len(text)]


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def losses(z: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Nats [worlds, N - 1] of each token given those before it, from logits."""
    return -np.take_along_axis(log_softmax(z[:, :-1]), np.asarray(text)[None, 1:, None], axis=-1)[..., 0]


def states(model: jd.Decoder, text: np.ndarray) -> np.ndarray:
    """S [boundaries, L, H, K, V] of the untouched text."""
    found = {}
    logits(model, text, lambda boundary, S: found.setdefault(boundary, S))
    return np.stack([np.asarray(found[b])[:, 0] for b in sorted(found)])


def term(S: np.ndarray, direction: int) -> np.ndarray:
    """sigma u v^T of one singular direction of a matrix, by LAPACK."""
    U, sigma, W = np.linalg.svd(S, full_matrices=False)
    return sigma[direction] * np.outer(U[:, direction], W[direction])


Pick = tuple[int, int, int, int | None]  # boundary, layer, head, direction; None is the whole state


def removed(picks: Sequence[Pick], share: np.ndarray | float = 1.0) -> Change:
    """A world for each pick, in which ``share`` of a direction of that state is taken away."""
    shares = np.broadcast_to(share, len(picks))

    def change(boundary, S):
        S = np.array(S)
        for world, (at, layer, head, direction) in enumerate(picks):
            if at == boundary:
                M = S[layer, world, head]
                S[layer, world, head] = M - shares[world] * (M if direction is None else term(M, direction))
        return jnp.asarray(S)

    return change


def nudged(model: jd.Decoder, text: np.ndarray, picks: Sequence[Pick]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [picks, N, Y] with the gate of each pick at 1 + EPS, and at 1 - EPS."""
    z = logits(model, text, removed([*picks, *picks], np.repeat([-EPS, EPS], len(picks))), 2 * len(picks))
    return z[: len(picks)], z[len(picks) :]


def fisher(model: jd.Decoder, text: np.ndarray, picks: Sequence[Pick], scored: np.ndarray) -> np.ndarray:
    """E[(d sum_t l_t(y_t) / d gate)^2] / N of each pick, every word of the vocabulary summed over, token by token."""
    high, low = nudged(model, text, picks)
    dz = ((high - low) / (2 * EPS))[:, :-1]
    p = np.exp(log_softmax(logits(model, text)[:, :-1]))
    score = (p * dz).sum(axis=-1, keepdims=True) - dz  # of each word as the label
    return ((p * score**2).sum(axis=-1) * scored).sum(axis=-1) / scored.sum()
