"""All seeds of a cell at once: one compiled program, rounds of steps and validations, resumable after each.

A round is ``Recipe.every`` steps, each on fresh words for each seed, and a validation. A killed training resumes and ends
with the parameters of an uninterrupted one, because words depend only on seed and round.
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.state_tracking.cells import Cell, Recipe, config_of
from jaxdelta.groups import group_of
from jaxdelta.implementation import Implementation, implementation_here
from jaxdelta.models import build
from jaxdelta.models.config import DeltaLMConfig
from jaxdelta.models.delta_lm import DeltaLM
from jaxdelta.runs.segments import rebuilt
from jaxdelta.tasks.state_tracking import Words, words

TRAINING, VALIDATION, TEST = range(3)  # independent streams of words


class Trainee(NamedTuple):
    """What a step changes; the first axis of every leaf is seeds.

    Attributes:
        params: of the models.
        optimizer: state of AdamW.
        average: exponential average of ``params``.
    """

    params: Any
    optimizer: Any
    average: Any


class Progress(NamedTuple):
    """A training between two rounds; the first axis of every leaf of a tree is seeds.

    Attributes:
        rounds: number of finished rounds.
        trainee: what training continues from.
        kept: average parameters of each seed at its best validation, the latest of equals.
        score: [seeds, 2], share of words without a mistake in that validation, at the long and at the trained length.
        steps_to_solve: [seeds], steps after which the trained length was first solved; -1 where it was not.
    """

    rounds: int
    trainee: Trainee
    kept: Any
    score: np.ndarray
    steps_to_solve: np.ndarray


def train(cell: Cell, recipe: Recipe, seeds: tuple[int, ...], file: Path) -> Progress:
    """Train until the kept parameters of every seed solve both lengths, or to the end; resumes from ``file``.

    Raises:
        FloatingPointError: a loss is not finite.
        ValueError: ``file`` is of another training.
    """
    config = config_of(cell, recipe)
    about = json.dumps([asdict(cell), asdict(recipe), seeds])
    progress = _fresh(config, recipe, seeds)
    if file.exists():
        progress = _restored(file, about, progress)
    while progress.rounds < len(recipe.lengths) and progress.score.min() < recipe.threshold:
        progress = _round(cell, recipe, config, seeds, progress)
        _save(file, about, progress)
    return progress


def tested(cell: Cell, recipe: Recipe, params) -> dict[str, np.ndarray]:
    """Accuracies of each seed on ``recipe.tested`` fresh words, at the trained length and at four times that.

    ``solved`` and ``solved_long`` say whether the share of words without a mistake reaches ``recipe.threshold``.
    """
    right = _right(cell, recipe, params, TEST, recipe.tested)
    sequence, sequence_long = _faultless(right, recipe).T
    return {
        "solved": sequence >= recipe.threshold,
        "solved_long": sequence_long >= recipe.threshold,
        "sequence_accuracy": sequence,
        "sequence_accuracy_long": sequence_long,
        "token_accuracy": right[..., : recipe.length].mean(axis=(1, 2)),
        "token_accuracy_long": right.mean(axis=(1, 2)),
    }


def model_of(cell: Cell, recipe: Recipe, params, seed: int) -> DeltaLM:
    """The model of the seed with this index."""
    return rebuilt(config_of(cell, recipe), implementation_here(), jax.tree.map(lambda leaf: leaf[seed], params))


def save_parameters(file: Path, params) -> None:
    """Write the parameters of all seeds of a cell."""
    _write(file, {f"leaf_{index}": np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(params))})


def load_parameters(file: Path, cell: Cell, recipe: Recipe):
    """Read what :func:`save_parameters` wrote."""
    structure = jax.tree.structure(nnx.state(build(config_of(cell, recipe))))
    with np.load(file) as saved:
        return jax.tree.unflatten(structure, [jnp.asarray(saved[f"leaf_{i}"]) for i in range(structure.num_leaves)])


def _round(cell: Cell, recipe: Recipe, config: DeltaLMConfig, seeds, progress: Progress) -> Progress:
    trainee, losses = _steps(
        config, implementation_here(), recipe, progress.trainee, *_training_words(cell, recipe, seeds, progress.rounds)
    )
    rounds = progress.rounds + 1
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"{cell}: losses {np.asarray(losses)[-1]} after {rounds * recipe.every} steps")
    score = _faultless(_right(cell, recipe, trainee.average, VALIDATION, recipe.validated), recipe)[:, ::-1]
    better = np.array([new >= old for new, old in zip(score.tolist(), progress.score.tolist(), strict=True)])
    newly = (score[:, 1] >= recipe.threshold) & (progress.steps_to_solve < 0)
    return Progress(
        rounds,
        trainee,
        jax.tree.map(lambda new, old: jnp.where(_like(better, new), new, old), trainee.average, progress.kept),
        np.where(better[:, None], score, progress.score),
        np.where(newly, rounds * recipe.every, progress.steps_to_solve),
    )


def _fresh(config: DeltaLMConfig, recipe: Recipe, seeds: tuple[int, ...]) -> Progress:
    models = [nnx.state(build(config, rngs=nnx.Rngs(seed))) for seed in seeds]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    average, kept = (jax.tree.map(jnp.copy, params) for _ in range(2))  # a step donates the buffers of the trainee
    trainee = Trainee(params, jax.vmap(_optimizer(recipe).init)(params), average)
    return Progress(0, trainee, kept, np.zeros((len(seeds), 2)), np.full(len(seeds), -1))


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    matrices = partial(jax.tree.map, lambda p: p.ndim > 1)
    adamw = optax.adamw(recipe.learning_rate, b2=recipe.b2, weight_decay=recipe.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw)


def _training_words(cell: Cell, recipe: Recipe, seeds, round_: int) -> Words:
    """Fresh words of a round, [steps, seeds, batch, T]."""
    size = {"count": recipe.every * recipe.batch, "length": recipe.lengths[round_]}
    of_seeds = [words(group_of(cell.group), **size, seed=(TRAINING, seed, round_)) for seed in seeds]
    apart = (np.stack(x, axis=1) for x in zip(*of_seeds, strict=True))
    return Words(*(x.reshape(recipe.every, recipe.batch, len(seeds), -1).swapaxes(1, 2) for x in apart))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _steps(config: DeltaLMConfig, implementation: Implementation, recipe: Recipe, trainee: Trainee, tokens, targets):
    """A step for each leading entry of words [steps, seeds, batch, T]; returns the trainee and losses [steps, seeds]."""
    optimizer = _optimizer(recipe)

    def step(trainee: Trainee, words):
        loss, grads = jax.value_and_grad(partial(_loss, config, implementation))(trainee.params, *words)
        updates, state = optimizer.update(grads, trainee.optimizer, trainee.params)
        params = optax.apply_updates(trainee.params, updates)
        average = optax.incremental_update(params, trainee.average, 1 - recipe.average)
        return Trainee(params, state, average), loss

    return jax.lax.scan(jax.vmap(step), trainee, (tokens, targets))


def _logits(config: DeltaLMConfig, implementation: Implementation, params, tokens):
    model = rebuilt(config, implementation, params)
    return model.logits(model(tokens, model.init_carry(*tokens.shape)).hidden)


def _loss(config: DeltaLMConfig, implementation: Implementation, params, tokens, targets):
    return optax.softmax_cross_entropy_with_integer_labels(_logits(config, implementation, params, tokens), targets).mean()


def _right(cell: Cell, recipe: Recipe, params, stream: int, count: int) -> np.ndarray:
    """Whether each product is right, [seeds, count, T], on the same words of the long length for all seeds."""
    tokens, targets = words(group_of(cell.group), count=count, length=recipe.long_length, seed=(stream,))
    return np.asarray(_named(config_of(cell, recipe), implementation_here(), params, tokens)) == targets


@partial(jax.jit, static_argnums=(0, 1))
def _named(config: DeltaLMConfig, implementation: Implementation, params, tokens):
    return jax.vmap(lambda p: jnp.argmax(_logits(config, implementation, p, tokens), axis=-1))(params)


def _faultless(right: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Share of words without a mistake, [seeds, 2], at the trained and the long length (prefixes, as models are causal)."""
    return np.stack([right[..., :length].all(axis=-1).mean(axis=1) for length in (recipe.length, recipe.long_length)], 1)


def _like(chosen: np.ndarray, leaf):
    """``chosen`` [seeds] with as many axes as ``leaf``."""
    return chosen.reshape(-1, *(1,) * (leaf.ndim - 1))


def _save(file: Path, about: str, progress: Progress) -> None:
    _write(file, {"about": about} | {f"leaf_{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(progress))})


def _restored(file: Path, about: str, like: Progress) -> Progress:
    leaves, structure = jax.tree.flatten(like)
    with np.load(file) as saved:
        if str(saved["about"]) != about:
            raise ValueError(f"{file} is of another training ({saved['about']}); remove it or choose another folder")
        progress = jax.tree.unflatten(structure, [saved[f"leaf_{i}"] for i in range(len(leaves))])
    return progress._replace(rounds=int(progress.rounds))


def _write(file: Path, arrays: dict) -> None:
    unfinished = file.with_suffix(".partial.npz")
    np.savez(unfinished, **arrays)
    unfinished.replace(file)
