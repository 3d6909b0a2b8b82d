"""Estimates of memory against what is allocated, and batches that fit."""

from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from jaxdelta.analysis.sensitivity.objectives import NextToken, NextTokenInputs
from jaxdelta.models import build
from jaxdelta.models.carry import split
from jaxdelta.models.config import DeltaLMConfig, Qwen3_5Config
from jaxdelta.nn import head
from jaxdelta.runs import capacity, reverse, segments
from jaxdelta.runs.capacity import RunMemory, gib, reverse_memory, reverse_on_host, rows_that_fit, run_memory
from tests.tiny import CONFIG, fresh_model

QWEN3_5_0_8B = Qwen3_5Config.size_0_8b()


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
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 2**14)
    monkeypatch.setattr(capacity, "LOGITS_AT_ONCE", 2**14)
    sizes = dict(key_dim=32, value_dim=48, mlp_width=257)
    four = DeltaLMConfig.tiny(layer_kinds=("linear",), attention=(), num_householder=4, **sizes)
    made = fresh_model(layer_kinds=("linear", "attention"), **sizes) if family == "Qwen3.5" else jd.DeltaLM(four)
    rows, segment, room = 4, 256, 1024
    compiled = segments._segment.lower(*segments.segment_arguments(made, rows, segment, room)).compile()
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
    monkeypatch.setattr(capacity, "device_memory", lambda: int(np.ceil((1500 + 100 * rows + 99) / capacity.SHARE)))


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
    monkeypatch.setattr(capacity, "device_memory", lambda: 10)
    with pytest.raises(MemoryError):
        rows_that_fit(RUN, 3)


def test_the_devices_memory_is_that_of_an_accelerator_or_of_the_machine(monkeypatch):
    assert 2**28 < capacity.device_memory() < 2**45
    monkeypatch.setattr(jax, "devices", lambda: [Mock(memory_stats=lambda: {"bytes_limit": 123})])
    assert capacity.device_memory() == 123


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MiB"), (2**20, "1.0 MiB"), (2**27 - 1, "128.0 MiB"), (3 * 2**29, "1.50 GiB")]
)
def test_sizes_for_people(size, text):
    assert gib(size) == text


# Reverse mode

SIZES = dict(key_dim=32, value_dim=48, mlp_width=257, width=128)
DEEP = Qwen3_5Config.tiny(layer_kinds=("linear", "linear", "linear", "attention"), **SIZES)
WRITES = DeltaLMConfig.tiny(layer_kinds=("linear",) * 2, attention=(), num_householder=4, key_dim=32, value_dim=48)


def abstract(tree, *leading, dtype=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*leading, *x.shape), dtype or x.dtype), tree)


def asked_by_reverse_mode(config, dtype, segment, max_length, cotangents):
    """Bytes of arguments and temporaries of one segment's pull-back, by the compiler."""
    made = nnx.eval_shape(lambda: build(config, dtype=jax.numpy.dtype(dtype)))
    recurrent, caches = jax.eval_shape(lambda: split(made.init_carry(1, max_length)))
    text = segments.Text(np.zeros((1, segment + 1), np.int32), np.array([segment]), segment)
    program, probes = reverse._program(made, reverse.Tape(config, text, [], caches, None, ()))
    ids, mask = (jax.ShapeDtypeStruct((1, segment), kind) for kind in (np.int32, bool))
    one = jax.ShapeDtypeStruct((1,), np.int32)
    uniforms = jax.ShapeDtypeStruct((cotangents - 1, 1, segment), np.float32)
    state, tails = (abstract(x, cotangents) for x in (recurrent.S, recurrent.tails))
    sums = abstract(caches, cotangents, dtype=np.float32)
    part, inputs = segments.Part(ids, ids, one), NextTokenInputs(ids, mask, one, uniforms)
    arrays = recurrent, caches, part, (), probes, inputs, state, reverse.Cotangents(tails, sums)
    asked = reverse._pull_segment.lower(program, NextToken(), nnx.state(made), *arrays).compile().memory_analysis()
    return asked.argument_size_in_bytes + asked.temp_size_in_bytes


@pytest.mark.parametrize(
    ("config", "dtype", "segment", "max_length", "cotangents"),
    [
        (CONFIG, "float32", 16, 64, 3),
        (DEEP, "float32", 256, 1024, 9),
        (DEEP, "bfloat16", 128, 16384, 1),
        (WRITES, "float32", 256, 1024, 3),
    ],
    ids=["tiny", "many samples", "long text in bf16", "DeltaProduct of four steps"],
)
def test_reverse_mode_is_estimated_near_what_the_compiler_asks_for(
    monkeypatch, config, dtype, segment, max_length, cotangents
):
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 2**14)
    monkeypatch.setattr(capacity, "LOGITS_AT_ONCE", 2**14)
    _, rest = reverse_memory(config, dtype=dtype, segment=segment, max_length=max_length, cotangents=cotangents)
    asked = asked_by_reverse_mode(config, dtype, segment, max_length, cotangents)
    assert 0.8 * asked < rest < 3 * asked


def test_the_boundaries_of_reverse_mode_are_counted_to_the_byte():
    """States and conv tails of every segment's start, the last of which may hold fewer tokens."""
    carry = jd.init_carry(fresh_model(), 1, 50)
    recurrent, _ = split(carry)
    kept, _ = reverse_memory(CONFIG, dtype="float32", segment=16, max_length=50, cotangents=1)
    assert kept == 4 * (nbytes(recurrent.S) + nbytes(recurrent.tails))


def of_device(monkeypatch, size, backend="cpu"):
    """A device of which ``size`` bytes may be used."""
    monkeypatch.setattr(capacity, "device_memory", lambda: int(np.ceil(size / capacity.SHARE)))
    monkeypatch.setattr(capacity, "has_own_memory", lambda: backend != "cpu")


def reverse_needs(*, segment=256, max_length=4096, cotangents=9):
    return reverse_memory(DEEP, dtype="float32", segment=segment, max_length=max_length, cotangents=cotangents)


def fits():
    return reverse_on_host(DEEP, dtype="float32", segment=256, max_length=4096, cotangents=9)


def test_boundaries_go_to_the_host_where_an_accelerator_cannot_hold_them(monkeypatch):
    kept, rest = reverse_needs()
    of_device(monkeypatch, kept + rest, "gpu")
    assert not fits()
    of_device(monkeypatch, kept + rest - 2, "gpu")
    assert fits()
    of_device(monkeypatch, rest - 2, "gpu")
    with pytest.raises(MemoryError, match=r"over 4,096 tokens needs about .* may be used: "):
        fits()


def test_a_cpu_has_no_other_memory_for_the_boundaries(monkeypatch):
    kept, rest = reverse_needs()
    of_device(monkeypatch, kept + rest)
    assert not fits()
    of_device(monkeypatch, kept + rest - 2)
    with pytest.raises(MemoryError, match=gib(kept + rest)):
        fits()


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("samples = 0", {"cotangents": 1}),
        ("segments of 128 tokens", {"segment": 128}),
        ("documents of 2048 tokens", {"max_length": 2048}),
        ("documents of 2048 tokens and samples = 0", {"max_length": 2048, "cotangents": 1}),
    ],
)
def test_what_does_not_fit_is_told_with_the_first_setting_that_does(monkeypatch, setting, changes):
    """On a device of just the size that the setting needs, unless an earlier one needs less."""
    order = [{"cotangents": 1}, {"segment": 128}, {"max_length": 2048}, {"max_length": 2048, "cotangents": 1}]
    needed = sum(reverse_needs(**changes))
    earlier = [sum(reverse_needs(**other)) for other in order[: order.index(changes)]]
    of_device(monkeypatch, needed)
    with pytest.raises(MemoryError) as error:
        fits()
    if all(size > needed for size in earlier):
        assert str(error.value).endswith(f"{setting} would need {gib(needed)}")
    else:
        assert "would need" in str(error.value)


def test_what_no_setting_helps_is_told_too(monkeypatch):
    of_device(monkeypatch, 1000)
    with pytest.raises(MemoryError, match="take shorter documents, shorter segments or dtype bfloat16"):
        fits()
