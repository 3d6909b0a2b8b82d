"""Estimates of memory against what is allocated, and batches that fit."""

from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from jaxdelta import memory, segments
from jaxdelta.memory import RunMemory, gib, rows_that_fit, run_memory
from jaxdelta.models.config import DeltaLMConfig, Qwen3_5Config
from tests.tiny import CONFIG, fresh_model

QWEN3_5_0_8B = Qwen3_5Config(
    vocab_size=248320,
    width=1024,
    mlp_width=3584,
    layer_kinds=("linear", "linear", "linear", "attention") * 6,
    num_key_heads=16,
    num_value_heads=16,
    key_dim=128,
    value_dim=128,
    conv_width=4,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=256,
    rotary_dim=64,
)


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_to_the_byte(dtype, tied):
    made = fresh_model(dtype=dtype, tied=tied)
    assert run_memory(made.config, dtype=dtype, segment=16, max_length=64).parameters == nbytes(nnx.state(made))


def test_sizes_of_the_0_8b_model():
    """752,393,024 parameters; 18 states of 16 heads of 128 x 128, thrice while they are cut; caches of six layers."""
    needed = run_memory(QWEN3_5_0_8B, dtype="bfloat16", segment=256, max_length=16384)
    wide = 18 * (16 + 16 + 128) + 6 * 2 * 256 + 49 * 1024
    assert needed.parameters == 2 * 752_393_024 + 2 * wide
    cache, tails = 6 * 2 * 16384 * 2 * 256 * 2, 18 * 3 * 6144 * 2
    assert needed.row_carry == 3 * 18_874_368 + cache + tails + 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_carry_is_counted_with_the_states_twice_more(dtype):
    carry = jd.init_carry(fresh_model(dtype=dtype), 1, 64)
    needed = run_memory(CONFIG, dtype=dtype, segment=16, max_length=64)
    assert needed.row_carry == nbytes(carry) + 2 * nbytes(jd.states(carry))


@pytest.mark.parametrize("family", ["Qwen3.5", "DeltaProduct of four steps"])
def test_an_estimate_covers_what_the_compiler_asks_for(monkeypatch, family):
    """Arguments and temporaries of the compiled segment, of four rows of a model whose activations outweigh its weights."""
    monkeypatch.setattr(segments, "LOGITS_AT_ONCE", 2**14)
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", 2**14)
    sizes = dict(key_dim=32, value_dim=48, mlp_width=257)
    four = DeltaLMConfig.tiny(layer_kinds=("linear",), attention=(), num_householder=4, **sizes)
    made = fresh_model(layer_kinds=("linear", "attention"), **sizes) if family == "Qwen3.5" else jd.DeltaLM(four)
    rows, segment, room = 4, 256, 1024
    carry = jax.eval_shape(lambda: made.init_carry(rows, room))
    ids, length = jax.ShapeDtypeStruct((rows, segment), np.int32), jax.ShapeDtypeStruct((rows,), np.int32)
    compiled = segments._segment.lower(made.config, nnx.state(made), carry, ids, ids, length).compile()
    asked = compiled.memory_analysis()
    estimate = run_memory(made.config, dtype="float32", segment=segment, max_length=room).total(rows)
    used = asked.argument_size_in_bytes + asked.temp_size_in_bytes + asked.output_size_in_bytes - asked.alias_size_in_bytes
    assert used < estimate < 4 * used


@pytest.mark.parametrize(("segment", "max_length"), [(0, 64), (-16, 64), (16, 0), (16, -64)])
def test_a_run_of_nothing_has_no_estimate(segment, max_length):
    with pytest.raises(ValueError, match=r"segment|max_length"):
        run_memory(CONFIG, dtype="float32", segment=segment, max_length=max_length)


# Batches

RUN = RunMemory(parameters=1000, row_carry=60, row_work=40, logits=500)


def device(monkeypatch, rows):
    """A device on which ``rows`` rows of RUN fit, and 99 bytes more."""
    monkeypatch.setattr(memory, "device_memory", lambda: int(np.ceil((1500 + 100 * rows + 99) / memory.SHARE)))


@pytest.mark.parametrize(
    ("rows", "fit", "batch"), [(1, 1, 1), (5, 8, 5), (8, 8, 8), (9, 8, 5), (16, 8, 8), (17, 8, 6), (100, 1, 1)]
)
def test_rows_are_split_into_few_batches_of_about_equal_size(monkeypatch, rows, fit, batch):
    device(monkeypatch, fit)
    assert rows_that_fit(RUN, rows) == batch
    assert -(-rows // batch) == -(-rows // fit)


def test_a_row_that_does_not_fit_is_told_with_what_it_needs(monkeypatch):
    device(monkeypatch, 0)
    with pytest.raises(MemoryError, match=r"one row needs about 0\.0 MiB, .*; 0\.0 MiB may be used\. Take shorter"):
        rows_that_fit(RUN, 3)


def test_parameters_that_do_not_fit_are_told_too(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda: 10)
    with pytest.raises(MemoryError):
        rows_that_fit(RUN, 3)


def test_the_devices_memory_is_that_of_an_accelerator_or_of_the_machine(monkeypatch):
    assert 2**28 < memory.device_memory() < 2**45
    monkeypatch.setattr(jax, "devices", lambda: [Mock(memory_stats=lambda: {"bytes_limit": 123})])
    assert memory.device_memory() == 123


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MiB"), (2**20, "1.0 MiB"), (2**27 - 1, "128.0 MiB"), (3 * 2**29, "1.50 GiB")]
)
def test_sizes_for_people(size, text):
    assert gib(size) == text
