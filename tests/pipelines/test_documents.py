"""Document readers: the tokens of `generate` in pipelines and in place, with the prompts of each family."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image

import mmspec
from benchmarks.document_reading import OCR, READERS, Reader, draw, smaller, tables, tokenizer_of_tables
from mmspec import MMSpecPipeline
from mmspec.errors import InputError
from mmspec.pipelines.vision_language import VisionLanguagePipeline
from tests.tiny_models.weights import randomise

PROMPTS = {
    "donut": "<s_docvqa><s_question>what is the text?</s_question><s_answer>",
    "trocr": "",
    "florence": OCR,
}
NEW_TOKENS = 20
IMAGES = [draw(table) for table in islice(tables(0), 2)]
Answered = tuple[Reader, list[list[int]]]


@pytest.fixture(scope="module", params=READERS)
def answered(request: pytest.FixtureRequest) -> Answered:
    """A reader of random weights, and what `generate` writes about each image alone, at different lengths."""
    reader = READERS[request.param](tokenizer_of_tables())
    reader = replace(reader, prompt=PROMPTS[request.param])
    randomise(reader.model, seed=1, silent_ids=(0, 1, 2))
    config = reader.model.generation_config
    config.update(no_repeat_ngram_size=3, forced_bos_token_id=0 if request.param == "florence" else None)
    long, short = map(partial(answer, reader), IMAGES)
    config.eos_token_id = next(token for token in short[5:] if token not in long)
    short = short[: short.index(config.eos_token_id) + 1]
    assert len(long) == NEW_TOKENS > len(short) > 5
    return reader, [long, short]


def answer(reader: Reader, image: Image) -> list[int]:
    """The tokens of `generate` about an image, without the prompt."""
    inputs = reader.inputs([image])
    begun = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
    return reader.model.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, begun:].tolist()


@pytest.mark.parametrize("name", ["copy", "draft_model"])
def test_a_batch_has_the_tokens_of_generate(answered: Answered, name: str) -> None:
    """In a pipeline, with `custom_generate` and in place."""
    reader, expected = answered
    model = reader.model
    options: dict[str, Any] = {"drafter": smaller(model)} if name == "draft_model" else {}
    pipe = VisionLanguagePipeline(model, reader.processor, accelerator=name, **options)
    output = pipe([reader.prompt] * 2, images=IMAGES, max_new_tokens=NEW_TOKENS)
    assert output.tokens == expected and sum(output.stats.drafted) > 0
    inputs, how = reader.inputs(IMAGES), {"max_new_tokens": NEW_TOKENS}
    plain = model.generate(**inputs, **how)
    loop = mmspec.accelerate(name, **options)
    assert torch.equal(model.generate(**inputs, **how, custom_generate=loop), plain)
    mmspec.enable(model, name, **options)
    try:
        assert torch.equal(model.generate(**inputs, **how), plain)
        assert mmspec.summary(model)[0].calls == 1
    finally:
        mmspec.disable(model)


def test_a_saved_reader_streams_and_takes_rows_while_it_decodes(answered: Answered, tmp_path: Path) -> None:
    reader, expected = answered
    VisionLanguagePipeline(reader.model, reader.processor).save_pretrained(tmp_path / "model")
    pipe = MMSpecPipeline.from_pretrained(tmp_path / "model")
    assert isinstance(pipe, VisionLanguagePipeline)
    how: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}
    streamed = "".join(pipe.stream(reader.prompt, images=IMAGES[1], **how))
    assert streamed == reader.processor.tokenizer.decode(expected[1], skip_special_tokens=True)
    ends: dict[object, Any] = {}
    with pipe.running_batch(rows=2) as batch:
        handles = [batch.enter(reader.prompt, images=IMAGES[0], **how)]
        batch.step()
        handles.append(batch.enter(reader.prompt, images=IMAGES[1], **how))
        while batch.handles:
            ends |= {update.handle: update.output for update in batch.step() if update.output is not None}
    assert [ends[handle].tokens[0] for handle in handles] == expected


@pytest.mark.parametrize(
    ("prompt", "images", "expected"),
    [
        ("", None, "images must have one image for each prompt of "),
        ("", IMAGES, "images must have one image for each prompt of "),
        ([{"role": "user", "content": "What is the text?"}], IMAGES[:1], "prompt must be a string"),
        ([5, 6], IMAGES[0], "prompt must be a string"),
    ],
)
def test_what_is_refused(answered: Answered, prompt: Any, images: Any, expected: str) -> None:
    reader, _ = answered
    pipe = VisionLanguagePipeline(reader.model, reader.processor)
    with pytest.raises(InputError, match=expected):
        pipe(prompt, images=images)


def test_a_prompt_without_tokens_is_refused(answered: Answered) -> None:
    reader, _ = answered
    pipe = VisionLanguagePipeline(reader.model, reader.processor)
    if reader.model.main_input_name == "pixel_values":  # Florence-2 adds tokens of its own
        with pytest.raises(InputError, match="prompt must have at least one token"):
            pipe("~", images=IMAGES[0])
