"""Free memory of this machine and of the container that the process runs in."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

__all__ = ["free_bytes"]

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes of free memory on a device, within the limit of the container."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min(int(psutil.virtual_memory().available), container_bytes())


def container_bytes() -> int:
    """Bytes left to the process's control group (version 2); 2**63 if it has no limit."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        held = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max"
        return 2**63
    return max(0, limit - used + int(held.get("inactive_file", 0)))  # the kernel can free cached files
