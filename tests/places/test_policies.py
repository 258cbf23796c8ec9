"""Rules that choose places of a block, compared with implementations for one row with lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.places.policies import PlaceRule, Places, within
from mmspec.plugins import RULES
from tests.contracts.running import decode
from tests.families.naive_masked import scores_of
from tests.tiny_models import MASKED_MODELS

WORDS, LENGTH, END = 32, 13, 4
OPTIONS: dict[str, dict[str, Any]] = {}  # of rules that have no defaults
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


class Seen(NamedTuple):
    """An open place: its index in the output, its token, and its scores and confidences of all tokens."""

    place: int
    token: int
    scores: list[float]
    p: list[float]

    @property
    def sure(self) -> float:
        return self.p[self.token]


class At(NamedTuple):
    """Progress of a row: places of the block, those decided before, output places before it, and in all."""

    size: int
    decided: int
    begin: int
    length: int

    @property
    def progress(self) -> float:
        return min((self.begin + self.decided + 1) / self.length, 1.0)


Pick = Callable[[list[Seen], At], set[int]]


def surest(seen: list[Seen], count: int, key: Callable[[Seen], float] = lambda one: one.sure) -> set[int]:
    return {one.place for one in sorted(seen, key=lambda one: (-key(one), one.place))[:count]}


def entropy(one: Seen) -> float:
    weights = [math.exp(score - max(one.scores)) for score in one.scores]
    shares = [weight / sum(weights) for weight in weights]  # as promised, unlike `p`
    return -sum(share * math.log(share) for share in shares if share > 0)


def by_steps(steps: int) -> Pick:
    def pick(seen: list[Seen], at: At) -> set[int]:
        left, share, rest = at.decided, at.size // steps, at.size % steps
        for step in range(steps):
            count = share + (step < rest)
            if left == 0:
                return surest(seen, max(count, 1))
            left -= count
        raise AssertionError("no step is left")

    return pick


def by_entropy(bound: float) -> Pick:
    def pick(seen: list[Seen], at: At) -> set[int]:
        total, chosen = 0.0, set()
        for one in sorted(seen, key=lambda one: (entropy(one), one.place)):
            if total <= bound:
                chosen.add(one.place)
            total += entropy(one)
        return chosen

    return pick


CASES: list[tuple[str, dict[str, Any], Pick]] = [
    ("low_confidence", {}, lambda seen, at: surest(seen, 1)),
    ("low_confidence", {"places_per_step": 3}, lambda seen, at: surest(seen, 3)),
    ("low_confidence", {"denoising_steps": 4}, by_steps(4)),
    ("low_confidence", {"denoising_steps": 1}, by_steps(1)),
    ("sequential", {"places_per_step": 2}, lambda seen, at: surest(seen, 2, lambda one: -one.place)),
    *(
        (
            "threshold",
            {"threshold": bar, "places_per_step": least},
            lambda seen, at, bar=bar, least=least: (
                surest(seen, least) | {one.place for one in seen if one.sure >= bar}
            ),
        )
        for bar, least in ((0.0, 1), (0.25, 1), (0.3, 2), (1.5, 1))
    ),
    (
        "threshold",
        {"threshold": 0.25, "places_per_step": 2, "fallback": "leftmost"},
        lambda seen, at: (
            surest(seen, 2, lambda one: -one.place) | {one.place for one in seen if one.sure >= 0.25}
        ),
    ),
    ("entropy_bound", {"entropy_bound": 0.0}, by_entropy(0.0)),
    ("entropy_bound", {"entropy_bound": 5.0}, by_entropy(5.0)),
]

#: Rules whose name is not that of the accelerator.
RULE_OF = {"low_confidence": "most_confident"}


def twin(
    kind: str, row: int, pick: Pick, block: int | None, sampler: Sampler, by_token: bool
) -> tuple[list[int], int]:
    """Decode a row with lists and without a cache; return its tokens and forward passes."""
    model, prompt, stream = model_of(kind), PROMPTS[row], RandomStream.from_seed(5, len(PROMPTS))
    mask, shift = model.config.mask_token_id, int(model.config.predicts == "next")
    causal, start = model.config.block_length, len(prompt)
    inside = start % causal if causal else 0
    size = causal or block or LENGTH
    whole = LENGTH + -(inside + LENGTH) % causal if causal else LENGTH
    output, is_open, forwards = [mask] * whole, [True] * whole, 0
    while any(is_open[:LENGTH]):
        first = is_open.index(True)
        begin = max(0, (first + inside) // size * size - inside)
        end = min((first + inside) // size * size - inside + size, whole)
        shown = [*prompt, *output][: start + end] if causal else [*prompt, *output]
        scores = scores_of(model, shown, causal)[start - shift :]
        forwards += 1
        seen, noise = [], noise_of(stream, row, is_open.count(False) if by_token else None)
        for place in range(begin, end):
            if is_open[place]:
                seen.append(see(scores[place], place, mask, noise, sampler, own=kind == "llada"))
        at = At(end - begin, end - begin - len(seen), begin, LENGTH)
        picked = pick(seen, at)
        for one in seen:
            if one.place in picked:
                output[one.place], is_open[one.place] = one.token, False
    return output[:LENGTH], forwards


def noise_of(stream: RandomStream, row: int, decided: int | None) -> Callable[[int], list[float]]:
    """Return the noise of a row's places, for a number of decided places; None for noise without it."""
    purpose = Purpose.TARGET if decided is None else Purpose.REDRAW

    def draw(place: int) -> list[float]:
        index = torch.full((len(PROMPTS), 1), place)
        noise: list[float] = (
            stream.at(decided or 0).gumbel(index, purpose, WORDS, torch.float64)[row, 0].tolist()
        )
        return noise

    return draw


def see(
    scores: list[float],
    place: int,
    mask: int,
    draw: Callable[[int], list[float]],
    sampler: Sampler,
    own: bool,
) -> Seen:
    scores[mask] = -math.inf
    scaled = [score / (sampler.temperature or 1.0) for score in scores]
    judged = scores if own else scaled
    weights = [math.exp(score - max(judged)) for score in judged]
    p = [weight / sum(weights) for weight in weights]
    noise = [0.0] * len(scores) if sampler.greedy else draw(place)
    token = max(range(len(scores)), key=lambda word: scaled[word] + noise[word])
    return Seen(place, token, scaled, p)


def model_of(kind: str) -> Any:
    return MASKED_MODELS[kind](WORDS)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "options", "pick"), CASES)
@pytest.mark.every(6)
def test_tokens_and_forwards_are_those_of_lists(
    name: str, options: dict[str, Any], pick: Pick, sampler: Sampler
) -> None:
    """On models that see all places, whole and in blocks, and on a block-causal one; ragged rows."""
    rule = RULES[RULE_OF.get(name, name)](**options)
    assert isinstance(rule, PlaceRule)
    for kind, block in (("llada", None), ("llada", 6), ("sdar", None), ("dream", 6)):
        target = MaskedTarget(model_of(kind))
        drafter = UnmaskingDrafter(block).fit(target)
        run = decode(target, PROMPTS, drafter, rule, sampler, max_new_tokens=LENGTH, seed=5, end=[END])
        for row, output in enumerate(run.outputs):
            expected, forwards = twin(kind, row, pick, block, sampler, rule.by_token)
            cut = expected.index(END) + 1 if END in expected else LENGTH
            assert output == expected[:cut], (kind, block, row)
            assert run.stats.nfe[row] == forwards or cut < LENGTH


def test_places_behind_a_decided_end_are_left_alone() -> None:
    """Places outside the output cost no forward passes."""
    target, saved = MaskedTarget(model_of("llada")), 0
    for end in range(WORDS - 1):
        how: dict[str, Any] = {"max_new_tokens": LENGTH, "end": [end]}
        runs = []
        for cut in (False, True):
            made = build_accelerator("low_confidence", end_cut=cut).fit(target)
            runs.append(decode(target, PROMPTS[:1], made.drafter, made.rule, Sampler(), **how))
        whole, short = runs
        assert short.stats.target_forwards <= whole.stats.target_forwards
        saved += whole.stats.target_forwards - short.stats.target_forwards
        if end not in whole.outputs[0]:
            assert short.outputs == whole.outputs
    assert saved > 3 and made.exactness == "lossy"


def test_every_rule_decides_something_and_nothing_that_is_not_open() -> None:
    noise = torch.Generator().manual_seed(0)
    for name in [name for name in RULES if issubclass(RULES[name], PlaceRule)]:
        for size in (1, 2, 5):
            is_open = torch.rand(16, size, generator=noise) < 0.6
            is_open[:, 0] = True
            logits = 4 * torch.randn(16, size, WORDS, generator=noise)
            exists = torch.ones_like(is_open)
            begin = torch.zeros(16, dtype=torch.long)
            places = Places(logits.argmax(-1), logits, logits, is_open, exists, begin, size, frozenset({END}))
            rule: Any = RULES[name](**OPTIONS.get(name, {}))
            chosen = rule.chosen(places)
            assert chosen.any(-1).all() and not (chosen & ~is_open).any()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("low_confidence", {"places_per_step": 0}),
        ("low_confidence", {"denoising_steps": 0}),
        ("low_confidence", {"denoising_steps": 2, "places_per_step": 2}),
        ("threshold", {"threshold": -0.1}),
        ("entropy_bound", {"entropy_bound": math.nan}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        build_accelerator(name, **bad)


def test_accelerators_are_lossy_unless_they_decide_one_place_a_step() -> None:
    for name in ("threshold", "entropy_bound", "sequential"):
        assert build_accelerator(name, block_length=4).exactness == "lossy"
    assert build_accelerator("low_confidence", denoising_steps=4).exactness == "lossy"
    assert build_accelerator("low_confidence").exactness == "exact"
    with pytest.raises(InputError, match="must be 'most_confident', the new name of this one; got 'low_conf"):
        build_accelerator("threshold", acceptance="low_confidence")


@pytest.mark.parametrize("bound", [0.0, 0.5, 1.5, 9.0])
def test_the_entropies_before_a_place_are_bounded_and_not_its_own(bound: float) -> None:
    nats = torch.tensor([[0.9, 0.2, 0.4, 2.0], [0.3, 0.3, 0.3, 0.3], [5.0, 4.0, 3.0, 2.0]])
    chosen = within(nats, bound)
    for row, values in enumerate(nats.tolist()):
        for place, value in enumerate(values):
            lower = [v for i, v in enumerate(values) if (v, i) < (value, place)]
            assert bool(chosen[row, place]) == (sum(lower) <= bound + 1e-6)
