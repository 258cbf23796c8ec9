"""Peak memory as the operating system or the device sees it."""

import pytest
import torch

from mmspec.evaluation import memory
from mmspec.evaluation.memory import PeakMemory

MEGABYTE = 2**20


def test_a_peak_is_seen_and_forgotten_again():
    peak = PeakMemory.start(torch.device("cpu"))
    if peak.kind != "resident set":
        pytest.skip("this system cannot reset its peak")
    before = peak.read()
    held = torch.ones(64 * MEGABYTE // 4)  # tracemalloc would not see it
    assert peak.read() >= before + 60 * MEGABYTE
    del held
    assert PeakMemory.start(torch.device("cpu")).read() < before + 32 * MEGABYTE


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
