"""A masked model that drafts for one that predicts the next token: search, lengths, identity."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from mmspec.accelerator import pair
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.methods.draft_model.masked import LengthControl, MaskedModelDrafter, NgramModel, search_path
from mmspec.targets import CausalTarget
from mmspec.targets.vision_language import VisionLanguageTarget
from tests.contracts.running import Run, decode
from tests.targets.loop import decode as decode_inputs
from tests.tiny_models import MASKED_MODELS, encode, tiny_images, tiny_llava, tiny_lm, user_message
from tests.tiny_models.masked import masked_target

WORDS, LENGTH, MASK = 32, 20, 5
PROMPTS = [[3, 1, 4, 1, 5, 3, 1], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


@functools.cache
def target() -> CausalTarget:
    return CausalTarget(tiny_lm(vocab=WORDS, seed=3))


def run_of(made: Any, sampler: Sampler, rows: list[int]) -> Run:
    made = made.fit(target())
    prompts = [PROMPTS[row] for row in rows]
    return decode(target(), prompts, made.drafter, made.rule, sampler, max_new_tokens=LENGTH, seed=rows)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["llada", "sdar", "dream"])
@pytest.mark.every(2)
def test_output_is_that_of_plain_decoding(kind: str, sampler: Sampler) -> None:
    model = MASKED_MODELS[kind](WORDS)
    made = build_accelerator("draft_model", model=model, num_draft_tokens=6)
    assert made.exactness == "exact" and isinstance(made.drafter, MaskedModelDrafter)
    plain = run_of(build_accelerator("none"), sampler, [0, 1, 2])
    fast = run_of(made, sampler, [0, 1, 2])
    assert fast.outputs == plain.outputs and sum(fast.stats.drafted) > 0
    assert run_of(made, sampler, [1]).outputs == plain.outputs[1:2]


@torch.inference_mode()
def test_images_are_seen_by_a_masked_model_that_can() -> None:
    """Its predictions equal those of slow decoding, which embeds images every time."""
    (model, processor), images = tiny_llava(), tiny_images()
    prompt = dict(encode(processor, user_message("what is there ?", images[:1])))
    seeing, masked = VisionLanguageTarget(model), masked_target(tiny_llava(seed=6)[0], mask_token_id=MASK)
    drafter = MaskedModelDrafter(masked, 4).fit(seeing)
    ids = torch.cat([prompt["input_ids"], torch.tensor([[3, 4, MASK, MASK]])], 1)
    everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    slow = masked.model(ids, pixel_values=prompt["pixel_values"], attention_mask=everything).logits[0, -2:]
    found = drafter.predict(masked.embed_prompt(prompt), [3, 4], 2)
    torch.testing.assert_close(found, slow.index_fill(-1, torch.tensor(MASK), -torch.inf))
    plain, fast = (
        decode_inputs(seeing, made.fit(seeing), [prompt], Stopping(8))
        for made in (build_accelerator("none"), pair("draft_model", drafter))
    )
    assert fast.outputs == plain.outputs and sum(fast.stats.drafted) > 0
    blind = MaskedModelDrafter(MaskedTarget(MASKED_MODELS["llada"](WORDS))).fit(seeing)
    with pytest.raises(InputError, match="images"):
        decode_inputs(seeing, pair("draft_model", blind), [prompt], Stopping(8))


def test_the_search_finds_the_best_path() -> None:
    """A wide beam finds the best of all paths; one candidate per place gives the most likely tokens."""
    noise = torch.Generator().manual_seed(0)
    log_p = (2 * torch.randn(4, 5, generator=noise)).log_softmax(-1)
    ngrams = NgramModel()
    ngrams.extend([0, 1, 2, 3, 1, 2, 4, 0, 1, 2, 3])

    def score(path: tuple[int, ...]) -> float:
        total = 0.0
        for place, word in enumerate(path):
            before = [*ngrams.words[-2:], *path[:place]]
            total += 0.5 * float(log_p[place, word]) + 0.5 * ngrams.log_score(before, word)
        return total

    best = max(itertools.product(range(5), repeat=4), key=score)
    found = search_path(log_p, ngrams, frozenset(), mass=1.0, most=5, beam=700)
    assert score(tuple(found)) == pytest.approx(score(best))
    likeliest = log_p.argmax(-1).tolist()
    assert search_path(log_p, ngrams, frozenset(), most=1) == likeliest
    assert search_path(log_p, ngrams, frozenset(), weight=1.0, beam=1) == likeliest
    assert search_path(log_p, ngrams, frozenset({likeliest[1]}), most=1) == likeliest[:2]


def test_lengths_follow_what_is_accepted() -> None:
    control = LengthControl(20, 30, 10, 30.0)
    assert control.length == 30
    for drafted, accepted, expected in ((30, 2, 30), (30, 2, 30), (12, 1, 21), (12, 12, 20), (12, 12, 20)):
        control.observe(drafted, accepted)
        assert control.length == expected
    assert LengthControl(20, 30, 10, 21.0, 21.0).length == 30 and LengthControl(20, 30, 10, 21.0).length == 21


def test_what_does_not_fit_is_refused() -> None:
    model = MASKED_MODELS["llada"](WORDS)
    for name, bad in (("num_draft_tokens", -1), ("sampling", "coupled"), ("tree", "4x2")):
        with pytest.raises(InputError, match=name):
            build_accelerator("draft_model", model=model, **{name: bad})
