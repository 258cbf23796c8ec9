"""Prompts with only some of their visual tokens, compared with forward passes that mask the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.canvas import Stopping
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.methods.draft_model.choice import draft_model
from mmspec.methods.draft_model.drafter import visual_places
from mmspec.targets import VisionLanguageTarget
from mmspec.targets.prefix import PrefixCache
from mmspec.targets.thinned import attention_behind, guided_and_even
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, encode, tiny_images, user_message
from tests.tiny_models.vision_language import tiny_llava, tiny_qwen2_5_vl

MESSAGE = user_message("what is there ?", tiny_images()[:2])
NEXT = [7, 9]  # tokens behind the prompt


def whole_forward(target: VisionLanguageTarget, inputs: dict[str, Any], hidden: Tensor, **more: Any) -> Any:
    """Prompt and `NEXT` in one plain forward, where no token sees the places [m] that are hidden."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([NEXT])], 1)
    length, new = ids.shape[1], len(NEXT)
    positions, offset = target.positions(inputs)
    after = torch.arange(length - new, length) + offset
    positions = torch.cat([positions, after.expand(*positions.shape[:-1], -1)], -1)
    mask = torch.ones(length, length).tril()
    mask[:, hidden] = 0
    mask.fill_diagonal_(1)
    given = {**inputs, "input_ids": ids}
    if "mm_token_type_ids" in inputs:
        given["mm_token_type_ids"] = pad(inputs["mm_token_type_ids"], (0, new))
    return target.model(
        **{**given, "position_ids": positions, "attention_mask": (1 - mask[None, None]) * -1e9}, **more
    )


@pytest.mark.parametrize("family", VISION_LANGUAGE_FAMILIES)
def test_what_is_not_read_is_as_if_no_token_saw_it(family: str) -> None:
    """In every family: other tokens keep their positions, and replies follow those of the whole prompt."""
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    target, inputs = VisionLanguageTarget(model), dict(encode(processor, MESSAGE))
    visual, length = visual_places(model.config, inputs), inputs["input_ids"].shape[1]
    hidden = visual[::2]
    kept = torch.tensor(sorted(set(range(length)) - set(hidden.tolist())))
    with torch.inference_mode():
        state, prompt = target.prefill_part([inputs], [kept], length)
        chain = target.score(state, Tree.chain(torch.tensor([NEXT]), DraftKind.POINT))
        inputs.pop("attention_mask", None)
        expected = whole_forward(target, inputs, hidden).logits[:, -1 - len(NEXT) :]
    assert torch.allclose(torch.cat([prompt.logits, chain.logits], 1), expected, atol=2e-5)
    assert len(hidden) and state.cache.lengths.tolist() == [len(kept)]


def test_attention_behind_a_prompt_is_that_of_an_eager_forward() -> None:
    model, processor = tiny_qwen2_5_vl()
    target, inputs = VisionLanguageTarget(model), dict(encode(processor, MESSAGE))
    del inputs["attention_mask"]
    length = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        state, _ = target.prefill([inputs], length)
        found = attention_behind(target, state, torch.tensor([NEXT[:1]]))
        model.set_attn_implementation("eager")
        maps = whole_forward(target, inputs, torch.tensor([], dtype=torch.long), output_attentions=True)
    expected = torch.stack([each[0, :, length, : length + 1].mean(0) for each in maps.attentions]).mean(0)
    assert torch.allclose(found[0, : length + 1], expected, atol=1e-6)
    assert not found[0, length + 1 :].any()


def test_the_chosen_are_those_of_most_attention_and_others_evenly_spread() -> None:
    weights = torch.tensor([0.05, 0.3, 0.05, 0.05, 0.2, 0.05, 0.1, 0.05, 0.1, 0.05])
    assert guided_and_even(weights, 3, 1.0).tolist() == [1, 4, 6]
    assert guided_and_even(weights, 5, 0.4).tolist() == [1, 2, 4, 6, 8]  # 0.3 + 0.2, then of eight others
    assert guided_and_even(weights, 5, 0.0).tolist() == [1, 3, 5, 7, 9]
    assert guided_and_even(weights, 10, 0.4).tolist() == list(range(10))
    assert guided_and_even(weights, 0, 0.4).tolist() == []


@pytest.mark.parametrize(("keep", "temperature"), [(0.5, 0.0), (0.5, 0.8), (1.0, 0.0)])
def test_the_target_reads_all_whatever_its_draft_model_reads(keep: float, temperature: float) -> None:
    """Also with a prompt without images. The target as draft model is always right until it reads less."""
    model, processor = tiny_qwen2_5_vl()
    target, small = VisionLanguageTarget(model), VisionLanguageTarget(tiny_qwen2_5_vl()[0])
    small.prefix_cache = PrefixCache(1 << 20)  # of whole prompts
    requests = [
        Request({k: v for k, v in encode(processor, message).items() if k != "attention_mask"})
        for message in (MESSAGE, user_message("and there ?"))
    ]
    runs = []
    for accelerator in (draft_model(small, 4), draft_model(small, 4, keep=keep, mass=0.6)):
        settings = Sampler(temperature), requests, Stopping(16), RandomStream.from_seed(3, 2)
        call = accelerator.fit(target).with_length("fixed").call(target, *settings)
        for _ in call.rounds():
            pass
        runs.append(call.canvas)
    whole, part = runs
    assert part.ids == whole.ids
    assert (part.stats.acceptance_length == whole.stats.acceptance_length) == (keep == 1.0)


def test_two_models_with_different_visual_tokens_are_refused() -> None:
    model, processor = tiny_llava()
    inputs = dict(encode(processor, MESSAGE))
    image = model.config.image_token_id
    fewer = {"input_ids": inputs["input_ids"][inputs["input_ids"] != image][None]}
    target = VisionLanguageTarget(model)
    drafter = draft_model(target, keep=0.5).fit(target).drafter
    state, prompt = target.prefill([inputs], 64)
    batch = PromptBatch([Request(inputs)], prompt, Sampler(), RandomStream.from_seed(0, 1))
    with pytest.raises(InputError, match="keep"):
        drafter.places([fewer], batch, state)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="mass"):
        draft_model(target, mass=0.5)
