"""Qwen3.5 with random weights at the size of the 0.8B model, here and in transformers, in separate processes.

    python -m ports.qwen3_5.full_size                            logits and all that is carried, two segments
    python -m ports.qwen3_5.full_size --gradients --tokens 512   the gradient of the loss for every parameter

Each command writes a checkpoint of 1.5 GB into a temporary folder, runs one process for each framework and prints the
largest relative error of each kind of array. Measured in f32; memory and time are for this library and for transformers:

| command | worst | peak memory | time of one core |
| --- | --- | --- | --- |
| two segments | 7.8e-6, S of the last linear layer | 4 and 5 GiB | 33 and 27 s |
| gradients, 128 tokens | 5.3e-5, in_proj_qkv of layer 1 | 7 and 11 GiB | 56 and 56 s |
| gradients, 512 tokens | 2.2e-5, dt_bias of layer 14 | 10 and 14 GiB | 86 and 158 s |

Errors are larger for short texts (16 tokens: 2.5e-4): for the first token a linear layer gives q.k times v, and the norm
scales this to one. The relative rounding error of a small q.k thus stays, and 23 layers amplify it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxdelta.checkpoints import load, qwen3_5
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.models.qwen3_5 import Qwen3_5
from ports.compare import named, relative_error

CONFIG = Qwen3_5Config.size_0_8b()
SPLITS = (96, 75)  # no chunk size divides them
ROOT = Path(__file__).parents[2]


def tokens(count: int) -> np.ndarray:
    """Random ids [1, count] over the whole vocabulary."""
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, count))


def write_checkpoint(folder: Path) -> Path:
    """Write 752,393,024 random parameters in the hub's dtypes, with signals of order one and short and long horizons."""
    rng = np.random.default_rng(0)
    tensors = {"model." + e.name: _weight(e.name, e.shape, rng) for e in qwen3_5.entries(CONFIG)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(qwen3_5.config_to_json(CONFIG)))
    return folder


def random_model(dtype: str = "float32") -> Qwen3_5:
    """The random checkpoint, loaded here."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write_checkpoint(Path(folder)), dtype=dtype)


def _weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    scale = 0.3 if len(shape) == 1 else 2 * shape[-1] ** -0.5 if "conv" in name else shape[-1] ** -0.5
    middle = {"A_log": 0.0, "dt_bias": -3.0}.get(name.rsplit(".", 1)[-1], float("linear_attn.norm" in name))
    dtype = np.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else ml_dtypes.bfloat16
    # Entries are drawn from 65,536 normal numbers, which is ten times faster than new ones.
    values = (middle + scale * rng.standard_normal(2**16)).astype(dtype)
    return values[rng.integers(0, 2**16, shape, np.uint16)]


def carried_here(folder: Path) -> dict[str, np.ndarray]:
    """Logits of the segments of SPLITS and, after each segment, S, conv tail, keys and values of the layers."""
    import jaxdelta as jd
    from ports.compare import carry_arrays

    model = jd.load(folder)
    carry, logits, snapshots = jd.init_carry(model, 1, sum(SPLITS)), [], []
    for segment in np.split(tokens(sum(SPLITS)), np.cumsum(SPLITS)[:-1], axis=1):
        out, carry = jd.forward(model, segment, carry)
        logits.append(np.asarray(out))
        snapshots.append(carry_arrays(carry))
    return _named(np.concatenate(logits, axis=1), snapshots)


def carried_there(folder: Path) -> dict[str, np.ndarray]:
    """As :func:`carried_here`, by transformers."""
    from ports.qwen3_5.reference import Reference

    return _named(*Reference(folder).run(tokens(sum(SPLITS)), SPLITS))


def _named(logits: np.ndarray, snapshots: list) -> dict[str, np.ndarray]:
    arrays = {
        f"{name} after segment {segment}": array
        for segment, layers in enumerate(snapshots)
        for name, array in named(CONFIG.layer_kinds, layers)
    }
    return arrays | {"logits": logits}


def gradients_here(folder: Path, count: int) -> dict[str, np.ndarray]:
    """The mean next-token loss of ``count`` tokens, and its derivatives by stored names of parameters."""
    import jax
    from flax import nnx

    import jaxdelta as jd
    from jaxdelta.nn.head import token_losses

    graphdef, params = nnx.split(jd.load(folder))
    text = tokens(count)

    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model(text, model.init_carry(*text.shape)).hidden
        return token_losses(model.head_weight, hidden[:, :-1], text[:, 1:]).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    leaves = dict(nnx.to_flat_state(grads))
    found = {"model." + e.name: np.asarray(leaves[e.path][...]).reshape(e.shape) for e in qwen3_5.entries(CONFIG)}
    return found | {"loss": np.asarray(value)}


def gradients_there(folder: Path, count: int) -> dict[str, np.ndarray]:
    """As :func:`gradients_here`, by transformers."""
    from ports.qwen3_5.reference import Reference

    value, grads = Reference(folder).loss_gradients(tokens(count))
    return grads | {"loss": np.asarray(value, np.float32)}


SIDES: dict[str, tuple[Callable, Callable]] = {
    "carried": (carried_here, carried_there),
    "gradients": (gradients_here, gradients_there),
}


def errors(folder: Path, what: str, *arguments: int) -> dict[str, float]:
    """Relative error of every array that both sides of ``what`` compute from the checkpoint in ``folder``."""
    files = [folder / f"{what}.{side}.safetensors" for side in ("here", "there")]
    for side, file in enumerate(files):
        command = [sys.executable, "-m", "ports.qwen3_5.full_size", "--side", what, str(side), str(folder), str(file)]
        subprocess.run([*command, *map(str, arguments)], check=True, cwd=ROOT)
    with safe_open(files[0], "numpy") as here, safe_open(files[1], "numpy") as there:
        if set(here.keys()) != set(there.keys()):
            raise ValueError(f"only one side has {sorted(set(here.keys()) ^ set(there.keys()))}")
        return {name: relative_error(here.get_tensor(name), there.get_tensor(name)) for name in here.keys()}  # noqa: SIM118


def worst_by_kind(found: dict[str, float]) -> dict[str, float]:
    """The largest error of each kind of array, over layers and segments."""
    worst: dict[str, float] = {}
    for name, error in found.items():
        kind = re.sub(r"^layer \d+ \(\w+\): | after segment \d+|^model\.|layers\.\d+\.", "", name)
        worst[kind] = max(worst.get(kind, 0.0), error)
    return worst


def _side(what: str, side: str, folder: str, file: str, *arguments: str) -> None:
    arrays = SIDES[what][int(side)](Path(folder), *map(int, arguments))
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", action="store_true", help="gradients for the parameters instead of a forward pass")
    parser.add_argument("--tokens", type=int, default=512, help="length of the text whose gradients are taken")
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return _side(*options.side)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        what = ("gradients", options.tokens) if options.gradients else ("carried",)
        for kind, error in worst_by_kind(errors(Path(folder), *what)).items():
            print(f"{error:.1e}  {kind}")


if __name__ == "__main__":
    main()
