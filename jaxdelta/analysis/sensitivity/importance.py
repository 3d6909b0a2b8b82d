"""Importance of heads and layers from sensitivities: the estimated rise of the mean loss when each is removed.

    head_output   the head's output is zero in the whole text
    head_state    the head's state is zero at every boundary

Derivatives are summed over segments or boundaries, those of the Fisher part within a sample before squares are taken.
"""

import xarray as xr

from jaxdelta.analysis.labels import labelled

PARTS = {"output": "segment", "state": "boundary"}  # of a head, and what its derivatives are summed over


def head_sums(maps: xr.Dataset, part: str) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Derivatives for one part of the heads ("output" or "state"), summed over the text, and the same for each sample.

    The second is None without samples. NaN for heads that a layer lacks.
    """
    along, sample = PARTS[part], f"head_{part}_sample"
    return maps[f"head_{part}"].sum(along, min_count=1), maps[sample].sum(along, min_count=1) if sample in maps else None


def head_importance(maps: xr.Dataset) -> xr.Dataset:
    """``head_output`` and ``head_state`` over (document, layer, head), ``layer_output`` and ``layer_state`` over
    (document, layer), all in the unit of the objective, and ``michel`` of the heads' outputs, without a unit.

    ``maps`` is a dataset of :func:`jaxdelta.analysis.sensitivity.maps.sensitivity`.
    """
    found = {}
    for part in PARTS:
        first, drawn = head_sums(maps, part)
        found[f"head_{part}"] = _effect(first, drawn, maps.scored)
        found[f"layer_{part}"] = _effect(first.sum("head"), None if drawn is None else drawn.sum("head"), maps.scored)
    found["michel"] = michel(head_sums(maps, "output")[0])
    return labelled(xr.Dataset(found, attrs=maps.attrs), _words(maps.attrs["unit"]))


def _words(unit: str) -> dict[str, tuple[str, str]]:
    """Long name and units of each variable."""
    removed = {"output": "output in the whole text is", "state": "state at every boundary is"}
    found = {
        f"{kind}_{part}": (f"estimated rise of the objective when a {kind}'s {said} removed", unit)
        for kind in ("head", "layer")
        for part, said in removed.items()
    }
    return found | {"michel": ("|derivative of a head's gate|, scaled to unit norm within its layer", "1")}


def michel(first: xr.DataArray) -> xr.DataArray:
    """|derivative for a head's gate|, scaled to unit norm within each layer and document.

    Source: Michel, Levy, Neubig, arXiv 1905.10650; the norm is taken per document, so documents do not affect one another.
    """
    size = abs(first.astype("float64"))
    norm = (size**2).sum("head") ** 0.5
    return size / norm.where(norm > 0, 1)


def _effect(first: xr.DataArray, drawn: xr.DataArray | None, scored: xr.DataArray) -> xr.DataArray:
    return -first if drawn is None else -first + 0.5 * (drawn**2).mean("sample") / scored
