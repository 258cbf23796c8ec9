"""DiffusionGemma in the loop, against transformers' own `generate` with the same noise, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.diffusion_gemma.target import DiffusionGemmaTarget
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import CausalTarget, adapt
from tests.contracts.running import Run, decode
from tests.families.canvas_noise import Noise
from tests.targets.loop import decode as decode_inputs
from tests.tiny_models import tiny_llama, tiny_tokenizer
from tests.tiny_models.diffusion_gemma import HAS_DIFFUSION_GEMMA, tiny_diffusion_gemma

pytestmark = pytest.mark.skipif(not HAS_DIFFUSION_GEMMA, reason="this transformers has no DiffusionGemma")

LENGTH, STEPS, VOCABULARY = 6, 5, 64
PROMPTS = [[2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [2, 9], [2, 6, 5, 3, 5, 8, 9, 7]]
SETTINGS: dict[str, Any] = {"entropy_bound": 3.0, "denoising_steps": STEPS}


@pytest.fixture(scope="module")
def target() -> DiffusionGemmaTarget:
    made = adapt(tiny_diffusion_gemma(LENGTH))
    assert isinstance(made, DiffusionGemmaTarget)
    return made


@contextmanager
def with_noise(noise: Noise, patch: pytest.MonkeyPatch) -> Iterator[None]:
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as module

    with patch.context() as inside:
        inside.setattr(torch, "multinomial", lambda p, num_samples: noise.draws(p))
        sampler = module.EntropyBoundSampler
        inside.setattr(sampler, "initialize_canvas", lambda self, batch_size, device: noise.begins())
        real = sampler.renoise_canvas

        def renoise(self: Any, accepted: Tensor, step: int) -> Tensor:
            with patch.context() as deeper:
                deeper.setattr(sampler, "initialize_canvas", lambda self, *where: noise.fills())
                return real(self, accepted, step)

        inside.setattr(sampler, "renoise_canvas", renoise)
        yield


def generated(
    target: DiffusionGemmaTarget, row: int, canvases: int, patch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[int], float]:
    """Return the tokens of `generate`, and its tokens per forward pass."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    given = {"max_denoising_steps": STEPS, "sampler_config": EntropyBoundSamplerConfig(3.0), **settings}
    with with_noise(Noise(row, LENGTH, STEPS, VOCABULARY), patch):
        output = target.model.generate(
            torch.tensor([PROMPTS[row]]), max_new_tokens=canvases * LENGTH, eos_token_id=None, **given
        )
    return output.sequences[0, len(PROMPTS[row]) :].tolist(), output.tokens_per_forward


def run_of(target: DiffusionGemmaTarget, rows: list[int], count: int, **more: Any) -> Run:
    settings = {**SETTINGS, **more.pop("settings", {})}
    made = build_accelerator("renoise", **settings).fit(target)
    prompts = [PROMPTS[row] for row in rows]
    how = {"max_new_tokens": count, "seed": rows, **more}
    return decode(target, prompts, made.drafter, made.rule, Sampler(1.0), **how)


def test_tokens_are_those_of_generate(target: DiffusionGemmaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows over several canvases, in a model with sliding windows."""
    run = run_of(target, [0, 1, 2], 2 * LENGTH)
    for row in range(3):
        tokens, _ = generated(target, row, 2, monkeypatch)
        assert run.outputs[row] == tokens
    assert len({tuple(output) for output in run.outputs}) == 3
    assert run.stats.target_forwards <= 1 + 2 * STEPS


@pytest.mark.parametrize("stability", [0, 2])
def test_canvases_end_early_as_they_do_there(
    target: DiffusionGemmaTarget, stability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"stability_threshold": stability, "confidence_threshold": 1.5}
    run = run_of(target, [0], 2 * LENGTH, settings={**settings, "entropy_bound": 9.0})
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    tokens, speed = generated(
        target, 0, 2, monkeypatch, **settings, sampler_config=EntropyBoundSamplerConfig(9.0)
    )
    assert run.outputs == [tokens]
    forwards = 2 * LENGTH / float(torch.as_tensor(speed).flatten()[0])
    assert run.stats.target_forwards - 1 == pytest.approx(forwards, abs=0.01)
    if stability == 0:
        assert forwards < 2 * STEPS


def test_an_end_token_cuts_the_output(target: DiffusionGemmaTarget) -> None:
    whole = run_of(target, [0, 1], 2 * LENGTH).outputs
    end = whole[0][LENGTH + 2]
    run = run_of(target, [0, 1], 2 * LENGTH, end=[end])
    for row, output in enumerate(run.outputs):
        cut = whole[row].index(end) + 1 if end in whole[row] else len(whole[row])
        assert output == whole[row][:cut]


def test_images_are_seen(target: DiffusionGemmaTarget) -> None:
    """Different images give different outputs, and equal images equal ones."""
    vision = target.config.vision_config
    side = vision.patch_size * vision.pooling_kernel_size
    pixels = torch.rand(1, 9, 3 * vision.patch_size**2, generator=torch.Generator().manual_seed(0))
    places = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"), -1).view(1, 9, 2)
    assert side > 0
    ids = torch.tensor([[2, 61, 60, 62, 7, 8]])
    kinds = (ids == 60).long()
    outputs = []
    for image in (pixels, pixels, 1 - pixels):
        prompt = {
            "input_ids": ids,
            "pixel_values": image,
            "image_position_ids": places,
            "mm_token_type_ids": kinds,
        }
        made = build_accelerator("none").fit(target)
        outputs.append(decode_inputs(target, made, [prompt], Stopping(LENGTH)).outputs)
    assert outputs[0] == outputs[1] != outputs[2]


def test_what_does_not_fit_is_refused(target: DiffusionGemmaTarget) -> None:
    with pytest.raises(InputError, match="renoise"):
        build_accelerator("renoise").fit(CausalTarget(tiny_llama()))
    for name in ("copy", "threshold", "freedave"):
        with pytest.raises(InputError, match="accelerator"):
            build_accelerator(name).fit(target)
    for bad in ({"entropy_bound": 0.0}, {"denoising_steps": 0}, {"stability_threshold": -1}):
        with pytest.raises(InputError, match=next(iter(bad))):
            build_accelerator("renoise", **bad)
    assert build_accelerator("renoise").exactness == "exact"
    assert build_accelerator("renoise", denoising_steps=4).exactness == "lossy"


def test_the_pipeline_answers_with_it() -> None:
    """Greedy calls take the most likely tokens; places with new noise still depend on the seed."""
    pipe: Any = VisionLanguagePipeline(tiny_diffusion_gemma(LENGTH, vocab=104), tiny_tokenizer())
    assert pipe.accelerator.name == "none" and pipe.default_accelerator == "none"
    asked: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 14}
    plain = pipe("how many", seed=3, **asked)
    assert plain.stats.exactness == "exact" and len(plain.tokens[0]) == 14
    pipe.set_accelerator("renoise")
    assert pipe("how many", seed=3, **asked).tokens == plain.tokens
    pipe.set_accelerator("renoise", denoising_steps=2)
    fast = pipe(["how many", "where is it ?"], seed=[3, 4], do_sample=False, **asked)
    assert fast.stats.exactness == "lossy" and fast.stats.target_forwards == 1 + 2 * 3
    for refused in (pipe.compile, pipe.enable_prefix_cache):
        with pytest.raises(InputError):
            refused()
