"""Packages import from those below them alone, and none of jaxdelta imports torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Modules and packages of jaxdelta, the lowest first. The contents page, jaxdelta/__init__.py, is above all of them.
ORDER = (
    *("arguments", "dims", "json_text", "documents", "metrics", "groups"),
    *("ops", "implementation", "nn", "models", "checkpoints", "runs", "results", "analysis", "tasks", "report", "cli"),
)
OUTSIDE = {
    "torch",
    "transformers",
    "fla",
    "triton",
    "ports",
    "experiments",
    "tests",
}  # of jaxdelta, what it must not import


def imports(source: str) -> Iterator[str]:
    """Full names of what is imported anywhere in a source; of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def misplaced(package: str, source: str) -> set[str]:
    """Imports of a module of ``package`` that reach up or outside."""
    above = set(ORDER[ORDER.index(package) + 1 :])
    return {
        name
        for name in imports(source)
        if (parts := name.split("."))[0] in OUTSIDE or (parts[0] == "jaxdelta" and parts[1:] and parts[1] in above)
    }


def modules(package: str) -> list[Path]:
    folder = ROOT / "jaxdelta" / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_down(package):
    found = {str(file.relative_to(ROOT)): misplaced(package, file.read_text()) for file in modules(package)}
    assert {file: names for file, names in found.items() if names} == {}


def test_every_package_has_its_place():
    names = {path.stem for path in (ROOT / "jaxdelta").iterdir() if path.suffix == ".py" or list(path.glob("*.py"))}
    assert names - {"__init__"} == set(ORDER)


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("analysis", "from jaxdelta.tasks.state_tracking import words", {"jaxdelta.tasks.state_tracking"}),
        ("analysis", "from jaxdelta import tasks, runs", {"jaxdelta.tasks"}),
        ("nn", "def f():\n    import jaxdelta.cli", {"jaxdelta.cli"}),
        ("ops", "import torch.nn", {"torch.nn"}),
        ("cli", "from jaxdelta.ops import spectra\nfrom jaxdelta import __version__\nimport jax", set()),
    ],
)
def test_an_import_that_points_up_is_seen(package, source, found):
    assert found <= misplaced(package, source) and bool(found) == bool(misplaced(package, source))


@pytest.mark.parametrize("top, others", [("ports", {"experiments", "tests"}), ("experiments", {"tests"})])
def test_nothing_imports_what_stands_on_it(top, others):
    files = (ROOT / top).rglob("*.py")
    assert {file.name for file in files if others & {name.split(".")[0] for name in imports(file.read_text())}} == set()
