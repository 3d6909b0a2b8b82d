"""What a process has taken of the machine's memory; it needs no JAX."""

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """Largest resident memory of this process."""
    try:  # ru_maxrss of Linux also counts the parent's memory as it was when this process was started
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
