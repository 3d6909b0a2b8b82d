"""Charts of the HTML report: the sections that each analysis has. Read results only."""

from collections.abc import Callable

from jaxdelta.report.charts.drawing import Section
from jaxdelta.report.charts.heads import sensitivity_sections, transitions_sections
from jaxdelta.report.charts.losses import compare_sections, storage_sections, sweep_sections
from jaxdelta.report.charts.states import keys_sections, reads_sections, spectrum_sections, trace_sections
from jaxdelta.results.opened import Opened

SECTIONS: dict[str, Callable[[Opened], list[Section]]] = {
    "spectrum": spectrum_sections,
    "keys": keys_sections,
    "reads": reads_sections,
    "sweep": sweep_sections,
    "compare": compare_sections,
    "storage": storage_sections,
    "trace": trace_sections,
    "sensitivity": sensitivity_sections,
    "transitions": transitions_sections,
}


def sections(results: Opened) -> list[Section]:
    """The sections of one results folder; none for an analysis that has no charts."""
    make = SECTIONS.get(results.analysis)
    return [] if make is None else make(results)
