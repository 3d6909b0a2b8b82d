"""What several tests share: inputs that have broken implementations before, and definitions in numpy float64."""

from collections.abc import Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdelta.nn.mixer import LinearCarry, Span
from ports.compare import relative_error

# Relative Frobenius errors that ops must meet, by dtype.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

KEYS = ("random", "cosine 0.5", "cosine 0.9", "near duplicates")
DECAYS = ("0", "-1e-7", "-2", "-20", "half 0, half -3", "-20 beside -1e-3", "0 to -20")


def unit_keys(rng: np.random.Generator, shape: tuple[int, ...], kind: str = "random") -> np.ndarray:
    """Unit vectors [B, T, H, K] that share a direction per head: a mean cosine between two tokens as ``kind`` says."""
    common = _unit(rng.standard_normal((shape[0], 1, *shape[2:])))
    own = _unit(rng.standard_normal(shape))
    if kind == "near duplicates":
        return _unit(common + 1e-3 * own)
    cosine = {"random": 0.0, "cosine 0.5": 0.5, "cosine 0.9": 0.9}[kind]
    return _unit(np.sqrt(cosine) * common + np.sqrt(1 - cosine) * own)


def log_decays(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """g of one of the regimes of ``DECAYS``, mixed token by token where it has several values."""
    if kind == "half 0, half -3":
        return rng.choice([0.0, -3.0], shape)
    if kind == "-20 beside -1e-3":
        return rng.choice([-20.0, -1e-3], shape)
    if kind == "0 to -20":
        return rng.choice([0.0, -1e-7, -1e-3, -0.1, -2.0, -20.0], shape)
    return np.full(shape, float(kind))


def delta_inputs(
    seed: int,
    T: int,
    *,
    keys: str = "random",
    decay: str = "0 to -20",
    B: int = 2,
    H: int = 3,
    K: int = 13,
    V: int = 7,
    dtype,
) -> dict[str, jax.Array]:
    """Arguments of the gated delta rule with a state to start from; beta over [0, 2] with its ends and 1 among them."""
    rng = np.random.default_rng(seed)
    arrays = {
        "q": _unit(rng.standard_normal((B, T, H, K))),
        "k": unit_keys(rng, (B, T, H, K), keys),
        "v": rng.standard_normal((B, T, H, V)),
        "g": log_decays(rng, (B, T, H), decay),
        "beta": np.where(rng.random((B, T, H)) < 0.2, rng.choice([0.0, 1.0, 2.0], (B, T, H)), 2 * rng.random((B, T, H))),
        "state": rng.standard_normal((B, H, K, V)),
    }
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}


def delta_rule(q, k, v, *, g, beta, state=None, scale=None) -> tuple[np.ndarray, np.ndarray]:
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and o_t = scale S_t^T q_t, literally, in f64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    B, T, H, K = k.shape
    V = v.shape[-1]
    scale = 1 / np.sqrt(K) if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    o = np.zeros((B, T, H, V))
    for b, t, h in np.ndindex(B, T, H):
        key, strength = k[b, t, h], beta[b, t, h]
        transition = np.exp(g[b, t, h]) * (np.eye(K) - strength * np.outer(key, key))
        S[b, h] = transition @ S[b, h] + strength * np.outer(key, v[b, t, h])
        o[b, t, h] = scale * q[b, t, h] @ S[b, h]
    return o, S


def delta_product(q, k, v, *, beta, num_householder, g=None, state=None, scale=None) -> tuple[np.ndarray, np.ndarray]:
    """Each token: S <- exp(g) S, then n_h times S <- S + beta k (v - S^T k)^T, then o = scale S^T q; in f64."""
    q, k, v, beta = (np.asarray(x, np.float64) for x in (q, k, v, beta))
    B, T, H, K = q.shape
    V, n = v.shape[-1], num_householder
    decay = np.ones((B, T, H)) if g is None else np.exp(np.asarray(g, np.float64))
    scale = 1 / np.sqrt(K) if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    o = np.zeros((B, T, H, V))
    for b, t, h in np.ndindex(B, T, H):
        S[b, h] *= decay[b, t, h]
        for i in range(t * n, (t + 1) * n):
            S[b, h] += beta[b, i, h] * np.outer(k[b, i, h], v[b, i, h] - k[b, i, h] @ S[b, h])
        o[b, t, h] = scale * q[b, t, h] @ S[b, h]
    return o, S


def matrices_of_spectrum(seed: int, sigma, K: int, V: int, batch: tuple[int, ...] = ()) -> np.ndarray:
    """K x V matrices with singular values ``sigma`` (any number up to min(K, V)) and random singular vectors, in f64."""
    sigma = np.asarray(sigma, np.float64)
    return (orthonormal_columns(seed, (*batch, K, sigma.size)) * sigma) @ np.swapaxes(
        orthonormal_columns(seed + 1000, (*batch, V, sigma.size)), -1, -2
    )


@cache
def orthonormal_columns(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random matrices with orthonormal columns, in f64."""
    return np.linalg.qr(np.random.default_rng(seed).standard_normal(shape))[0]


def truncated(S, rank: int) -> np.ndarray:
    """The best approximation of ``rank`` to each matrix, by LAPACK's SVD in f64."""
    U, sigma, Wt = np.linalg.svd(np.asarray(S, np.float64), full_matrices=False)
    return (U[..., :rank] * sigma[..., None, :rank]) @ Wt[..., :rank, :]


def randomised(module: nnx.Module, seed: int = 0) -> nnx.Module:
    """``module`` with noise on every parameter: signals of order one, and no norm whose scale is the same everywhere."""
    rng = np.random.default_rng(seed)

    def noisy(x):
        scale = 0.3 if x.ndim == 1 else x.shape[-1] ** -0.5
        return (x + scale * rng.standard_normal(x.shape)).astype(x.dtype)

    nnx.update(module, jax.tree.map(noisy, nnx.state(module, nnx.Param)))
    return module


def run(module: nnx.Module, *args):
    """``module(*args)``, compiled, as a pure function that other transformations may enclose."""
    return _run(*nnx.split(module), *args)


@partial(jax.jit, static_argnums=0)
def _run(graphdef, state, *args):
    return nnx.merge(graphdef, state)(*args)


def mix(layer: nnx.Module, x, carry, positions=None, length=None):
    """A segment through a mixer, compiled; at the first positions of its text where they are not given."""
    positions = np.broadcast_to(np.arange(x.shape[1], dtype=np.int32), x.shape[:2]) if positions is None else positions
    return _mix(*nnx.split(layer), x, carry, positions, length)


@partial(jax.jit, static_argnums=0)
def _mix(graphdef, state, x, carry, positions, length):
    return nnx.merge(graphdef, state)(x, carry, Span(positions, length))


def mixed_in_segments(layer: nnx.Module, x, lengths, max_length: int):
    """Outputs of an attention layer for a text cut to ``lengths``, and the last carry."""
    carry, outputs, start = layer.init_carry(x.shape[0], max_length, x.dtype), [], 0
    for n in lengths:
        positions = jnp.broadcast_to(jnp.arange(start, start + n), (x.shape[0], n))
        y, carry = mix(layer, x[:, start : start + n], carry, positions)
        outputs.append(y)
        start += n
    return jnp.concatenate(outputs, axis=1), carry


def run_in_segments(model: nnx.Module, tokens, lengths, max_length: int):
    """Hidden states of a model for a text cut to ``lengths``, and the last carry."""
    carry, hidden, start = model.init_carry(tokens.shape[0], max_length), [], 0
    for n in lengths:
        out = run(model, tokens[:, start : start + n], carry)
        carry = out.carry
        hidden.append(out.hidden)
        start += n
    return jnp.concatenate(hidden, axis=1), carry


def filled_carry(layer: nnx.Module, B: int = 3) -> LinearCarry:
    """A linear layer's carry as it stands in the middle of a text."""
    rng = np.random.default_rng(1)
    return LinearCarry(*(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in layer.init_carry(B, 1, jnp.float32)))


def assert_agree(found, expected, tolerance: float) -> None:
    """(o, S) of two forms of a rule."""
    for name, a, b in zip("oS", found, expected, strict=True):
        assert relative_error(a, b) < tolerance, name


def silu(x) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms_normalised(x, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def parameters(module: nnx.Module) -> dict[str, np.ndarray]:
    """The module's own parameters in f64, by attribute."""
    return {name: np.asarray(x[...], np.float64) for name, x in vars(module).items() if isinstance(x, nnx.Param)}


def dot_precisions(f, *args) -> list:
    """The precision of every matrix product in the program of ``f``, inner functions and loops included."""
    equations = _equations(jax.make_jaxpr(f)(*args).jaxpr)
    return [equation.params["precision"] for equation in equations if equation.primitive.name == "dot_general"]


def _equations(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
