"""State tracking: the word problem of a group, and how many Householder steps a token it should take."""

from jaxdelta.tasks.state_tracking.groups import Group, generated, group_of, shortest_words
from jaxdelta.tasks.state_tracking.representations import (
    Representation,
    direct_sum,
    minimal_representation,
    predicted_householder,
    real_irreps,
)
from jaxdelta.tasks.state_tracking.solution import solution
from jaxdelta.tasks.state_tracking.words import Words, prefix_products, words

__all__ = [
    "Group",
    "Representation",
    "Words",
    "direct_sum",
    "generated",
    "group_of",
    "minimal_representation",
    "predicted_householder",
    "prefix_products",
    "real_irreps",
    "shortest_words",
    "solution",
    "words",
]
