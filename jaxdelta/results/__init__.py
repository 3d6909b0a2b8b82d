"""Results folders, the loop over documents that fills them, and how others read them."""

from jaxdelta.results.folder import Results, ResultsError
from jaxdelta.results.opened import Opened
from jaxdelta.results.opened import opened as open

__all__ = ["Opened", "Results", "ResultsError", "open"]
