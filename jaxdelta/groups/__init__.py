"""Finite groups, the words that spell their elements, and their real representations."""

from jaxdelta.groups.representations import (
    Representation,
    direct_sum,
    minimal_representation,
    predicted_householder,
    real_irreps,
)
from jaxdelta.groups.tables import Group, generated, group_of, shortest_words

__all__ = [
    "Group",
    "Representation",
    "direct_sum",
    "generated",
    "group_of",
    "minimal_representation",
    "predicted_householder",
    "real_irreps",
    "shortest_words",
]
