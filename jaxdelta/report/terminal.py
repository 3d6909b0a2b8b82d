"""Output to a terminal, pipe or file: text in its encoding, lines that are never cut, pipes whose reader has left."""

# ruff: noqa: RUF001  letters that look like others are meant

import codecs
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

# Letters beyond ASCII that are printed, and their spelling for encodings that lack them.
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
    """``text`` with letters that ``encoding`` lacks spelled in ASCII, or as ``?``."""
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
    """A console that does not cut lines at the right edge.

    Letters that its encoding lacks are spelled in ASCII. A closed pipe is not an error: the rest of the output is dropped,
    and the command continues to its end.
    """

    def __init__(self, *, stderr: bool = False):
        stream = sys.stderr if stderr else sys.stdout
        tolerate(stream)
        super().__init__(stderr=stderr, file=None if stream else io.StringIO())

    def print(self, *objects, crop: bool | None = False, **options) -> None:
        """Like rich's, without the cut at the right edge."""
        super().print(*objects, crop=crop, **options)

    def say(self, text: str) -> None:
        """Print a line literally, without markup, colours or line breaks."""
        self.print(text, markup=False, highlight=False, soft_wrap=True)

    def written(self, folder: Path, names: Iterable[str]) -> None:
        """Print which files were written to ``folder``."""
        self.say(f"Written to {folder}: {', '.join(names)}")

    def fail(self, message: str) -> None:
        """Print an error."""
        self.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)

    def on_broken_pipe(self) -> None:
        """Stop printing."""
        self.quiet = True
        flush(self.file)


def tolerate(stream: Any) -> None:
    """Make ``stream`` spell letters that its encoding lacks."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=HANDLER)


def flush(stream: Any) -> str | None:
    """Flush ``stream``; returns the reason if that fails, or None, also for a closed pipe.

    What cannot be written is dropped, so that the interpreter does not try again at exit and complain.
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
