"""The embedded control models are what their cards say, and show what a cut of the carried state costs."""

import hashlib
import re

import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.checkpoints import ASSETS
from jaxdelta.documents import embedded_texts, tokenize
from jaxdelta.runs.segments import run

NAMES = ("control", "control-product")


@pytest.fixture(scope="module")
def control():
    return jd.load("control")


def test_these_are_all():
    assert tuple(jd.embedded_models()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_checksums_are_those_of_the_card(name):
    sums = dict(re.findall(r"\| (\S+) \| ([0-9a-f]{64}) \|", (ASSETS / name / "README.md").read_text()))
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (ASSETS / name).iterdir()}
    assert {name: files[name] for name in sums} == sums
    assert set(sums) == {"config.json", "model.safetensors", "tokenizer.json"}


def test_it_is_small_hybrid_three_to_one_and_has_states_of_at_least_32(control):
    assert (ASSETS / "control" / "model.safetensors").stat().st_size < 8e6
    kinds = control.config.layer_kinds
    assert kinds.count("linear") == 3 * kinds.count("attention")
    assert control.config.max_rank >= 32
    assert 2048 <= control.tokenizer.get_vocab_size() <= 4096


def test_the_product_is_small_has_two_steps_a_token_that_reflect_and_nothing_but_states():
    assert sum(file.stat().st_size for file in (ASSETS / "control-product").iterdir()) < 4e6
    config = jd.load("control-product").config
    assert set(config.layer_kinds) == {"linear"}
    assert (config.num_householder, config.negative_eigenvalues, config.forget_gate) == (2, True, True)


def test_tokenizer_inverts_on_any_text(control):
    text = "Thou 'shalt' not é\n\n\tdivide 0x7f by — zero 日本語 🙂"
    assert control.tokenizer.decode(control.tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_it_predicts_held_out_text_better_than_a_compressor_and_worse_when_its_states_are_cut(name):
    """xz -9e needs at least 2.2 bits a byte for every held-out document; rank 1 costs more than rank 8."""
    control = jd.load(name)
    tokens = tokenize({"daniel_1_4": embedded_texts()["daniel_1_4"]}, control.tokenizer)[0].tokens[None, :3000]
    num_bytes = len(control.tokenizer.decode(tokens[0]).encode())

    def bits_per_byte(rank):
        cut = None if rank is None else jd.Truncate(rank)
        return float(np.sum(run(control, tokens, intervention=cut).losses, dtype=np.float64)) / np.log(2) / num_bytes

    untouched, one, eight = bits_per_byte(None), bits_per_byte(1), bits_per_byte(8)
    assert untouched < 2.2
    assert untouched == pytest.approx(bits_per_byte(control.config.max_rank), abs=1e-6)
    assert one > eight > untouched - 1e-3
