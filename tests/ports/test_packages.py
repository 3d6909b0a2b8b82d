"""Versions of the references' packages: untested ones are refused, missing ones named, wrong gradients refused."""

import importlib.metadata

import pytest

from ports.packages import UnusableReference, check_triton_gradients, check_versions, untested


def test_versions(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.13.0+cpu", "triton": "3.5.1"}[name])
    assert check_versions("torch") == {"torch": "2.13.0+cpu"}
    with pytest.raises(UnusableReference, match=r"triton is 3\.5\.1; 3\.6\.0 was tested"):
        check_versions("torch", "triton")
    assert untested(check_versions("torch", "triton", any_version=True)) == ["triton"]


@pytest.mark.parametrize("any_version", [False, True])
def test_a_missing_package_is_named(monkeypatch, any_version):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UnusableReference, match=r"transformers is missing; 5\.24\.0 was tested\. Install it with pip"):
        check_versions("transformers", any_version=any_version)


@pytest.mark.parametrize(
    "version, capability, refused",
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.6.0", (9, 0), True),
        ("3.7.0", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
        ("3.6.0", None, False),
    ],
)
def test_triton_gradients(monkeypatch, version, capability, refused):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if not refused:
        return check_triton_gradients()
    with pytest.raises(UnusableReference, match="wrong gradients"):
        check_triton_gradients()
