"""LLaDA, SDAR and Dream from their folders to text, against the slow way of decoding them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.accelerators import low_confidence
from mmspec.accelerators.accelerator import Accelerator
from mmspec.acceptance.confidence import LowConfidence
from mmspec.decoding.draft import Draft
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.drafters.none import UnmaskingDrafter
from mmspec.errors import InputError
from mmspec.pipelines import MMSpecPipeline
from mmspec.pipelines.outputs import TextOutput
from mmspec.targets import CausalTarget, MaskedTarget
from tests.targets.naive_masked import Choose, unmask_blocks, unmask_doubting, unmask_everywhere
from tests.tiny_models import save_masked, tiny_images, tiny_lm

PROMPTS = ["what colour is the circle ?", "how many", "is the red star left of the small green square ?"]
SEEDS, LENGTH = [5, 6, 7], 9
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 12, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("masked")
    for kind in KINDS:
        save_masked(kind, base / kind)
    return base


KINDS = ["llada"]


@pytest.fixture(scope="module", params=KINDS)
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


def chooser(mask: int, row: int, settings: dict[str, Any]) -> Choose:
    """Choose as the sampler promises, with the noise of a row's places; the mask is never chosen."""
    stream = RandomStream.from_seed([SEEDS[row]], 1)
    temperature, top_k = settings.get("temperature", 1.0), settings.get("top_k", 0)

    def choose(scores: list[float], place: int) -> tuple[int, list[float]]:
        words = sorted((word for word in range(len(scores)) if word != mask), key=lambda word: -scores[word])
        kept = words[: top_k or None]
        warped = {word: scores[word] / temperature for word in kept}
        largest = max(warped.values())
        weights = {word: math.exp(value - largest) for word, value in warped.items()}
        total = sum(weights.values())
        probabilities = [weights.get(word, 0.0) / total for word in range(len(scores))]
        if settings is GREEDY:
            return kept[0], probabilities
        index = torch.full((1, 1), place)
        noise = stream.gumbel(index, Purpose.TARGET, len(scores), torch.float64)[0, 0].tolist()
        return max(kept, key=lambda word: warped[word] + noise[word]), probabilities

    return choose


def expected(
    pipe: Any, row: int, settings: dict[str, Any], block: int | None, places: int
) -> tuple[list[int], int]:
    """What the slow way gives for a prompt."""
    choose = chooser(pipe.model.config.mask_token_id, row, settings)
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
@pytest.mark.parametrize(("block", "places"), [(None, 1), (None, 3), (4, 1), (4, 2)])
def test_tokens_and_forwards_of_ragged_prompts_are_those_of_the_slow_way(
    pipe: Any, settings: dict[str, Any], block: int | None, places: int
) -> None:
    if pipe.model.config.block_length is not None and block is None:
        pytest.skip("its blocks are its own")
    output = said(pipe, [0, 1, 2], settings, low_confidence(places, block))
    assert output.stats.exactness == "lossy"
    for row in range(3):
        tokens, forwards = expected(pipe, row, settings, block, places)
        assert output.tokens[row] == tokens
        assert output.stats.nfe[row] == forwards
    assert len({tuple(row) for row in output.tokens}) == 3


def test_rows_of_a_batch_are_the_rows_alone(pipe: Any) -> None:
    together = said(pipe, [0, 1, 2], SAMPLED, low_confidence(2, 4)).tokens
    assert [said(pipe, [row], SAMPLED, low_confidence(2, 4)).tokens[0] for row in range(3)] == together


class Doubting(LowConfidence):
    """Opens a place again, once, whose token has become less probable than a threshold.

    Nothing of a block is emitted until all of it is decided. For one batch: what it knows of it stays in it.
    """

    def __init__(self, places: int, threshold: float, block: int) -> None:
        super().__init__(places)
        self.__dict__.update(threshold=threshold, block=block, doubted=None)

    def decide(self, draft: Draft, output: Any, scores: Any, random: RandomStream, first: Tensor) -> Any:
        fill, measured = super().decide(draft, output, scores, random, first)
        places, is_open = fill.places, draft.is_open[:, :, 0]
        rows, length = places.shape
        doubted = torch.zeros_like(is_open) if self.doubted is None else self.doubted
        kept = scores.logits.softmax(-1).view(rows, length, -1).gather(2, draft.tokens)[:, :, 0]
        start = self.start(draft, length)
        inside = (places >= start[:, None]) & (places < start[:, None] + self.block)
        reopened = inside & ~is_open & ~doubted & (kept < self.threshold)
        self.__dict__["doubted"] = doubted | reopened
        left = (is_open & ~fill.decided) | reopened | (places >= start[:, None] + self.block)
        first_left = torch.where(left, places, length).amin(-1)
        settled = torch.where(first_left < length, first_left // self.block * self.block, length)
        return fill.__class__(**{**vars(fill), "reopened": reopened, "settled": settled}), measured

    def start(self, draft: Draft, length: int) -> Tensor:
        """[B] where the block of the open places begins; the output's end where none is left."""
        is_open = draft.is_open[:, :, 0]
        place = torch.arange(length, device=is_open.device).expand_as(is_open)
        return torch.where(is_open, place, length).amin(-1) // self.block * self.block


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_decided_places_that_are_doubted_are_masked_again(llada: Any, settings: dict[str, Any]) -> None:
    rule, total = Doubting(2, 0.3, 4), 0
    accelerator = Accelerator("doubting", UnmaskingDrafter(4), rule)
    output = said(llada, [0, 1, 2], settings, accelerator)
    for row in range(3):
        choose = chooser(127, row, settings)
        tokens, forwards, opened = unmask_doubting(
            llada.model, tokens_of(llada, row), LENGTH, choose, 0.3, 4, 2
        )
        assert output.tokens[row] == tokens and output.stats.nfe[row] == forwards
        assert forwards > 5 or not opened
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
    with pytest.raises(InputError, match="a model that predicts the next token"):
        text.set_accelerator("draft_model", drafter=text.model)
    with pytest.raises(InputError, match="prefix cache"):
        text.enable_prefix_cache()
    with pytest.raises(InputError, match="stay together"):
        text.running_batch(2)
    with pytest.raises(InputError, match="a masked model"):
        low_confidence().fit(CausalTarget(tiny_lm()))
