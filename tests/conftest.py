"""Precision and device of the tests: f32 unless a test asks for f64, on the CPU unless the environment names a device."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two threads of OpenBLAS that wait for each other on a busy machine made small factorizations 250 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def x64():
    """Run the test with f64 switched on."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """Run the test once in f32 and once in f64."""
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module():
    """Every compiled program holds memory maps, of which Linux gives a process 65,530: thousands of tests use them up."""
    yield
    jax.clear_caches()
