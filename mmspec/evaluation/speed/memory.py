"""Peak memory of a stretch of work, and the kind of measurement.

tracemalloc sees none of torch's memory, so the device's allocator is asked, or the operating system.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["PeakMemory"]

CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
RESET_PEAK = "5"  # proc(5): resets the peak resident set size (VmHWM) of this process alone


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory since this was made.

    Attributes:
        kind: "cuda allocated", "resident set" (of the process during the work, weights included), or
            "resident set since start" where the system cannot reset its peak.
    """

    kind: str
    device: torch.device

    @classmethod
    def start(cls, device: torch.device) -> PeakMemory:
        """Start measuring the memory of a model on `device`."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls("cuda allocated", device)
        try:
            CLEAR.write_text(RESET_PEAK)
            STATUS.read_text()
        except OSError:
            return cls("resident set since start", device)
        return cls("resident set", device)

    def read(self) -> int:
        """Read the peak since the start, in bytes."""
        if self.kind == "cuda allocated":
            return torch.cuda.max_memory_allocated(self.device)
        if self.kind == "resident set":
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return _peak_since_start()


def _peak_since_start() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, kilobytes elsewhere
