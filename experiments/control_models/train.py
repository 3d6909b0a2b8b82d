"""Train an embedded control model: ``control``, a small Qwen3.5, or ``control-product``, a small Gated DeltaProduct.

Question: is there a model of exactly this architecture, small enough to ship, that predicts unseen text clearly better
    than a general compressor, and that uses its states beyond a segment of 256 tokens?
Command: ``python -m experiments.control_models.train NAME``, then ``python -m experiments.control_models.install
    NAME`` to put the result into the package. Resumes when run again.
Wall time: control 98 minutes on 2 CPU cores that had other work too (bf16 products, f32 parameters); on idle cores a short
    step takes 1.0 s. control-product 54 minutes of CPU time.
Expected: control 1.96 and control-product 2.03 held-out bits a byte, where ``xz -9e`` needs 2.71; the cards of the
    installed models have the figures.

Texts are one stream with separators. Training has windows of 512 tokens, and of 4,096 in the last steps, so that it
includes positions and states as in the embedded documents. The optimizer is AdamW (Loshchilov and Hutter, arXiv 1711.05101)
with a warm-up and a cosine schedule.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.control_models import data
from jaxdelta.models import build
from jaxdelta.models.config import DecoderConfig, DeltaLMConfig, Qwen3_5Config

CONTROL = Qwen3_5Config(
    vocab_size=data.VOCAB_SIZE,
    width=128,
    mlp_width=384,
    layer_kinds=("linear", "linear", "linear", "attention") * 2,
    num_key_heads=4,
    num_value_heads=4,
    key_dim=32,
    value_dim=32,
    conv_width=4,
    num_query_heads=2,
    num_kv_heads=1,
    head_dim=48,
    rotary_dim=12,
    rope_theta=1e4,
    max_position=8192,
)

# No attention: all that it knows of earlier text is in the states. beta reaches 2, so that a factor can reflect.
CONTROL_PRODUCT = DeltaLMConfig(
    family="gated_deltaproduct",
    vocab_size=data.VOCAB_SIZE,
    width=128,
    mlp_width=384,
    layer_kinds=("linear",) * 6,
    num_key_heads=4,
    num_value_heads=4,
    key_dim=32,
    value_dim=32,
    num_householder=2,
    negative_eigenvalues=True,
    tied=True,
    max_position=8192,
)

SAVED = "training.npz"


@dataclass(frozen=True)
class Recipe:
    """How a control model is trained.

    Attributes:
        steps: optimizer steps, each of ``batch_tokens`` predicted tokens.
        batch_tokens: predicted tokens of a step.
        window: tokens of a training window.
        long_window: tokens of a window in the last ``long_share`` of the steps.
        long_share: share of steps with long windows.
        learning_rate: at the peak; a cosine lowers it to a tenth.
        warmup: steps of linear warm-up.
        weight_decay: on matrices alone.
        seed: of parameters and windows.
    """

    steps: int = 2200
    batch_tokens: int = 4096
    window: int = 512
    long_window: int = 4096
    long_share: float = 0.12
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 0

    def window_at(self, step: int) -> int:
        return self.long_window if step >= (1 - self.long_share) * self.steps else self.window


CONTROLS: dict[str, tuple[DecoderConfig, Recipe]] = {
    "control": (CONTROL, Recipe()),
    "control-product": (CONTROL_PRODUCT, Recipe(steps=1500)),
}


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, recipe.warmup, recipe.steps, 0.1 * recipe.learning_rate
    )
    decayed = partial(jax.tree.map, lambda p: p.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=recipe.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def mean_loss(graphdef, params, windows):
    """Mean next-token loss in nats of windows [B, T + 1], each from an empty carry, with bf16 matrices."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim > 1 else p, params)
    model = nnx.merge(graphdef, params)
    tokens, targets = windows[:, :-1], windows[:, 1:]
    hidden = model(tokens, model.init_carry(*tokens.shape)).hidden
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets).mean()


def train(recipe: Recipe, config: DecoderConfig, stream: np.ndarray, held_out: np.ndarray, out: Path, *, every: int = 100):
    """Train on windows of ``stream``; returns the parameters and the loss curve. Resumes from ``out``."""
    graphdef, params = nnx.split(build(config, rngs=nnx.Rngs(recipe.seed)))
    transform = optimizer(recipe)
    opt_state = transform.init(params)
    loss_of = partial(mean_loss, graphdef)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, windows):
        loss, grads = jax.value_and_grad(loss_of)(params, windows)
        updates, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    evaluate = jax.jit(loss_of)
    held_out_windows = _windows(held_out, np.arange(32) * (len(held_out) // 32), recipe.window)
    saved = out / SAVED
    first, curve = 0, []
    if saved.exists():
        first, curve, (params, opt_state) = _restore(saved, recipe, (params, opt_state))
    begun, losses = time.perf_counter(), []
    for step in range(first, recipe.steps):
        window = recipe.window_at(step)
        rng = np.random.default_rng((recipe.seed, step))
        starts = rng.integers(0, len(stream) - window - 1, recipe.batch_tokens // window)
        params, opt_state, loss = update(params, opt_state, _windows(stream, starts, window))
        losses.append(loss)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            trained, measured = float(np.mean(losses)), float(evaluate(params, held_out_windows))
            losses = []
            if not np.isfinite(trained + measured):
                raise FloatingPointError(f"loss {trained}, held-out loss {measured} after {step + 1} steps")
            curve.append({"step": step + 1, "train": round(trained, 4), "held_out": round(measured, 4)})
            _save(saved, recipe, step + 1, curve, (params, opt_state))
            print(f"{step + 1:6d}  {trained:.4f}  {measured:.4f}  {time.perf_counter() - begun:7.0f} s", flush=True)
    return nnx.merge(graphdef, params), curve


def restored(out: Path, recipe: Recipe, config: DecoderConfig):
    """Parameters and loss curve of the training in ``out``, finished or not."""
    params = nnx.split(build(config))[1]
    _, curve, (params, _) = _restore(out / SAVED, recipe, (params, optimizer(recipe).init(params)))
    return params, curve


def _windows(stream: np.ndarray, starts: np.ndarray, window: int) -> np.ndarray:
    return np.stack([stream[s : s + window + 1] for s in starts]).astype(np.int32)


def _save(path: Path, recipe: Recipe, step: int, curve: list, tree) -> None:
    leaves = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    partial_path = path.with_suffix(".partial.npz")
    np.savez(partial_path, recipe=json.dumps(asdict(recipe)), step=step, curve=json.dumps(curve), **leaves)
    partial_path.replace(path)


def _restore(path: Path, recipe: Recipe, tree):
    with np.load(path) as saved:
        if json.loads(str(saved["recipe"])) != asdict(recipe):
            raise ValueError(f"{path} is of another recipe ({saved['recipe']}); choose another folder")
        leaves = [jnp.asarray(saved[f"leaf_{i}"]) for i in range(len(jax.tree.leaves(tree)))]
        return int(saved["step"]), json.loads(str(saved["curve"])), jax.tree.unflatten(jax.tree.structure(tree), leaves)


def arguments_of(description: str) -> argparse.ArgumentParser:
    """The parser of the arguments that training and installation share: model, and folder of the training."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("name", choices=list(CONTROLS))
    parser.add_argument("--out", type=Path, help="folder of the training (default: results/NAME)")
    return parser


def main() -> None:
    arguments = arguments_of("Train an embedded control model.").parse_args()
    out = arguments.out or Path("results") / arguments.name
    config, recipe = CONTROLS[arguments.name]
    out.mkdir(parents=True, exist_ok=True)

    documents, held_out_documents = data.split_documents(data.load_documents())
    tokenizer = data.train_tokenizer([d.text for d in documents])
    tokenizer.save(str(out / "tokenizer.json"))
    stream = data.training_stream(tokenizer, [d.text for d in documents])
    held_out = data.training_stream(tokenizer, [d.text for d in held_out_documents])
    print(f"{len(stream):,} training tokens, {len(held_out):,} held out; {asdict(recipe)}", flush=True)
    train(recipe, config, stream, held_out, out)


if __name__ == "__main__":
    main()
