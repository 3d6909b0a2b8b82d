"""Bounds of an equivalence run, and which of its errors break them.

f32: SMALL_BOUND for models below SMALL parameters, else LARGE_BOUND, for every carried array and the logits of a segment.
Measured over 1,024 tokens: at most 3.6e-6 (control model) and 5.5e-6 (random, 4 layers); over 512 tokens 2.4e-5 (random
weights of the 0.8B size). Depth and random weights amplify rounding: a random model of 24 layers and width 44 has 7.6e-5,
which breaks SMALL_BOUND. The error of a single position and of a single loss may be EXTREME times as large: measured 1.8e-5
and 2.8e-5 nats (random, 4 layers), 2.1e-5 and 3.8e-5 nats (0.8B size). Keys have an allowance that grows with the text, see
:func:`rotation_allowance`.

bf16: rounding alone changes the arrays by 0.5 to 1.5 % in the control model, 3 to 10 % in random models of 4 layers and 50
to 100 % in one of 24, so no fixed bound serves all checkpoints. The yardstick is the error of the reference's own bf16 run
against its f32 run of the same text; ours may be BF16_FACTOR times as large. Measured for each array, over the control
model, three random models of 4 layers and one of 24: 0.4 to 1.7 times.
"""

from typing import Any, NamedTuple

from jaxdelta.models.config import DecoderConfig
from ports.compare import LOGITS_OF_POSITION, LOSS, RUN_LOSS, worst_errors

SMALL = 50_000_000
SMALL_BOUND = 2e-5
LARGE_BOUND = 1e-4
EXTREME = 10
BF16_FACTOR = 3
MARGINS = {"float32": 1e-3, "bfloat16": 0.1}  # least lead of the reference's most likely word for a choice to count


class Verdict(NamedTuple):
    """An error and its bound.

    Attributes:
        name: of the array, with its layer.
        error: the largest error; NaN if a side is not finite.
        where: the segment, counted from 1, or the token, counted from 0.
        bound: the largest allowed error.
    """

    name: str
    error: float
    where: str
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the error is within its bound; False for NaN."""
        return self.error <= self.bound


def rotation_allowance(config: DecoderConfig, num_tokens: int) -> float:
    """Largest relative difference of keys that the rotation alone may cause, at the last token.

    transformers computes the frequencies theta^(-2i/d) in f32, with errors of up to 2.8 half units in the last place; here
    they are rounded from f64. The angle multiplies the difference by the position. Two roundings of the largest frequency
    below 1 bound it: 2.6e-8 for each token of the control model, where a drift of 4e-9 was measured (2.9e-5 at 7,256
    tokens).
    """
    frequencies = [sizes.rope_theta ** (-2 / sizes.rotated) for sizes in config.attention_sizes if sizes.rotated > 2]
    return num_tokens * max(frequencies, default=0.0) * 2.0**-23


def judge(comparison: dict[str, Any], *, num_parameters: int, dtype: str, rotation: float = 0.0) -> list[Verdict]:
    """Every error of a comparison with its bound; ``rotation`` is from :func:`rotation_allowance`."""
    errors = worst_errors(comparison)
    if dtype == "bfloat16":
        scale = {name: BF16_FACTOR * worst.error for name, worst in worst_errors(comparison["yardstick"]).items()}
        scale[RUN_LOSS] = scale[LOSS]
    else:
        bound = SMALL_BOUND if num_parameters < SMALL else LARGE_BOUND
        extremes = (LOGITS_OF_POSITION, LOSS, RUN_LOSS)
        scale = {name: bound * EXTREME if name in extremes else bound for name in errors}
        scale |= {name: bound + rotation for name in errors if ": keys" in name}
    return [Verdict(name, *worst, scale[name]) for name, worst in errors.items()]


def broken(comparison: dict[str, Any], verdicts: list[Verdict]) -> list[str]:
    """What is broken, in words: arrays that are not finite, with side, layer and segment; then broken bounds."""
    lost = [
        f"NaN or infinity in {found['array']} of {found['side']}"
        + (f", segment {found['segment']}" if found["segment"] else "")
        for part in (comparison, comparison.get("yardstick") or {})
        for found in part.get("nonfinite", [])
    ]
    return lost + [
        f"{verdict.name}: {verdict.error:.1e} at {verdict.where}, at most {verdict.bound:.1e} allowed"
        for verdict in verdicts
        if not verdict.holds
    ]
