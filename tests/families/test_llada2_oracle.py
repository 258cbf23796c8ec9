"""The threshold rule in blocks against diffusers' `LLaDA2Pipeline`, token for token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspec.core.sampling import Sampler
from mmspec.families.masked_language.modeling import LLaDA2Config
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.methods.threshold.policy import Threshold
from tests.contracts.running import decode
from tests.tiny_models import tiny_sdar

diffusers = pytest.importorskip("diffusers", reason="the pipeline is in diffusers")
pytestmark = pytest.mark.skipif(not hasattr(diffusers, "LLaDA2Pipeline"), reason="a diffusers without LLaDA2")

WORDS, LENGTH, BLOCK = 32, 12, 4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5], [6, 5, 3, 5, 8, 9, 7]]


class BlockCausal(nn.Module):
    """A model that builds the block mask itself, as LLaDA2's code does, and counts its forward passes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.forwards = model, model.config, 0
        self.dtype, self.device = model.dtype, model.device

    def forward(self, ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        # most blocks have one more forward pass, which finds no masks
        self.forwards += bool((ids[:, -BLOCK:] == WORDS - 1).any())
        place = torch.arange(ids.shape[1])
        sees = (place[:, None] // BLOCK >= place // BLOCK) & attention_mask[0].bool()
        sees |= place[:, None] == place  # what is behind the output sees something
        mask = torch.zeros(sees.shape, dtype=self.dtype).masked_fill(~sees, torch.finfo(self.dtype).min)
        logits = self.model(ids, attention_mask=mask[None, None], position_ids=position_ids).logits
        return SimpleNamespace(logits=logits.index_fill(-1, torch.tensor(WORDS - 1), -torch.inf))


@pytest.mark.parametrize("behind", [0, 1, 2, 3])
@pytest.mark.parametrize("threshold", [0.2, 0.3, 0.45, 1.5])
@pytest.mark.every(3)
def test_tokens_and_forwards_are_those_of_the_pipeline(threshold: float, behind: int) -> None:
    """Also if places of the last block are after the output; the pipeline masks these out."""
    model = tiny_sdar(WORDS)
    model.config.whole_blocks = LLaDA2Config.whole_blocks
    drafter, rule = UnmaskingDrafter().fit(MaskedTarget(model)), Threshold(threshold=threshold)
    for prompt in PROMPTS:
        length = LENGTH + (-len(prompt)) % BLOCK - behind
        run = decode(MaskedTarget(model), [prompt], drafter, rule, Sampler(), max_new_tokens=length)
        wrapped = BlockCausal(model)
        scheduler = diffusers.BlockRefinementScheduler(block_length=BLOCK)
        pipe = diffusers.LLaDA2Pipeline(model=wrapped, scheduler=scheduler, tokenizer=None)
        pipe.set_progress_bar_config(disable=True)
        output = pipe(
            input_ids=torch.tensor([prompt]),
            gen_length=length,
            block_length=BLOCK,
            num_inference_steps=BLOCK,
            sampling_method="greedy",
            threshold=threshold,
            editing_threshold=None,
            eos_early_stop=False,
            mask_token_id=WORDS - 1,
            output_type="seq",
        )
        assert run.outputs == output.sequences.tolist()
        if not behind:  # the pipeline decides the places after the output as well
            assert run.stats.target_forwards == wrapped.forwards
