"""The cells of the grid, their models, and the recipe that all share."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

from jaxdelta.groups import group_of
from jaxdelta.models.config import DeltaLMConfig

GROUPS = ("Z2", "Z3", "Z7", "S3", "S4", "A5", "S5", "S5_limit_2", "S5_limit_3", "S5_limit_4")


@dataclass(frozen=True)
class Cell:
    """One kind of model on one group. Many seeds are trained for each cell.

    Attributes:
        group: a name that ``group_of`` knows.
        num_householder: n_h.
        negative_eigenvalues: whether beta reaches 2 (eigenvalues in [-1, 1]) or 1 (in [0, 1]).
        forget_gate: whether the state decays.

    Raises:
        ValueError: an unknown group, or n_h below 1.
    """

    group: str
    num_householder: int
    negative_eigenvalues: bool
    forget_gate: bool = False

    def __post_init__(self):
        group_of(self.group)
        if self.num_householder < 1:
            raise ValueError(f"num_householder is {self.num_householder}; expected at least 1")


@dataclass(frozen=True)
class Recipe:
    """How cells are trained: the same for those that should fail and those that should not.

    Attributes:
        width: D of the one layer.
        mlp_width: F.
        num_heads: H.
        head_dim: K and V.
        stages: (length of words, steps), in order; the last length is called the trained one.
        batch: words for each step and seed.
        learning_rate: of AdamW, constant.
        b2: of AdamW.
        weight_decay: on matrices alone.
        clip: largest norm of a seed's gradient.
        average: share of the exponential average of parameters that a step keeps; the average is what is measured.
        every: steps between validations; divides the steps of every stage.
        validated: words of a validation.
        tested: fresh words of the final test.
        threshold: share of words without a wrong product that a seed needs to have solved the task.

    Raises:
        ValueError: no stages, or ``every`` does not divide the steps of a stage.
    """

    width: int = 64
    mlp_width: int = 64
    num_heads: int = 4
    head_dim: int = 8
    stages: tuple[tuple[int, int], ...] = ((8, 800), (32, 1200))
    batch: int = 32
    learning_rate: float = 2e-3
    b2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.99
    every: int = 100
    validated: int = 128
    tested: int = 512
    threshold: float = 0.99

    def __post_init__(self):
        if not self.stages:
            raise ValueError("a recipe with no stages")
        for length, steps in self.stages:
            if length < 1 or steps < 1 or steps % self.every:
                raise ValueError(f"a stage of {steps} steps at length {length}; expected multiples of {self.every} steps")

    @classmethod
    def of(cls, changes: dict[str, Any]) -> "Recipe":
        """The recipe with changes, given as JSON values.

        Raises:
            ValueError: an unknown field, or stages that do not fit.
        """
        unknown = changes.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a recipe has no {', '.join(sorted(unknown))}")
        stages = {"stages": tuple(map(tuple, changes["stages"]))} if "stages" in changes else {}
        return cls(**changes | stages)

    @property
    def length(self) -> int:
        """The trained length: that of the words of the last stage."""
        return self.stages[-1][0]

    @property
    def long_length(self) -> int:
        """Four times the trained length, to which a seed should extrapolate."""
        return 4 * self.length

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of the words in each round; a round is the steps between two validations."""
        return tuple(length for length, steps in self.stages for _ in range(steps // self.every))


def grid(
    groups: Sequence[str], steps: Sequence[int], eigenvalues: Sequence[bool], gates: Sequence[bool] = (False,)
) -> list[Cell]:
    """All combinations, one group after the other."""
    return [Cell(*choice) for choice in product(groups, steps, eigenvalues, gates)]


def config_of(cell: Cell, recipe: Recipe) -> DeltaLMConfig:
    """One layer without convolution or output gate, so that a token's transition depends on that token alone."""
    return DeltaLMConfig(
        family="gated_deltaproduct",
        vocab_size=len(group_of(cell.group)),
        width=recipe.width,
        mlp_width=recipe.mlp_width,
        layer_kinds=("linear",),
        num_key_heads=recipe.num_heads,
        num_value_heads=recipe.num_heads,
        key_dim=recipe.head_dim,
        value_dim=recipe.head_dim,
        conv_width=1,
        num_householder=cell.num_householder,
        forget_gate=cell.forget_gate,
        negative_eigenvalues=cell.negative_eigenvalues,
        output_gate=None,
    )


def configuration(cells: Sequence[Cell], recipe: Recipe, seeds: Sequence[int]) -> dict[str, Any]:
    """What the results depend on, as JSON values."""
    return {
        "experiment": "state_tracking",
        "cells": [asdict(cell) for cell in cells],
        "recipe": asdict(recipe),
        "seeds": list(seeds),
    }
