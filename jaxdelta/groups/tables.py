"""Finite groups as multiplication tables, with an alphabet of elements.

``table[a, b]`` is a b. For permutations of n points this means b first, then a, (a b)(i) = a(b(i)), so that matrices
multiply in the same order. Permutations are numbered in lexicographic order, and the identity is 0. Z_m is addition modulo
m.
"""

import itertools
import re
from dataclasses import dataclass

import numpy as np

MAX_ORDER = 120
NAMES = "Z2 .. Z120, S2 .. S5, A3 .. A5, and with moves of at most l points S5_limit_2 .. S5_limit_5"


@dataclass(frozen=True, eq=False)
class Group:
    """A group and an alphabet.

    Attributes:
        name: such as "S4".
        table: whole numbers [G, G], ``table[a, b]`` = a b.
        alphabet: elements that occur as tokens, ascending; they need not generate the whole group.

    Raises:
        ValueError: the table is not that of a group, or the alphabet is empty or has repeated or unknown elements.
    """

    name: str
    table: np.ndarray
    alphabet: np.ndarray

    def __post_init__(self):
        G, letters = len(self.table), self.alphabet
        if self.table.shape != (G, G) or not 1 <= G <= MAX_ORDER:
            raise ValueError(f"table of {self.name} has shape {self.table.shape}; expected square, 1 .. {MAX_ORDER} rows")
        rows_and_columns = np.concatenate([self.table, self.table.T])
        if (np.sort(rows_and_columns) != np.arange(G)).any():
            raise ValueError(f"a row or column of the table of {self.name} does not hold each of {G} elements once")
        if (self.table[self.table] != self.table[:, self.table]).any():
            raise ValueError(f"the table of {self.name} is not associative")
        if letters.size == 0 or len(np.unique(letters)) < letters.size or not 0 <= letters.min() <= letters.max() < G:
            raise ValueError(f"alphabet of {self.name} is {letters.tolist()}; expected different elements of 0 .. {G - 1}")

    def __len__(self) -> int:
        """The order, |G|."""
        return len(self.table)

    @property
    def identity(self) -> int:
        return int(np.argmax(np.diag(self.table) == np.arange(len(self))))

    @property
    def inverses(self) -> np.ndarray:
        """The inverse of each element."""
        return np.argmax(self.table == self.identity, axis=1)


def group_of(name: str) -> Group:
    """The group with a name such as ``Z3``, ``S4``, ``A5`` or ``S5_limit_3`` (moves of at most 3 points as alphabet).

    Raises:
        ValueError: the name is unknown, or a number in it is out of range.
    """
    found = re.fullmatch(r"([ZSA])(\d+)(?:_limit_(\d+))?", name)
    if not found or (found[1] == "Z" and found[3]):
        raise ValueError(f"unknown group {name!r}; known: {NAMES}")
    kind, size, moved = found[1], int(found[2]), found[3]
    least, most = {"Z": (2, MAX_ORDER), "S": (2, 5), "A": (3, 5)}[kind]
    if not least <= size <= most:
        raise ValueError(f"{name}: {size} is out of range; expected {kind}{least} .. {kind}{most}")
    if kind == "Z":
        table = np.add.outer(np.arange(size), np.arange(size)) % size
        return Group(name, table, np.arange(size))
    return _permutations(name, size, even=kind == "A", moved=size if moved is None else int(moved))


def shortest_words(group: Group) -> dict[int, tuple[int, ...]]:
    """A shortest word over the alphabet for each element that it generates; the empty word for the identity.

    The word (a, b, c) is the product a b c.
    """
    found = {group.identity: ()}
    latest = [group.identity]
    while latest:
        reached = {int(group.table[a, x]): (a, *found[x]) for x in latest for a in group.alphabet.tolist()}
        latest = [x for x in reached if x not in found]
        found |= {x: reached[x] for x in latest}
    return found


def generated(group: Group) -> Group:
    """The subgroup that the alphabet generates; its elements are renumbered in the same order."""
    elements = np.array(sorted(shortest_words(group)))
    table = np.searchsorted(elements, group.table[np.ix_(elements, elements)])
    return Group(group.name, table, np.searchsorted(elements, group.alphabet))


def _permutations(name: str, points: int, *, even: bool, moved: int) -> Group:
    """All or the even permutations, with those that move at most ``moved`` points as alphabet."""
    if not 2 + even <= moved <= points:
        raise ValueError(f"{name}: moves of at most {moved} points; expected {2 + even} .. {points}")
    maps = np.array(list(itertools.permutations(range(points))))
    if even:
        inversions = sum((maps[:, i] > maps[:, j]) for i in range(points) for j in range(i + 1, points))
        maps = maps[inversions % 2 == 0]
    numbers = {tuple(m): number for number, m in enumerate(maps.tolist())}
    table = np.array([[numbers[tuple(a[b].tolist())] for b in maps] for a in maps])
    return Group(name, table, np.flatnonzero((maps != np.arange(points)).sum(axis=1) <= moved))
