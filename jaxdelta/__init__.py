"""Gated DeltaNet and DeltaProduct in JAX, and the analysis of their carried states: all public names."""

import os

# XLA already spreads a batch of factorizations over the cores. OpenBLAS threads below it wait for one another and made
# small factorizations 250 times slower on a busy machine. OpenBLAS reads this when the first one is compiled.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"

from jaxdelta.analysis.compare import compare
from jaxdelta.analysis.keys import keys
from jaxdelta.analysis.reads import state_reads
from jaxdelta.analysis.sensitivity.importance import head_importance
from jaxdelta.analysis.sensitivity.maps import sensitivity, sensitivity_maps, tail_effect, tail_fisher, tail_gate
from jaxdelta.analysis.sensitivity.objectives import LogitDifference, OfHidden, OfLogits
from jaxdelta.analysis.spectrum import spectrum
from jaxdelta.analysis.storage import storage_costs
from jaxdelta.analysis.sweep import sweep
from jaxdelta.analysis.trace import rank_trace
from jaxdelta.analysis.transitions.claims import ledger
from jaxdelta.analysis.transitions.ledger import ledger_of
from jaxdelta.checkpoints import CheckpointError, embedded_models, inspect, load, save
from jaxdelta.documents import Document
from jaxdelta.implementation import Implementation
from jaxdelta.models.carry import Carry, states, with_states
from jaxdelta.models.config import DeltaLMConfig, Qwen3_5Config
from jaxdelta.models.decoder import Decoder
from jaxdelta.models.delta_lm import DeltaLM
from jaxdelta.models.qwen3_5 import Qwen3_5
from jaxdelta.nn.sizes import AttentionSizes
from jaxdelta.ops import householder
from jaxdelta.ops.delta_product import gated_delta_product, gated_delta_product_chunked
from jaxdelta.ops.delta_rule import gated_delta_rule, gated_delta_rule_chunked
from jaxdelta.ops.low_rank import truncate
from jaxdelta.ops.nearest_product import nearest_product
from jaxdelta.ops.reads import Contributions, Reads, RecallErrors, contributions, reads, recall_errors
from jaxdelta.ops.reflections import reflections
from jaxdelta.ops.spectra import effective_rank, energy_rank, singular_values, stable_rank, threshold_rank
from jaxdelta.results.folder import ResultsError
from jaxdelta.runs.hooks import HookPoint, hook_names, run_with_cache, run_with_hooks
from jaxdelta.runs.interventions import (
    Factors,
    Filter,
    Noise,
    NoOp,
    Perturbation,
    Project,
    Quantise,
    Round,
    Scale,
    Sequential,
    Swap,
    Truncate,
    Zero,
)
from jaxdelta.runs.observers import Edit, Named, added, added_at, multiplied, substituted
from jaxdelta.runs.segments import NonFiniteError, Run, forward, init_carry, run

__all__ = [  # noqa: RUF022
    # checkpoints
    "CheckpointError",
    "embedded_models",
    "inspect",
    "load",
    "save",
    # models
    "AttentionSizes",
    "Decoder",
    "DeltaLM",
    "DeltaLMConfig",
    "Implementation",
    "Qwen3_5",
    "Qwen3_5Config",
    # runs of one batch
    "Carry",
    "NonFiniteError",
    "Run",
    "forward",
    "init_carry",
    "run",
    "states",
    "with_states",
    # interventions at boundaries
    "Factors",
    "Filter",
    "NoOp",
    "Noise",
    "Perturbation",
    "Project",
    "Quantise",
    "Round",
    "Scale",
    "Sequential",
    "Swap",
    "Truncate",
    "Zero",
    # arrays inside a segment: changed, kept
    "Edit",
    "added",
    "added_at",
    "multiplied",
    "substituted",
    "Named",
    # the same under TransformerLens's names
    "HookPoint",
    "hook_names",
    "run_with_cache",
    "run_with_hooks",
    # many documents, kept in a results folder
    "Document",
    "ResultsError",
    "compare",
    "storage_costs",
    "sweep",
    # measures of the state
    "keys",
    "rank_trace",
    "spectrum",
    "state_reads",
    # sensitivities
    "LogitDifference",
    "OfHidden",
    "OfLogits",
    "head_importance",
    "sensitivity",
    "sensitivity_maps",
    "tail_effect",
    "tail_fisher",
    "tail_gate",
    # transitions
    "householder",
    "ledger",
    "ledger_of",
    "nearest_product",
    "reflections",
    # functions of arrays
    "gated_delta_product",
    "gated_delta_product_chunked",
    "gated_delta_rule",
    "gated_delta_rule_chunked",
    "Contributions",
    "Reads",
    "RecallErrors",
    "contributions",
    "reads",
    "recall_errors",
    "truncate",
    "effective_rank",
    "energy_rank",
    "singular_values",
    "stable_rank",
    "threshold_rank",
]
