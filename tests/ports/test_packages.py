"""Versions of the references' packages: untested ones are refused, missing ones named."""

import importlib.metadata

import pytest

from ports.packages import UnusableReference, check_versions, untested


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
