"""Calls of a pipeline reach the kernels of relaxed rules and of merging, and give what torch gives."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.compressors import build_compressor
from mmspec.models.head_checkpoint import load_head
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import render, sample_scene
from tests.acceptance.codes import fitted

ASSETS = Path(__file__).parents[2] / "assets"


@functools.cache
def pipeline(name: str) -> Any:
    pipe = MMSpecPipeline.from_pretrained(str(ASSETS / name), accelerator="none", dtype=torch.float32)
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    return pipe


def launches(patch: pytest.MonkeyPatch, module: str, launcher: str) -> list[str]:
    """Names of a launcher, one for each call of it from now on."""
    pytest.importorskip("triton")
    __import__(f"mmspec.kernels.{module}")
    room, calls = sys.modules[f"mmspec.kernels.{module}"], []
    real = getattr(room, launcher)

    def counted(*args: Any) -> Any:
        calls.append(launcher)
        return real(*args)

    patch.setattr(room, launcher, counted)
    return calls


def draw(rounds: int) -> tuple[list[list[int]], Any]:
    """The first rounds of an image of scenes-llamagen: tokens of its cells, and what was accepted."""
    pipe = pipeline("scenes-llamagen")
    output = pipe(
        "a red ring left of a small blue square",
        seed=3,
        output_type="latent",
        callback_on_step_end=lambda pipe, step, *_: pipe.interrupt() if step + 1 == rounds else None,
    )
    return output.tokens, output.stats


WINDOW = {"window": 4}
RULES = {
    "gsd": ("groups_triton", "rank_ratio_triton", "gsd", {}),
    "gsd by clusters": (
        "groups_triton",
        "cluster_ratio_triton",
        "gsd",
        {"acceptance": "grouped", "partition": "codebook"},
    ),
    "gsd as released": (
        "windows_triton",
        "window_ratio_at_triton",
        "gsd",
        {"acceptance": "grouped", "reference": True},
    ),
    "lantern": ("neighbours_triton", "nearby_mass_triton", "lantern", {"neighbours": 10}),
    "lantern as published": (
        "neighbours_triton",
        "nearby_prefix_triton",
        "lantern",
        {"acceptance": "lantern", "neighbours": 10},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_reach_their_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, launcher, preset, options = RULES[name]
    found = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
        pipeline("scenes-llamagen").set_accelerator(preset, **options, **WINDOW)
        with monkeypatch.context() as patch:
            calls = launches(patch, module, launcher)
            found[backend] = draw(rounds=4)
        assert bool(calls) == (backend == "triton")
    (kernel, judged), (twin, expected) = found["triton"], found["torch"]
    assert kernel == twin
    assert judged.acceptance_length == expected.acceptance_length
    torch.testing.assert_close(judged.tv_mean, expected.tv_mean, rtol=1e-4, atol=1e-5)


def describe() -> tuple[list[list[int]], Any]:
    image = Image.fromarray(render(sample_scene(21_001)))
    output = pipeline("scenes-llava")("describe the picture.", images=image, max_new_tokens=6)
    return output.tokens, output.stats


def test_a_head_that_merges_visual_tokens_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, found = pipeline("scenes-llava"), {}
    head = load_head(
        "eagle", ASSETS / "scenes-llava-eagle", pipe.target.config, pipe.target.dtype, pipe.target.device
    )
    head.compressor = build_compressor("merging", head.compressor.width, tokens=12)
    for backend in ("torch", "triton"):
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
        pipe.set_accelerator("eagle", drafter=head)
        with monkeypatch.context() as patch:
            calls = [
                launches(patch, "similarity_triton", launcher)
                for launcher in ("most_similar_triton", "merge_vectors_triton")
            ]
            found[backend] = describe()
        assert [bool(each) for each in calls] == [backend == "triton"] * 2
    assert found["triton"][0] == found["torch"][0]
    assert found["triton"][1].acceptance_length == found["torch"][1].acceptance_length


@pytest.mark.parametrize(
    ("name", "options", "module", "launcher"),
    [
        ("grouped", {"group_size": 5}, "groups_triton", "rank_ratio_at_triton"),
        ("budget", {"relaxation": "groups", "group_size": 5}, "groups_triton", "rank_ratio_at_triton"),
        ("budget", {"neighbours": 5}, "neighbours_triton", "nearby_prefix_triton"),
        ("lantern", {"neighbours": 5, "reference": True}, "neighbours_triton", "nearby_prefix_triton"),
        ("grouped", {"reference": True}, "windows_triton", "window_ratio_triton"),
    ],
)
def test_rules_judge_as_in_torch(
    name: str, options: dict[str, Any], module: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic candidates by their own token alone; sampled ones by the windows of all tokens."""
    rule: Any = fitted(ACCEPTANCE_RULES[name](**options), 40, 3)
    p, q = torch.rand(2, 2, 3, 40, generator=torch.Generator().manual_seed(8)).pow(4).unbind(0)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    x, allowance = torch.tensor([[3, 39, 20], [0, 7, 11]])[..., None], torch.full((2, 3, 1), 0.1)
    deterministic = launcher != "window_ratio_triton"
    judged = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
        with monkeypatch.context() as patch:
            calls = launches(patch, module, launcher)
            judged[backend] = rule.judge(p, None if deterministic else q, x, allowance)
        assert bool(calls) == (backend == "triton")
    for field in ("accepted", "tv"):
        pair = (getattr(judged[backend], field) for backend in ("triton", "torch"))
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)
