"""Tokenizers of vocab.json and merges.txt against those that transformers makes of the same files, and refusals by name."""

import importlib
import json
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

import jaxdelta as jd
from jaxdelta.checkpoints import CheckpointError, load_tokenizer
from tests.tiny import hub_tensors, nested_json, tokenizer, write

TEXTS = [
    "Hello world, it's 1234 fine!\n\n  don't  stop",
    "na\u00efve cafe\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 \u65e5\u672c\u8a9e \U0001f600",
    "a<|endoftext|>b <pad> c <extra> d <think> hi</think>",
    "  x\t\ty\r\n z",
    "",
]


def _trained() -> dict:
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [*TEXTS * 3, "the cat sat on the mat"],
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False),
    )
    return json.loads(made.to_str())["model"]


MODEL = _trained()
VOCABULARY = MODEL["vocab"]
N = len(VOCABULARY)
AS_IT_STANDS = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)
END = dict(content="<|endoftext|>", special=True) | AS_IT_STANDS
THINK = dict(content="<think>", special=False) | AS_IT_STANDS | dict(rstrip=True)
ADDED = {str(N + 1): THINK, str(N): END}


def folder_of(path, settings=None, *, vocabulary=VOCABULARY, **files):
    """A folder with a vocabulary, merges, and other JSON files by their stems."""
    path.mkdir(exist_ok=True)
    merges = ["#version: 0.2", *(" ".join(pair) for pair in MODEL["merges"])]
    (path / "merges.txt").write_text("\n".join(merges) + "\n")
    for name, value in ({"vocab": vocabulary, "tokenizer_config": settings} | files).items():
        if value is not None:
            (path / f"{name}.json").write_text(json.dumps(value))
    return path


def ids(made, text):
    return made.encode(text, add_special_tokens=False).ids


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)  # whose import takes half a minute, and which is not asked
    return importlib.import_module("transformers")


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        (dict(tokenizer_class="GPT2Tokenizer"), {}),
        (None, dict(config=dict(model_type="gpt2"))),
        (None, dict(config=dict(model_type="qwen3"))),
        (dict(tokenizer_class="GPT2TokenizerFast", add_prefix_space=True, pad_token="<pad>"), {}),
        (dict(tokenizer_class="GPT2Tokenizer", bos_token=None, eos_token=None, unk_token=None), {}),
        (dict(tokenizer_class="GPT2Tokenizer"), dict(vocabulary=VOCABULARY | {"<|endoftext|>": N})),
        (dict(tokenizer_class="GPT2Tokenizer", eos_token=THINK | {"__type": "AddedToken"}), {}),
        (dict(tokenizer_class="GPT2Tokenizer", extra_special_tokens=["<extra>"], additional_special_tokens=["<pad>"]), {}),
        (
            dict(tokenizer_class="GPT2Tokenizer", extra_special_tokens=["<extra>"]),
            dict(special_tokens_map=dict(extra_special_tokens=["<pad>"], mask_token="<think>")),
        ),
        (dict(tokenizer_class="Qwen2Tokenizer"), {}),
        (dict(tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=ADDED, pad_token="<pad>"), {}),
        (
            dict(tokenizer_class="Qwen2Tokenizer"),
            dict(special_tokens_map=dict(eos_token=END, pad_token="<pad>"), added_tokens={"<think>": N, "<pad>": N + 1}),
        ),
        (dict(tokenizer_class="Qwen2Tokenizer", extra_special_tokens={"image_token": "<extra>"}, own_token="<think>"), {}),
        (dict(tokenizer_class="Qwen2Tokenizer", additional_special_tokens=[THINK | {"__type": "AddedToken"}]), {}),
        (dict(tokenizer_class="Qwen2Tokenizer"), dict(config=dict(model_type="qwen3_5_text"))),
        (dict(tokenizer_class="GPT2Tokenizer"), dict(config=dict(model_type="qwen2"))),
        (dict(tokenizer_class="GPT2Tokenizer"), dict(config=dict(model_type="qwen3"))),
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(tmp_path, transformers, settings, files):
    folder = folder_of(tmp_path / "m", settings, **files)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in TEXTS:
        assert ids(ours, text) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids(ours, text), skip_special_tokens=False) == theirs.decode(ids(ours, text))


@pytest.mark.parametrize("config", [dict(model_type="qwen3_5_text"), dict(model_type="qwen3_5")], ids=str)
def test_ids_are_those_of_qwen3_5_tokenizers(tmp_path, transformers, config):
    """AutoTokenizer would make an empty one of these two files, so the class is given them."""
    settings = None if config["model_type"] == "qwen3_5_text" else dict(tokenizer_class="Qwen2Tokenizer")
    folder = folder_of(tmp_path / "m", settings, config=config)
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    theirs = Qwen3_5Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    for text in TEXTS:
        assert ids(load_tokenizer(folder), text) == theirs(text, add_special_tokens=False)["input_ids"], text


def test_words_are_cut_as_the_class_says(tmp_path):
    """The three differ: GPT-2 keeps numbers whole, Qwen3.5 keeps marks with their letters."""
    texts = ["1234", "\u0928\u092e\u0938\u094d\u0924\u0947"]
    folders = {
        name: folder_of(tmp_path / name, dict(tokenizer_class=f"{name}Tokenizer")) for name in ("GPT2", "Qwen2", "Qwen3_5")
    }
    words = {
        name: [len(load_tokenizer(folder).pre_tokenizer.pre_tokenize_str(text)) for text in texts]
        for name, folder in folders.items()
    }
    assert words == {"GPT2": [1, 4], "Qwen2": [4, 3], "Qwen3_5": [4, 1]}


@pytest.mark.parametrize(
    ("settings", "files", "reason"),
    [
        (None, {}, "neither tokenizer_config.json nor the kind of model says how text is cut into words"),
        (None, dict(config=dict(model_type="gated_deltanet")), "neither tokenizer_config.json nor the kind of model"),
        (None, dict(config=dict(model_type=["gpt2"])), "neither tokenizer_config.json nor the kind of model"),
        (dict(tokenizer_class="RobertaTokenizer"), {}, "tokenizer_class is 'RobertaTokenizer'; known: GPT2Tokenizer, "),
        (dict(tokenizer_class=5), {}, "tokenizer_class is 5; known"),
        (
            dict(tokenizer_class="GPT2Tokenizer", auto_map={"AutoTokenizer": ["a.B", None]}),
            {},
            "an auto_map, code of its own",
        ),
        (dict(tokenizer_class="GPT2Tokenizer", add_prefix_space="yes"), {}, "add_prefix_space = 'yes'"),
        (dict(tokenizer_class="GPT2Tokenizer", split_special_tokens=True), {}, "split_special_tokens = True"),
        (
            dict(tokenizer_class="GPT2Tokenizer", added_tokens_decoder={str(N + 5): THINK}),
            {},
            f"'<think>' has id {N + 5} there, {N} in order",
        ),
        (dict(tokenizer_class="GPT2Tokenizer", added_tokens_decoder={"x": THINK}), {}, "added tokens are not understood"),
        (dict(tokenizer_class="GPT2Tokenizer", added_tokens_decoder=[THINK]), {}, "added tokens are not understood"),
        (
            dict(tokenizer_class="GPT2Tokenizer", added_tokens_decoder={str(N): {"a": 1}}),
            {},
            "added tokens are not understood",
        ),
        (dict(tokenizer_class="GPT2Tokenizer", eos_token=5), {}, "added tokens are not understood"),
        (dict(tokenizer_class="GPT2Tokenizer", extra_special_tokens=5), {}, "added tokens are not understood"),
        (dict(tokenizer_class="GPT2Tokenizer"), dict(added_tokens={"<x>": "1"}), "added tokens are not understood"),
    ],
    ids=str,
)
def test_what_cannot_be_read_exactly_is_refused_with_the_reason_and_a_way_out(tmp_path, settings, files, reason):
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(folder_of(tmp_path / "m", settings, **files))
    assert reason in str(error.value)
    assert str(error.value).endswith("give a tokenizer.json, or remove them and give documents as token ids")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "{", "vocab.json and merges.txt are no tokenizer"),
        ("vocab.json", "[" * 100_000, "vocab.json and merges.txt are no tokenizer"),
        ("vocab.json", "version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("merges.txt", "no such pair\n", "vocab.json and merges.txt are no tokenizer"),
        ("merges.txt", "no such\n", "vocab.json and merges.txt are no tokenizer"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a list"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    folder = folder_of(tmp_path / "m", dict(tokenizer_class="GPT2Tokenizer"))
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_a_model_with_a_vocabulary_and_merges_has_a_tokenizer(tmp_path):
    """Saved, it is one file that gives the same ids."""
    folder = write(tmp_path / "m", hub_tensors(), nested_json())
    folder_of(folder, dict(tokenizer_class="GPT2Tokenizer"), config=nested_json())
    loaded = jd.load(folder)
    files = ("vocab.json", "merges.txt", "tokenizer_config.json")
    assert jd.inspect(folder).tokenizer_files == files
    assert set(loaded.origin.sha256()) == {"config.json", "model.safetensors", *files}
    jd.save(loaded, tmp_path / "saved")
    again = jd.load(tmp_path / "saved")
    assert jd.inspect(tmp_path / "saved").tokenizer_files == ("tokenizer.json",)
    for text in TEXTS:
        assert ids(again.tokenizer, text) == ids(loaded.tokenizer, text)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_of_the_two_files_is_no_tokenizer(tmp_path, name):
    folder = write(tmp_path / "m", hub_tensors(), nested_json())
    (folder_of(folder, config=nested_json()) / name).unlink()
    assert jd.load(folder).tokenizer is None
    assert not jd.inspect(folder).has_tokenizer
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor vocab\.json with merges\.txt"):
        load_tokenizer(folder)


def test_a_tokenizer_is_given_as_a_file_or_as_its_folder(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer().save(str(tmp_path / "other.json"))
    for path in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json", tmp_path / "other.json"):
        np.testing.assert_array_equal(ids(load_tokenizer(path), "w3 w1"), [3, 1])
    with pytest.raises(CheckpointError, match=r"nowhere is missing; expected a tokenizer\.json"):
        load_tokenizer(tmp_path / "nowhere")
