"""Transitions of the delta rule: what products of factors can do, and what those of a model do."""
