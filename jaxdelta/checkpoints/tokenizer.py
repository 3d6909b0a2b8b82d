"""The tokenizer of a folder: ``tokenizer.json`` as it is, or a byte-level BPE from ``vocab.json`` and ``merges.txt``.

A vocabulary and its merges do not tell how text is first cut into words, and which words are matched whole. The first
follows from the class that ``tokenizer_config.json`` names, or from the kind of model; the second from the added and
special tokens there, in ``special_tokens_map.json`` or in ``added_tokens.json``. Both are read as in transformers 5.24.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxdelta.checkpoints.files import CheckpointError, pointer_hint, read_json

WHOLE = "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
FILES = (WHOLE, VOCABULARY, MERGES, *SETTINGS)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
END = "<|endoftext|>"


class ClassDefaults(NamedTuple):
    """What a tokenizer class of transformers adds to a vocabulary and its merges.

    Attributes:
        pattern: regular expression for words; None is GPT-2's, which byte-level pre-tokenizers have built in.
        special: default special tokens of the class.
        plain: whether special tokens are matched literally, ignoring options about spaces around them.
    """

    pattern: str | None
    special: dict[str, str]
    plain: bool = False


def _qwen(letters: str, *, plain: bool) -> ClassDefaults:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return ClassDefaults(pattern, {"eos_token": END, "unk_token": END, "pad_token": END}, plain)


CLASSES = {
    "GPT2Tokenizer": ClassDefaults(None, {"bos_token": END, "eos_token": END, "unk_token": END}),
    "Qwen2Tokenizer": _qwen(r"\p{L}", plain=True),
    "Qwen3_5Tokenizer": _qwen(r"\p{L}\p{M}", plain=False),
}
CLASS_OF_MODEL = {
    "gpt2": "GPT2Tokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "Qwen3_5Tokenizer"),
}
MODEL_DECIDES = ("qwen2", "qwen3_5")  # their published settings name the wrong class


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, under any name, or of a folder; it neither truncates nor pads texts.

    Raises:
        CheckpointError: there is none, it is broken, or it cannot be reproduced exactly; tells what is missing.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        if (tokenizer := read_tokenizer(path)) is None:
            raise CheckpointError(f"{path} has neither {WHOLE} nor {VOCABULARY} with {MERGES}")
        return tokenizer
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; expected a {WHOLE}, or a folder that holds one")
    return _whole(path)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder, or None; raises CheckpointError as :func:`load_tokenizer`."""
    if (folder / WHOLE).exists():
        return _whole(folder / WHOLE)
    return _from_vocabulary(folder) if tokenizer_files(folder) else None


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the files of a folder's tokenizer; empty without a tokenizer."""
    if (folder / WHOLE).exists():
        return [WHOLE]
    if not all((folder / name).exists() for name in (VOCABULARY, MERGES)):
        return []
    return [VOCABULARY, MERGES, *(name for name in SETTINGS if (folder / name).exists())]


def _whole(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(f"{file} is no tokenizer ({error}){pointer_hint(file)}") from None
    tokenizer.no_truncation()  # a stored limit would silently truncate documents
    tokenizer.no_padding()
    return tokenizer


def _from_vocabulary(folder: Path) -> Tokenizer:
    settings = _optional(folder, "tokenizer_config.json")
    defaults = CLASSES[_class_of(folder, settings)]
    prefix_space = settings.get("add_prefix_space") or False
    for name, value in (("add_prefix_space", prefix_space), ("split_special_tokens", settings.get("split_special_tokens"))):
        if not isinstance(value, bool | None) or (value and name == "split_special_tokens"):
            raise _refusal(folder, f"tokenizer_config.json has {name} = {value!r}")
    try:
        tokenizer = Tokenizer(BPE.from_file(str(folder / VOCABULARY), str(folder / MERGES)))
    except Exception as error:  # tokenizers raises Exception itself
        hint = pointer_hint(folder / VOCABULARY) or pointer_hint(folder / MERGES)
        raise CheckpointError(f"{folder / VOCABULARY} and {MERGES} are no tokenizer ({error}){hint}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=defaults.pattern is None)
    if defaults.pattern is not None:
        cut = pre_tokenizers.Split(Regex(defaults.pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, tokenizer.pre_tokenizer])
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    try:
        placed, special = _added_tokens(folder, settings, defaults)
        _add_tokens(tokenizer, placed, special)
        if defaults.plain:
            tokenizer.add_tokens([AddedToken(token.content, special=True) for token in special])
    except (TypeError, ValueError, AttributeError) as error:
        raise _refusal(folder, f"its added tokens are not understood ({error})") from None
    return tokenizer


def _class_of(folder: Path, settings: dict[str, Any]) -> str:
    model = _optional(folder, "config.json")
    kind = model.get("model_type")
    kind = kind if isinstance(kind, str) else None
    said = settings.get("tokenizer_class") or model.get("tokenizer_class")
    if said is None or kind in MODEL_DECIDES:
        said = CLASS_OF_MODEL.get(kind, said)
    elif "auto_map" in settings:
        raise _refusal(folder, "tokenizer_config.json has an auto_map, code of its own")
    if said is None:
        raise _refusal(folder, "neither tokenizer_config.json nor the kind of model says how text is cut into words")
    name = str(said).removesuffix("Fast")
    if name not in CLASSES:
        raise _refusal(folder, f"its tokenizer_class is {said!r}; known: {', '.join(CLASSES)}")
    return name


def _added_tokens(
    folder: Path, settings: dict[str, Any], defaults: ClassDefaults
) -> tuple[dict[int, AddedToken], list[AddedToken]]:
    """Added tokens by their ids in the files, in order, and all special tokens."""
    named = dict(settings)
    placed: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in settings:
        placed = {int(i): AddedToken(**token) for i, token in settings["added_tokens_decoder"].items()}
    else:
        for name, value in _optional(folder, "special_tokens_map.json").items():
            if name == "extra_special_tokens" and isinstance(value, list):
                value = [*(settings.get(name) or []), *value]
            named[name] = value | {"special": True} if isinstance(value, dict) and "content" in value else value
        special = {str(token.content) for token in _special(named, defaults)}
        for text, i in _optional(folder, "added_tokens.json").items():
            placed[i] = AddedToken(text, normalized=text not in special, special=text in special)
    return dict(sorted(placed.items())), list(_special(named, defaults))


def _special(named: dict[str, Any], defaults: ClassDefaults) -> Iterator[AddedToken]:
    """Special tokens in the order in which those outside the vocabulary get ids."""
    own = [n for n in named if n.endswith("_token") and n not in NAMED and isinstance(named[n], str | dict)]
    more = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    for name in (*NAMED, *own):
        if (token := named.get(name, defaults.special.get(name))) is not None:
            yield _token(token)
    yield from map(_token, more.values() if isinstance(more, dict) else more)


def _token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    token = AddedToken(**{k: v for k, v in value.items() if k != "__type"})
    token.special = True
    return token


def _add_tokens(tokenizer: Tokenizer, placed: dict[int, AddedToken], special: list[AddedToken]) -> None:
    for i, token in placed.items():
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != i:
            raise ValueError(f"{token.content!r} has id {i} there, {tokenizer.token_to_id(token.content)} in order")
    known = {token.content for token in placed.values()}
    for token in special:
        if token.content not in known:
            tokenizer.add_tokens([token])
            known.add(token.content)


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).exists() else {}


def _refusal(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{folder / VOCABULARY} and {MERGES} cannot be read exactly: {reason}; "
        f"give a {WHOLE}, or remove them and give documents as token ids"
    )
