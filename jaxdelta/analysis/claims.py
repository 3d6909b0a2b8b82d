"""Claims and the measured range of each; the verdict follows from both."""

from typing import Literal, NamedTuple

import numpy as np


class Line(NamedTuple):
    """A claim, ``claim relation claimed``, and the range measured for it.

    Attributes:
        tolerance: largest deviation from ``claimed`` that "=" allows.
        low, high: smallest and largest measured value.
    """

    claim: str
    relation: Literal["=", "<=", "<", ">"]
    claimed: float
    tolerance: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether all measured values are as claimed; False for NaN."""
        return {
            "=": bool(np.max(np.abs(np.array([self.low, self.high]) - self.claimed)) <= self.tolerance),
            "<=": self.high <= self.claimed,
            "<": self.high < self.claimed,
            ">": self.low > self.claimed,
        }[self.relation]


def equal(claim: str, claimed: float | int, measured, tolerance: float = 0.0) -> Line:
    """Every measured value is ``claimed``, within ``tolerance``."""
    return Line(claim, "=", float(claimed), tolerance, float(np.min(measured)), float(np.max(measured)))


def at_most(claim: str, claimed: float | int, measured) -> Line:
    """No measured value exceeds ``claimed``."""
    return Line(claim, "<=", float(claimed), 0.0, float(np.min(measured)), float(np.max(measured)))


def below(claim: str, claimed: float | int, measured) -> Line:
    """Every measured value is below ``claimed``."""
    return at_most(claim, claimed, measured)._replace(relation="<")


def above(claim: str, claimed: float | int, measured) -> Line:
    """Every measured value is above ``claimed``."""
    return at_most(claim, claimed, measured)._replace(relation=">")
