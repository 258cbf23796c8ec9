"""Training data of drafters in these tests: conversations with images that a tiny target goes on with."""

from __future__ import annotations

import functools

import torch

from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from tests.drafters.flash_checks import inputs_of, target_of
from tests.targets import loop

CASES = ("two images", "no image", "several turns")


@functools.cache
def own_answers(
    family: str = "llava", dtype: torch.dtype = torch.float64, new_tokens: int = 5
) -> DrafterBatch:
    """The target's own answers, each a token longer than the one before."""
    examples = []
    for row, case in enumerate(CASES):
        inputs = dict(inputs_of(family, dtype)[case])
        reply = loop.generate(target_of(family, dtype).model, inputs, new_tokens + row)
        inputs.pop("attention_mask", None)
        start = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([reply])], 1)
        if (kinds := inputs.get("mm_token_type_ids")) is not None:
            inputs["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, len(reply))], 1)
        examples.append(TrainingExample(inputs, start))
    return DrafterBatch(tuple(examples), seed=1)
