"""Training data of drafters in tests: outputs of tiny targets, with and without images."""

from __future__ import annotations

import functools

import torch

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial
from tests.contracts.running import random_prompts
from tests.methods.flash_checks import inputs_of, target_of
from tests.targets import loop
from tests.tiny_models import tiny_llama

WORDS, LENGTH, POOL = 12, 24, 200
CASES = ("two images", "no image", "several turns")


@functools.cache
def own_answers(
    family: str = "llava", dtype: torch.dtype = torch.float64, new_tokens: int = 5
) -> DrafterBatch:
    """Return answers of the target, each one token longer than the previous one."""
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


@functools.cache
def speaker() -> CausalTarget:
    return CausalTarget(tiny_llama(vocab=WORDS).requires_grad_(False))


@functools.cache
def sentences() -> torch.Tensor:
    """[POOL, 3 + LENGTH] random prompts and what the target says after them."""
    tokens = torch.tensor(
        [(*prompt, 1, 2, 3)[:3] for prompt in random_prompts(POOL, WORDS, longest=4, seed=1)]
    )
    for _ in range(LENGTH):
        said = speaker().model(tokens).logits[:, -1].argmax(-1)
        tokens = torch.cat([tokens, said[:, None]], 1)
    return tokens


class Sentences:
    """Training data from outputs of the target; the last four are held out.

    Args:
        rows: a step and process; of every `rows * per` the step's part, so that steps can be cut in several.
    """

    def __init__(self, rows: int = 4) -> None:
        self.rows = rows

    def batch(self, step: int, process: int) -> DrafterBatch:
        places = [(self.rows * step + row) % (POOL - 4) for row in range(self.rows)]
        return DrafterBatch(tuple(TrainingExample({"input_ids": sentences()[[row]]}, 3) for row in places), 7)

    def trial(self) -> Trial:
        return Trial([Request({"input_ids": row[None, :3]}) for row in sentences()[-4:]], Sampler(), LENGTH)
