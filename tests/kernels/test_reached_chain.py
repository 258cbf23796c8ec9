"""Calls of sampled chains and Jacobi windows reach the kernels of chains, and give what torch gives."""

from typing import Any

from mmspec.acceptance.rejection import SpeculativeSampling
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.draft_model import DraftModelDrafter
from mmspec.targets import CausalTarget
from tests.contracts.running import decode, random_prompts
from tests.kernels.test_reached_relaxed import draw, launches, pipeline
from tests.tiny_models import tiny_llama

CHAIN, REDRAW = ("chain_triton", "verify_chain_triton"), ("redraw_triton", "redraw_triton")


def test_an_image_by_speculative_jacobi_decoding(monkeypatch):
    found: dict[str, Any] = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
        pipeline("scenes-llamagen").set_accelerator("sjd", window=4, coupling="maximal")
        with monkeypatch.context() as patch:
            calls = [launches(patch, *each) for each in (CHAIN, REDRAW)]
            found[backend] = draw(rounds=4)
        assert [bool(each) for each in calls] == [backend == "triton"] * 2
    (ours, judged), (expected, twin) = found["triton"], found["torch"]
    assert ours == expected and judged.acceptance_length == twin.acceptance_length > 1


def test_a_sampled_chain_of_a_draft_model(both, device, monkeypatch):
    model, small = tiny_llama().to(device), tiny_llama().to(device)
    small.lm_head.weight.data /= 2  # flatter, so that some candidates are refused
    calls = launches(monkeypatch, *CHAIN)
    drafter = DraftModelDrafter(CausalTarget(small), 3, "sampled")
    roles = CausalTarget(model), random_prompts(2), drafter, SpeculativeSampling(), Sampler(1.0)
    ours, expected = both(decode, *roles, max_new_tokens=8, seed=1)
    assert calls and ours.outputs == expected.outputs
    assert 1 < ours.stats.acceptance_length < 4
