"""Drafts of heads equal those of slow drafting: no cache, no batch, one path at a time.

In float64, on ragged prompts with images and accepted paths, so that states, rows, positions, masks and
scores are right.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mmspec.accelerator import Accelerator
from mmspec.core.sampling import Sampler
from mmspec.heads.drafter import HeadDrafter
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.flash.drafter import FlashDrafter
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import CausalTarget
from tests.contracts.running import decode, random_prompts
from tests.heads.visual_checks import KINDS as VISUAL
from tests.heads.visual_checks import NaiveVisual
from tests.methods import eagle3_checks, eagle_checks, flash_checks
from tests.methods.eagle_checks import WORDS, Examined, Gullible, SlowWay, few_words, llamagen
from tests.methods.flash_checks import answer, inputs_of, target_of
from tests.methods.heads_checks import KINDS, drafter_for
from tests.methods.naive_eagle import NaiveEagle
from tests.methods.naive_eagle3 import NaiveEagle3
from tests.methods.naive_heads import NaiveFlash, NaiveHydra, NaiveMedusa
from tests.targets.image_loop import draw

SMALL: dict[str, Any] = {"num_draft_tokens": 8, "depth": 3, "top_k": 3}


def compare(drafter: HeadDrafter, slow_way: SlowWay, family: str, tree: str = "eagle", path: int = 2) -> None:
    """Compare all drafts for prompts of a family, paths of so many candidates accepted among them."""
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    examined = Examined(drafter.fit(target), 10, slow_way, tree)
    cases = [inputs[case] for case in ("two images", "no image", "several turns")]
    canvas = answer(target, examined, cases, Sampler(0.9), 10, Gullible())
    assert examined.drafts >= 6, "some drafts were compared"
    assert max(canvas.stats.accepted_histogram) >= path


def compare_text(drafter: HeadDrafter, slow_way: SlowWay, scale: float = 3.0, tree: str = "eagle") -> None:
    """Compare all drafts under guidance, whose prompts have different lengths."""
    examined = Examined(drafter.fit(few_words()), 12, slow_way, tree)
    negatives = random_prompts(2, WORDS, longest=6, seed=9) if scale != 1 else None
    decode(
        few_words(),
        random_prompts(2, WORDS, longest=6, seed=4),
        examined,
        Gullible(),
        Sampler(1.0, guidance_scale=scale),
        max_new_tokens=12,
        negatives=negatives,
    )
    assert examined.drafts >= 4


def eagle3(target: CausalTarget, words: int = 0, window: int | None = None, **shape: Any) -> HeadDrafter:
    more = {"draft_vocabulary": words} if words else {}
    return Eagle3Drafter(eagle3_checks.head_for(target, sliding_window=window, **more), **shape)


@pytest.mark.parametrize(("tree", "scale"), [("dynamic", 3.0), ("eagle", 1.0)])
def test_eagle(tree: str, scale: float) -> None:
    sizes = {"num_draft_tokens": 12, "depth": 3, "top_k": 4} if tree == "dynamic" else {}
    head = eagle_checks.head_for(few_words())
    compare_text(GrownTreeDrafter(head, tree=tree, **sizes), NaiveEagle, scale)


def test_eagle_on_images_that_are_drawn() -> None:
    """Prompts of one condition slot, raster positions and guidance."""
    target = llamagen()
    drafter = GrownTreeDrafter(eagle_checks.head_for(target), num_draft_tokens=12, depth=2, top_k=6).fit(
        target
    )
    examined = Examined(drafter, 16, NaiveEagle)
    requests = image_requests(target, class_labels=[0, 3], guided=True)
    draw(target, Accelerator("eagle", examined, Gullible()), requests, 3.0, 0.8)
    assert examined.drafts > 4


@pytest.mark.parametrize(("kind", "family"), list(zip(VISUAL, ["llava", "qwen2_5_vl"] * 3, strict=False)))
@pytest.mark.every(2)
def test_eagle_that_reads_images_in_ways_of_its_own(kind: str, family: str) -> None:
    head = eagle_checks.head_for(target_of(family, torch.float64), **VISUAL[kind])
    compare(GrownTreeDrafter(head, 6, depth=3, top_k=2), NaiveVisual, family)


@pytest.mark.parametrize(
    ("family", "words", "window", "shape"),
    [
        ("qwen3_vl", 13, None, SMALL),
        ("qwen3_vl", 0, None, {"tree": "eagle"}),
        ("llava", 13, 3, SMALL),
        ("llava", 0, 1, {"tree": "eagle"}),
        ("qwen2_5_vl", 0, 5, SMALL),
    ],
)
@pytest.mark.every(2)
def test_eagle3(family: str, words: int, window: int | None, shape: dict[str, Any]) -> None:
    """With windows shorter than a prompt or a path; windows count rows, not places in images."""
    compare(eagle3(target_of(family, torch.float64), words, window, **shape), NaiveEagle3, family)


def test_eagle3_under_guidance() -> None:
    compare_text(eagle3(few_words(), 7, 3, **SMALL), NaiveEagle3)


def flash(target: CausalTarget, nodes: int, depth: int, top_k: int, block: int, **head: Any) -> HeadDrafter:
    return FlashDrafter(flash_checks.head_for(target, **head), nodes, depth=depth, top_k=top_k, block=block)


@pytest.mark.parametrize(
    ("family", "block", "top_k", "compressor"),
    [
        ("llava", 1, 2, "none"),
        ("qwen2_5_vl", 4, 2, "latent"),
        ("qwen2_5_vl", 2, 2, "attention_pruning"),
        ("llava", 2, 2, "identity"),
        ("llava", 2, 1, "latent"),
        ("qwen2_5_vl", 4, 1, "latent"),
    ],
)
@pytest.mark.every(2)
def test_flash(family: str, block: int, top_k: int, compressor: str) -> None:
    """Trees and chains that are deeper than a block."""
    options = {} if compressor in ("none", "identity") else {"tokens": 2}
    settings = {"compressor": compressor, "compressor_options": options}
    nodes = 5 if top_k == 1 else 9
    drafter = flash(target_of(family, torch.float64), nodes, 5, top_k, block, **settings)
    compare(drafter, partial(NaiveFlash, block=block), family, path=3)


@pytest.mark.parametrize(("nodes", "top_k"), [(8, 3), (3, 1)])
def test_flash_under_guidance(nodes: int, top_k: int) -> None:
    compare_text(flash(few_words(), nodes, 3, top_k, 2), partial(NaiveFlash, block=2))


@pytest.mark.parametrize(("kind", "family"), list(zip(KINDS, ["llava", "qwen2_5_vl"] * 3, strict=False)))
@pytest.mark.every(2)
def test_medusa_and_hydra(kind: str, family: str) -> None:
    slow_way = NaiveMedusa if kind.startswith("medusa") else NaiveHydra
    target = target_of(family, torch.float64)
    compare(drafter_for(kind, target, num_draft_tokens=9, depth=3, top_k=3), slow_way, family)
    compare_text(drafter_for(kind, few_words(), **SMALL), slow_way)


@pytest.mark.parametrize(
    ("kind", "slow_way", "tree"),
    [("medusa", NaiveMedusa, "medusa"), ("hydra", NaiveHydra, "medusa"), ("medusa", NaiveMedusa, "1x1x1")],
)
@pytest.mark.every(2)
def test_static_trees_of_medusa_and_hydra(kind: str, slow_way: SlowWay, tree: str) -> None:
    drafter = drafter_for(kind, target_of("llava", torch.float64), tree=tree)
    compare(drafter, slow_way, "llava", tree)
