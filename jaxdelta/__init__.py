"""Gated DeltaNet in JAX: segmented runs, truncation of the carried state, and what it costs. The contents page."""

import os

# XLA spreads a batch of factorizations over the cores; threads of OpenBLAS below it wait for one another, and on a busy
# machine made small ones 250 times slower. OpenBLAS reads this when the first of them is compiled.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"

from jaxdelta.analysis.sensitivity.maps import sensitivity
from jaxdelta.analysis.sensitivity.objectives import LogitDifference
from jaxdelta.analysis.sweep import sweep
from jaxdelta.analysis.transitions.claims import ledger
from jaxdelta.checkpoints import CheckpointError, embedded_models, inspect, load, save
from jaxdelta.models.carry import Carry, states, with_states
from jaxdelta.models.config import DeltaLMConfig, Qwen3_5Config
from jaxdelta.models.decoder import Decoder
from jaxdelta.models.delta_lm import DeltaLM
from jaxdelta.models.qwen3_5 import Qwen3_5
from jaxdelta.nn.sizes import AttentionSizes
from jaxdelta.ops.delta_product import gated_delta_product, gated_delta_product_chunked
from jaxdelta.ops.delta_rule import gated_delta_rule, gated_delta_rule_chunked
from jaxdelta.ops.householder import active_rank, frozen_dimension, spectral_radius, transition
from jaxdelta.ops.low_rank import truncate
from jaxdelta.ops.nearest_product import nearest_product
from jaxdelta.ops.reflections import reflections
from jaxdelta.ops.spectra import effective_rank, energy_rank, singular_values, stable_rank, threshold_rank
from jaxdelta.results.folder import ResultsError
from jaxdelta.runs.interventions import Truncate
from jaxdelta.runs.segments import NonFiniteError, Run, forward, init_carry, run

__all__ = [
    "AttentionSizes",
    "Carry",
    "CheckpointError",
    "Decoder",
    "DeltaLM",
    "DeltaLMConfig",
    "LogitDifference",
    "NonFiniteError",
    "Qwen3_5",
    "Qwen3_5Config",
    "ResultsError",
    "Run",
    "Truncate",
    "active_rank",
    "effective_rank",
    "embedded_models",
    "energy_rank",
    "forward",
    "frozen_dimension",
    "gated_delta_product",
    "gated_delta_product_chunked",
    "gated_delta_rule",
    "gated_delta_rule_chunked",
    "init_carry",
    "inspect",
    "ledger",
    "load",
    "nearest_product",
    "reflections",
    "run",
    "save",
    "sensitivity",
    "singular_values",
    "spectral_radius",
    "stable_rank",
    "states",
    "sweep",
    "threshold_rank",
    "transition",
    "truncate",
    "with_states",
]
