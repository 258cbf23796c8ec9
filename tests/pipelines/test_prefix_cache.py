"""`enable_prefix_cache`: unchanged outputs with chat messages, and events that empty the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.errors import InputError
from mmspec.pipelines import MMSpecPipeline, TextOutput
from tests.tiny_models import tiny_image, user_message

IMAGE, ANOTHER = tiny_image(), tiny_image(7, tiny_image().size)
SHORT: dict[str, Any] = {"max_new_tokens": 12}


@pytest.fixture
def pipe(checkpoints: Path) -> Any:
    return MMSpecPipeline.from_pretrained(checkpoints / "qwen2_5_vl")


def converse(pipe: Any, **settings: Any) -> list[TextOutput]:
    """Three turns, the replies being those of the model, the last with a new image."""
    turns = user_message("what is there ?", [IMAGE])
    outputs = [pipe(turns, **SHORT, **settings)]
    for following in (
        user_message("which colour is it ?"),
        user_message("and there ?", [tiny_image(2)]),
    ):
        reply = {"role": "assistant", "content": [{"type": "text", "text": outputs[-1].text[0]}]}
        turns = [*turns, reply, *following]
        outputs.append(pipe(turns, **SHORT, **settings))
    return outputs


def known(*outputs: TextOutput) -> list[int]:
    return [output.stats.cached_prompt_tokens for output in outputs]


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llava", {}), ("qwen2_5_vl", {"temperature": 0.9, "seed": 3, "guidance_scale": 1.5})],
)
def test_a_conversation_says_the_same(family: str, settings: dict[str, Any], checkpoints: Path) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / family)
    expected = converse(pipe, **settings)
    pipe.enable_prefix_cache()
    outputs = converse(pipe, **settings)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    first, second, third = known(*outputs)
    assert first < second < third
    assert known(*expected) == [0, 0, 0], "off unless it is asked for"


def test_switching_off_moving_and_new_weights_forget(pipe: Any) -> None:
    ask = {"prompt": "what is there ?", "images": IMAGE, **SHORT}
    pipe.enable_prefix_cache()
    assert known(pipe(**ask), pipe(**ask))[1] > 0
    cache = pipe.target.prefix_cache
    pipe.enable_prefix_cache()
    assert pipe.target.prefix_cache is cache, "asking for the same again forgets nothing"
    pipe.enable_prefix_cache(2**20)
    assert pipe.target.prefix_cache.max_bytes == 2**20 and len(pipe.target.prefix_cache) == 0
    assert known(pipe(**ask), pipe(**ask))[1] > 0
    pipe.to(torch.float64)
    assert pipe.target.prefix_cache is not cache and len(pipe.target.prefix_cache) == 0
    assert known(pipe(**ask)) == [0]
    with torch.no_grad():
        pipe.model.get_output_embeddings().weight.mul_(0.5)
    assert known(pipe(**ask), pipe(**ask))[0] == 0
    pipe.disable_prefix_cache()
    assert pipe.target.prefix_cache is None and known(pipe(**ask)) == [0]


def test_another_accelerator_keeps_it_and_a_draft_model_has_its_own(pipe: Any, checkpoints: Path) -> None:
    expected = converse(pipe)
    pipe.enable_prefix_cache()
    converse(pipe)
    pipe.set_accelerator("none")
    assert known(pipe(user_message("what is there ?", [IMAGE]), **SHORT))[0] > 0
    pipe.set_accelerator("draft_model", drafter=pipe.model)
    outputs = converse(pipe)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    draft = pipe.accelerator.drafter.model
    assert len(draft.prefix_cache) and draft.prefix_cache is not pipe.target.prefix_cache
    again = pipe(user_message("what is there ?", [IMAGE]), **SHORT)
    assert again.stats.acceptance_rate == outputs[0].stats.acceptance_rate > 0.9
    pipe.disable_prefix_cache()
    assert draft.prefix_cache is None


def test_a_limit_that_is_none_is_refused(text: Any) -> None:
    for limit in (0, 0.5, "1 GB"):
        with pytest.raises(InputError, match="max_bytes"):
            text.enable_prefix_cache(max_bytes=limit)
    assert text.target.prefix_cache is None
