"""State tracking: the word problem of a group, and a model that solves it."""

from jaxdelta.tasks.state_tracking.solution import solution
from jaxdelta.tasks.state_tracking.words import Words, prefix_products, words

__all__ = ["Words", "prefix_products", "solution", "words"]
