"""Which file holds which tensor, and what is said of files that are broken, missing or of another kind."""

import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdelta.checkpoints import files
from jaxdelta.checkpoints.files import CheckpointError, TensorFiles, read_json
from tests.tiny import bits, safetensors_bytes, write_index

WIDE = np.arange(6, dtype=np.float32).reshape(2, 3)
NARROW = np.array([1.0, -0.0, 3.0], ml_dtypes.bfloat16)
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


def test_files_beside_those_of_the_index_are_not_read(single):
    save_file({"wide": 2 * WIDE}, single.parent / "shard.safetensors")
    write_index(single.parent, {"wide": "shard.safetensors"})
    tensors = TensorFiles(single.parent)
    assert tensors.shapes == {"wide": (2, 3)}
    np.testing.assert_array_equal(tensors.read("wide"), 2 * WIDE)


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
    "weight_map", [{}, None, [], "x", {"wide": 5}, {"wide": 5, "narrow": "model.safetensors"}, {"wide": None}], ids=str
)
def test_an_index_that_is_none_is_refused(single, weight_map):
    write_index(single.parent, weight_map)
    with pytest.raises(CheckpointError, match=files.INDEX):
        TensorFiles(single.parent)


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/hostname", "sub/shard.safetensors", "..", "."])
def test_an_index_does_not_lead_out_of_its_folder(single, place):
    (single.parent / "sub").mkdir()
    for folder in (single.parent.parent, single.parent / "sub"):
        save_file({"wide": WIDE}, folder / ("outside.safetensors" if folder.name != "sub" else "shard.safetensors"))
    write_index(single.parent, {"wide": place})
    with pytest.raises(CheckpointError, match=f"{files.INDEX} names the file {place}"):
        TensorFiles(single.parent)


# What the files are


class Payload:
    """What unpickling would run."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_pickled_weights_are_refused_by_name_and_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"model\.safetensors; pytorch_model\.bin would have to be unpickled"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_under_the_name_of_safetensors_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path} has neither {files.INDEX} nor {files.SINGLE}$"):
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
    ],
    ids=["shape", "dtype", "offsets", "negative shape", "unknown dtype", "missing fields", "no entry", "list"],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors_bytes(header, bytes(24)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*; download it again"):
        TensorFiles(tmp_path)


def test_bf16_is_read_whatever_was_imported_before(single):
    """safetensors hands bf16 to numpy only once something has imported ml_dtypes; here nothing but the module has."""
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("files", {files.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
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
        (POINTER, "Git LFS pointer"),
    ],
    ids=["missing", "empty", "cut", "not UTF-8", "list", "LFS pointer"],
)
def test_a_json_file_that_is_none_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.* {message}"):
        read_json(tmp_path / "config.json")
