"""Denoising heads use the kernels: in whole chains, in graphs, and in pipeline calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.pipelines import MMSpecPipeline
from mmspec.vectors.denoising_head import DDPMSchedule, DenoisingHead, DenoisingHeadConfig, FlowSchedule
from mmspec.vectors.denoising_head.head import run_rows
from tests.tiny_models.continuous import folder_of
from tests.vectors.denoising_layout import randomize
from tests.vectors.test_denoising_head import Spy

TOKEN, CONDITION, WIDTH, DEPTH = 8, 24, 64, 2
SCHEDULES = {
    "ddpm": DDPMSchedule(12, clip_sample_range=3.0),
    "flow": FlowSchedule(12, last_step_noise=True),
}
LAUNCHERS = {"modulated_linear", "gated_linear", "denoising_update"}


class Chain:
    """A head of width 64 and depth 2, and what its chains start from."""

    def __init__(self, name: str, dtype: torch.dtype, rows: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        self.schedule = SCHEDULES[name]
        config = DenoisingHeadConfig(TOKEN, CONDITION, WIDTH, DEPTH, self.schedule.kind)
        self.head = randomize(DenoisingHead(config)).to(dtype)
        steps = self.schedule.steps
        self.branches = torch.randn(2, rows, CONDITION, generator=generator)
        self.noise = torch.randn(rows, steps + 1, TOKEN, generator=generator)

    def process(self) -> Any:
        condition, unconditional = self.branches.to(self.head.net.dtype)
        return self.head.process(condition, unconditional, 2.0, 0.9, self.schedule)

    def run(self) -> Tensor:
        with torch.no_grad():
            states: Tensor = self.process().run(self.noise)
        return states


def error(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.every(2)
def test_whole_chains_of_the_kernels_stay_near_those_of_float64(name, both, launched):
    kernel, twin = both(Chain(name, torch.float32).run)
    exact = Chain(name, torch.float64).run()
    steps = SCHEDULES[name].steps
    assert sum(launched[name] for name in LAUNCHERS) == steps * (2 * DEPTH + 2)
    assert kernel.dtype == torch.float32 and error(kernel, exact) < 1e-4
    assert error(kernel, exact) < 3 * error(twin, exact) + 1e-6


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_graph_can_hold_a_whole_chain(name):
    chain = Chain(name, torch.bfloat16)
    process = chain.process()
    columns = process.branches.transpose(0, 1), process.scale, process.temperature, chain.noise
    known = torch.zeros_like(chain.noise), torch.zeros(chain.noise.shape[:2], dtype=torch.bool)
    with torch.no_grad():
        expected = run_rows(chain.head.net, process.schedule, *columns)  # tables are made once
        with Spy() as spy:
            plain = run_rows(chain.head.net, process.schedule, *columns)
            run_rows(chain.head.net, process.schedule, *columns, *known)
    assert spy.found == []
    assert torch.equal(plain, expected) and torch.equal(plain, process.run(chain.noise))


@pytest.mark.parametrize(
    ("kind", "asked"), [("nextstep", {"prompt": "a red circle"}), ("mar", {"class_labels": 1})]
)
@pytest.mark.every(2)
def test_an_image_reaches_the_kernels_and_is_that_of_torch(kind, asked, both, launched):
    pipe: Any = MMSpecPipeline.from_pretrained(folder_of(kind))
    pipe.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 2, "guidance_scale": 2.0, "seed": 3, "output_type": "latent"}

    def image() -> Tensor:
        latents: Tensor = pipe(**asked, **settings).images
        return latents

    kernel, twin = both(image)
    assert set(launched) >= LAUNCHERS
    assert error(kernel, twin) < 1e-4
