"""The torch references: which versions were tested, and how they are imported on a CPU."""

import importlib.metadata
import sys

TESTED = {"torch": "2.13.0", "transformers": "5.24.0", "flash-linear-attention": "0.6.0", "triton": "3.6.0"}
INSTALL = 'pip install -e ".[test]"'


class UnusableReference(RuntimeError):
    """A reference that is missing, of another version than tested, or known to be wrong."""


def check_versions(*packages: str) -> dict[str, str]:
    """Versions of ``packages``; raises UnusableReference for one that is missing or was not tested."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UnusableReference(
                f"{package} is missing; {TESTED[package]} was tested. Install it with {INSTALL}"
            ) from None
        public = found[package].split("+")[0]
        if public != TESTED[package]:
            raise UnusableReference(f"{package} is {public}; {TESTED[package]} was tested. Install that with {INSTALL}")
    return found


def import_transformers():
    """transformers, with its own torch implementation of the delta rule rather than fla's Triton kernels.

    transformers takes fla's kernels wherever fla imports, and these need a GPU. Versions before the fix of
    huggingface/transformers#45513 restart every segment of more than one token from a zero state; the tested one has it.

    Raises:
        UnusableReference: see :func:`check_versions`; or fla was imported before.
    """
    check_versions("torch", "transformers")
    if sys.modules.get("fla") is not None:
        raise UnusableReference(
            "fla is imported in this process, so transformers would run its kernels; use another process"
        )
    sys.modules["fla"] = None
    import transformers

    return transformers
