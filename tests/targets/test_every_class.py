"""Every class of transformers that can be built small gives the output of `generate`, or is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import mmspec
from mmspec.core.canvas import Stopping
from mmspec.errors import UnsupportedModelError
from mmspec.pipelines.base import adapt
from tests.targets.loop import decode, generate, oracle
from tests.tiny_models.any_class import FIRST_SPECIAL, generative_classes, tiny_of_class

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
    ids = torch.randint(5, FIRST_SPECIAL, (1, 21), generator=torch.Generator().manual_seed(1))
    ids[0, 12:20] = ids[0, 2:10]  # longer than a window of 8, and with something to copy
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        model = tiny_of_class(name)
        model.generation_config.eos_token_id = None
        expected = generate(model, prompt, NEW_TOKENS)
    except Exception as error:  # a default config that cannot be shrunk so, or a prompt of another kind
        return f"not built: {type(error).__name__}"
    try:
        return "identical" if says(model, prompt) == [expected] * 3 else "other words"
    except UnsupportedModelError:
        return "refused"


def says(model: PreTrainedModel, prompt: dict[str, torch.Tensor]) -> list[list[int]]:
    """Outputs decoded without drafts, with chains and with trees."""
    ids = prompt["input_ids"]
    outputs = [
        model.generate(
            **prompt, do_sample=False, max_new_tokens=NEW_TOKENS, custom_generate=mmspec.accelerate(name)
        )[0, ids.shape[1] :].tolist()
        for name in ("none", "copy")
    ]
    drafted = oracle([prompt], [outputs[0]], 4, FIRST_SPECIAL, 0.3)
    return [*outputs, *decode(adapt(model), drafted, [prompt], Stopping(NEW_TOKENS)).outputs]
