"""What does a second Householder step for each token cost?

    python -m experiments.speed.product                             heads of 128 x 128, 256 tokens
    python -m experiments.speed.product --key-dim 32 --heads 4      the control model's

Times the chunked gated delta product with n_h = 1, 2 and 3 in turn, alone and with its gradients, and prints ratios to
n_h = 1. Expected: n_h = 2 costs at most 2.2 times n_h = 1 on a CPU.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxdelta as jd
from jaxdelta.implementation import implementation_here

STEPS = (1, 2, 3)


def inputs(n: int, *, tokens: int, heads: int, key_dim: int) -> dict[str, jax.Array]:
    """Random unit queries and keys, values, gates and a state for ``n`` steps a token."""
    keys = jax.random.split(jax.random.key(n), 6)
    q = jax.random.normal(keys[0], (1, tokens, heads, key_dim))
    k, v = (jax.random.normal(key, (1, tokens * n, heads, key_dim)) for key in keys[1:3])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = 2 * jax.nn.sigmoid(jax.random.normal(keys[3], (1, tokens * n, heads)))
    g = -jnp.exp(jax.random.normal(keys[4], (1, tokens, heads)) - 3)
    return dict(q=q, k=k, v=v, beta=beta, g=g, state=jax.random.normal(keys[5], (1, heads, key_dim, key_dim)))


def seconds(call, x) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call(x))
    return time.perf_counter() - begin


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--tokens", type=int, default=256)
    top.add_argument("--heads", type=int, default=16)
    top.add_argument("--key-dim", type=int, default=128)
    top.add_argument("--repeats", type=int, default=15)
    arguments = top.parse_args()
    sizes = dict(tokens=arguments.tokens, heads=arguments.heads, key_dim=arguments.key_dim)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, float32, {sizes}")

    chunk_size = implementation_here().chunk_size

    def rule(n, x):
        return jd.gated_delta_product_chunked(**x, num_householder=n, chunk_size=chunk_size)

    def gradients(n, x):
        return jax.grad(lambda x: sum(jnp.sum(y**2) for y in rule(n, x)))(x)

    for name, form in (("forward", rule), ("with gradients", gradients)):
        calls = [(jax.jit(partial(form, n)), inputs(n, **sizes)) for n in STEPS]
        for call in calls:
            seconds(*call)
        rows = np.array([[seconds(*call) for call in calls] for _ in range(arguments.repeats)])
        ratios = rows / rows[:, :1]
        times = ", ".join(f"{1e3 * s:.1f}" for s in np.median(rows, axis=0))
        print(f"{name}: n_h = 1, 2, 3 take {times} ms")
        for index, n in enumerate(STEPS[1:], 1):
            r = ratios[:, index]
            print(f"  n_h = {n} / n_h = 1: median {np.median(r):.2f}, {r.min():.2f} to {r.max():.2f}")


if __name__ == "__main__":
    main()
