"""The shipped drafters of images: small, documented, made for the shipped model, and of use to it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from mmspec.decoding.interfaces import Drafter
from mmspec.drafters.corrected import CorrectedDrafter
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.drafters.vertical import VerticalDrafter
from mmspec.evaluation.identity.distribution import DistributionTest, check_distribution
from mmspec.models.cjd import CorrectorHead
from mmspec.models.eagle import EagleHead
from mmspec.models.ssd import VerticalHead
from mmspec.pipelines import MMSpecPipeline
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.data.images import open_llamagen
from mmspec.training.data.scenes import SceneImages
from mmspec.training.data.sequences import Trial, acceptance_length

ASSETS = Path(__file__).parents[2] / "assets"
TARGETS = ("scenes-llamagen", "scenes-llamagen-long")


@functools.cache
def trial(name: str) -> tuple[LlamaGenTarget, Trial]:
    """Two prompts, the first 48 tokens."""
    target = open_llamagen(ASSETS / name, torch.device("cpu"))
    return target, replace(SceneImages(target, ASSETS / name, batch_size=1, seed=0).trial(), new_tokens=48)


def accepted(drafter: Drafter, target: str = TARGETS[0], new_tokens: int = 48) -> float:
    model, usual = trial(target)
    return acceptance_length(model, drafter, replace(usual, new_tokens=new_tokens))


def head_of(method: str, target: str = TARGETS[0]) -> Any:
    return AutoModel.from_pretrained(ASSETS / f"{target}-{method}").eval()


def test_drafters_are_small_and_carry_their_cards() -> None:
    for target, method in ((TARGETS[0], "eagle"), (TARGETS[0], "ssd"), *((each, "cjd") for each in TARGETS)):
        folder = ASSETS / f"{target}-{method}"
        files = [path for path in folder.iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 3_000_000
        assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")], "safetensors only"
        record = json.loads((folder / "training.json").read_text())
        card = (folder / "README.md").read_text()
        assert record["method"] == method and record["target"] == target
        assert all(f"{stage['steps']:,}" in card or str(stage["steps"]) in card for stage in record["stages"])


def test_a_tree_saves_forwards_of_its_target() -> None:
    """24 candidates; a head of random weights gets 1.02."""
    head = head_of("eagle")
    assert isinstance(head, EagleHead)
    assert accepted(EagleDrafter(head, num_draft_tokens=24, depth=3, top_k=8)) > 1.1


@pytest.mark.parametrize("target", TARGETS)
def test_a_corrected_window_saves_more_forwards_than_a_stale_one(target: str) -> None:
    head = head_of("cjd", target)
    assert isinstance(head, CorrectorHead)
    # in a quarter as many tokens the ratio is 1.05 to 1.8, by the rounding of the processor
    stale = accepted(JacobiDrafter(), target, new_tokens=192)
    assert accepted(CorrectedDrafter(head), target, new_tokens=192) > 1.2 * stale


def test_drafts_from_the_row_above_save_forwards() -> None:
    """In whole images, by windows of half a row, whose places are judged soon after they are new."""
    head = head_of("ssd")
    assert isinstance(head, VerticalHead)
    target, some = trial(TARGETS[0])
    whole = replace(some, new_tokens=target.grid.length)
    below, edge = (
        acceptance_length(target, one, whole) for one in (VerticalDrafter(head, 8), JacobiDrafter(8))
    )
    assert below > edge


def whole_images(**options: Any) -> DistributionTest:
    """Test the tokens of whole images that a corrector draws for the reference model."""
    pipe: Any = MMSpecPipeline.from_pretrained(ASSETS / TARGETS[0], accelerator="cjd", **options)
    prompts = ["a red ring left of a small blue cross", "two green squares", "a large yellow star"]
    call = pipe.prepare(prompts * 4, {"seed": 5, "output_type": "latent"})
    for _ in call.rounds():
        pass
    (drawn,) = call.calls
    return check_distribution(pipe.target, call.sampler, call.requests, drawn.canvas.outputs())


TREE = {"window": 16, "front": "4x2", "reach": 8, "corrected": 8}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"window": 32}, TREE])
def test_whole_images_follow_the_targets_distribution(options: dict[str, Any]) -> None:
    assert whole_images(**options).passed
