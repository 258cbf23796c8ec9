"""LLaDA, SDAR and Dream from folder to text, compared with slow decoding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import mmspec
from mmspec.accelerators import build_accelerator
from mmspec.errors import InputError
from mmspec.pipelines import MMSpecPipeline
from mmspec.pipelines.outputs import TextOutput
from mmspec.targets import CausalTarget
from tests.families.naive_masked import Choose, scores_of, unmask_blocks, unmask_everywhere
from tests.tiny_models import MASKED_MODELS, save_masked, tiny_images, tiny_lm

PROMPTS = ["what colour is the circle ?", "how many", "is the red star left of the small green square ?"]
SEEDS, LENGTH = [5, 6, 7], 9
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 12, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("masked")
    for kind in MASKED_MODELS:
        save_masked(kind, base / kind)
    return base


@pytest.fixture(scope="module", params=MASKED_MODELS)
def pipe(request: pytest.FixtureRequest, folders: Path) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained(folders / request.param)


@pytest.fixture(scope="module")
def llada(folders: Path) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained(folders / "llada")


def said(pipe: Any, rows: list[int], settings: dict[str, Any], accelerator: Any, **more: Any) -> TextOutput:
    """Return the output of a pipeline for some of the prompts."""
    pipe.set_accelerator(accelerator)
    settings = {"max_new_tokens": LENGTH, **settings, **more}
    prompts, seeds = [PROMPTS[row] for row in rows], [SEEDS[row] for row in rows]
    output: TextOutput = pipe(prompts, apply_chat_template=False, seed=seeds, **settings)
    return output


def tokens_of(pipe: Any, row: int) -> list[int]:
    tokens: list[int] = pipe.tokenizer(PROMPTS[row])["input_ids"]
    return tokens


def likeliest(mask: int) -> Choose:
    """Choose greedily, with the probabilities of the tokens; the mask is never chosen."""

    def choose(scores: list[float], place: int, decided: int) -> tuple[int, list[float]]:
        words = [word for word in range(len(scores)) if word != mask]
        best = max(words, key=lambda word: scores[word])
        weights = {word: math.exp(scores[word] - scores[best]) for word in words}
        total = sum(weights.values())
        return best, [weights.get(word, 0.0) / total for word in range(len(scores))]

    return choose


def expected(pipe: Any, row: int) -> list[int]:
    """Return the greedy output of slow decoding for a prompt, one place at a time."""
    choose = likeliest(pipe.model.config.mask_token_id)
    decode = unmask_blocks if pipe.model.config.block_length is not None else unmask_everywhere
    return decode(pipe.model, tokens_of(pipe, row), LENGTH, choose)[0]


def test_a_text_streams_as_places_from_the_left_are_decided(pipe: Any) -> None:
    whole = said(
        pipe, [0], SAMPLED, build_accelerator("low_confidence", places_per_step=2, block_length=4)
    ).text[0]
    deltas = pipe.stream(
        PROMPTS[0], max_new_tokens=LENGTH, apply_chat_template=False, seed=SEEDS[0], **SAMPLED
    )
    assert "".join(deltas) == whole


def test_inside_generate_of_transformers(pipe: Any) -> None:
    loop = mmspec.accelerate("none")
    ids = torch.tensor([tokens_of(pipe, 2)])
    masks = {"attention_mask": torch.ones_like(ids)}
    output = pipe.model.generate(ids, custom_generate=loop, max_new_tokens=LENGTH, do_sample=False, **masks)
    assert output[0, ids.shape[1] :].tolist() == expected(pipe, 2)


def test_forbidden_and_favoured_tokens_are_those_of_the_slow_way(pipe: Any) -> None:
    """A processor that reads only the place and the token acts at every place."""
    free = said(pipe, [0, 1, 2], GREEDY, "none").tokens
    often, other, ends = free[0][0], free[1][2], [free[2][1], free[0][4]]
    asked: dict[str, Any] = {"eos_token_id": ends, "min_new_tokens": 6, "suppress_tokens": [often]}
    asked |= {"sequence_bias": [[[other], -2.5]], "begin_suppress_tokens": [free[1][0]]}
    output = said(pipe, [0, 1, 2], GREEDY, "none", **asked)
    choose = likeliest(pipe.model.config.mask_token_id)
    slow = unmask_blocks if pipe.model.config.block_length is not None else unmask_everywhere

    def changed(scores: list[float], place: int, decided: int) -> tuple[int, list[float]]:
        scores = list(scores)
        for token in (often, *(ends if place < 6 else ()), *([free[1][0]] if place == 0 else ())):
            scores[token] = -math.inf
        scores[other] -= 2.5
        return choose(scores, place, decided)

    for row in range(3):
        tokens = slow(pipe.model, tokens_of(pipe, row), LENGTH, changed)[0]
        cut = min((tokens.index(end) + 1 for end in ends if end in tokens), default=LENGTH)
        assert output.tokens[row] == tokens[:cut] and cut > 6
    assert output.tokens != free


def test_guidance_of_llada_leads_away_from_masks(llada: Any) -> None:
    """As its generate.py: the unconditional prompt is the prompt with all tokens masked."""
    mask, scale = llada.model.config.mask_token_id, 2.5
    output = said(llada, [0, 1, 2], GREEDY, "none", guidance_scale=scale)
    for row in range(3):
        prompt, text = tokens_of(llada, row), [mask] * LENGTH
        while mask in text:
            known, blank = (
                torch.tensor(scores_of(llada.model, [*before, *text])[len(prompt) :], dtype=torch.float64)
                for before in (prompt, [mask] * len(prompt))
            )
            p = (blank + scale * (known - blank)).index_fill(-1, torch.tensor(mask), -torch.inf).softmax(-1)
            sure, tokens = p.max(-1)
            place = int(sure.where(torch.tensor(text) == mask, -1.0).argmax())
            text[place] = int(tokens[place])
        assert output.tokens[row] == text
    inside = []
    for row in range(3):
        ids = torch.tensor([tokens_of(llada, row)])
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH, "do_sample": False}
        how |= {"custom_generate": mmspec.accelerate("none"), "guidance_scale": scale}
        masks = {"negative_prompt_ids": torch.full_like(ids, mask)} if row else {}  # named, or its own
        inside.append(llada.model.generate(ids, **how, **masks)[0, ids.shape[1] :].tolist())
    assert inside == output.tokens
    named = said(llada, [0, 1, 2], GREEDY, "none", guidance_scale=scale, negative_prompt="how")
    assert named.tokens != output.tokens


class Same(LogitsProcessor):
    """A processor that changes nothing and is not declared as row-wise."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


@pytest.mark.parametrize("enabled", [False, True], ids=["custom_generate", "enabled"])
@pytest.mark.parametrize(
    "asked",
    [
        {"logits_processor": LogitsProcessorList([Same()])},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(100))},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3, 4]]},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_looks_at_a_next_token_is_refused_inside_generate(
    pipe: Any, enabled: bool, asked: dict[str, Any]
) -> None:
    """The loop of transformers would decode the next token, and return masks."""
    ids = torch.tensor([tokens_of(pipe, 2)] * 2)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH, "do_sample": False, **asked}
    if not enabled:
        with pytest.raises(InputError, match="logits_processor"):
            pipe.model.generate(ids, custom_generate=mmspec.accelerate("none"), **how)
        return
    mmspec.enable(pipe.model, "threshold")
    try:
        with pytest.raises(InputError, match="logits_processor"):
            pipe.model.generate(ids, **how)
    finally:
        mmspec.disable(pipe.model)


def test_criteria_of_several_rows_and_masks_in_a_prompt_are_refused(pipe: Any) -> None:
    class Never(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
            return torch.zeros(len(input_ids), dtype=torch.bool)

    ids, mask = torch.tensor([tokens_of(pipe, 2)] * 2), pipe.model.config.mask_token_id
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH, "do_sample": False}
    how["custom_generate"] = mmspec.accelerate("none")
    with pytest.raises(InputError, match=r"stopping_criteria.*Never"):
        pipe.model.generate(ids, stopping_criteria=StoppingCriteriaList([Never()]), **how)
    holed = ids.clone()
    holed[1, 3] = mask
    with pytest.raises(InputError, match=r"prompt\[1\].*mask token at place 3"):
        pipe.model.generate(holed, **how)


def test_what_needs_a_next_token_is_refused(folders: Path) -> None:
    text: Any = MMSpecPipeline.from_pretrained(folders / "llada")
    with pytest.raises(InputError, match="does not accept images"):
        text(PROMPTS[0], images=tiny_images()[0])
    for name in ("copy", "sjd"):
        with pytest.raises(InputError, match="no next token to draft"):
            text.set_accelerator(name)
        with pytest.raises(InputError, match="no next token to draft"):
            MMSpecPipeline.from_pretrained(folders / "llada", accelerator=name)
    with pytest.raises(InputError, match="no next token to draft"):
        text.set_accelerator("draft_model", drafter=text.model)
    with pytest.raises(InputError, match="prefix cache"):
        text.enable_prefix_cache()
    with pytest.raises(InputError, match="stay together"):
        text.running_batch(2)
    with pytest.raises(InputError, match="a masked model"):
        build_accelerator("low_confidence").fit(CausalTarget(tiny_lm()))
