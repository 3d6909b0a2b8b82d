"""This library's chunked operators against fla's chunked kernels, forward, on a GPU: prints relative errors.

    python -m ports.fla.chunked

Both read the same values, in bf16 or f32. So does this library's recurrence, which shows which side has which error. fla's
delta rule and delta product refuse f32. This has not been run on a GPU yet, so there is no expected number.
"""

import os
import sys

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

from ports.fla.interpreter import import_fla
from ports.packages import UnusableReference, check_versions

B, T, H, K, V = 2, 777, 4, 128, 64
SCALE = K**-0.5


def inputs(steps: int) -> dict[str, np.ndarray]:
    """f32 q, k, v, g, beta and state: unit keys and queries, decays with short and long horizons."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((B, n, H, K)) for n in (T, T * steps))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, state = rng.standard_normal((B, T * steps, H, V)), rng.standard_normal((B, H, K, V))
    g = -np.exp(rng.uniform(-9, 1, (B, T, H)))
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": rng.uniform(0, 2, (B, T * steps, H)), "state": state}
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def run_fla(rule: str, steps: int, arrays: dict[str, np.ndarray], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """o and S of a chunked kernel; decays and states are always f32."""
    import torch
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_product import chunk_gated_delta_product
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    x = {name: torch.tensor(array, device="cuda") for name, array in arrays.items()}
    x |= {name: x[name].to(getattr(torch, dtype)) for name in ("q", "k", "v", "beta")}
    ends = {"beta": x["beta"], "scale": SCALE, "initial_state": x["state"], "output_final_state": True}
    with torch.no_grad():
        if rule == "delta rule":
            o, S = chunk_delta_rule(x["q"], x["k"], x["v"], **ends)
        elif rule == "gated delta rule":
            o, S = chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], **ends)
        else:
            o, S = chunk_gated_delta_product(x["q"], x["k"], x["v"], x["g"], num_householder=steps, **ends)
    return o.float().cpu().numpy(), S.float().cpu().numpy()


def run_jaxdelta(rule: str, steps: int, arrays: dict[str, np.ndarray], dtype: str, *, chunked: bool):
    """o and S of this library on the same values."""
    import jax.numpy as jnp

    import jaxdelta as jd

    x = {n: jnp.asarray(a, dtype if n in ("q", "k", "v", "beta") else jnp.float32) for n, a in arrays.items()}
    g = jnp.zeros_like(x["g"]) if rule == "delta rule" else x["g"]
    run = jd.gated_delta_product_chunked if chunked else jd.gated_delta_product
    return run(x["q"], x["k"], x["v"], g=g, beta=x["beta"], state=x["state"], scale=SCALE, num_householder=steps)


def compare(rule: str, steps: int, dtype: str) -> str:
    """A line with the errors of o and of S between fla, this library and the recurrence."""
    from ports.compare import relative_error

    arrays = inputs(steps)
    try:
        theirs = run_fla(rule, steps, arrays, dtype)
    except AssertionError as error:
        return f"not run: {error}"
    here, exact = (run_jaxdelta(rule, steps, arrays, dtype, chunked=chunked) for chunked in (True, False))
    pairs = {"here to fla": (here, theirs), "fla to recurrence": (theirs, exact), "here to recurrence": (here, exact)}
    found = {what: [f"{relative_error(*each):.1e}" for each in zip(*pair, strict=True)] for what, pair in pairs.items()}
    return ", ".join(f"{what} {o} {S}" for what, (o, S) in found.items())


def main():
    try:
        check_versions("torch")
        import torch

        if not torch.cuda.is_available():
            sys.exit("fla's chunked kernels need a GPU, and torch finds none here")
        import_fla()
    except UnusableReference as error:
        sys.exit(str(error))
    print(f"{torch.cuda.get_device_name()}: B={B} T={T} H={H} K={K} V={V}; relative errors of o and of S")
    cases = [("gated delta rule", 1), ("delta rule", 1), *(("gated delta product", n) for n in (1, 2, 3))]
    for rule, steps in cases:
        for dtype in ("bfloat16", "float32"):
            print(f"{rule}, {steps} a token, {dtype}: {compare(rule, steps, dtype)}")


if __name__ == "__main__":
    main()
