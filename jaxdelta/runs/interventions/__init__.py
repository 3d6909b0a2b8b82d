"""Interventions on the carried state at boundaries: truncation, and other perturbations.

Every row of the batch is a world: a document with its own ranks, factors or choice of heads. Arrays over heads are
[B, L, H]: rows, linear layers in depth order (the index ``linear_layer`` of tables and datasets), value heads. Between
boundaries an intervention keeps a pytree of arrays, its ``memory``. Ranks and other values are in there and not in the
compiled program, so runs that differ only in them share a program. ``contract.py`` tells how to write an intervention.
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
from jaxdelta.runs.interventions.storage import Factors, Round
from jaxdelta.runs.interventions.truncation import Truncate

__all__ = [
    "Factors",
    "Filter",
    "Intervention",
    "NoOp",
    "Noise",
    "Perturbation",
    "Project",
    "Quantise",
    "Round",
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
