"""Packages of the torch references: tested versions, and how to import them."""

import importlib.metadata
import sys

TESTED = {"torch": "2.13.0", "transformers": "5.24.0", "flash-linear-attention": "0.6.0", "triton": "3.6.0"}
INSTALL = 'pip install -e ".[test]"'


class UnusableReference(RuntimeError):
    """A reference is missing, has an untested version, or is known to be wrong."""


def check_versions(*packages: str, any_version: bool = False) -> dict[str, str]:
    """Installed versions of ``packages``.

    Raises:
        UnusableReference: one is missing, or was not tested and ``any_version`` is not set.
    """
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UnusableReference(
                f"{package} is missing; {TESTED[package]} was tested. Install it with {INSTALL}"
            ) from None
    for package in [] if any_version else untested(found):
        raise UnusableReference(f"{package} is {found[package]}; {TESTED[package]} was tested. Install that with {INSTALL}")
    return found


def untested(versions: dict[str, str]) -> list[str]:
    """Packages whose version is not the tested one, ignoring local labels such as ``+cpu``."""
    return [name for name, version in versions.items() if version.split("+")[0] != TESTED[name]]


def import_transformers(*, any_version: bool = False):
    """transformers, with its own torch implementation of the delta rule rather than fla's Triton kernels.

    transformers uses fla's kernels whenever fla can be imported, and these need a GPU. Versions before the fix of
    huggingface/transformers#45513 restart every segment of more than one token from a zero state. The tested version has
    the fix; :func:`ports.reference.check_segments` checks any version.

    Raises:
        UnusableReference: as :func:`check_versions`, or fla has been imported.
    """
    check_versions("torch", "transformers", any_version=any_version)
    if sys.modules.get("fla") is not None:
        raise UnusableReference(
            "fla is imported in this process, so transformers would run its kernels; use another process"
        )
    sys.modules["fla"] = None
    import transformers

    return transformers
