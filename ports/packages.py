"""The packages of the torch references: which versions were tested or are known to be wrong, and how they are imported."""

import importlib.metadata
import sys

TESTED = {"torch": "2.13.0", "transformers": "5.24.0", "flash-linear-attention": "0.6.0", "triton": "3.6.0"}
INSTALL = 'pip install -e ".[test]"'


class UnusableReference(RuntimeError):
    """A reference that is missing, of another version than tested, or known to be wrong."""


def check_versions(*packages: str, any_version: bool = False) -> dict[str, str]:
    """Versions of ``packages``.

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
    """Packages of another version than tested; a local label such as ``+cpu`` does not count."""
    return [name for name, version in versions.items() if version.split("+")[0] != TESTED[name]]


def import_transformers(*, any_version: bool = False):
    """transformers, with its own torch implementation of the delta rule rather than fla's Triton kernels.

    transformers takes fla's kernels wherever fla imports, and these need a GPU. Versions before the fix of
    huggingface/transformers#45513 restart every segment of more than one token from a zero state; the tested one has it,
    and :func:`ports.reference.check_segments` tells of any other.

    Raises:
        UnusableReference: see :func:`check_versions`; or fla was imported before.
    """
    check_versions("torch", "transformers", any_version=any_version)
    if sys.modules.get("fla") is not None:
        raise UnusableReference(
            "fla is imported in this process, so transformers would run its kernels; use another process"
        )
    sys.modules["fla"] = None
    import transformers

    return transformers
