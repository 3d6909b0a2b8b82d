"""Peak memory of a process, measured without JAX."""

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """Largest resident memory of this process, in bytes."""
    try:  # on Linux ru_maxrss includes the memory of the parent at the start of this process
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
