"""Comparison of this library's runs with those of a reference, in f64 and segment by segment.

Errors are relative Frobenius errors, ||found - expected|| / ||expected||: of a carried array, of one head's state, or of
the logits of a segment or position.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # the process of a reference does not need JAX
    from jaxdelta.models.carry import Carry

Layers = Sequence[Sequence[np.ndarray]]  # two arrays a layer, named in ARRAYS
ARRAYS = {"linear": ("S", "tail"), "attention": ("keys", "values")}
WORST_HEAD = "S, worst head"
LOGITS_OF_SEGMENT, LOGITS_OF_POSITION = "logits of a segment", "logits of a position"
LOSS, RUN_LOSS = "loss of a token (nats)", "loss of a token in jd.run (nats)"
LOGITS_AT_ONCE = 2**23  # entries of a block of logits in f64, 64 MiB


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative Frobenius error, in f64; if ``expected`` is zero, the norm of ``found``.

    Raises:
        ValueError: shapes differ.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        raise ValueError(f"shapes differ: {found.shape} here, {expected.shape} in the reference")
    difference, size = np.linalg.norm(found - expected), np.linalg.norm(expected)
    return float(difference / size) if size else float(difference)


def carry_arrays(carry: "Carry") -> list[tuple[np.ndarray, np.ndarray]]:
    """(S, tail) or the used places of (keys, values) of each layer; all rows must have the same length."""
    used = int(np.max(carry.position))
    return [
        (np.asarray(layer.S), np.asarray(layer.tail, np.float32))
        if hasattr(layer, "S")
        else (np.asarray(layer.keys[:, :used], np.float32), np.asarray(layer.values[:, :used], np.float32))
        for layer in carry.layers
    ]


def layer_kinds(carry: "Carry") -> list[str]:
    """Kind of each layer, "linear" or "attention", in depth order."""
    return ["linear" if hasattr(layer, "S") else "attention" for layer in carry.layers]


def layer_errors(kind: str, found: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> dict[str, float]:
    """Error of each carried array of a layer; for a state S [B, H, K, V] also that of the worst head."""
    errors = {}
    for name, a, b in zip(ARRAYS[kind], found, expected, strict=True):
        errors[name] = relative_error(a, b)
        if name == "S":
            errors[WORST_HEAD] = float(np.max([relative_error(a[:, h], b[:, h]) for h in range(b.shape[1])]))
    return errors


class Positions(NamedTuple):
    """Numbers for each position of a segment, f64 [T]; losses are NaN where no token follows.

    Attributes:
        difference: norm of the difference of the logits.
        size: norm of the reference's logits.
        kl: divergence of our distribution from the reference's, in nats.
        loss: the reference's loss of the next token, in nats.
        loss_here: our loss of the next token, in nats.
        margin: lead of the reference's most likely word over the second, in logits.
        same: 1 where the most likely word is the same, else 0.
    """

    difference: np.ndarray
    size: np.ndarray
    kl: np.ndarray
    loss: np.ndarray
    loss_here: np.ndarray
    margin: np.ndarray
    same: np.ndarray

    def error_together(self) -> float:
        """Relative error of the logits of all positions."""
        return float(np.linalg.norm(self.difference) / np.linalg.norm(self.size))


def compare_positions(found: np.ndarray, expected: np.ndarray, following: np.ndarray) -> Positions:
    """Compare logits [T, Y] of both sides; ``following`` is the next token of each position, -1 for none."""
    rows = max(1, LOGITS_AT_ONCE // expected.shape[-1])
    blocks = [
        _compare_block(*(a[begin : begin + rows] for a in (found, expected, following)))
        for begin in range(0, len(expected), rows)
    ]
    return Positions(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))


def _compare_block(found: np.ndarray, expected: np.ndarray, following: np.ndarray) -> Positions:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    here, there = _log_softmax(found), _log_softmax(expected)
    loss_here, loss = (
        np.where(following >= 0, -np.take_along_axis(a, following[:, None], -1)[:, 0], np.nan) for a in (here, there)
    )
    two = np.partition(expected, -2, axis=-1)[:, -2:]
    return Positions(
        difference=np.linalg.norm(found - expected, axis=-1),
        size=np.linalg.norm(expected, axis=-1),
        kl=np.sum(np.exp(there) * (there - here), axis=-1),
        loss=loss,
        loss_here=loss_here,
        margin=two[:, 1] - two[:, 0],
        same=(found.argmax(-1) == expected.argmax(-1)).astype(np.float64),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


class Comparison:
    """Two runs of one text [1, N] compared segment by segment.

    Args:
        kinds: "linear" or "attention" for each layer, in depth order.
        tokens: ids [1, N].
        sides: names of what is compared, and with what.
    """

    def __init__(self, kinds: Sequence[str], tokens: np.ndarray, sides: tuple[str, str] = ("jaxdelta", "reference")):
        self.kinds = tuple(kinds)
        self._sides = sides
        self._following = np.append(tokens[0, 1:], -1)
        self._segments: list[dict[str, Any]] = []
        self._positions: list[Positions] = []
        self._caches: dict[str, list[np.ndarray]] = {}
        self._nonfinite: dict[str, dict[str, Any]] = {}

    def add(self, begin: int, logits: np.ndarray, found: Layers, expected_logits: np.ndarray, expected: Layers) -> None:
        """Compare the segment that begins at token ``begin``.

        Args:
            logits, expected_logits: [1, T, Y].
            found, expected: carried arrays after the segment; of keys and values only the places of this segment.

        Raises:
            ValueError: shapes differ.
        """
        self._look_for_nonfinite(self._sides[0], found, logits)
        self._look_for_nonfinite(self._sides[1], expected, expected_logits)
        end = begin + logits.shape[1]
        with np.errstate(invalid="ignore"):  # named above, and null in the errors
            layers = [layer_errors(*layer) for layer in zip(self.kinds, found, expected, strict=True)]
            at = compare_positions(logits[0], expected_logits[0], self._following[begin:end])
            self._segments.append({"begin": begin, "end": end, "logits": at.error_together(), "layers": layers})
        self._positions.append(at)
        for name, array in named(self.kinds, expected):
            if name.endswith(ARRAYS["attention"]):
                self._caches.setdefault(name, []).append(array)

    def result(self, found: Layers) -> dict[str, Any]:
        """Errors of each segment, numbers of each position, and errors of whole caches; ``found`` is carried at the end."""
        arrays = dict(named(self.kinds, found))
        with np.errstate(invalid="ignore"):
            caches = {n: relative_error(arrays[n], np.concatenate(parts, axis=1)) for n, parts in self._caches.items()}
        positions = Positions(*(np.concatenate(arrays) for arrays in zip(*self._positions, strict=True)))
        return {
            "kinds": list(self.kinds),
            "segments": self._segments,
            "positions": positions._asdict(),
            "caches": caches,
            "nonfinite": list(self._nonfinite.values()),
        }

    def _look_for_nonfinite(self, side: str, layers: Layers, logits: np.ndarray) -> None:
        """Note the first array of a side with a NaN or an infinity."""
        for name, array in (*named(self.kinds, layers), ("logits", logits)):
            if side not in self._nonfinite and not np.isfinite(array).all():
                self._nonfinite[side] = {"side": side, "segment": len(self._segments) + 1, "array": name}


class Worst(NamedTuple):
    """The largest error of one kind, and where: a segment, counted from 1, or a token, counted from 0."""

    error: float
    where: str


def worst_errors(result: dict[str, Any]) -> dict[str, Worst]:
    """The largest errors, which have bounds, by name; ``result`` is from a :class:`Comparison` or its JSON."""
    found = {}
    for index, kind in enumerate(result["kinds"]):
        for name in result["segments"][0]["layers"][index]:
            errors = [segment["layers"][index][name] for segment in result["segments"]]
            found[f"layer {index} ({kind}): {name}"] = _worst(errors, "segment", 1)
    for name, error in result["caches"].items():
        found[f"{name}, whole cache"] = Worst(_number(error), "end")
    found[LOGITS_OF_SEGMENT] = _worst([segment["logits"] for segment in result["segments"]], "segment", 1)
    at = position_arrays(result)
    found[LOGITS_OF_POSITION] = _worst(at.difference / at.size, "token")
    found[LOSS] = _worst(np.abs(at.loss_here - at.loss)[:-1], "token")
    if result.get("run_losses") is not None:
        losses = np.array([_number(x) for x in result["run_losses"]])
        found[RUN_LOSS] = _worst(np.abs(losses - at.loss[:-1]), "token")
    return found


def position_arrays(result: dict[str, Any]) -> Positions:
    """Numbers of each position as arrays, NaN for null."""
    return Positions(**{name: np.array([_number(x) for x in values]) for name, values in result["positions"].items()})


def _worst(errors: Sequence[float | None], unit: str, first: int = 0) -> Worst:
    numbers = np.array([_number(error) for error in errors])
    index = int(np.argmax(numbers))  # the first NaN, if there is one
    return Worst(float(numbers[index]), f"{unit} {index + first}")


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def named(kinds: Iterable[str], layers: Iterable[Iterable[np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Carried arrays in depth order, with names such as ``layer 3 (attention): keys``."""
    for index, (kind, arrays) in enumerate(zip(kinds, layers, strict=True)):
        for name, array in zip(ARRAYS[kind], arrays, strict=True):
            yield f"layer {index} ({kind}): {name}", array


def to_json(value: Any) -> Any:
    """``value`` with arrays as lists, and NaN and infinity as null, since JSON lacks them."""
    if isinstance(value, dict):
        return {key: to_json(member) for key, member in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(member) for member in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
