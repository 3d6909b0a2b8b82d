"""The word problem: read elements of a group, and name the product of all elements so far.

    target_t = x_t target_{t-1},   target_0 = the identity

The newest element stands on the left, like the newest transition in a recurrence, S_t = A(x_t) S_{t-1} + ..., so a state
that solves the task by a representation has A(g) A(h) = A(g h). Tokens and targets are element numbers for every alphabet.
Over Z2 the task is parity, over Z_m counting modulo m. Source: the word problems of Siems, Carstensen, Zela, Hutter,
Pontil, Grazzi, "DeltaProduct", arXiv 2502.10297.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxdelta.groups.tables import Group


class Words(NamedTuple):
    """Words, and the right answer after each letter.

    Attributes:
        tokens: Int[B T], element numbers.
        targets: Int[B T], element numbers of the products so far.
    """

    tokens: np.ndarray
    targets: np.ndarray


def words(group: Group, *, count: int, length: int, seed: int | Sequence[int]) -> Words:
    """``count`` words of ``length`` independent, uniform letters of the alphabet; reproducible by ``seed``.

    Raises:
        ValueError: ``count`` or ``length`` is below 1.
    """
    for name, value in (("count", count), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    tokens = np.random.default_rng(seed).choice(group.alphabet.astype(np.int32), (count, length))
    return Words(tokens, prefix_products(group, tokens))


def prefix_products(group: Group, tokens: Int[np.ndarray, "*batch T"]) -> Int[np.ndarray, "*batch T"]:
    """The product of all tokens so far, after each token.

    Raises:
        ValueError: a token is not an element of the group.
    """
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(group):
        raise ValueError(
            f"tokens reach from {tokens.min()} to {tokens.max()}; {group.name} has elements 0 .. {len(group) - 1}"
        )
    table = group.table.astype(tokens.dtype)
    targets = np.empty_like(tokens)
    product = np.full(tokens.shape[:-1], group.identity)
    for t in range(tokens.shape[-1]):
        product = targets[..., t] = table[tokens[..., t], product]
    return targets
