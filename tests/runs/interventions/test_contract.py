"""Interventions of one's own: runs give the right numbers whatever a class keeps where, or say why they cannot."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.runs import segments
from jaxdelta.runs.interventions import Perturbation, Scale, check_intervention, described
from jaxdelta.runs.reverse import record
from jaxdelta.runs.segments import text_of
from tests.tiny import model, tokens

KINDS, SEGMENT = ("linear", "attention", "linear"), 8
TEXT = np.stack(tokens(30))
FACTORS = (1.0, 0.0, 0.5)


def losses(intervention):
    return jd.run(model(layer_kinds=KINDS), TEXT, segment=SEGMENT, intervention=intervention).losses


@pytest.fixture(scope="module")
def expected():
    """Losses by the factor on every state."""
    return {factor: losses(Scale(np.full(8, factor))) for factor in FACTORS}


@dataclass(frozen=True)
class Open(Perturbation):
    """Its factor is part of the program."""

    factor: float

    def change(self, S, own, index):
        return self.factor * S, own


@dataclass(frozen=True)
class Handed(Perturbation):
    """Its factor reaches the program through the memory."""

    factor: float = field(compare=False)

    def prepare(self, S):
        return jnp.float32(self.factor)

    def change(self, S, own, index):
        return own * S, own


class OwnInit(Perturbation):
    """A subclass that is no dataclass and keeps its field on the side."""

    def __init__(self, factor):
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "where", True)
        object.__setattr__(self, "at", None)

    def change(self, S, own, index):
        return self.factor * S, own


class Plain:
    """No dataclass, and equal to all of its kind."""

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def start(self, carry):
        return self, None

    def __call__(self, carry, memory):
        return jd.with_states(carry, [self.factor * S for S in jd.states(carry)]), memory, None


@dataclass(frozen=True, eq=False)
class OwnEquality(Perturbation):
    """A dataclass whose equality leaves out what it reads."""

    factor: float

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return 0

    def change(self, S, own, index):
        return self.factor * S, own


@dataclass(frozen=True, slots=True)
class Slots(Perturbation):
    """Keeps its fields outside of ``__dict__``."""

    factor: float

    def change(self, S, own, index):
        return self.factor * S, own


@dataclass(frozen=True)
class Cached(Perturbation):
    """Works an array out once and keeps it on the side."""

    factor: float

    @cached_property
    def mask(self):
        return np.full((8, 11), self.factor, np.float32)

    def change(self, S, own, index):
        return self.mask[None, None, None] * S, own


@dataclass(frozen=True)
class OfClass(Perturbation):
    """Reads an attribute of its class."""

    factor: ClassVar[float] = 1.0

    def change(self, S, own, index):
        return self.factor * S, own


@dataclass(frozen=True)
class Boxed(Perturbation):
    """Keeps its factor in a container that may change."""

    box: dict

    def change(self, S, own, index):
        return self.box["factor"] * S, own


@dataclass(frozen=True)
class Function(Perturbation):
    """Keeps a function, of which nothing is known."""

    map: Any

    def change(self, S, own, index):
        return self.map(S), own


@dataclass
class Mutable:
    """A dataclass that may change."""

    factor: float

    __hash__ = object.__hash__

    def start(self, carry, boundaries):
        return self, None

    def __call__(self, carry, memory):
        return jd.with_states(carry, [self.factor * S for S in jd.states(carry)]), memory, None


@pytest.mark.parametrize(
    "kind", [Open, Handed, OwnInit, Plain, OwnEquality, Slots, Cached, Mutable], ids=lambda k: k.__name__
)
def test_each_object_has_its_own_numbers(kind, expected):
    for factor in (*FACTORS, FACTORS[0]):
        np.testing.assert_allclose(losses(kind(factor)), expected[factor], rtol=1e-5, atol=1e-5)


def test_what_changes_between_two_runs_changes_their_numbers(expected):
    scale = {"factor": 1.0}
    mine, others = Mutable(1.0), (Function(lambda S: scale["factor"] * S), Boxed(scale), OfClass())
    for factor in FACTORS:
        mine.factor = scale["factor"] = OfClass.factor = factor
        for intervention in (mine, *others):
            np.testing.assert_allclose(losses(intervention), expected[factor], rtol=1e-5, atol=1e-5)


def test_a_declared_class_shares_its_program_and_others_do_not(expected):
    before = segments._boundary._cache_size()
    for factor in FACTORS:
        losses(Handed(factor))
    assert segments._boundary._cache_size() - before <= 1


@dataclass(frozen=True)
class Hidden(Perturbation):
    """Reads in the compiled part what it declared to be outside of it."""

    factor: float = field(compare=False)

    def change(self, S, own, index):
        return (S if self.factor is None else self.factor * S), own


@dataclass(frozen=True)
class Wrapped:
    """Another one inside of a field."""

    inner: Any

    def start(self, carry, boundaries):
        inner, memory = self.inner.start(carry, boundaries)
        return Wrapped(inner), memory

    def __call__(self, carry, memory):
        return self.inner(carry, memory)


@dataclass(frozen=True)
class Several(Wrapped):
    """Others, in a set."""

    def start(self, carry, boundaries):
        return Several(frozenset([self.inner])), self.inner.start(carry, boundaries)[1]

    def __call__(self, carry, memory):
        return next(iter(self.inner))(carry, memory)


@pytest.mark.parametrize("wrap", [lambda x: x, Wrapped, Several], ids=["alone", "inside another", "in a set of others"])
def test_a_hidden_field_cannot_be_read_in_the_program(wrap):
    net = model(layer_kinds=KINDS)
    message = "Hidden.factor is declared compare=False.*hand its value on in the memory that start"
    with pytest.raises(TypeError, match=message):
        losses(wrap(Hidden(0.0)))
    with pytest.raises(TypeError, match=message):
        record(net, text_of(net, TEXT, segment=SEGMENT), intervention=wrap(Hidden(0.0)))


def test_one_inside_another_keeps_its_numbers(expected):
    for factor in FACTORS:
        for kind in (Open, Handed, Mutable):
            np.testing.assert_allclose(losses(Wrapped(Wrapped(kind(factor)))), expected[factor], rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Numbers(Perturbation):
    """A value whose type tells programs apart: 1 / -0.0 is not 1 / 0.0."""

    factor: Any

    def change(self, S, own, index):
        return jnp.where(1 / jnp.float32(self.factor) > 0, S, 0), own


def test_equal_numbers_of_other_kinds_are_other_programs(expected):
    np.testing.assert_allclose(losses(Numbers(0.0)), expected[1.0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(losses(Numbers(-0.0)), expected[0.0], rtol=1e-5, atol=1e-5)


def test_a_field_without_a_hash_is_refused_with_what_to_do():
    with pytest.raises(TypeError, match=r"Function tells its programs apart by a field that has no hash.*compare=False"):
        losses(Function(np.ones(3)))


@pytest.mark.parametrize(
    "intervention", [OwnInit(1.0), Plain(1.0), Function(np.tanh), Boxed({"factor": 1.0})], ids=lambda x: type(x).__name__
)
def test_results_of_what_no_field_tells_apart_are_not_kept(intervention):
    with pytest.raises(ValueError, match="cannot be kept"):
        described(intervention)


def test_what_is_kept_tells_interventions_apart():
    arrays = [
        Scale(np.full(8, 0.5)),
        Scale(np.full(8, 0.25)),
        Scale(np.full((1, 1, 1, 8), 0.5)),
        Scale(0.5 * np.ones(8), at=8),
    ]
    others = [Wrapped(Handed(1.0)), Wrapped(Handed(2.0)), Wrapped(Open(1.0)), Wrapped((Handed(1.0),)), jd.Truncate(4)]
    said = [json.dumps(described(x)) for x in (*arrays, *others)]
    assert len(set(said)) == len(said)
    assert said == [json.dumps(described(x)) for x in (*arrays, *others)]
    assert described(None) is None


def test_start_is_told_the_boundaries_of_the_run():
    seen = []

    class Asks(Plain):
        def start(self, carry, boundaries):
            seen.append(boundaries)
            return self, None

    losses(Asks(1.0))
    assert seen == [(8, 16, 24)]


@pytest.mark.parametrize(
    "wrong", [lambda carry: carry, Perturbation, "Truncate(4)", 4], ids=["function", "class", "text", "number"]
)
def test_what_is_no_intervention_is_refused(wrong):
    with pytest.raises(TypeError, match=r"intervention is .*expected an object with start"):
        check_intervention(wrong)
