"""DiffusionGemma in the loop, against diffusers' `DiffusionGemmaPipeline` with equal noise, token for token.

The canvases are compared where they settle: the pipeline differs from transformers' `generate`, and from
mmspec, in the content of a canvas whose steps run out and in tokens after an end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core.sampling import Sampler
from mmspec.families.diffusion_gemma.target import DiffusionGemmaTarget
from tests.contracts.running import Run, decode
from tests.families.canvas_noise import Noise
from tests.tiny_models.diffusion_gemma_pipeline import HAS_CANVAS_PIPELINE, tiny_canvas_pipeline

pytestmark = pytest.mark.skipif(not HAS_CANVAS_PIPELINE, reason="diffusers or transformers has no such model")

LENGTH = 6
PROMPTS = ["how many", "where is the red circle ? what is there ?"]
#: Settings in which canvases settle.
SETTLING = {"entropy_bound": 9.0, "t_min": 0.02, "t_max": 0.05}


def piped(pipe: Any, rows: Sequence[int], steps: int, patch: pytest.MonkeyPatch, **how: Any) -> Tensor:
    """Return the sequences of the pipeline, run with the random numbers of mmspec."""
    vocabulary = pipe.model.config.text_config.vocab_size
    noises = [Noise(row, LENGTH, steps, vocabulary) for row in rows]
    drawn = False

    def randint(*given: Any, **more: Any) -> Tensor:
        nonlocal drawn
        fresh, drawn = not drawn, False
        return torch.cat([each.begins() if fresh else each.fills() for each in noises])

    def multinomial(p: Tensor, num_samples: int, generator: Any = None) -> Tensor:
        nonlocal drawn
        drawn = True
        return torch.cat([each.draws(own) for each, own in zip(noises, p.chunk(len(noises)), strict=True)])

    how = {"prompt": [PROMPTS[row] for row in rows], "gen_length": 3 * LENGTH - 2, **how}
    with patch.context() as inside:
        inside.setattr(torch, "randint", randint)
        inside.setattr(torch, "multinomial", multinomial)
        sequences: Tensor = pipe(num_inference_steps=steps, output_type="seq", **how).sequences
    return sequences


def ours(pipe: Any, rows: Sequence[int], steps: int, **settings: Any) -> Run:
    """Return the sequences of the loop of mmspec, with each row in a batch of its own."""
    how = {"messages": None, "image": None, "add_generation_prompt": True}
    ids, mask, _ = pipe._prepare_inputs(prompt=[PROMPTS[row] for row in rows], **how)
    prompts = [tokens[seen.bool()].tolist() for tokens, seen in zip(ids, mask, strict=True)]
    target = DiffusionGemmaTarget(pipe.model)
    config = {name: pipe.scheduler.config[name] for name in SETTLING}
    made = build_accelerator("renoise", **config, denoising_steps=steps, **settings).fit(target)
    where = target, prompts, made.drafter, made.rule, Sampler(1.0)
    return decode(*where, max_new_tokens=3 * LENGTH, seed=list(rows))


@pytest.mark.parametrize("stability", [1, 2])
def test_settled_canvases_are_those_of_the_pipeline(stability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows over several canvases; in mmspec, rows do not wait for other rows."""
    pipe, steps = tiny_canvas_pipeline(LENGTH, **SETTLING), 40
    settled = {"stability_threshold": stability, "confidence_threshold": 1.5}
    forwards: list[Any] = []
    pipe.model.register_forward_hook(lambda *_: forwards.append(None))
    sequences = piped(pipe, [0, 1], steps, monkeypatch, **settled)
    theirs = len(forwards)
    run = ours(pipe, [0, 1], steps, **settled)
    assert run.outputs == sequences.tolist()
    assert run.stats.target_forwards - 1 <= theirs < 3 * steps
