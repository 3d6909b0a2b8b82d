"""Put a trained control model into the package: bf16 weights, tokenizer, and a card with measured figures.

Question: how well does the shipped model, in bf16 unlike the trained one, predict unseen text?
Command: ``python -m experiments.control_models.install NAME`` after the training of the same name.
Wall time: about 2 minutes on 2 cores.
Expected: fewer held-out bits a byte than ``xz -9e``; the card has both for every document.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

import jaxdelta as jd
from experiments.control_models import data
from experiments.control_models.train import CONTROLS, arguments_of, restored
from jaxdelta.checkpoints import ASSETS
from jaxdelta.models import build
from jaxdelta.runs.segments import run

WINDOW = 4096


def install(name: str, out: Path, target: Path) -> None:
    """Write the model ``name`` of a finished training in ``out`` to ``target``, with a card of measured figures.

    Raises:
        ValueError: the training in ``out`` is not finished, or ``target`` is not a model.
    """
    config, recipe = CONTROLS[name]
    params, curve = restored(out, recipe, config)
    if curve[-1]["step"] != recipe.steps:
        raise ValueError(f"{out} is at step {curve[-1]['step']} of {recipe.steps}; run the training to its end")
    graphdef, _ = nnx.split(build(config))
    # Matrices are bf16; vectors, which belong to gates and norms, are f32.
    model = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim > 1 else p, params))
    model.tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    made = out / "installed"
    shutil.rmtree(made, ignore_errors=True)
    jd.save(model, made)
    _, held_out = data.split_documents(data.load_documents())
    (made / "README.md").write_text(card(name, jd.load(made), curve, held_out))
    if target.exists():
        if not (target / "config.json").exists():
            raise ValueError(f"{target} is no model; not replaced")
        shutil.rmtree(target)
    shutil.copytree(made, target)


def held_out_loss(model: jd.Decoder, text: str) -> tuple[float, int]:
    """Mean loss in nats of a text, in windows of WINDOW tokens from empty carries, and the number of predicted tokens.

    The first token is predicted from a separator, the first of every later window from the last token before it.
    """
    tokens = data.training_stream(model.tokenizer, [text])[:-1].astype(np.int32)
    starts = range(0, len(tokens) - 1, WINDOW)
    lengths = np.array([min(WINDOW + 1, len(tokens) - s) for s in starts])
    windows = np.stack([np.pad(tokens[s : s + n], (0, WINDOW + 1 - n)) for s, n in zip(starts, lengths, strict=True)])
    total = 0.0
    for begin in range(0, len(windows), 4):
        part = slice(begin, begin + 4)
        losses = run(model, windows[part], lengths=lengths[part], max_length=WINDOW + 256).losses
        total += float(np.nansum(losses, dtype=np.float64))
    return total / (len(tokens) - 1), len(tokens) - 1


def card(name: str, model: jd.Decoder, curve: list[dict], held_out) -> str:
    """The text of the card, with bits a byte of the shipped weights."""
    c, recipe = CONTROLS[name]
    rows, bits, xz_bits, size = [], 0.0, 0.0, 0
    for document in held_out:
        loss, count = held_out_loss(model, document.text)
        num_bytes = len(document.text.encode())
        ours, xz = data.bits_per_byte(loss, count, num_bytes), data.xz_bits_per_byte(document.text)
        rows.append(f"| {document.name} | {num_bytes:,} | {count:,} | {loss:.4f} | {ours:.3f} | {xz:.3f} |")
        bits, xz_bits, size = bits + ours * num_bytes, xz_bits + xz * num_bytes, size + num_bytes
    together = data.xz_bits_per_byte("\n".join(document.text for document in held_out))
    parameters = sum(leaf.size for leaf in _leaves(model))
    steps = "\n".join(f"| {p['step']} | {p['train']:.3f} | {p['held_out']:.3f} |" for p in _thinned(curve))
    sums = "\n".join(f"| {name} | {value} |" for name, value in model.origin.sha256().items())
    steps_a_token = f", {c.num_householder} Householder steps a token" if c.num_householder > 1 else ""
    others = "" if len(c.linear_layers) == c.num_layers else ", the others gated attention"
    return f"""# {name}

A {c.title} of {parameters:,} parameters: {c.num_layers} layers ({len(c.linear_layers)} {c.linear_title} with
{c.num_value_heads} heads of {c.key_dim} x {c.value_dim}{steps_a_token}{others}), width {c.width}, byte-level BPE of
{c.vocab_size:,} words. Made to show and test what this library does on text that ships with it; of no use for writing.

**Data.** The King James Bible, 42 works of Shakespeare and the Jargon File 4.4.7, all in the public domain
(`experiments/control_models/README.md`); seven documents held out whole, before the tokenizer was trained.

**Command.** `python -m experiments.control_models.train {name}`, then `... .install {name}`; {recipe.steps:,} steps, on
2 CPU cores.
`{json.dumps(asdict(recipe))}`

**Held-out text**, measured on these weights in f32, in windows of {WINDOW:,} tokens, each from an empty carry; xz is
`xz -9e` on the document alone.

| document | bytes | tokens | nats a token | bits a byte | xz, bits a byte |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}
| all | {size:,} | | | {bits / size:.3f} | {xz_bits / size:.3f} ({together:.3f} as one file) |

**Loss curve**, nats a token, training windows and 32 held-out windows of {recipe.window} tokens:

| step | training | held out |
| --- | --- | --- |
{steps}

**Checksums** (sha256)

| file | sha256 |
| --- | --- |
{sums}
"""


def _leaves(model: jd.Decoder) -> list:
    return [leaf for _, leaf in nnx.to_flat_state(nnx.state(model))]


def _thinned(curve: list[dict]) -> list[dict]:
    return curve[:: max(1, len(curve) // 12)] + ([curve[-1]] if (len(curve) - 1) % max(1, len(curve) // 12) else [])


def main() -> None:
    parser = arguments_of(__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="folder of the installed model (default: that of the library's assets)")
    arguments = parser.parse_args()
    out, target = arguments.out or Path("results") / arguments.name, arguments.target or ASSETS / arguments.name
    install(arguments.name, out, target)
    print((target / "README.md").read_text())


if __name__ == "__main__":
    main()
