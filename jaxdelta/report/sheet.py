"""A printed table that never cuts a number: columns without room are printed below, next to the row names again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxdelta.report.terminal import spelled


def spread(values: Sequence[float] | np.ndarray, form: str = "{:.3g}") -> str:
    """Least, median and largest of ``values`` without NaN, as the text of a cell; "-" if none is left."""
    known = np.asarray(values, float)[~np.isnan(values)]
    if not known.size:
        return "-"
    return "  ".join(form.format(x) for x in (known.min(), np.median(known), known.max()))


class Facts:
    """Names with texts, next to one another or, on a narrow terminal, below one another."""

    def __init__(self, about: Mapping[str, str]):
        self.about = about

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[object]:
        """One or more lines for each name."""
        said = {spelled(name, options.encoding): spelled(text, options.encoding) for name, text in self.about.items()}
        names = max(map(cell_len, said))
        words = max(cell_len(word) for text in said.values() for word in text.split())
        below = names + 1 + words > options.max_width
        view = Table(show_header=False, box=None)
        view.add_column(no_wrap=True)
        view.add_column(overflow="fold")
        for name, text in said.items():
            if below:
                yield Text(name, "bold", overflow="fold")
                yield Padding(Text(text, overflow="fold"), (0, 0, 0, 2))
            else:
                view.add_row(Text(name, "bold"), Text(text, overflow="fold"))
        if not below:
            yield view


@dataclass(frozen=True)
class Column:
    """A column and how it may be laid out.

    Attributes:
        heading: above the cells, one line or several.
        group: heading above adjacent columns of the same group, which stay together if possible.
        prose: text, left-aligned, which may wrap between words; otherwise a number, right-aligned, which never wraps.
        width: least width, if there is room.
    """

    heading: str
    group: str = ""
    prose: bool = False
    width: int = 0


class Laid(NamedTuple):
    """A column as printed: headings and cells as the encoding can spell them, least and full width."""

    column: Column
    group: str
    heading: str
    cells: tuple[str, ...]
    least: int
    most: int


class Sheet:
    """A table whose first ``keys`` columns name the row.

    If the columns do not fit the terminal, they are printed in bands below one another, each with the keys; groups are
    split only if necessary. What is still too wide extends beyond the right edge.
    """

    def __init__(
        self,
        title: str = "",
        *,
        caption: str = "",
        keys: int = 1,
        header: bool = True,
        frame=box.SIMPLE,
        left: bool = False,
    ):
        self.title, self.caption, self.keys, self.header, self.frame, self.left = title, caption, keys, header, frame, left
        self.columns: list[Column] = []
        self.rows: list[tuple[str, ...]] = []
        self.styles: list[str | None] = []

    def add_column(self, heading: str, *, group: str = "", prose: bool = False, width: int = 0) -> None:
        """Add a column on the right; see :class:`Column`."""
        self.columns.append(Column(heading, group, prose, width))

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Add a row with a cell for every column; ``style`` is one of rich.

        Raises:
            ValueError: there are fewer or more cells than columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)
        self.styles.append(style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[object]:
        """Title, bands, caption."""
        width, encoding = options.max_width, options.encoding
        is_unicode = encoding.lower().startswith("utf")
        frame = self.frame if is_unicode else box.Box(str(self.frame).replace("─", "-"), ascii=True)
        tables = [self._table(band, width, frame) for band in self._bands(width, encoding)]
        boundless = options.update(width=10**6)
        wide = max(console.measure(table, options=boundless).maximum for table in tables)

        def prose(text: str, style: str) -> Iterator[object]:
            justify = "left" if self.left else "center"
            shown = Text(spelled(text, encoding), style, justify=justify, overflow="fold")
            yield from console.render(shown, options.update(width=min(wide, width))) if text else ()

        yield from prose(self.title, "table.title")
        for table in tables:
            yield from console.render(table, options.update(width=max(width, wide)))
        yield from prose(self.caption, "table.caption")

    def _bands(self, width: int, encoding: str) -> Iterator[list[Laid]]:
        """Columns to print next to one another, as many as fit ``width``; each band begins with the keys."""
        laid = [self._laid(index, encoding) for index in range(len(self.columns))]
        keys, band = laid[: self.keys], []
        for group in _groups(laid[self.keys :]):
            if _width([*keys, *group]) > width:
                group = [part._replace(group="\n".join(part.group.split())) for part in group]
            for together in [group] if _width([*keys, *group]) <= width else [[part] for part in group]:
                if band and _width([*keys, *band, *together]) > width:
                    yield [*keys, *band]
                    band = []
                band += together
        yield [*keys, *band]

    def _laid(self, index: int, encoding: str) -> Laid:
        column = self.columns[index]
        group, heading = (spelled(text, encoding) if self.header else "" for text in (column.group, column.heading))
        cells = tuple(spelled(row[index], encoding) for row in self.rows)
        lines = [line for text in (heading, *cells) for line in text.splitlines()]
        most = max([column.width, *map(cell_len, lines)])
        least = max([0, *(cell_len(word) for line in lines for word in line.split())]) if column.prose else most
        return Laid(column, group, heading, cells, least, most)

    def _table(self, band: Sequence[Laid], width: int, frame: box.Box) -> Table:
        """The table of a band; columns of prose share the room that numbers leave, the last column first."""
        table = Table(box=frame, show_header=self.header, padding=(0, 1, 0, 0), pad_edge=False)
        spare = max(0, width - _width(band))
        widths: list[int | None] = []
        for laid in reversed(band):
            widths.append(min(laid.most, laid.least + spare) if laid.column.prose else None)
            spare -= (widths[-1] or laid.least) - laid.least
        for laid, heading, given in zip(band, _headings(band), reversed(widths), strict=True):
            table.add_column(
                Text(heading),
                justify="left" if laid.column.prose else "right",
                no_wrap=not laid.column.prose,
                overflow="fold",
                width=given,
                min_width=laid.column.width,
            )
        for style, *cells in zip(self.styles, *(laid.cells for laid in band), strict=True):
            table.add_row(*map(Text, cells), style=style)
        return table


def _groups(columns: Sequence[Laid]) -> list[list[Laid]]:
    """Neighbours of one group; a column without a group stands alone."""
    found: list[list[Laid]] = []
    for laid in columns:
        if found and laid.group and found[-1][-1].group == laid.group:
            found[-1].append(laid)
        else:
            found.append([laid])
    return found


def _headings(band: Sequence[Laid]) -> list[str]:
    """Heading lines of each column, aligned at the bottom: the group's above its first column, then the column's own."""
    groups = [laid.group for laid in band]
    found = [
        [*([] if group == before else group.splitlines()), *laid.heading.splitlines()]
        for laid, group, before in zip(band, groups, ["", *groups], strict=False)
    ]
    height = max(map(len, found))
    return ["\n".join([""] * (height - len(lines)) + lines) for lines in found]


def _width(band: Sequence[Laid]) -> int:
    """Width of a line: columns at their least width, two cells between them, one at each end."""
    headings = zip(band, _headings(band), strict=True)
    return sum(2 + max([laid.least, *map(cell_len, heading.splitlines())]) for laid, heading in headings)
