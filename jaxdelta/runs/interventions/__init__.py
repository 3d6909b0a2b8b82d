"""Interventions on the carried state at boundaries: the cut, and perturbations beside it.

Every row of the batch is a world of its own: a document under its own ranks, factors or choice of heads. Arrays over heads
are [B, L, H]: rows, linear layers in depth order (the index ``linear_layer`` of tables and datasets), value heads. The
object itself is hashable and holds only what shapes the compiled program; everything else travels in its memory, so that
runs which differ in ranks alone share one. ``contract.py`` says what a class of one's own must keep to.
"""

from jaxdelta.runs.interventions.contract import Intervention, Started, check_intervention, described, started
from jaxdelta.runs.interventions.perturbations import (
    Filter,
    Noise,
    NoOp,
    Perturbation,
    Project,
    Quantise,
    Scale,
    Swap,
    Zero,
)
from jaxdelta.runs.interventions.sequential import Sequential
from jaxdelta.runs.interventions.truncation import Truncate

__all__ = [
    "Filter",
    "Intervention",
    "NoOp",
    "Noise",
    "Perturbation",
    "Project",
    "Quantise",
    "Scale",
    "Sequential",
    "Started",
    "Swap",
    "Truncate",
    "Zero",
    "check_intervention",
    "described",
    "started",
]
