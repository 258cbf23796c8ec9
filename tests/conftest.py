"""Set-up of every test run: no network, one thread a process, GPU tests skipped where there is no GPU."""

import os

# Set before any test imports the libraries that read them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more; xdist fills the cores

import pytest

if not os.path.exists("/dev/nvidia0"):
    # Triton reads it where a kernel is defined; torch is not imported yet, which would know of a GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
