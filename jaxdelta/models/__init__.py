"""The model families, and the model of each configuration."""

from typing import Any

from jaxdelta.models.config import DecoderConfig, DeltaLMConfig, Qwen3_5Config
from jaxdelta.models.decoder import Decoder
from jaxdelta.models.delta_lm import DeltaLM
from jaxdelta.models.qwen3_5 import Qwen3_5

MODELS: dict[type[DecoderConfig], type[Decoder]] = {Qwen3_5Config: Qwen3_5, DeltaLMConfig: DeltaLM}


def build(config: DecoderConfig, **options: Any) -> Decoder:
    """A model of ``config`` with fresh parameters; options as of :class:`~jaxdelta.models.decoder.Decoder`."""
    return MODELS[type(config)](config, **options)
