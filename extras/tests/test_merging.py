"""Merging of visual tokens: its formula, the contract of compressors, and an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from PIL import Image

from mmspec import MMSpecPipeline
from mmspec.compressors import build_compressor
from mmspec.heads.checkpoint import load_head
from mmspec.scenes import render, sample_scene
from mmspec.visual_tokens.tokens import raster
from mmspec_extras.compressors.merging import merge_once
from tests.compressors.test_formulas import WIDTH, image
from tests.contracts import test_compressors
from tests.packaging.source_tree import ROOT

ASSETS = ROOT / "assets"


@pytest.mark.parametrize("check", test_compressors.CONTRACT, ids=lambda check: check.__name__)
def test_it_obeys_the_contract_of_compressors(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_compressors, "OPTIONS", {"merging": {"tokens": 6}})
    check()


def test_merging_makes_means_of_the_most_similar_pairs() -> None:
    """One step by hand: even places against odd ones, six pairs of ten, the rest in reading order."""
    given = image(raster(4, 5))
    tokens, boxes = given.features[0], given.boxes[0]
    unit = tokens / tokens.norm(dim=-1, keepdim=True)
    cosine = unit[0::2] @ unit[1::2].T
    best = {2 * row: 2 * int(cosine[row].argmax()) + 1 for row in range(10)}
    merged = sorted(best, key=lambda token: -float(cosine[token // 2].max()))[:6]
    left = [[token] for token in range(20) if token not in merged]
    for token in merged:
        next(group for group in left if group[0] == best[token]).append(token)
    made = build_compressor("merging", WIDTH, tokens=14)(given, torch.zeros(1, WIDTH))
    torch.testing.assert_close(made.features[0], torch.stack([tokens[group].mean(0) for group in left]))
    torch.testing.assert_close(made.boxes[0], torch.stack([boxes[group].mean(0) for group in left]))
    assert max(map(len, left)) > 2, "several tokens merged into one"


def test_merging_conserves_the_sum_of_tokens_over_rounds() -> None:
    given = image(raster(6, 7))
    weights = given.mask.float()
    total = (given.features * weights[..., None]).sum(1)
    images, sizes = given, weights
    while images.mask.shape[1] > 3:
        images, sizes = merge_once(images, sizes, 3)
        torch.testing.assert_close((images.features * sizes[..., None]).sum(1), total)
        assert sizes.sum() == 42 and images.mask.all()
    assert images.features.shape[1] == 3
    same = build_compressor("merging", WIDTH, tokens=42)(given, total)
    assert torch.equal(same.features, given.features) and torch.equal(same.boxes, given.boxes)


def test_an_answer_by_a_head_that_merges_visual_tokens() -> None:
    pipe = MMSpecPipeline.from_pretrained(
        str(ASSETS / "scenes-llava"), accelerator="none", dtype=torch.float32
    )
    picture = Image.fromarray(render(sample_scene(21_001)))
    how = {"images": picture, "max_new_tokens": 3, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    plain, target = pipe("describe the picture.", **how).tokens, pipe.target
    head = load_head("eagle", ASSETS / "scenes-llava-eagle", target.config, target.dtype, target.device)
    head.compressor = build_compressor("merging", head.compressor.width, tokens=12)
    pipe.set_accelerator("eagle", drafter=head, num_draft_tokens=4, depth=2, top_k=2, sampling="coupled")
    assert pipe("describe the picture.", **how).tokens == plain
