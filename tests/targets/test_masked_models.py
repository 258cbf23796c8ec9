"""LLaDA, SDAR and Dream from their folders to text, against the slow way of decoding them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.accelerators import low_confidence
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.pipelines import MMSpecPipeline
from mmspec.pipelines.outputs import TextOutput
from mmspec.targets import CausalTarget, MaskedTarget
from tests.targets.naive_masked import Choose, unmask_blocks, unmask_doubting, unmask_everywhere
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
    """What a pipeline gives for some of the prompts."""
    pipe.set_accelerator(accelerator)
    settings = {"max_new_tokens": LENGTH, **settings, **more}
    prompts, seeds = [PROMPTS[row] for row in rows], [SEEDS[row] for row in rows]
    output: TextOutput = pipe(prompts, apply_chat_template=False, seed=seeds, **settings)
    return output


def tokens_of(pipe: Any, row: int) -> list[int]:
    tokens: list[int] = pipe.tokenizer(PROMPTS[row])["input_ids"]
    return tokens


def chooser(mask: int, row: int, settings: dict[str, Any], own: bool) -> Choose:
    """Choose as the sampler promises, with the noise of a row's places; the mask is never chosen.

    LLaDA's probabilities are those of the scores as they are.
    """
    stream = RandomStream.from_seed([SEEDS[row]], 1)
    temperature, top_k = settings.get("temperature", 1.0), settings.get("top_k", 0)

    def choose(scores: list[float], place: int, decided: int) -> tuple[int, list[float]]:
        words = sorted((word for word in range(len(scores)) if word != mask), key=lambda word: -scores[word])
        kept = words[: top_k or None]
        warped = {word: scores[word] / temperature for word in kept}
        judged = {word: scores[word] for word in words} if own else warped
        largest = max(judged.values())
        weights = {word: math.exp(value - largest) for word, value in judged.items()}
        total = sum(weights.values())
        probabilities = [weights.get(word, 0.0) / total for word in range(len(scores))]
        if settings is GREEDY:
            return kept[0], probabilities
        index = torch.full((1, 1), place)
        fresh = stream.at(decided)
        noise = fresh.gumbel(index, Purpose.REDRAW, len(scores), torch.float64)[0, 0].tolist()
        return max(kept, key=lambda word: warped[word] + noise[word]), probabilities

    return choose


def expected(
    pipe: Any, row: int, settings: dict[str, Any], block: int | None, places: int
) -> tuple[list[int], int]:
    """What the slow way gives for a prompt."""
    own = pipe.model.config.model_type == "llada"
    choose = chooser(pipe.model.config.mask_token_id, row, settings, own)
    if pipe.model.config.block_length is not None:
        return unmask_blocks(pipe.model, tokens_of(pipe, row), LENGTH, choose, places)
    return unmask_everywhere(pipe.model, tokens_of(pipe, row), LENGTH, choose, block, places)


def test_the_default_is_one_place_a_forward(pipe: Any) -> None:
    assert type(pipe).__name__ == "VisionLanguagePipeline" and isinstance(pipe.target, MaskedTarget)
    assert pipe.default_accelerator == "none"
    output = said(pipe, [0, 1, 2], GREEDY, "none")
    assert output.tokens == [expected(pipe, row, GREEDY, None, 1)[0] for row in range(3)]
    assert output.stats.exactness == "exact" and output.finish_reasons == ["length"] * 3
    assert output.text == [pipe.tokenizer.decode(row, skip_special_tokens=True) for row in output.tokens]


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("block", "places"), [(None, 1), (None, 3), (4, 2)])
def test_tokens_and_forwards_of_ragged_prompts_are_those_of_the_slow_way(
    pipe: Any, settings: dict[str, Any], block: int | None, places: int
) -> None:
    output = said(pipe, [0, 1, 2], settings, low_confidence(places, block))
    assert output.stats.exactness == ("exact" if (block, places) == (None, 1) else "lossy")
    for row in range(3):
        tokens, forwards = expected(pipe, row, settings, block, places)
        assert output.tokens[row] == tokens
        assert output.stats.nfe[row] == forwards
    assert len({tuple(row) for row in output.tokens}) == 3


def test_rows_of_a_batch_are_the_rows_alone(pipe: Any) -> None:
    together = said(pipe, [0, 1, 2], SAMPLED, low_confidence(2, 4)).tokens
    assert [said(pipe, [row], SAMPLED, low_confidence(2, 4)).tokens[0] for row in range(3)] == together


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_decided_places_that_are_doubted_are_masked_again(llada: Any, settings: dict[str, Any]) -> None:
    total = 0
    output = said(llada, [0, 1, 2], settings, low_confidence(3, 6, remask_below=0.6))
    for row in range(3):
        choose = chooser(127, row, settings, own=True)
        tokens, forwards, opened = unmask_doubting(
            llada.model, tokens_of(llada, row), LENGTH, choose, 0.6, 6, 3
        )
        assert output.tokens[row] == tokens and output.stats.nfe[row] == forwards
        assert forwards > 3 or not opened
        total += opened
    assert total >= 3


def test_a_text_streams_as_places_from_the_left_are_decided(pipe: Any) -> None:
    whole = said(pipe, [0], SAMPLED, low_confidence(2, 4)).text[0]
    deltas = pipe.stream(
        PROMPTS[0], max_new_tokens=LENGTH, apply_chat_template=False, seed=SEEDS[0], **SAMPLED
    )
    assert "".join(deltas) == whole


def test_inside_generate_of_transformers(pipe: Any) -> None:
    loop = mmspec.accelerate("none")
    ids = torch.tensor([tokens_of(pipe, 2)])
    masks = {"attention_mask": torch.ones_like(ids)}
    output = pipe.model.generate(ids, custom_generate=loop, max_new_tokens=LENGTH, do_sample=False, **masks)
    assert output[0, ids.shape[1] :].tolist() == expected(pipe, 2, GREEDY, None, 1)[0]


def test_what_needs_a_next_token_is_refused(folders: Path) -> None:
    text: Any = MMSpecPipeline.from_pretrained(folders / "llada")
    with pytest.raises(InputError, match="does not take images"):
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
        low_confidence().fit(CausalTarget(tiny_lm()))


def test_keys_that_are_kept_are_lossy_but_for_block_causal_models(pipe: Any) -> None:
    exact = said(pipe, [0, 1, 2], GREEDY, low_confidence(block_length=4)).tokens
    for cache in ("prefix", "dual"):
        output = said(pipe, [0, 1, 2], GREEDY, low_confidence(block_length=4, cache=cache))
        is_causal = pipe.model.config.block_length is not None
        assert output.stats.exactness == ("exact" if is_causal else "lossy")
        assert output.tokens == exact or not is_causal
