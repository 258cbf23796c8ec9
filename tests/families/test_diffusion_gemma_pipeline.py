"""DiffusionGemma in the loop, against diffusers' `DiffusionGemmaPipeline` with equal noise, token for token.

The pipeline differs from transformers' `generate`, and from mmspec, in the content of a canvas whose steps
run out and in tokens after an end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
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

LENGTH, STEPS = 6, 5
PROMPTS = ["how many", "where is the red circle ? what is there ?"]
#: Settings in which canvases settle, and settings in which uncertain places stay noise to the end.
SETTLING = {"entropy_bound": 9.0, "t_min": 0.02, "t_max": 0.05}
NOISY = {"entropy_bound": 3.0, "t_min": 0.4, "t_max": 0.8}


def tiny(likeliest: bool = True, **settings: float) -> Any:
    """The pipeline; if asked for, its scheduler gives the likeliest tokens in the last step."""

    class Likeliest(diffusers.EntropyBoundScheduler):
        def step(self, *args: Any, timestep: int, **more: Any) -> Any:
            output = super().step(*args, timestep=timestep, **more)
            if timestep == self.num_inference_steps - 1:
                output.prev_sample = output.pred_logits.argmax(-1)
            return output

    pipe = tiny_canvas_pipeline(LENGTH, **settings)
    if likeliest:
        pipe.scheduler = Likeliest.from_config(pipe.scheduler.config)
    return pipe


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


def ours(pipe: Any, rows: Sequence[int], steps: int, end: Sequence[int] = (), **settings: Any) -> Run:
    """Return the sequences of the loop of mmspec, with each row in a batch of its own."""
    how = {"messages": None, "image": None, "add_generation_prompt": True}
    ids, mask, _ = pipe._prepare_inputs(prompt=[PROMPTS[row] for row in rows], **how)
    prompts = [tokens[seen.bool()].tolist() for tokens, seen in zip(ids, mask, strict=True)]
    target = DiffusionGemmaTarget(pipe.model)
    config = {name: pipe.scheduler.config[name] for name in NOISY}
    made = build_accelerator("renoise", **config, denoising_steps=steps, **settings).fit(target)
    where = target, prompts, made.drafter, made.rule, Sampler(1.0)
    return decode(*where, max_new_tokens=3 * LENGTH, seed=list(rows), end=end)


@pytest.mark.parametrize("stability", [1, 2])
def test_settled_canvases_are_those_of_the_pipeline(stability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows over several canvases; in mmspec, rows do not wait for other rows."""
    pipe, steps = tiny(likeliest=False, **SETTLING), 40
    settled = {"stability_threshold": stability, "confidence_threshold": 1.5}
    forwards: list[Any] = []
    pipe.model.register_forward_hook(lambda *_: forwards.append(None))
    sequences = piped(pipe, [0, 1], steps, monkeypatch, **settled)
    theirs = len(forwards)
    run = ours(pipe, [0, 1], steps, **settled)
    assert run.outputs == sequences.tolist()
    assert run.stats.target_forwards - 1 <= theirs < 3 * steps


def test_a_canvas_whose_steps_run_out_is_what_was_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline keeps accepted tokens of the last step, and replaces all others by noise."""
    pipe, plain = tiny(**NOISY), tiny(likeliest=False, **NOISY)
    run = ours(pipe, [0, 1], STEPS)
    assert run.outputs == piped(pipe, [0, 1], STEPS, monkeypatch).tolist()
    left = piped(plain, [0, 1], STEPS, monkeypatch)[:, :LENGTH]
    decided = torch.tensor(run.outputs)[:, :LENGTH]
    assert 0 < int((left != decided).sum()) < left.numel()
    endless = piped(pipe, [0, 1], STEPS, monkeypatch, confidence_threshold=None)
    assert endless.tolist() == run.outputs  # no place was certain


@pytest.mark.parametrize("rows", [[1], [0, 1]])
def test_rows_are_the_same_up_to_an_end_token(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline continues after it, to the end of the canvas with the last row's end token."""
    pipe = tiny(**NOISY)
    whole = ours(pipe, rows, STEPS).outputs
    shared = (token for token in whole[-1] if all(token in row for row in whole))
    end = next(token for token in shared if max(row.index(token) for row in whole) >= LENGTH)
    sequences = piped(pipe, rows, STEPS, monkeypatch, eos_token_id=end).tolist()
    canvases = max(row.index(end) for row in whole) // LENGTH + 1
    assert sequences == [row[: canvases * LENGTH] for row in whole]
    for row, output in zip(whole, ours(pipe, rows, STEPS, end=[end]).outputs, strict=True):
        assert output == row[: row.index(end) + 1]
