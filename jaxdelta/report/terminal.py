"""What a terminal, a pipe or a file takes: text in its encoding, lines that are never cut, and a reader that has left."""

# ruff: noqa: RUF001  the letters that look like others are the subject

import codecs
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

# What is printed beyond ASCII, as it is written where the encoding has no such letter.
SPELLED = {
    "±": "+-",
    "×": "x",
    "²": "^2",
    "‖": "||",
    "−": "-",
    "–": "-",
    "…": "...",
    "’": "'",
    "“": '"',
    "”": '"',
    "α": "alpha",
    "β": "beta",
    "λ": "lambda",
    "ρ": "rho",
    "σ": "sigma",
    "≤": "<=",
    "≥": ">=",
    "√": "sqrt",
    "ᵀ": "^T",
}
HANDLER = "jaxdelta.spelled"


def spelled(text: str, encoding: str) -> str:
    """``text`` with every letter that ``encoding`` has, and others as ASCII has them, ``?`` at worst."""
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.encode(encoding, HANDLER).decode(encoding)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(SPELLED.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error(HANDLER, _spell)


class Terminal(Console):
    """A console whose lines are as long as what they say: what is beyond the right edge is not cut off.

    Letters that its encoding lacks are spelled in ASCII. A pipe that nobody reads any more is no failure: its reader has
    what was wanted, the rest is dropped, and the command goes on to its end.
    """

    def __init__(self, *, stderr: bool = False):
        stream = sys.stderr if stderr else sys.stdout
        tolerate(stream)
        super().__init__(stderr=stderr, file=None if stream else io.StringIO())

    def print(self, *objects, crop: bool | None = False, **options) -> None:
        """As rich's, without the cut at the right edge."""
        super().print(*objects, crop=crop, **options)

    def say(self, text: str) -> None:
        """A line as it stands, without markup, colours or breaks."""
        self.print(text, markup=False, highlight=False, soft_wrap=True)

    def written(self, folder: Path, names: Iterable[str]) -> None:
        """The line that says which files are in ``folder``."""
        self.say(f"Written to {folder}: {', '.join(names)}")

    def fail(self, message: str) -> None:
        """The line that says what is wrong."""
        self.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)

    def on_broken_pipe(self) -> None:
        """Say no more."""
        self.quiet = True
        flush(self.file)


def tolerate(stream: Any) -> None:
    """Let ``stream`` spell what its encoding has no letters for."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=HANDLER)


def flush(stream: Any) -> str | None:
    """Write what is in the buffer of ``stream``, or drop it where it is not taken; says why, but for a reader who has left.

    What is dropped is not tried again when the interpreter ends, which would complain.
    """
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return None if isinstance(error, BrokenPipeError) else error.strerror or str(error)
    return None
