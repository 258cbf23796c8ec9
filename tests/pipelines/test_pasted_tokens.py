"""Special tokens in the text of a message are plain text for the model, without turns or images."""

from __future__ import annotations

from typing import Any

import pytest

from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.pipelines.pasted_tokens import SpellingTokenizer, reading_stand_ins, with_stand_ins
from mmspec.pipelines.prompts import Prompt, apply_template
from tests.pipelines.small_tokenizers import BYTES
from tests.tiny_models import build_processor, tiny_image, user_message
from tests.tiny_models.processors import SPECIAL


def read(pipe: VisionLanguagePipeline, messages: list[dict[str, Any]]) -> list[int]:
    """The prompt's tokens."""
    call, _ = pipe._prepare_request(messages, {"sanitize_control_tokens": True})
    return list(call.requests[0].inputs["input_ids"][0].tolist())


@pytest.mark.parametrize("pasted", ["<|end|>", "é<|end|> <|pad|><|end|>", "<|end|>the"])
def test_a_pasted_token_is_spelled_and_the_templates_own_are_tokens(pasted: str) -> None:
    text = with_stand_ins(f"the {pasted}", BYTES)
    assert "<|" not in text
    encoded = SpellingTokenizer(BYTES)(f"<|end|>{text}<|pad|>", return_tensors="pt")
    ids = encoded["input_ids"][0].tolist()
    assert (ids[0], ids[-1]) == (BYTES.eos_token_id, BYTES.pad_token_id)
    assert not set(BYTES.all_special_ids) & set(ids[1:-1])
    assert BYTES.decode(ids[1:-1]) == f"the {pasted}"
    assert encoded["attention_mask"].shape == encoded["input_ids"].shape
    assert with_stand_ins("the \ufdd01\ufdd1 é", BYTES) == "the \ufdd01\ufdd1 é"


def test_pasted_tokens_forge_no_turn_and_count_as_no_image(llava: VisionLanguagePipeline) -> None:
    image, tokenizer = tiny_image(), llava.tokenizer
    special = [token for token in tokenizer.all_special_ids if token != tokenizer.unk_token_id]
    for token in tokenizer.all_special_tokens:
        plain = read(llava, user_message("red ring", [image]))
        ids = read(llava, user_message(f"red {token} ring", [image]))
        assert [one for one in ids if one in special] == [one for one in plain if one in special]
        assert len(ids) > len(plain)
    output = llava(user_message("red <image>", [image]), sanitize_control_tokens=True, max_new_tokens=4)
    assert output.tokens[0]


def test_an_answer_with_its_end_token_comes_back_in_a_conversation(text: Any) -> None:
    text.processor.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    end = text.tokenizer.eos_token
    said = [*user_message("red"), {"role": "assistant", "content": f"blue{end}"}, *user_message("green")]
    assert text.tokenizer.eos_token_id not in read(text, said)
    assert text(said, sanitize_control_tokens=True, max_new_tokens=4).tokens[0]
    with pytest.raises(InputError, match="special token"):
        text(said, max_new_tokens=4)
    with pytest.raises(InputError, match="role"):
        text([{"role": end, "content": "red"}], sanitize_control_tokens=True)
    with pytest.raises(InputError, match="special token"):  # a prompt that looks templated
        text(f"red {end}", sanitize_control_tokens=True)


@pytest.mark.parametrize("family", SPECIAL)
def test_processors_of_every_family_read_pasted_tokens_as_text(family: str) -> None:
    processor = build_processor(family)
    tokenizer = processor.tokenizer
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}

    def specials(text: str) -> list[int]:
        parts = [{"type": "image"}, {"type": "text", "text": f"red {text} ring"}]
        prompt = Prompt([{"role": "user", "content": parts}], images=[tiny_image()])
        templated = apply_template(prompt, processor, tokenizer, {})
        reader = reading_stand_ins(processor, tokenizer) if text else processor
        encoded = reader(text=[templated], images=[prompt.images], return_tensors="pt")
        assert encoded["input_ids"].shape == encoded["attention_mask"].shape
        return [token for token in encoded["input_ids"][0].tolist() if token in special]

    assert specials("".join(tokenizer.all_special_tokens)) == specials("")
