"""Peak memory as the operating system or the device sees it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmspec.evaluation.speed import timing as memory
from mmspec.evaluation.speed.timing import PeakMemory

MEGABYTE = 2**20
ROOT = Path(__file__).resolve().parents[2]


# A process of its own: one that has run other tests holds memory that a new tensor may take over unseen.
WATCH = """
import torch
from mmspec.evaluation.speed.timing import PeakMemory

peak = PeakMemory.start(torch.device("cpu"))
before = peak.read()
held = torch.ones(64 * 2**20 // 4)  # tracemalloc would not see it
during = peak.read()
del held
print(peak.kind, before, during, PeakMemory.start(torch.device("cpu")).read(), sep="|")
"""


def test_a_peak_is_seen_and_forgotten_again():
    result = subprocess.run(
        [sys.executable, "-c", WATCH], capture_output=True, text=True, check=True, cwd=ROOT
    )
    kind, *readings = result.stdout.split("|")
    if kind != "resident set":
        pytest.skip("this system cannot reset its peak")
    before, during, after = map(int, readings)
    assert during >= before + 60 * MEGABYTE
    assert after < before + 32 * MEGABYTE


def test_without_a_reset_the_number_says_what_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "none" / "clear_refs")
    peak = PeakMemory.start(torch.device("cpu"))
    assert peak.kind == "resident set since start"
    assert peak.read() > MEGABYTE


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_is_asked():
    device = torch.device("cuda")
    peak = PeakMemory.start(device)
    held = torch.ones(64 * MEGABYTE // 4, device=device)
    assert peak.kind == "cuda allocated"
    assert peak.read() >= held.nbytes
