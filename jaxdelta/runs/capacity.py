"""Bytes of device memory that a segmented run needs, and the rows of a batch that fit."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdelta.implementation import FOR_GPU
from jaxdelta.models import build
from jaxdelta.models.config import DecoderConfig
from jaxdelta.nn.attention import QUERY_BLOCK
from jaxdelta.nn.head import LOGITS_AT_ONCE
from jaxdelta.nn.sizes import LinearSizes
from jaxdelta.ops.delta_rule import CHUNK_SIZE

SHARE = 0.7  # of the device's memory; the rest is for fragmentation and what the estimate leaves out


@dataclass(frozen=True)
class RunMemory:
    """Bytes of a segmented run.

    Attributes:
        parameters: parameters of the model.
        row_carry: carry of one row: conv tails, key/value cache, and three copies of the states, which a truncation needs.
        row_work: activations of one row in a segment, at their peak.
        logits: the largest block of logits; does not depend on the batch.
    """

    parameters: int
    row_carry: int
    row_work: int
    logits: int

    def total(self, rows: int) -> int:
        """Bytes of a run of ``rows`` rows."""
        return self.parameters + self.logits + rows * (self.row_carry + self.row_work)


def run_memory(config: DecoderConfig, *, dtype: str, segment: int, max_length: int) -> RunMemory:
    """Estimate from the sizes of the arrays that are alive together.

    Args:
        dtype: of parameters and activations.
        segment, max_length: in tokens; the cache has ``max_length`` places.

    Raises:
        ValueError: ``segment`` or ``max_length`` is below 1.
    """
    if segment < 1 or max_length < 1:
        raise ValueError(f"segment = {segment} and max_length = {max_length}; expected at least 1 token each")
    model = nnx.eval_shape(lambda: build(config, dtype=jnp.dtype(dtype), implementation=FOR_GPU))  # no device is asked
    carry = jax.eval_shape(lambda: model.init_carry(1, max_length))
    c, size = config, jnp.dtype(dtype).itemsize
    mlp = segment * (3 * c.mlp_width + 2 * c.width) * size
    mixer = segment * max((_mixer(sizes, size) for sizes in c.linear_sizes), default=0)
    attention = 8 * min(segment, QUERY_BLOCK) * c.num_query_heads * max_length if "attention" in c.layer_kinds else 0
    return RunMemory(
        parameters=_bytes(nnx.state(model)),
        row_carry=_bytes(carry) + 2 * _states(c),
        row_work=max(mlp, mixer, attention),
        logits=4 * max(LOGITS_AT_ONCE, c.vocab_size),
    )


def _states(config: DecoderConfig) -> int:
    """Bytes of the stacked states of one row."""
    return 4 * len(config.linear_layers) * math.prod(config.largest_state)


def _mixer(sizes: LinearSizes, size: int) -> int:
    """Bytes of a linear layer's activations for each token, at their peak; ``size`` is bytes of an entry."""
    writes = CHUNK_SIZE * sizes.num_householder * sizes.num_value_heads
    return 2 * sizes.conv_channels * size + 4 * (sizes.conv_channels + 6 * writes)


def _mixer_and_tape(sizes: LinearSizes, size: int) -> int:
    """:func:`_mixer` with what reverse mode keeps."""
    (H, K, V), E, C = sizes.state, sizes.conv_channels, CHUNK_SIZE * sizes.num_householder
    return size * (3 * E + 6 * H * V) + 4 * (2 * E + 6 * H * (K + V) + 8 * H * C + H * K * V // 16)


def reverse_on_host(config: DecoderConfig, *, dtype: str, segment: int, max_length: int, cotangents: int) -> bool:
    """Whether reverse mode over one text fits the device only with the states of its boundaries in host memory.

    Raises:
        MemoryError: it does not fit at all; names the bytes needed and a setting that would fit.
    """
    limit = int(SHARE * device_memory())
    kept, rest = reverse_memory(config, dtype=dtype, segment=segment, max_length=max_length, cotangents=cotangents)
    if kept + rest <= limit:
        return False
    on_host = has_own_memory()
    if on_host and rest <= limit:
        return True

    def needed(segment: int, length: int, cotangents: int) -> int:
        parts = reverse_memory(config, dtype=dtype, segment=segment, max_length=length, cotangents=cotangents)
        return parts[1] + (0 if on_host else parts[0])

    for setting, size in (
        ("samples = 0", needed(segment, max_length, 1)),
        (f"segments of {segment // 2} tokens", needed(max(1, segment // 2), max_length, cotangents)),
        (f"documents of {max_length // 2} tokens", needed(segment, max_length // 2, cotangents)),
        (f"documents of {max_length // 2} tokens and samples = 0", needed(segment, max_length // 2, 1)),
    ):
        if size <= limit:
            advice = f"{setting} would need {gib(size)}"
            break
    else:
        advice = "take shorter documents, shorter segments or dtype bfloat16"
    raise MemoryError(
        f"reverse mode over {max_length:,} tokens needs about {gib(needed(segment, max_length, cotangents))}, "
        f"{gib(limit)} may be used: {advice}"
    )


def reverse_memory(config: DecoderConfig, *, dtype: str, segment: int, max_length: int, cotangents: int) -> tuple[int, int]:
    """Bytes of reverse mode over one text: of the carries of its boundaries, and of everything else at its peak.

    Everything else is parameters, key/value cache and the sum of its cotangents, activations of one segment, cotangents of
    one layer, and blocks of logits. It depends on the number of segments only through the cache. ``segment`` and
    ``max_length`` are in tokens, ``cotangents`` is R of :func:`jaxdelta.runs.reverse.pull_back`.
    """
    run = run_memory(config, dtype=dtype, segment=segment, max_length=max_length)
    c, size = config, jnp.dtype(dtype).itemsize
    linear, attention = len(c.linear_layers), c.num_layers - len(c.linear_layers)
    states = _states(c)
    tails = sum((sizes.conv_width - 1) * sizes.conv_channels for sizes in c.linear_sizes) * size
    cache = run.row_carry - 3 * states - tails
    stream = size * (6 * c.width + 4 * c.mlp_width)
    mixers = [_mixer_and_tape(sizes, size) for sizes in c.linear_sizes]
    gates = sum((sizes.num_householder + 1) * sizes.num_value_heads for sizes in c.linear_sizes)
    scores = 4 * c.num_query_heads * max_length if attention else 0  # of one query; five arrays of them live at once
    # Cotangents are pulled back one after the other: the work of one layer, and the results of each cotangent.
    pulled = 2 * (stream + max(mixers, default=0)) + cotangents * 4 * (c.width * (linear + 2) + gates)
    token = linear * stream + sum(mixers) + attention * (stream + size * 12 * c.width) + pulled
    count = -(-max_length // segment)
    kept = count * (states + tails)
    wide_cache = cache * 4 // size
    rest = (
        run.parameters
        + cache
        + (1 + 2 * cotangents) * wide_cache
        + segment * token
        + min(segment, QUERY_BLOCK) * scores * 5
    )
    return kept, rest + 3 * run.logits + 3 * cotangents * states


def rows_that_fit(memory: RunMemory, rows: int) -> int:
    """Rows of each batch for ``rows`` rows in all: the fewest batches that fit the device, of about equal size.

    Raises:
        MemoryError: not even one row fits; names the bytes needed and available.
    """
    limit = int(SHARE * device_memory())
    each = memory.row_carry + memory.row_work
    fit = (limit - memory.total(0)) // each
    if fit < 1:
        raise MemoryError(
            f"a run of one row needs about {gib(memory.total(1))}, of which {gib(memory.parameters)} for the parameters; "
            f"{gib(limit)} may be used. Take shorter documents, shorter segments or dtype bfloat16."
        )
    batches = -(-rows // int(fit))
    return -(-rows // batches)


def has_own_memory() -> bool:
    """Whether the default device has its own memory; a CPU uses that of the host."""
    return "bytes_limit" in _stats()


def device_memory() -> int:
    """Bytes of the default device's memory; for a CPU those of the machine, or of the container if that has fewer."""
    if has_own_memory():
        return _stats()["bytes_limit"]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return machine


def _stats() -> dict[str, int]:
    return jax.devices()[0].memory_stats() or {}


def gib(size: int) -> str:
    """``size`` in bytes as text, in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _bytes(tree) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
