"""Progress: a bar on a terminal, otherwise a line on stderr every half minute."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERVAL = 30.0  # seconds between two lines
RUNNING = "running segments (the first compiles)"


class Lines:
    """A replacement of :class:`rich.progress.Progress` that prints lines; their time shows that the program is alive."""

    def __init__(self, interval: float = INTERVAL):
        self._interval = interval
        self._task: tuple[str, int, int | None] | None = None  # description, completed, total
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def add_task(self, description: str, *, total: int | None = None) -> int:
        """Begin a task; later lines are about it."""
        self._task, self._begun = (description, 0, total), time.monotonic()
        return 0

    def update(self, task: int, *, completed: int, total: int | None = None) -> None:
        """Set the progress of the task."""
        description, _, known = self._task
        self._task = (description, completed, known if total is None else total)

    def __enter__(self) -> "Lines":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._over.set()
        self._thread.join()

    def _print(self) -> None:
        while not self._over.wait(self._interval):
            if self._task is not None:
                try:
                    print(_line(*self._task, time.monotonic() - self._begun), file=sys.stderr, flush=True)
                except (OSError, ValueError):  # nobody reads them; the command goes on
                    return


def _line(description: str, completed: int, total: int | None, seconds: float) -> str:
    done = f": {completed} of {total}" if total else ""
    return f"{description}{done}, {elapsed(seconds)}"


def elapsed(seconds: float) -> str:
    """A duration as text: 40 s, 1 min 10 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress(console: Console) -> Iterator[Progress | Lines]:
    """A bar if ``console`` or stderr is a terminal, otherwise lines; both have ``add_task`` and ``update``."""
    terminal = next((c for c in (console, Console(stderr=True)) if c.is_terminal and not c.is_dumb_terminal), None)
    if terminal is None:
        with Lines() as lines:
            yield lines
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=terminal, transient=True) as bar:
        yield bar


def follow(bar: Progress | Lines, description: str, *, total: int | None = None) -> Callable[[int, int], None]:
    """Begin a task of ``bar``; returns a function of the amount done and the total that updates it."""
    task = bar.add_task(description, total=total)
    return lambda done, total: bar.update(task, completed=done, total=total)
