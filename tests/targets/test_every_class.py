"""Every class of transformers that can be built small gives the output of `generate`, or is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import mmspec
from mmspec.core.canvas import Stopping
from mmspec.errors import UnsupportedModelError
from mmspec.pipelines.base import adapt
from mmspec.targets.encoder_decoder import prompt_of
from tests.targets.loop import decode, oracle
from tests.tiny_models.any_class import (
    FIRST_SPECIAL,
    encoder_inputs,
    generative_classes,
    text_inputs,
    tiny_of_class,
)

NEW_TOKENS = 16
PARTS = 8  # of the list of classes, so that each stays below the time limit
LEAST_IDENTICAL = 10  # of a part; more than half of all classes are built and decoded


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_says_what_generate_says_or_is_refused(part: int) -> None:
    verdicts = {name: verdict(name) for name in generative_classes()[part::PARTS]}
    assert not {name: found for name, found in verdicts.items() if found == "other words"}
    assert list(verdicts.values()).count("identical") >= LEAST_IDENTICAL, verdicts


def verdict(name: str) -> str:
    """Outcome of checking a class; errors of mmspec's own making, other than refusals, are raised."""
    try:
        model = tiny_of_class(name)
        model.generation_config.eos_token_id = None
        inputs = encoder_inputs(model) if model.config.is_encoder_decoder else text_inputs()
        expected = generated(model, inputs)
    except Exception as error:  # a default config that cannot be shrunk so, or a prompt of another kind
        return f"not built: {type(error).__name__}"
    try:
        return "identical" if says(model, inputs) == [expected] * 3 else "other words"
    except UnsupportedModelError:
        return "refused"


def generated(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **keywords: object) -> list[int]:
    """The last new tokens of `generate`; encoder-decoders differ in how much of the prompt they return."""
    output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, num_beams=1, **keywords)
    return output[0, -NEW_TOKENS:].tolist()


def says(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """Outputs decoded without drafts, with chains and with trees."""
    outputs = [generated(model, inputs, custom_generate=mmspec.accelerate(name)) for name in ("none", "copy")]
    prompt = prompt_of(model, inputs) if model.config.is_encoder_decoder else inputs
    drafted = oracle([prompt], [outputs[0]], 4, FIRST_SPECIAL, 0.3)
    return [*outputs, *decode(adapt(model), drafted, [prompt], Stopping(NEW_TOKENS)).outputs]
