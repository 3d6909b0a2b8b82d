"""Equivalence of this library and a torch reference on any supported checkpoint: ``python -m ports.verify MODEL``.

Both run one after the other in separate processes, segment by segment, on the same token ids; every carried array and every
logit is compared. Exit status: 0 if all bounds hold, 1 if one is broken, 2 for bad input or an unusable reference.

``python -m ports.verify control``: about 40 seconds on 2 CPU cores, and all 30 bounds hold.
"""

import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from jaxdelta.checkpoints import Info, inspect, load_tokenizer
from jaxdelta.documents import embedded_texts, read_documents, tokenize
from jaxdelta.report.terminal import Terminal
from ports import report
from ports.packages import UnusableReference
from ports.sides import PROGRESS, Job
from ports.verdict import broken, judge, rotation_allowance

HOLDS, BROKEN, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
NOISE_LINES = 20  # last lines of a failed process that are shown


class SideFailed(RuntimeError):
    """A side's process did not finish.

    Attributes:
        details: its traceback, or the last lines of its output.
    """

    def __init__(self, message: str, details: str):
        super().__init__(message)
        self.details = details


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    top = argparse.ArgumentParser(
        prog="python -m ports.verify",
        description="Run a checkpoint here and in its torch reference, and compare logits and everything carried.",
    )
    top.add_argument("model", help="embedded model, folder in Hugging Face's format, or hub id (owner/name)")
    top.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text, or texts or token ids as JSON lines, of which the first is run; default: an embedded document",
    )
    top.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or a folder with one; default: the model's"
    )
    top.add_argument(
        "--segment",
        "--segments",
        dest="segments",
        type=_lengths,
        default=(256,),
        metavar="N[,N...]",
        help="tokens of a segment; of several numbers, the last is repeated to the end of the text; default: 256",
    )
    top.add_argument(
        "--max-tokens", "--tokens", dest="tokens", type=int, default=1024, help="of the text, at most; default: 1024"
    )
    top.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of this library's run; the reference runs in float32 (for bfloat16 in both); default: float32",
    )
    top.add_argument(
        "--out", "--output", dest="output", type=Path, metavar="FOLDER", help="of the report; default: equivalence-MODEL"
    )
    top.add_argument("--revision", help="branch, tag or commit of a hub id")
    top.add_argument("--any-version", action="store_true", help="accept untested versions of the reference's packages")
    top.add_argument("--debug", action="store_true", help="show the traceback of a process that fails")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = parser().parse_args(argv)
    console, errors = Terminal(), Terminal(stderr=True)
    try:
        with _terminable():
            return _run(arguments, console)
    except (ValueError, OSError, UnusableReference, SideFailed) as error:
        errors.fail(str(error))
        if arguments.debug and isinstance(error, SideFailed):
            errors.print(error.details, markup=False, highlight=False, soft_wrap=True)
        return UNUSABLE
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: argparse.Namespace, console: Terminal) -> int:
    info = inspect(arguments.model, revision=arguments.revision)
    if arguments.tokens < 2:
        raise ValueError(f"--tokens is {arguments.tokens}; at least 2 are needed to score one")
    tokens, text = read_tokens(info, arguments.text, arguments.tokens, arguments.tokenizer)
    console.say(f"Text: {text}")
    splits = cut(tokens.shape[1], arguments.segments)
    folder = arguments.output or Path(f"equivalence-{Path(arguments.model).name}")
    _clear(folder)
    where = str(info.folder.resolve())
    comparison = run_sides(Job(where, where, arguments.dtype, splits, arguments.any_version), info, tokens, console)
    rotation = rotation_allowance(info.config, tokens.shape[1])
    verdicts = judge(comparison, num_parameters=info.num_parameters, dtype=arguments.dtype, rotation=rotation)
    subject = describe(arguments, info, tokens, text, splits, comparison)
    report.write_report(folder, comparison, verdicts, subject, arguments.dtype)
    report.print_report(comparison, verdicts, arguments.dtype, console)
    console.written(folder, report.FILES)
    return BROKEN if broken(comparison, verdicts) else HOLDS


def read_tokens(info: Info, file: Path | None, limit: int, tokenizer: Path | None = None) -> tuple[np.ndarray, str]:
    """At most ``limit`` ids [1, N] of the first document of a file, and a description of that document.

    Raises:
        ValueError: the file cannot be read, is empty or has fewer than two tokens, or there is no tokenizer for it.
    """
    if file is None and tokenizer is None and not info.has_tokenizer:
        ids = np.random.default_rng(0).integers(0, info.config.vocab_size, limit)
        return ids[None], f"{limit} random ids (numpy default_rng(0)), as there is no tokenizer"
    given = embedded_texts() if file is None else read_documents([file])
    name, document = next(iter(given.items()))
    if tokenizer is None and isinstance(document, str):
        if not info.has_tokenizer:
            raise ValueError(
                f"{info.folder} has no tokenizer.json, which --text needs; give --tokenizer, or token ids, "
                'as {"ids": [...]} in a .jsonl; without --text random ids are run'
            )
        tokenizer = info.folder
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    ids = tokenize({name: document}, loaded, vocab_size=info.config.vocab_size)[0].tokens
    which = f"embedded document {name}" if file is None else name
    of = f", the first of {len(given)} documents in {file}" if file is not None and len(given) > 1 else ""
    return ids[None, :limit], f"{which}{of}, the first {min(limit, len(ids))} of {len(ids)} tokens"


def cut(num_tokens: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Tokens of each segment; the last of ``lengths`` repeats to the end of the text, where it may be shorter."""
    found: list[int] = []
    while (left := num_tokens - sum(found)) > 0:
        found.append(min(left, lengths[min(len(found), len(lengths) - 1)]))
    return tuple(found)


def in_words(splits: Sequence[int]) -> str:
    """Number and lengths of the segments, in words."""
    first, last = splits[0], splits[-1]
    if len(set(splits[:-1])) > 1 or last > first:
        return f"{len(splits)} of {', '.join(map(str, splits[:12]))}{' ...' if len(splits) > 12 else ''} tokens"
    return f"{len(splits)} of {first} tokens" + (f", the last of {last}" if last != first else "")


def describe(arguments, info: Info, tokens: np.ndarray, text: str, splits, comparison: dict[str, Any]) -> dict[str, str]:
    """What was compared, as text by name."""
    c, packages = info.config, comparison["reference"]["packages"]
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).hexdigest()
    beyond = f"; beyond the {c.max_position} the model was made for" if tokens.shape[1] > c.max_position else ""
    dtype = "float32" if arguments.dtype == "float32" else "float32, and bfloat16 for the yardstick"
    stored = ", ".join(f"{count} in {kind}" for kind, count in info.stored_dtypes.items())
    return {
        "Model": arguments.model + (f" (commit {info.revision})" if info.revision else ""),
        "Folder": f"`{info.folder}`",
        "Sizes": f"{info.num_parameters:,} parameters, {len(c.linear_layers)} linear and "
        f"{c.num_layers - len(c.linear_layers)} attention layers, vocabulary {c.vocab_size} "
        f"(with equal chances for all a loss of {np.log(c.vocab_size):.3f} nats)",
        "Tensors": f"{info.num_tensors} ({stored}), every one loaded on both sides",
        "Text": f"{text}{beyond}; sha256 of the int32 ids {digest}",
        "Segments": in_words(splits),
        "This library": f"{arguments.dtype} on {comparison['jaxdelta']['device']}",
        "Reference": ", ".join(f"{k} {v}" for k, v in packages.items() if k != "numpy") + f", {dtype} on the CPU",
        "Date": datetime.now(UTC).isoformat(timespec="seconds"),
        "Command": f"`{shlex.join(['python', '-m', 'ports.verify', *sys.argv[1:]])}`",
    }


def run_sides(job: Job, info: Info, tokens: np.ndarray, console: Console) -> dict[str, Any]:
    """Run all sides of a job and return their comparison; its files are in a temporary folder that is always removed.

    Raises:
        UnusableReference: see :func:`ports.sides.reference_side`.
        SideFailed: a process did not finish.
        OSError: too little room on the disk.
    """
    with tempfile.TemporaryDirectory(prefix="jaxdelta-verify-") as name:
        work = Path(name)
        check_disk(work, disk_bytes(info, job.splits), console)
        job.write(work, tokens)
        for side in ("reference", *(["yardstick"] if job.dtype != "float32" else []), "jaxdelta"):
            dtype = "float32" if side == "reference" else job.dtype
            with _progress(console, f"{side} ({dtype})") as say:
                run_side(side, work, say)
            written = json.loads((work / ("comparison" if side == "jaxdelta" else side)).with_suffix(".json").read_text())
            console.print(f"{side} ({dtype}): {report.cost(written.get(side, written))}", highlight=False, soft_wrap=True)
        return written


def run_side(side: str, work: Path, say: Callable[[str], None]) -> None:
    """Run a side as a process, which never outlives this call; ``say`` gets its progress."""
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "ports.sides", side, str(work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},  # the files are here
    )
    noise: deque[str] = deque(maxlen=NOISE_LINES)
    try:
        for line in process.stdout:
            if line.startswith(PROGRESS):
                say(line.removeprefix(PROGRESS).strip())
            else:
                noise.append(line)
        if code := process.wait():
            raise failure(side, work, code, "".join(noise))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def failure(side: str, work: Path, code: int, noise: str) -> Exception:
    """The error for a process that ended with ``code``."""
    if (work / "failure.json").exists():
        told = json.loads((work / "failure.json").read_text())
        if told["kind"] == UnusableReference.__name__:
            return UnusableReference(told["message"])
        return SideFailed(f"the {side} side failed with {told['kind']}: {told['message']}", told["traceback"])
    if code < 0:
        memory = "; was there too little memory?" if -code == signal.SIGKILL else ""
        return SideFailed(f"the {side} process was ended by {signal.Signals(-code).name}{memory}", noise)
    return SideFailed(f"the {side} process ended with {code}: {noise.strip() or 'it said nothing'}", noise)


def disk_bytes(info: Info, splits: Sequence[int]) -> int:
    """Bytes that the reference writes: f32 logits, keys and values of each token, and the states after each segment."""
    c, tokens = info.config, sum(splits)
    states = sum(math.prod(s.state) + (s.conv_width - 1) * s.conv_channels for s in c.linear_sizes)
    cache = sum(2 * sizes.num_kv_heads * sizes.head_dim for sizes in c.attention_sizes)
    return 4 * (tokens * (c.vocab_size + cache) + len(splits) * states)


def check_disk(work: Path, needed: int, console: Console) -> None:
    """Print the disk space needed; raises OSError if there is less."""
    free = shutil.disk_usage(work).free
    room = f"{needed / 2**30:.2f} GiB for the reference's logits and states in {work.parent}, {free / 2**30:.1f} GiB free"
    if needed > 0.95 * free:
        raise OSError(f"too little room: {room}; take fewer --tokens, or set TMPDIR to a folder with more")
    console.print(f"Disk: {room}", highlight=False, soft_wrap=True)


def _clear(folder: Path) -> None:
    """Make the folder of the report and remove an earlier report, which could be mistaken for a failed new one.

    Raises:
        ValueError: the folder has files with the names of a report that are not one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [folder / name for name in report.FILES if (folder / name).exists()]
    if found and not report.is_report(folder):
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{folder} holds {names}, which no earlier run has written; choose another --output")
    for file in found:
        file.unlink()


@contextmanager
def _progress(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """A function that prints progress: on a terminal in one line, otherwise a line for each step."""
    if not console.is_terminal:
        yield lambda text: console.print(f"{title}: {text}", highlight=False, soft_wrap=True)
        return
    with console.status(f"{title}: starting") as status:
        yield lambda text: status.update(f"{title}: {escape(text)}")


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C, so that processes and files are removed."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = (0,)
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected tokens of a segment, at least 1, e.g. 256 or 1,2,3,64")
    return lengths


if __name__ == "__main__":
    sys.exit(main())
