"""Sampling settings per row: a row of a batch equals its single run with the same settings and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.checks import PROMPTS, precise
from tests.contracts.running import decode
from tests.methods import eagle_checks, staircase_checks
from tests.methods.heads_checks import drafter_for
from tests.oracles import RandomTreeDrafter
from tests.tiny_models import tiny_lm

ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0, "guidance_scale": 2.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05, "guidance_scale": 2.5},
]
OFF = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": 0.0, "guidance_scale": 1.0}
MIXED = {name: [row.get(name, off) for row in ROWS] for name, off in OFF.items()}
SEEDS = [3, 5, 8]
NEGATIVES = [[1, 2], [3], [4, 5, 6, 7]]


def alone(row: int, settings: dict[str, Any]) -> Sampler:
    return Sampler(**{name: v[row] if isinstance(v, list) else v for name, v in settings.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_warped_as_they_are_alone_bit_for_bit(dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(1), dtype=dtype)
    logits[2, 1, 7] = logits[5, 1, 7] = float("-inf")
    lanes = Tree.chain(torch.zeros(6, 2, dtype=torch.long), DraftKind.POINT)
    mixed = Sampler(**MIXED)
    by_lanes = mixed(logits, lanes, [], lanes.first(torch.zeros(len(logits))))
    scores = mixed.scores(mixed.guided(logits))
    for row in range(3):
        single = alone(row, MIXED)
        given = logits[[row, row + 3]] if single.is_guided else logits[[row]]
        own = single.scores(single.guided(given))
        assert torch.equal(own.p[0], scores.p[row])
        assert torch.equal(own.logits[0], scores.logits[row])
        assert torch.equal(own.p[0], by_lanes.p[2 * row : 2 * row + 2].flatten(0, 1))
        assert torch.equal(mixed.part([row]).scores(single.guided(given)).p, own.p)


def rows_equal_single_calls(drafter: Drafter, rule: AcceptanceRule | None, settings: dict[str, Any]) -> None:
    def run(rows: Sequence[int], sampler: Sampler) -> list[list[int]]:
        prompts, negatives, seeds = ([each[row] for row in rows] for each in (PROMPTS, NEGATIVES, SEEDS))
        keywords: dict[str, Any] = {"negatives": negatives, "seed": seeds, "max_new_tokens": 12}
        return decode(precise(), prompts, drafter, rule, sampler, **keywords).outputs

    together = run([0, 1, 2], Sampler(**settings))
    assert together == [run([row], alone(row, settings))[0] for row in range(3)]
    assert together != run([0, 1, 2], Sampler(0.8)), "the settings must matter"


def draft_model() -> DraftModelDrafter:
    return DraftModelDrafter(CausalTarget(tiny_lm(seed=22)), 3, "sampled")


TEXT: dict[str, Callable[[], tuple[Drafter, AcceptanceRule | None]]] = {
    "none": lambda: (NoDrafter(), None),
    "trees": lambda: (RandomTreeDrafter(6, precise().vocabulary), None),
    "draft model": lambda: (draft_model().stopping_below(0.2), SpeculativeSampling()),
    "medusa": lambda: (drafter_for("medusa", precise()).fit(precise()), None),
}


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.every(2)
def test_text(name: str) -> None:
    rows_equal_single_calls(*TEXT[name](), MIXED)


def images_equal_single_calls(name: str, **options: Any) -> None:
    target = eagle_checks.llamagen() if name == "eagle" else staircase_checks.rasters()
    if name == "eagle":
        options["model"] = eagle_checks.head_for(target)
    accelerator = build_accelerator(name, **options).fit(target)
    requests = staircase_checks.requests_of(target, 3)

    def run(rows: Sequence[int], sampler: Sampler) -> list[list[int]]:
        stream = RandomStream.from_seed([SEEDS[row] for row in rows], len(rows))
        stopping = Stopping(target.grid.length)
        call = accelerator.call(target, sampler, [requests[row] for row in rows], stopping, stream)
        for _ in call.rounds():
            pass
        return call.canvas.outputs()

    together = run([0, 1, 2], Sampler(**MIXED))
    assert together == [run([row], alone(row, MIXED))[0] for row in range(3)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sjd", {"window": 5}),
        ("sjd", {"window": 5, "coupling": "exact", "front": "3x2", "reach": 2}),
        ("zipar", {"zipar_window": 2, "window": 2}),
        ("eagle", {}),
    ],
)
@pytest.mark.every(2)
def test_images(name: str, options: dict[str, Any]) -> None:
    images_equal_single_calls(name, **options)
