"""Costs of a round of every accelerator, at its defaults, on the reference models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mmspec.assets import find_assets
from mmspec.pipelines import MMSpecPipeline
from mmspec.plugins import METHODS
from tests.core.test_rounds import counted_copies, counted_reads
from tests.methods import eagle3_checks
from tests.methods.heads_checks import medusa_for

TEXT = ("none", "copy", "draft_model", "eagle", "eagle3", "flash", "medusa")
HYBRID = ("none", "copy", "mtp", "dflash", "dspark")
IMAGES = ("none", "sjd", "gsd", "lantern", "zipar", "eagle", "cjd")
VECTORS = {"scenes-nextstep": ("none", "shared_noise", "draft_model"), "scenes-mar": ("none", "masked")}
BY_ORDER = ("low_confidence", "sequential", "threshold", "entropy_bound")
MODES = {"blocks": ("none", "freedave", *BY_ORDER), "autoregressive": ("none", "self_speculation")}
# Of a Gemma 4, a DiffusionGemma, models for any cells none is shipped, nor prompt tokens of
# `ppd`; `hydra` is behind `medusa` on ours.
NOT_SHIPPED = ("assistant", "hydra", "ppd", "renoise", "lpd", "maskgit")
#: Heads of random weights, where none is shipped for a reference model.
RANDOM: dict[str, Callable[[Any], Any]] = {"eagle3": eagle3_checks.head_for, "medusa": medusa_for}
BOUNDS = 4  # copies of where the blocks of the rows begin and end, which the host knows
UNEVEN = ("cspd",)  # images of a batch know different numbers of cells, which MAR reads in each forward


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    with counted_reads() as reads, counted_copies() as copies:
        yield reads, copies


def check(call: Any, name: str, rounds: int, copied: int = 0) -> None:
    """At most one read of the device in a round; no copy to it but `copied`, and a text that was searched."""
    with counted() as counters:
        steps = call.rounds()
        next(steps), next(steps)  # objects that a call creates once exist by now
        for _ in range(rounds):
            for counter in counters:
                counter.clear()
            if next(steps, None) is None:
                break
            reads, copies = counters
            assert dict(reads) == {"tolist": 1}, name
            assert sum(copies.values()) <= copied + (name == "copy"), (name, copies)


def test_every_accelerator_is_here() -> None:
    groups = (TEXT, HYBRID, IMAGES, *VECTORS.values(), *MODES.values(), UNEVEN, NOT_SHIPPED)
    assert {name for names in groups for name in names} == set(METHODS)


@pytest.mark.parametrize(("model", "names"), [("scenes-llava", TEXT), ("scenes-hybrid", HYBRID)])
def test_a_round_of_text(model: str, names: tuple[str, ...]) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(find_assets() / model, accelerator="none")
    for name in names:
        pipe.set_accelerator(name, **({"drafter": RANDOM[name](pipe.target)} if name in RANDOM else {}))
        check(pipe._prepare("Describe a red ring.", {"max_new_tokens": 24}), name, 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.every(2)
def test_a_round_of_masked_blocks(mode: str) -> None:
    folder = find_assets() / "scenes-diffusion"
    pipe: Any = MMSpecPipeline.from_pretrained(folder, accelerator="none", mode=mode)
    for name in MODES[mode]:
        pipe.set_accelerator(name)
        call = pipe._prepare("Describe a red ring.", {"max_new_tokens": 48})
        check(call, name, 3, copied=BOUNDS if mode == "blocks" else 0)


@pytest.mark.parametrize("model", VECTORS)
@pytest.mark.every(2)
def test_a_round_of_continuous_tokens(model: str) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(find_assets() / model, accelerator="none")
    settings = {"seed": 0, "output_type": "latent", "num_inference_steps": 5, "last_step_noise": True}
    asked = {"class_labels": 3} if pipe.target.any_order else {}
    for name in VECTORS[model]:
        pipe.set_accelerator(name)
        check(pipe.prepare(None if asked else "a red ring", settings, **asked), name, 4)
