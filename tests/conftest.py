"""Precision and device of the tests: f32 unless a test asks for f64, on the CPU unless the environment names a device."""

import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two threads of OpenBLAS that wait for each other on a busy machine made small factorizations 250 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the time goes into compiling programs that run once. Unless flags are given, the compiler's passes over single
# instructions are left out; with jaxlib 0.10, fused kernels are made by its older emitters too, which are twice as quick
# (later ones do not know the flag, and end the process). The pass of .ci/run with the newest versions compiles as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

LONG = ("ports/test_full_size.py", "cli/test_commands.py")  # a few tests that take minutes


def pytest_configure(config):
    """Files start in the order of collection, where xdist would start those of few tests last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Long files first: begun last, they would leave the other processes without work."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


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


@pytest.fixture
def as_for_users():
    """Annotations are not checked: the checks of types that tests switch on come first and have words of their own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module():
    """Every compiled program holds memory maps, of which Linux gives a process 65,530: thousands of tests use them up."""
    yield
    jax.clear_caches()
