"""Drafting with a smaller model: distributions with a real cache, other vocabularies, other prompts."""

from __future__ import annotations

import pytest
import torch

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.interfaces import Request
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.tiny_models import tiny_llama


@pytest.mark.parametrize(("vocabulary", "sampling"), [(48, "coupled"), (80, "sampled")])
def test_a_draft_vocabulary_may_be_padded_differently(vocabulary: int, sampling: str) -> None:
    small = CausalTarget(tiny_llama(vocab=vocabulary, seed=3))
    expected = [generate(llama().model, prompt, 24) for prompt in PROMPTS]
    assert max(map(max, PROMPTS)) >= 48, "some tokens of the prompts are unknown to the smallest draft"
    run = decode(llama(), PROMPTS, DraftModelDrafter(small, 3, sampling), max_new_tokens=24)
    assert run.outputs == expected and run.stats.draft_faults == 0


def test_a_draft_may_read_a_prompt_of_its_own() -> None:
    """A longer or shorter prompt than the target's, for example text without images."""
    expected = [generate(llama().model, prompt, 24) for prompt in PROMPTS]
    extra = [[9] * 40, [], [5]]
    requests = [
        Request(
            {"input_ids": torch.tensor([list(prompt)])},
            {"input_ids": torch.tensor([more + list(prompt)[-2:]])},
        )
        for prompt, more in zip(PROMPTS, extra, strict=True)
    ]
    stats = DecodingStats()
    canvas = Canvas([list(prompt) for prompt in PROMPTS], Stopping(24), stats, llama().device)
    drafter = DraftModelDrafter(CausalTarget(tiny_llama()), 4)
    decoder, random = Decoder(drafter, SampleAndMatch()), RandomStream.from_seed(0, 3)
    for _ in speculate(llama(), decoder, Sampler(), requests, canvas, random):
        pass
    assert canvas.outputs() == expected
