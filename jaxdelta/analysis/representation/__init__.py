"""What a layer that tracks a state has learnt: transitions of tokens, their span, and the group that they represent."""

from jaxdelta.analysis.representation.heads import HeadAccuracy, head_accuracies
from jaxdelta.analysis.representation.homomorphism import (
    extended,
    homomorphism_error,
    multiplicities,
    represented_dimension,
)
from jaxdelta.analysis.representation.retention import retention
from jaxdelta.analysis.representation.span import MovedSpan, moved_span
from jaxdelta.analysis.representation.steps import TokenSteps, token_steps, transitions

__all__ = [
    "HeadAccuracy",
    "MovedSpan",
    "TokenSteps",
    "extended",
    "head_accuracies",
    "homomorphism_error",
    "moved_span",
    "multiplicities",
    "represented_dimension",
    "retention",
    "token_steps",
    "transitions",
]
