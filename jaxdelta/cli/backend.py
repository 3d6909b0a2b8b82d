"""A check of jax's device before any work is done."""

import jax

REMEDIES = {
    "cuda": 'install the CUDA build (pip install "jaxdelta[cuda]")',
    "gpu": 'install the CUDA build (pip install "jaxdelta[cuda]")',
    "rocm": "install jax's plugin for ROCm",
    "tpu": "install jax's build for TPUs (pip install libtpu)",
}


def check_backend() -> None:
    """Start jax's backend.

    Raises:
        ValueError: the one that JAX_PLATFORMS asks for is not available; tells what to install or to unset.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a message, for CUDA without its plugin
        asked = jax.config.jax_platforms
        reason = str(error).removesuffix(" (set JAX_PLATFORMS='' to automatically choose an available backend)")
        because = f" ({' '.join(reason.split())})" if reason else " (its plugin is not installed)"
        if not asked:
            raise ValueError(f"no device of jax's can be used{because}; JAX_PLATFORMS=cpu takes the processor") from None
        remedies = [REMEDIES[name] for name in asked.split(",") if name in REMEDIES]
        raise ValueError(
            f"JAX_PLATFORMS asks for {asked}, which is not there{because}; "
            f"{', or '.join([*remedies, 'unset it, or set it to cpu'])}"
        ) from None
