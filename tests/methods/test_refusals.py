"""Options out of range, and unsupported targets or images, raise errors with their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mmspec.accelerators import build_accelerator
from mmspec.core.image_grid import ImageGrid
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.methods.cjd.drafter import CorrectedDrafter
from mmspec.methods.cjd.head import CorrectorConfig
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.targets import CausalTarget
from mmspec.trees.growth import DynamicTree, StaticTree
from mmspec.trees.jacobi import JacobiDrafter
from tests.contracts.checks import llama, precise
from tests.methods import corrected_checks, eagle3_checks, eagle_checks, flash_checks, heads_checks
from tests.methods.staircase_checks import rasters
from tests.tiny_models import tiny_llama, tiny_lm
from tests.trees.jacobi_checks import draw, images

MODELS: dict[str, Callable[[], Any]] = {
    "cjd": lambda: corrected_checks.head_for(images()),
    "draft_model": llama,
    "eagle": lambda: eagle_checks.head_for(llama()),
    "flash": lambda: flash_checks.head_for(llama()),
    "medusa": lambda: heads_checks.medusa_for(llama()),
    "hydra": lambda: heads_checks.hydra_for(llama()),
}
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("copy", {"min_match": 0}, "min_match"),
    ("copy", {"length": "confidence"}, "does not estimate the probability of its candidates"),
    ("none", {"length": "cost"}, "one size"),
    ("sjd", {"length": "cost"}, "one size"),
    ("draft_model", {"sampling": "couple"}, "^sampling .*did you mean 'coupled'"),
    ("eagle", {"length": "costs"}, "cost"),
    ("eagle", {"length": "confidence", "stop_below": 0.0}, "stop_below"),
    ("eagle", {"length": "cost", "stop_below": 0.5}, "stop_below"),
    ("eagle", {"length": "confidence", "tree": "eagle"}, "tree=.dynamic. can stop early"),
    ("eagle", {"tree": "eagle", "num_draft_tokens": 25}, "num_draft_tokens"),
    ("eagle", {"tree": [0, 0], "depth": 1}, "depth"),
    ("eagle", {"tree": "eagel"}, "^tree .*did you mean 'eagle'"),
    ("eagle", {"tree": [0, 1]}, r"parents\[1\]"),
    ("flash", {"depth": 7, "num_draft_tokens": 6}, "depth"),
    ("flash", {"block": 5}, "block"),
    ("medusa", {"depth": 5}, "depth"),
    ("medusa", {"tree": "medusa", "depth": 2}, "depth"),
    ("hydra", {"tree": "eagle"}, "depth"),
    ("hydra", {"tree": "medussa"}, "tree"),
    ("sjd", {"window": 0}, "window"),
    ("sjd", {"window": 129}, "window"),
    ("sjd", {"coupling": "maximum"}, "did you mean 'maximal'"),
    ("sjd", {"init": "edges"}, "did you mean 'edge'"),
    ("sjd", {"reuse": 0.0}, "^reuse .*must be above 0.*got 0.0"),
    ("sjd", {"reuse": 0.5, "coupling": "exact"}, "reuse"),
    ("sjd", {"front": "4by2"}, "^front .*candidates such as 4x2.*got '4by2'"),
    ("sjd", {"front": (65,)}, "at most 64 chains"),
    ("sjd", {"window": 4, "front": (1, 1, 1, 2)}, "^front .*at most 3 places"),
    ("sjd", {"front": (2, 2), "reach": 1}, "^reach must be from 2 .*to 31; got 1"),
    ("cjd", {"window": 8, "corrected": 8}, "corrected must be an integer from 0 to 7.*got 8"),
    ("cjd", {"passes": 0}, "passes must be an integer from 1 to 128; got 0"),
    ("cjd", {"front": "2", "reach": 3, "corrected": 4}, "corrected must be an integer from 0 to 3.*got 4"),
    ("cjd", {"window": 100, "corrected": 70}, "corrected must be at most 63.*got 70"),
    ("cjd", {"init": "above"}, "init"),
    ("zipar", {"zipar_window": 1, "adaptive": True}, "zipar_window"),
    ("zipar", {"adaptive": "yes"}, "adaptive"),
    ("zipar", {"window": 2, "adaptive": True}, "window"),
    ("zipar", {"zipar_windw": 8}, "zipar_window"),
    ("zipar", {"adaptive": True, "acceptance": "typical"}, "speculative_sampling"),
    *(("zipar", {"zipar_window": window}, "zipar_window") for window in (0, 2.0, True, "8")),
]


@pytest.mark.parametrize("name", sorted({name for name, *_ in OPTIONS}))
def test_options_out_of_range_are_named(name: str) -> None:
    model = {"model": MODELS[name]()} if name in MODELS else {}
    for _, options, message in (row for row in OPTIONS if row[0] == name):
        with pytest.raises(InputError, match=message):
            build_accelerator(name, **model, **options)


def test_trees_that_cannot_be_grown_are_refused() -> None:
    for sizes, named in (
        ((0, 1, 1), "num_draft_tokens"),
        ((513, 9, 9), "num_draft_tokens"),
        ((5, 0, 1), "depth"),
        ((5, 6, 1), "depth"),
        ((5, 2, 0), "top_k"),
        ((5, 2, 6), "top_k"),
        ((5, 2, True), "top_k"),
        ((7, 2, 2), "num_draft_tokens"),  # 2 + 4 candidates
    ):
        with pytest.raises(InputError, match=f"^{named}"):
            DynamicTree(*sizes)
    for parents in ([], [0], [1, 0], [0, 2, 0]):
        with pytest.raises(InputError):
            StaticTree(parents)


def cjd(**head: Any) -> CorrectedDrafter:
    return CorrectedDrafter(corrected_checks.head_for(images(), **head), 8, 4)


SMALL, GUIDED = ImageGrid(2, 2, 62, 62), Sampler(guidance_scale=2.0)
UNFIT: list[tuple[Callable[[], Any], str]] = [
    (lambda: draw(JacobiDrafter(7), grid=ImageGrid(2, 3, 5)), "^window .*1 to 6.*got 7"),
    (lambda: JacobiDrafter(37).fit(images()), "^window .*1 to 36.*got 37"),
    (lambda: JacobiDrafter(4, init="above").fit(precise()), "init"),
    (lambda: JacobiDrafter(4, front=(4,)).fit(CausalTarget(tiny_lm(vocab=3))), "front"),
    (lambda: cjd(hidden_size=48).fit(images()), "whose hidden size is"),
    (lambda: cjd(vocabulary=12).fit(images()), "whose vocabulary is"),
    (lambda: draw(cjd().fit(images()), grid=SMALL), "window"),
    (
        lambda: draw(cjd(columns=7).fit(images()), grid=ImageGrid(3, 3, 62)),
        "must have rows of 7 tokens.*got '3 rows of 3",
    ),
    (lambda: draw(cjd(guided=False).fit(images()), sampler=GUIDED), "trained under guidance"),
    (lambda: draw(cjd()), "fitted to a target first"),
    (lambda: build_accelerator("zipar", zipar_window=5).fit(rasters()), "zipar_window"),
    (lambda: build_accelerator("zipar").fit(CausalTarget(tiny_llama())), "draws images"),
    (
        lambda: Eagle3Drafter(eagle3_checks.head_for(llama(), draft_vocabulary=6)).fit(llama()),
        "top_k must be at most 6.*got 8",
    ),
]


def test_targets_and_images_that_do_not_fit_are_refused() -> None:
    for call, message in UNFIT:
        with pytest.raises(InputError, match=message):
            call()


def test_heads_that_cannot_be_built_are_refused() -> None:
    wrong: dict[type[Any], list[dict[str, Any]]] = {
        CorrectorConfig: [{"width": 22, "num_heads": 4}, {"window": 8, "corrected": 8}, {"context": 0}],
    }
    for config, cases in wrong.items():
        for case in cases:
            with pytest.raises(Exception, match="width|corrected|sizes|taps"):
                config(vocabulary=8, **case)
