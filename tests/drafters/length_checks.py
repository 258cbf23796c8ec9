"""Checks of drafts of changing size."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest

from mmspec.acceptance.rejection import SpeculativeSampling
from mmspec.decoding import cache as cache_module
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.draft_model import DraftModelDrafter
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.heads import HeadDrafter
from mmspec.drafters.length import CostModel, PacedDrafter
from tests.contracts import distributions
from tests.contracts.checks import PROMPTS, joint_of, llama
from tests.contracts.running import FanOutTarget, decode, random_prompts
from tests.drafters.eagle_checks import WORDS, Examined, Gullible, SlowWay, few_words, head_for
from tests.drafters.heads_checks import drafter_for
from tests.drafters.naive_eagle import NaiveEagle
from tests.drafters.naive_heads import NaiveHydra, NaiveMedusa
from tests.tiny_models import tiny_lm_v8

PACE = (1, 0, 2, 0, 0, 3, 1, 0, 4, 4)


class Script(CostModel):
    """Chooses by a list, again and again, whatever rounds cost."""

    def __init__(self, depths: Sequence[int], pace: Iterable[int] = PACE) -> None:
        super().__init__(depths)
        self.pace = cycle(choice for choice in pace if choice <= len(depths))
        self.rounds: list[tuple[int, list[int], float]] = []

    def choose(self) -> int:
        return next(self.pace)

    def record(self, choice: int, tokens: Sequence[int], seconds: float) -> None:
        self.rounds.append((choice, list(tokens), seconds))


class Scripts(dict[int, CostModel]):
    """A script for every batch size."""

    def __init__(self, pace: Iterable[int]) -> None:
        super().__init__()
        self.pace = tuple(pace)

    def setdefault(self, rows: int, default: CostModel) -> CostModel:  # type: ignore[override]
        return super().setdefault(rows, Script(default.depths[1:], self.pace))


def paced(inner: Any, pace: Iterable[int] = PACE) -> PacedDrafter:
    """A drafter that runs through its sizes, plain rounds between them."""
    return PacedDrafter(inner, Scripts(pace))


class Resized(Examined):
    """Compares the drafts of every size with the slow way."""

    def __init__(self, inner: HeadDrafter, new_tokens: int, slow_way: SlowWay) -> None:
        super().__init__(inner, new_tokens, slow_way)
        self.known = inner.sizes

    @property
    def sizes(self) -> tuple[Any, ...]:
        return self.known

    def resize(self, size: Any) -> None:
        self.inner.shape = size
        self.session.resize(size)


def resized_drafts_are_those_of_the_slow_way(kind: str = "eagle", scale: float = 1.0) -> None:
    """Sizes that change and rounds left out, in float64: the head has read all that was committed."""
    target, sizes = few_words(), {"num_draft_tokens": 12, "depth": 4, "top_k": 4}
    drafter: HeadDrafter
    if kind == "eagle":
        drafter, slow_way = EagleDrafter(head_for(target), **sizes).fit(target), NaiveEagle
    else:
        drafter = drafter_for(kind, target, **sizes)
        slow_way = NaiveMedusa if kind == "medusa" else NaiveHydra
    examined = Resized(drafter, 24, slow_way)
    assert len(examined.sizes) == 4
    prompts = random_prompts(2, WORDS, longest=6, seed=4)
    run = decode(
        target,
        prompts,
        paced(examined),
        Gullible(),
        Sampler(1.0, guidance_scale=scale),
        max_new_tokens=24,
        negatives=random_prompts(2, WORDS, longest=6, seed=9) if scale != 1 else None,
    )
    assert examined.drafts >= 8, "some drafts were compared"
    assert len(run.stats.accepted_histogram) >= 3


def confident_distribution(stop_below: float = 0.3, pace: Iterable[int] = (1,)) -> None:
    """Chains that end where the draft model is unsure, of changing sizes, keep the target's distribution."""
    sampler, prompt, rows = Sampler(1.0), (3, 1, 4), 6_000
    target, small = FanOutTarget(tiny_lm_v8()), FanOutTarget(tiny_lm_v8(seed=5))
    drafter = DraftModelDrafter(small, 3, "sampled").stopping_below(stop_below)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "CAPACITY_BLOCK", 16)  # 6,000 rows of 256 places would be gigabytes
        run = decode(
            target,
            [prompt] * rows,
            paced(drafter, pace),
            SpeculativeSampling(),
            sampler,
            max_new_tokens=4,
            seed=7,
        )
    distributions.check_outputs(run, joint_of(target, prompt, 4, sampler), f"stopping below {stop_below}")
    drafted = sum(run.stats.drafted) / sum(run.stats.rounds)
    assert 0.2 < drafted < 2.8, "some chains were cut short, others were not"


@dataclass
class Device:
    """Device on which rounds take given seconds, and a text whose tokens are predicted at some rate.

    Attributes:
        seconds: of a round of each choice.
        rate: how often a drafted token is right, if those before it are.
        rows: of a batch.
    """

    seconds: Sequence[float]
    rate: float
    rows: int = 1
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, model: CostModel, rounds: int) -> list[int]:
        """The choices that a model makes in so many rounds."""
        choices = []
        for _ in range(rounds):
            choice = model.choose()
            tokens = [self.tokens(model.depths[choice]) for _ in range(self.rows)]
            model.record(choice, tokens, self.seconds[choice])
            choices.append(choice)
        return choices

    def tokens(self, depth: int) -> int:
        """Tokens of a round of one row."""
        return 1 + next((right for right in range(depth) if self.dice.random() >= self.rate), depth)


def draft_model_is_always_right() -> None:
    """A model that drafts for itself has all its tokens accepted, after rounds left out too."""
    target = llama()
    drafter = DraftModelDrafter(target, 3)
    run = decode(target, PROMPTS, paced(drafter, (1, 0, 2, 0, 0, 3)), max_new_tokens=40)
    assert min(run.stats.accepted) / max(run.stats.drafted) > 0.85  # the last round is cut
