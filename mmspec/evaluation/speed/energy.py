"""Energy of a stretch of work, where the driver counts it (NVML, by the package nvidia-ml-py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["EnergyMeter"]


@dataclass(frozen=True)
class EnergyMeter:
    """Energy of a GPU since this was made, everything that runs on it included.

    Attributes:
        library: NVML; None where nothing counts.
        handle: of the device.
        start_millijoules: what its counter showed.
    """

    library: Any = None
    handle: Any = None
    start_millijoules: int = 0

    @classmethod
    def start(cls, device: torch.device) -> EnergyMeter:
        """Start to count the energy of a device; one that nothing counts reads None."""
        if device.type != "cuda":
            return cls()
        try:
            import pynvml
        except ImportError:
            return cls()
        library: Any = pynvml
        try:
            library.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            return cls(library, handle, library.nvmlDeviceGetTotalEnergyConsumption(handle))
        except library.NVMLError:  # no driver, or a card without the counter
            return cls()

    def read(self) -> float | None:
        """Joules since the start; None where nothing counts."""
        if self.library is None:
            return None
        torch.cuda.synchronize()
        total: int = self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle)
        return (total - self.start_millijoules) / 1000
