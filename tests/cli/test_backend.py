"""A backend that is not there is told in a line before anything is done."""

import os
import subprocess
import sys

import jax
import pytest

from jaxdelta.cli.backend import check_backend

COMMANDS = {
    "sweep": ["sweep", "--out", "out"],
    "sensitivity": ["sensitivity", "--out", "out"],
    "ledger": ["ledger", "--out", "out"],
    "ledger of a model": ["ledger", "--model", "control", "--out", "out"],
}


@pytest.mark.parametrize(
    ("asked", "command", "remedy"),
    [
        ("tpu", "sweep", "install jax's build for TPUs"),
        ("rocm", "sensitivity", "install jax's plugin for ROCm"),
        ("nonsense", "ledger", "unset it, or set it to cpu"),
        ("tpu", "ledger of a model", "or unset it, or set it to cpu"),
    ],
)
def test_a_backend_that_is_not_there_is_told_in_a_line(tmp_path, asked, command, remedy):
    found = subprocess.run(
        [sys.executable, "-c", "from jaxdelta.cli import main; main()", *COMMANDS[command]],
        env=os.environ | {"JAX_PLATFORMS": asked, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout) == (1, "")
    (line,) = [line for line in found.stderr.splitlines() if "error: " in line]
    assert found.stderr.splitlines()[-1] == line
    assert line.startswith(f"error: JAX_PLATFORMS asks for {asked}, which is not there (")
    assert remedy in line
    assert "Traceback" not in found.stderr
    assert not list(tmp_path.iterdir())


def test_cuda_without_its_plugin_is_told_though_jax_says_nothing(monkeypatch):
    """A bare AssertionError."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", "cuda")
        with pytest.raises(ValueError, match=r"asks for cuda, .*\(its plugin is not installed\); install the CUDA build"):
            check_backend()
        jax.config.update("jax_platforms", None)
        with pytest.raises(ValueError, match=r"no device of jax's can be used"):
            check_backend()
    finally:
        jax.config.update("jax_platforms", before)


def test_a_backend_that_is_there_is_no_matter():
    check_backend()


def test_what_needs_no_device_asks_for_none(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", "from jaxdelta.cli import main; main()", "info", "control"],
        env=os.environ | {"JAX_PLATFORMS": "tpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "parameters" in found.stdout
