"""Copy tokens against their definition, and paired differences against a calculation by hand."""

import numpy as np
import pytest

from jaxdelta.metrics import copy_mask, paired_difference, spearman


def copies_by_definition(tokens, gap):
    """Token i is one if tokens i - 1 and i stood at j - 1 and j for a j more than ``gap`` before i."""
    bigrams = [tuple(tokens[i - 1 : i + 1]) for i in range(1, len(tokens))]
    return [any(bigrams[j] == bigrams[i] for j in range(len(bigrams)) if i - j > gap) for i in range(len(bigrams))]


@pytest.mark.parametrize("gap", [0, 1, 7, 199, 1000])
@pytest.mark.parametrize("words", [1, 3, 12, 1000])
def test_copy_tokens_by_definition(words, gap):
    tokens = np.random.default_rng(words).integers(0, words, 200)
    mask = copy_mask(tokens, gap)
    assert mask.tolist() == copies_by_definition(tokens.tolist(), gap)


def test_the_distance_must_exceed_the_gap():
    tokens = [1, 2, 0, 0, 0, 1, 2]  # the second (1, 2) ends 5 after the first
    assert copy_mask(np.array(tokens), 4).tolist() == [False] * 5 + [True]
    assert not copy_mask(np.array(tokens), 5).any()


def test_a_near_occurrence_does_not_hide_a_far_one():
    tokens = np.array([1, 2, 0, 3, 4, 5, 1, 2, 1, 2])
    assert copy_mask(tokens, 6)[-1]


def test_bigrams_are_ordered_and_of_both_words():
    tokens = np.array([1, 2, 9, 9, 9, 9, 2, 1, 3, 2, 1, 4])
    assert copy_mask(tokens, 3).tolist() == copies_by_definition(tokens.tolist(), 3)
    assert not copy_mask(np.array([1, 23, 7, 12, 3]), 0).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_large_ids_of_narrow_dtypes_do_not_collide(dtype):
    """Products of two ids pass the end of the dtype; 248,319 is Qwen3.5's last word."""
    top = min(248_319, np.iinfo(dtype).max)
    tokens = np.random.default_rng(0).integers(top - 5, top + 1, 100).astype(dtype)
    assert copy_mask(tokens, 9).tolist() == copies_by_definition(tokens.tolist(), 9)


@pytest.mark.parametrize("tokens", [[3], [3, 5]], ids=["one token", "two tokens"])
def test_short_texts_have_no_copy_tokens(tokens):
    assert copy_mask(np.array(tokens), 0).tolist() == [False] * (len(tokens) - 1)


def test_paired_difference_by_hand():
    """Differences 1, 2, 6: mean 3, sd sqrt((4 + 1 + 9) / 2), over sqrt(3)."""
    mean, stderr = paired_difference(np.array([11.0, 22.0, 36.0]), np.array([10.0, 20.0, 30.0]))
    assert mean == pytest.approx(3)
    assert stderr == pytest.approx(np.sqrt(7) / np.sqrt(3))


def test_what_documents_share_cancels_in_a_paired_difference():
    values = np.array([1.0, 5.0, 90.0])
    assert paired_difference(values + 0.5, values) == pytest.approx((0.5, 0))


def test_one_document_has_no_standard_error():
    mean, stderr = paired_difference(np.array([3.0]), np.array([1.0]))
    assert mean == 2
    assert np.isnan(stderr)


def test_rank_correlations_take_infinities_and_leave_out_nan():
    a = np.array([1.0, 2.0, np.nan, 3.0, np.inf])
    assert spearman(a, np.array([0.0, 1.0, 7.0, 2.0, 3.0])) == pytest.approx(1)
    assert spearman(a, np.array([3.0, 2.0, 0.0, 1.0, -1.0])) == pytest.approx(-1)
    assert np.isnan(spearman(np.full(4, np.inf), np.arange(4.0)))
    assert np.isnan(spearman(np.full(3, np.nan), np.arange(3.0)))
