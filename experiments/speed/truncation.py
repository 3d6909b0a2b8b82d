"""How long does it take to truncate the states of a boundary, by each method, cold and warm?

Command: ``python -m experiments.speed.truncation [--states 288,2304,25344] [--rank 12]``
Wall time: under a minute on 2 cores for 288 states.
Expected on one H200: 288 states of 128 x 128 in at most 1 ms, 25,344 in at most 25 ms, by warm-started subspace iteration,
with a retained energy within 1e-5 of exact.

States have geometric spectra with effective ranks from 4 to 62; those of Qwen3.5-0.8B are 1 to 44. "Warm" starts from the
basis of the boundary before, since which the states have changed by a tenth of their norm. Methods take turns; times are
medians.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxdelta.ops import low_rank


def random_states(count: int, K: int = 128, V: int = 128, seed: int = 0) -> jax.Array:
    """f32 [count, K, V] with sigma_i = decay^i; decays spread from 0.6 to 0.96."""
    rng = np.random.default_rng(seed)
    distinct = min(count, 288)
    decay = np.linspace(0.6, 0.96, distinct)[:, None] ** np.arange(min(K, V))
    U, W = (np.linalg.qr(rng.standard_normal((distinct, n, min(K, V))))[0] for n in (K, V))
    states = np.einsum("nkr,nr,nvr->nkv", U, decay, W).astype(np.float32)
    return jnp.asarray(np.resize(states, (count, K, V)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", default="288")
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, rank {arguments.rank}, 128 x 128, f32")
    for count in map(int, arguments.states.split(",")):
        measure(count, arguments.rank, arguments.repeats)


def measure(count: int, rank: int, repeats: int) -> None:
    """Print medians for ``count`` states."""
    S = random_states(count)
    noise = jax.random.normal(jax.random.key(0), S.shape)
    norms = (jnp.linalg.norm(a, axis=(-2, -1), keepdims=True) for a in (S, noise))
    moved = S + 0.1 * noise * (lambda s, n: s / n)(*norms)

    def cut(method):
        return jax.jit(lambda S, basis: low_rank.truncation(S, rank, method=method, basis=basis))

    start = {m: low_rank.initial_basis(S.shape, rank, m, S.dtype) for m in ("subspace", "eigh")}
    warm = cut("subspace")(S, start["subspace"]).basis
    runs = {
        "subspace, cold": (cut("subspace"), S, start["subspace"]),
        "subspace, warm": (cut("subspace"), moved, warm),
        "subspace, same state": (cut("subspace"), S, warm),
        "eigh": (cut("eigh"), S, start["eigh"]),
    }
    times = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, (function, *arrays) in runs.items():
            begun = time.perf_counter()
            jax.block_until_ready(function(*arrays))
            if repeat:
                times[name].append(time.perf_counter() - begun)
    sigma = np.linalg.svd(np.asarray(moved[:288], np.float64), compute_uv=False)
    exact = (sigma[:, :rank] ** 2).sum(1)
    for name, (function, *arrays) in runs.items():
        out = function(*arrays)
        kept = np.square(np.asarray(out.state[:288], np.float64)).sum((1, 2))
        deficit = f", energy missed {np.max(1 - kept / exact):+.1e}" if arrays[0] is moved else ""
        spread = f"{min(times[name]) * 1e3:.1f} to {max(times[name]) * 1e3:.1f}"
        median = statistics.median(times[name]) * 1e3
        print(f"{count:6d} states  {name:22s} {median:8.1f} ms ({spread}), {int(out.rounds)} rounds{deficit}", flush=True)


if __name__ == "__main__":
    main()
