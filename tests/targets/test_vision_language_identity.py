"""Greedy output through the loop is that of `generate`, token by token, for every family and request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.targets import VisionLanguageTarget
from tests.targets.loop import GreedyRun, decode, generate, oracle
from tests.tiny_models import (
    HAS_VIDEO,
    VISION_LANGUAGE_FAMILIES,
    VOCABULARY_SIZE,
    encode,
    tiny_clip,
    tiny_images,
    user_message,
)

NEW_TOKENS = 32
STOPPING = Stopping(NEW_TOKENS)
DEPTH = 4
QUESTION = "what is there ?"
IMAGES = tiny_images()
MESSAGES = {
    "one image": user_message(QUESTION, IMAGES[:1]),
    "another image": user_message("which colour is it ?", IMAGES[3:]),
    "two images": user_message(QUESTION, IMAGES[1:3]),
    "no image": user_message(QUESTION),
    "video": user_message(QUESTION, videos=[tiny_clip()]),
    "several turns": [
        *user_message(QUESTION, IMAGES[:1]),
        {"role": "assistant", "content": [{"type": "text", "text": "a red circle"}]},
        *user_message("and there ?", IMAGES[2:3]),
    ],
}
METHODS = ["oracle 0 %", "oracle 30 %"]


@dataclass
class Family:
    """A model with the inputs and reference outputs of all requests."""

    name: str
    model: PreTrainedModel
    inputs: dict[str, dict[str, Any]]

    @cached_property
    def target(self) -> VisionLanguageTarget:
        return VisionLanguageTarget(self.model)

    @cached_property
    def reference(self) -> dict[str, list[int]]:
        return {case: generate(self.model, inputs, NEW_TOKENS) for case, inputs in self.inputs.items()}

    def accelerator(self, name: str, *cases: str) -> Accelerator:
        """The accelerator of a test, for a batch of these requests."""
        if not name.startswith("oracle"):
            return build_accelerator(name)
        corruption = int(name.split()[1]) / 100
        inputs, answers = zip(*((self.inputs[case], self.reference[case]) for case in cases), strict=True)
        return oracle(inputs, answers, DEPTH, VOCABULARY_SIZE, corruption)

    def decode(self, name: str, *cases: str) -> GreedyRun:
        """Decode a batch of these requests to the end."""
        inputs = [self.inputs[case] for case in cases]
        return decode(self.target, self.accelerator(name, *cases), inputs, STOPPING)

    def run(self, name: str, case: str) -> GreedyRun:
        """Set up a request that is not decoded yet."""
        return GreedyRun(self.target, self.accelerator(name, case), [self.inputs[case]], STOPPING)


@pytest.fixture(scope="module", params=list(VISION_LANGUAGE_FAMILIES))
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    model, processor = VISION_LANGUAGE_FAMILIES[request.param]()
    cases = {case: m for case, m in MESSAGES.items() if case != "video" or request.param in HAS_VIDEO}
    yield Family(request.param, model, {case: dict(encode(processor, m)) for case, m in cases.items()})


@pytest.mark.parametrize("accelerator", METHODS)
@pytest.mark.every(6)
def test_greedy_output_is_that_of_generate(family: Family, accelerator: str) -> None:
    for case, reference in family.reference.items():
        run = family.decode(accelerator, case)
        assert run.outputs == [reference], case
        if accelerator == "oracle 0 %":
            full, rest = divmod(NEW_TOKENS - 1, DEPTH + 1)
            assert run.stats.rounds == [full + bool(rest)], case


@pytest.mark.every(3)
def test_ragged_batch_equals_its_rows_alone(family: Family) -> None:
    cases = ["one image", "two images", "no image"]
    assert family.decode("oracle 30 %", *cases).outputs == [family.reference[case] for case in cases]


def test_m_rope_positions_are_those_of_the_longer_prompt(family: Family) -> None:
    rope_index = getattr(family.model.model, "get_rope_index", None)
    for case, inputs in family.inputs.items() if rope_index else ():
        positions, offset = family.target.positions(inputs)
        length = inputs["input_ids"].shape[1]
        words = torch.tensor([family.reference[case]])
        longer = {
            **inputs,
            "input_ids": torch.cat([inputs["input_ids"], words], 1),
            "mm_token_type_ids": torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(words)], 1),
            "attention_mask": torch.ones(1, length + NEW_TOKENS, dtype=torch.long),
        }
        media = {k: v for k, v in longer.items() if k.endswith(("grid_thw", "grid_ts"))}
        expected, _ = rope_index(longer["input_ids"], longer["mm_token_type_ids"], **media)
        assert torch.equal(expected[:, :, :length], positions.expand(3, 1, length)), case
        after = torch.arange(length, length + NEW_TOKENS) + offset
        assert torch.equal(expected[:, 0, length:], after.expand(3, -1)), case
