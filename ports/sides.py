"""The sides of a verification, each in its own process: ``python -m ports.sides reference|yardstick|jaxdelta FOLDER``.

FOLDER holds ``job.json`` and ``tokens.npy``. The reference writes ``reference.json`` and, for each segment, logits and
carried arrays (``logits_3.npy``, ``carry_3.npz``) there. If this library runs in bf16, the yardstick compares the reference
in bf16 with these arrays and writes ``yardstick.json``. The JAX side compares its own run with them segment by segment,
removes the arrays that it has compared, and writes ``comparison.json``. All report progress in lines that begin with
PROGRESS; other output comes from packages and is ignored. A side that fails writes ``failure.json`` and exits with 2.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ports.memory import peak_bytes

PROGRESS = "progress: "
FAILED = 2
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What all sides run.

    Attributes:
        reference_folder: checkpoint of the reference.
        folder: checkpoint of this library; the same, except in tests of the comparison.
        dtype: of this library's run; the reference runs in f32.
        splits: tokens of each segment.
        any_version: whether packages of the reference may have untested versions.
    """

    reference_folder: str
    folder: str
    dtype: str
    splits: tuple[int, ...]
    any_version: bool = False

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Index, first token and end of each segment."""
        begin = 0
        for index, length in enumerate(self.splits):
            yield index, begin, begin + length
            begin += length

    def write(self, work: Path, tokens: np.ndarray) -> None:
        """Write ``job.json`` and ``tokens.npy``, int32 [1, N]."""
        (work / "job.json").write_text(json.dumps(asdict(self)))
        np.save(work / "tokens.npy", tokens.astype(np.int32))

    @classmethod
    def read(cls, work: Path) -> "Job":
        fields = json.loads((work / "job.json").read_text())
        return cls(**fields | {"splits": tuple(fields["splits"])})


def reference_side(work: Path, say: Say) -> None:
    """Run the reference in f32 and write its logits and carried arrays.

    Raises:
        UnusableReference: it is missing, has an untested version, or does not carry its state.
    """
    from ports.packages import untested
    from ports.reference import check_segments, load_reference

    job, tokens, clock = Job.read(work), np.load(work / "tokens.npy"), Clock()
    say("loading")
    reference = load_reference(Path(job.reference_folder), any_version=job.any_version)
    load_s = clock.lap()
    say("checking that segments continue one another")
    probe = check_segments(reference, tokens)
    probe_s = clock.lap()
    segments = reference.segments(tokens, job.splits)
    for index, begin, _ in job.spans():
        say(f"segment {index + 1} of {len(job.splits)}")
        logits, snapshots = next(segments)
        np.save(work / f"logits_{index}.npy", logits)
        _write_carry(work / f"carry_{index}.npz", _of_segment(reference.layer_kinds, snapshots, begin))
        del logits
    about = {
        "packages": reference.packages | {"numpy": np.__version__},
        "untested": untested(reference.packages),
        "implementation": reference.implementation,
        "layer_kinds": list(reference.layer_kinds),
        "probe": probe,
        "seconds": {"load": load_s, "probe": probe_s, "run": clock.lap()},
        "peak_bytes": peak_bytes(),
    }
    _write_json(work / "reference.json", about)


def yardstick_side(work: Path, say: Say) -> None:
    """Compare the reference in the job's dtype with the reference in f32."""
    from ports.compare import Comparison
    from ports.reference import load_reference

    job, tokens, clock = Job.read(work), np.load(work / "tokens.npy"), Clock()
    say("loading")
    reference = load_reference(Path(job.reference_folder), job.dtype, any_version=job.any_version)
    load_s, kinds = clock.lap(), reference.layer_kinds
    comparison = Comparison(kinds, tokens, (f"reference in {job.dtype}", "reference"))
    segments = reference.segments(tokens, job.splits)
    for index, begin, _ in job.spans():
        say(f"segment {index + 1} of {len(job.splits)}")
        logits, snapshots = next(segments)
        comparison.add(begin, logits, _of_segment(kinds, snapshots, begin), *_read_segment(work, index, len(kinds)))
        del logits
    about = {"seconds": {"load": load_s, "run and compare": clock.lap()}, "peak_bytes": peak_bytes()}
    _write_json(work / "yardstick.json", comparison.result(snapshots) | about)


def jaxdelta_side(work: Path, say: Say) -> None:
    """Run this library on the same tokens, compare, write ``comparison.json`` and remove the reference's arrays."""
    import jaxdelta as jd
    from jaxdelta.cli.backend import check_backend
    from jaxdelta.results.folder import PACKAGES, commit

    check_backend()
    job, tokens, clock = Job.read(work), np.load(work / "tokens.npy"), Clock()
    say("loading")
    model = jd.load(job.folder, dtype=job.dtype)
    load_s = clock.lap()
    found = _compare(model, job, tokens, work, say)
    about = {
        "packages": _versions(*PACKAGES),
        "device": _device(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "commit": commit(),
        "checkpoint": model.origin.sha256(),
        "torch_imported": "torch" in sys.modules,
        "seconds": {"load": load_s, "run and compare": clock.lap()},
        "peak_bytes": peak_bytes(),
    }
    parts = {name: _read_json(work / f"{name}.json") for name in ("reference", "yardstick")}
    _write_json(work / "comparison.json", found | parts | {"jaxdelta": about})


def _compare(model, job: Job, tokens: np.ndarray, work: Path, say: Say) -> dict[str, Any]:
    """The result of :class:`ports.compare.Comparison`, the losses of a segmented run, and the control without states."""
    import jaxdelta as jd
    from ports.compare import Comparison, carry_arrays, layer_kinds

    carry, control = jd.init_carry(model, 1, tokens.shape[1]), None
    kinds, there = layer_kinds(carry), _read_json(work / "reference.json")["layer_kinds"]
    if kinds != there:
        raise ValueError(f"layers are {kinds} here, {there} in the reference")
    comparison = Comparison(kinds, tokens)
    for index, begin, end in job.spans():
        say(f"segment {index + 1} of {len(job.splits)}")
        expected_logits, expected = _read_segment(work, index, len(kinds))
        here = tokens[:, begin:end]
        if index and end == tokens.shape[1]:
            control = _without_states(model, here, carry, expected_logits)
        logits, carry = jd.forward(model, here, carry)
        found = _of_segment(kinds, carry_arrays(carry), begin)
        comparison.add(begin, np.asarray(logits), found, expected_logits, expected)
        del expected_logits, logits
        (work / f"logits_{index}.npy").unlink()
        (work / f"carry_{index}.npz").unlink()
    found = comparison.result(carry_arrays(carry))
    say("a segmented run for its losses")
    run = _run_losses(model, job, tokens, found["nonfinite"])
    return found | {"run_losses": run, "control": control}


def _of_segment(kinds, layers, begin: int) -> list[tuple[np.ndarray, ...]]:
    """Carried arrays; of keys and values only the places from ``begin`` on, since earlier ones have been compared."""
    return [
        tuple(a[:, begin:] for a in arrays) if kind == "attention" else tuple(arrays)
        for kind, arrays in zip(kinds, layers, strict=True)
    ]


def _write_carry(file: Path, layers: list[tuple[np.ndarray, ...]]) -> None:
    np.savez(file, **{f"{layer}.{slot}": a for layer, arrays in enumerate(layers) for slot, a in enumerate(arrays)})


def _read_segment(work: Path, index: int, num_layers: int) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Logits, memory-mapped, and carried arrays of the reference."""
    with np.load(work / f"carry_{index}.npz") as arrays:
        layers = [[arrays[f"{layer}.{slot}"] for slot in (0, 1)] for layer in range(num_layers)]
    return np.load(work / f"logits_{index}.npy", mmap_mode="r"), layers


def _without_states(model, tokens: np.ndarray, carry, expected: np.ndarray) -> float | None:
    """Error of a segment's logits with every S before it zero, as if S were not carried."""
    import jaxdelta as jd
    from ports.compare import compare_positions

    if not (states := jd.states(carry)):
        return None
    logits, _ = jd.forward(model, tokens, jd.with_states(carry, [0 * S for S in states]))
    return compare_positions(np.asarray(logits)[0], expected[0], np.full(tokens.shape[1], -1)).error_together()


def _run_losses(model, job: Job, tokens: np.ndarray, nonfinite: list[dict[str, Any]]) -> np.ndarray | None:
    """Losses [N - 1] of ``jd.run``, which forms no whole logits; None if segments have different lengths."""
    import jaxdelta as jd

    if len(set(job.splits[:-1])) > 1 or job.splits[-1] > job.splits[0]:
        return None
    try:
        return jd.run(model, tokens, segment=job.splits[0]).losses[0].astype(np.float64)
    except jd.NonFiniteError as error:
        nonfinite.append({"side": "jaxdelta", "segment": None, "array": f"jd.run: {error}"})
        return None


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed, run from its folder"
    return found


def _device() -> str:
    import jax

    device = jax.devices()[0]
    return device.platform if device.device_kind == device.platform else f"{device.platform} ({device.device_kind})"


class Clock:
    """Seconds of wall time since the last lap."""

    def __init__(self):
        self._last = time.perf_counter()

    def lap(self) -> float:
        self._last, before = time.perf_counter(), self._last
        return self._last - before


def _read_json(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.exists() else None


def _write_json(file: Path, value: dict[str, Any]) -> None:
    from ports.compare import to_json

    file.write_text(json.dumps(to_json(value), allow_nan=False))


SIDES = {"reference": reference_side, "yardstick": yardstick_side, "jaxdelta": jaxdelta_side}


def main(side: str, work: Path) -> int:
    """Run a side; returns its exit status, and writes an error to ``failure.json``."""

    def say(text: str) -> None:
        print(f"{PROGRESS}{text}", flush=True)

    try:
        SIDES[side](work, say)
    except Exception as error:
        failure = {"kind": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        (work / "failure.json").write_text(json.dumps(failure))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
