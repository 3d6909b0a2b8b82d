"""The axes of all tables and datasets, each with one meaning, and descriptions of variables.

layer          model layer index                linear_layer   its index among the linear layers
head           value head                       direction      of a state, the largest sigma first
boundary       tokens seen at the boundary      segment        index, from 0
token          index in its document            document       name
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from jaxdelta.models.config import DecoderConfig

COORDINATES = {
    "document": ("document", "name"),
    "boundary": ("boundary between segments", "tokens seen"),
    "at": ("where the state is measured: tokens seen, or the end of the document", "label"),
    "segment": ("segment", "index"),
    "token": ("token of the document", "index"),
    "layer": ("layer of the model", "index"),
    "linear_layer": ("layer among the linear layers", "index"),
    "step": ("Householder step of a token", "index"),
    "key_dim": ("K of the layer", "1"),
    "head": ("value head", "index"),
    "direction": ("singular direction, the largest sigma first", "index"),
    "window": ("length of a window", "tokens"),
    "tolerance": ("relative change up to which a direction counts as frozen", "1"),
    "kind": ("subspace of a window", "name"),
    "key": ("key dimension", "index"),
    "key_too": ("key dimension", "index"),
    "start": ("document of the text", "index"),
    "strength": ("write strength, middle of its bin", "1"),
    "quantile": ("share of the values below", "1"),
    "angle": ("principal angle, middle of its bin", "degrees"),
}


def head_coordinates(config: DecoderConfig) -> dict[str, Any]:
    """Coordinates of arrays over linear layers and value heads: ``layer``, ``linear_layer`` beside it, and ``head``."""
    return {
        "layer": list(config.linear_layers),
        "linear_layer": ("layer", np.arange(len(config.linear_layers))),
        "head": np.arange(config.largest_state.heads),
    }


def without_padding(config: DecoderConfig, data: xr.Dataset) -> xr.Dataset:
    """``data`` of stacked states with NaN (True in flags) for heads and directions that a smaller layer lacks."""
    shapes = [c.state for c in config.linear_sizes]
    if len(set(shapes)) < 2:
        return data
    heads, directions = (xr.DataArray([getattr(s, name) for s in shapes], dims="layer") for name in ("heads", "directions"))
    data = data.isel(direction=slice(config.max_rank), missing_dims="ignore")
    has = data["head"] < heads
    masks = {
        x: has & (data["direction"] < directions) if "direction" in v.dims else has
        for x, v in data.items()
        if "head" in v.dims
    }
    return data.assign({x: data[x].where(m, True if data[x].dtype == bool else np.nan) for x, m in masks.items()})


def labelled(data: xr.Dataset, descriptions: Mapping[str, tuple[str, str]]) -> xr.Dataset:
    """``data`` with ``long_name`` and ``units`` for every variable and coordinate; ``descriptions`` are of variables.

    Raises:
        KeyError: a variable without a description.
    """
    for name, variable in data.variables.items():
        long_name, units = (descriptions | COORDINATES)[name]
        variable.attrs |= {"long_name": long_name, "units": units}
    return data
