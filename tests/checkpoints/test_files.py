"""Which file holds which tensor, and what is said of files that are broken, missing or of another kind."""

import functools
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdelta.checkpoints import files
from jaxdelta.checkpoints.files import CheckpointError, TensorFiles, read_json
from tests.tiny import bits, safetensors_bytes, write_index

WIDE = np.arange(6, dtype=np.float32).reshape(2, 3)
NARROW = np.array([1.0, -0.0, 3.0], ml_dtypes.bfloat16)
NESTED = functools.reduce(lambda inner, _: [inner], range(900), 5)  # deeper than the reader goes
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1746882752\n"


@pytest.fixture
def single(tmp_path):
    """``model.safetensors`` with a tensor of each dtype."""
    save_file({"wide": WIDE, "narrow": NARROW}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


# Where tensors are


def test_a_single_file_needs_no_index(single):
    tensors = TensorFiles(single.parent)
    assert tensors.files == [single]
    assert tensors.shapes == {"wide": (2, 3), "narrow": (3,)}
    assert tensors.dtypes == {"wide": "F32", "narrow": "BF16"}


def test_tensors_are_read_as_stored(single):
    tensors = TensorFiles(single.parent)
    for name, stored in (("wide", WIDE), ("narrow", NARROW)):
        assert tensors.read(name).dtype == stored.dtype
        np.testing.assert_array_equal(bits(tensors.read(name)), bits(stored))


def test_a_tensor_read_outlives_its_file(single):
    read = TensorFiles(single.parent).read("wide")
    single.write_bytes(b"\0" * single.stat().st_size)
    np.testing.assert_array_equal(read, WIDE)


def test_the_odd_single_shard_is_found_through_the_index(tmp_path):
    """Qwen3.5-0.8B's name, with a dash where others have none."""
    odd = "model.safetensors-00001-of-00001.safetensors"
    save_file({"wide": WIDE}, tmp_path / odd)
    write_index(tmp_path, {"wide": odd})
    assert TensorFiles(tmp_path).files == [tmp_path / odd]


def test_a_single_file_goes_before_an_index(single):
    """As in transformers: an older set of shards, or part of one, stays where a model was saved once more."""
    save_file({"wide": 2 * WIDE}, single.parent / "shard.safetensors")
    write_index(single.parent, {"wide": "shard.safetensors"})
    tensors = TensorFiles(single.parent)
    assert (tensors.files, tensors.unread) == ([single], [single.parent / "shard.safetensors"])
    np.testing.assert_array_equal(tensors.read("wide"), WIDE)


def test_an_index_goes_before_a_variant_and_files_that_it_does_not_name(tmp_path):
    others = ["model.fp16.safetensors", "consolidated.safetensors", "model-00002-of-00002.safetensors"]
    for name in others:
        save_file({"wide": 2 * WIDE, "narrow": NARROW}, tmp_path / name)
    save_file({"wide": WIDE}, tmp_path / "shard.safetensors")
    write_index(tmp_path, {"wide": "shard.safetensors"})
    tensors = TensorFiles(tmp_path)
    assert tensors.shapes == {"wide": (2, 3)}
    assert [file.name for file in tensors.unread] == sorted(others)
    np.testing.assert_array_equal(tensors.read("wide"), WIDE)


@pytest.mark.parametrize("chosen", ["other.safetensors", "other.safetensors.index.json"])
def test_weights_that_the_configuration_names_go_before_all(single, chosen):
    """The field transformers_weights of config.json."""
    save_file({"wide": 2 * WIDE}, single.parent / "other.safetensors")
    write_index(single.parent, {"wide": "other.safetensors"}, name="other.safetensors.index.json")
    tensors = TensorFiles(single.parent, chosen=chosen)
    assert tensors.files == [single.parent / "other.safetensors"]
    np.testing.assert_array_equal(tensors.read("wide"), 2 * WIDE)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("nowhere.safetensors", "names the weights nowhere.safetensors, which are missing"),
        ("../model.safetensors", "transformers_weights = '../model.safetensors'; expected a safetensors file or index"),
        ("pytorch_model.bin", "transformers_weights = 'pytorch_model.bin'; expected"),
        (5, "transformers_weights = 5; expected"),
        (["model.safetensors"], "expected a safetensors file or index of the same folder"),
    ],
    ids=str,
)
def test_weights_that_the_configuration_cannot_name_are_refused(single, chosen, message):
    with pytest.raises(CheckpointError, match=message):
        TensorFiles(single.parent, chosen=chosen)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            "it holds model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, shards without their "
            "model.safetensors.index.json: add it",
        ),
        (
            ["model.fp16.safetensors"],
            "it holds model.fp16.safetensors, a name that is not read by itself: rename it to model.s",
        ),
        (["consolidated.safetensors"], "it holds consolidated.safetensors, a name that is not read"),
    ],
    ids=["shards", "variant", "another name"],
)
def test_weights_under_other_names_are_said_to_be_there(tmp_path, names, message):
    for name in names:
        save_file({"wide": WIDE}, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"has neither {files.SINGLE} nor {files.INDEX}; {message}"):
        TensorFiles(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    save_file({"wide": WIDE}, tmp_path / "model-00001-of-00002.safetensors")
    write_index(tmp_path, {"wide": "model-00001-of-00002.safetensors", "narrow": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        TensorFiles(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path):
    save_file({"wide": WIDE}, tmp_path / "1.safetensors")
    save_file({"narrow": NARROW}, tmp_path / "2.safetensors")
    write_index(tmp_path, {"wide": "2.safetensors", "narrow": "2.safetensors", "other": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"places tensor (wide in 2|other in 1)\.safetensors, which does not hold it"):
        TensorFiles(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    save_file({"wide": WIDE}, tmp_path / "1.safetensors")
    save_file({"wide": WIDE, "narrow": NARROW}, tmp_path / "2.safetensors")
    write_index(tmp_path, {"wide": "1.safetensors", "narrow": "2.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor wide is in both 1\.safetensors and 2\.safetensors"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [{}, None, [], "x", {"wide": 5}, {"wide": 5, "narrow": "shard.safetensors"}, {"wide": None}], ids=str
)
def test_an_index_that_is_none_is_refused(tmp_path, weight_map):
    save_file({"wide": WIDE, "narrow": NARROW}, tmp_path / "shard.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=files.INDEX):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/hostname", "sub/shard.safetensors", "..", "."])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, place):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    save_file({"wide": WIDE}, tmp_path / "outside.safetensors")
    save_file({"wide": WIDE}, folder / "sub" / "shard.safetensors")
    write_index(folder, {"wide": place})
    with pytest.raises(CheckpointError, match=f"{files.INDEX} names the file {place}"):
        TensorFiles(folder)


# What the files are


class Payload:
    """What unpickling would run."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_pickled_weights_are_refused_by_name_and_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"index\.json; pytorch_model\.bin would have to be unpickled"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_under_the_name_of_safetensors_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path} has neither {files.SINGLE} nor {files.INDEX}$"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"", "its 0 bytes are no safetensors file"),
        (lambda b: b[:4], "its 4 bytes are no safetensors file"),
        (lambda b: b[:20], "its 20 bytes are no safetensors file"),
        (lambda b: b[:-1], "it has {minus_one} bytes, its header promises {size}"),
        (lambda b: b + b"\0" * 8, "it has {plus_eight} bytes, its header promises {size}"),
        (lambda b: POINTER, "Git LFS pointer, not the file itself: run `git lfs pull`"),
        (lambda b: b"<!DOCTYPE html><html><body>Not found</body></html>", "its 50 bytes are no safetensors file"),
    ],
    ids=["empty", "4 bytes", "20 bytes", "one byte short", "eight bytes too long", "LFS pointer", "web page"],
)
def test_a_broken_file_is_named_with_what_is_wrong(single, change, message):
    """The sizes found and expected, and what to do."""
    whole = single.read_bytes()
    single.write_bytes(change(whole))
    size = len(whole)
    with pytest.raises(CheckpointError) as error:
        TensorFiles(single.parent)
    assert f"{single} cannot be read" in str(error.value)
    assert message.format(size=size, minus_one=size - 1, plus_eight=size + 8) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "header",
    [
        {"wide": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}},
        {"wide": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 24]}},
        {"wide": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]}},
        {"wide": {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}},
        {"wide": {"dtype": "F33", "shape": [2, 3], "data_offsets": [0, 24]}},
        {"wide": {"shape": [2, 3]}},
        {"wide": 5},
        ["wide"],
        NESTED,
    ],
    ids=["shape", "dtype", "offsets", "negative shape", "unknown dtype", "missing fields", "no entry", "list", "nested"],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors_bytes(header, bytes(24)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*; download it again"):
        TensorFiles(tmp_path)


def test_bf16_is_read_whatever_was_imported_before(single):
    """safetensors hands bf16 to numpy only once something has imported ml_dtypes; here nothing but the module has."""
    here = Path(files.__file__).parent
    places = {"jaxdelta": str(here.parent), "jaxdelta.checkpoints": str(here)}
    code = f"""
import importlib, sys, types
for name, place in {places!r}.items():  # the packages themselves import jax
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [place]
module = importlib.import_module("jaxdelta.checkpoints.files")
assert "jax" not in sys.modules
tensors = module.TensorFiles(module.Path({str(single.parent)!r}))
print(tensors.read("narrow").dtype, tensors.read("wide").dtype, tensors.read("narrow").astype("float32").tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == "bfloat16 float32 [1.0, -0.0, 3.0]", done.stderr


# JSON


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        (b"", "is not valid JSON"),
        (b'{"a": 1', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1]", "holds a list; expected a JSON object"),
        (b"[" * 200_000, r"is not valid JSON \(nested too deeply\)"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"is not valid JSON \(a number has too many digits\)"),
        (b'{"a": 1, "a": 2}', 'the key "a" is given twice; keep the one that is meant'),
        (POINTER, "Git LFS pointer"),
    ],
    ids=["missing", "empty", "cut", "not UTF-8", "list", "deep", "digits", "twice", "LFS pointer"],
)
def test_a_json_file_that_is_none_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.* {message}"):
        read_json(tmp_path / "config.json")


def test_a_folder_in_place_of_a_json_file_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read \(Is a directory\)"):
        read_json(tmp_path / "config.json")


def test_an_index_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / files.INDEX).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=rf"{files.INDEX} is not valid JSON \(nested too deeply\)"):
        TensorFiles(tmp_path)


def test_a_header_that_claims_more_than_the_memory_holds_is_refused(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((200 << 30).to_bytes(8, "little"))
        file.truncate((200 << 30) + 100)  # no byte of it on the disk
    with pytest.raises(CheckpointError, match="its 214748364900 bytes are no safetensors file; download it again"):
        TensorFiles(tmp_path)
