"""NextStep and MAR in the loop, compared with decoding without a cache, a canvas or a draft."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core.canvas import Stopping, VectorCanvas
from mmspec.core.decoder import Decoder
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import Request
from mmspec.core.loop import speculate
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.families.mar.cells import CellOrderDrafter, cells_by_forward
from mmspec.families.mar.modeling import MARConfig, MARForImageGeneration
from mmspec.families.mar.target import MARTarget
from mmspec.families.nextstep.modeling import NextStepConfig, NextStepForImageGeneration
from mmspec.families.nextstep.target import NextStepTarget
from mmspec.methods.shared_noise.drafter import VectorWindowDrafter
from mmspec.trees.matching import SampleAndMatch
from mmspec.vectors.denoising_head import DDPMSchedule, FlowSchedule
from mmspec.vectors.rules import SharedNoise
from mmspec.vectors.sampling import DenoisingSampler

SIDE, SIZE = 3, 4
FLOW, DDPM = FlowSchedule(steps=4), DDPMSchedule(steps=4, last_step_noise=True)
PROMPTS = [[1, 2, 3, 7], [4, 7], [5, 6, 7]]
NEGATIVE = [7]


def random_weights(model: Any, seed: int) -> Any:
    """The model in eval mode, its weights drawn anew: those of heads begin at zero."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.15
    return model.eval()


@functools.cache
def nextstep(seed: int = 0) -> NextStepTarget:
    config = NextStepConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        latent_size=SIDE,
        latent_patch_size=1,
        latent_channels=SIZE,
        fm_head_dim=16,
        fm_head_layers=1,
        use_gen_pos_embed=True,
        gen_pos_grid=SIDE,
        boi=7,
    )
    return NextStepTarget(random_weights(NextStepForImageGeneration(config), seed))


@functools.cache
def mar() -> MARTarget:
    config = MARConfig(
        hidden_size=16,
        encoder_layers=1,
        decoder_layers=1,
        num_attention_heads=2,
        token_size=SIZE,
        grid_size=SIDE,
        buffer_size=2,
        num_classes=5,
        head_width=16,
        head_depth=1,
    )
    return MARTarget(random_weights(MARForImageGeneration(config), 0))


def decode(
    target: Any,
    requests: list[Request],
    drafter: Any = None,
    rule: Any = None,
    scale: float = 1.0,
    seed: int = 0,
) -> VectorCanvas:
    """Decode a batch of images to its end; plain decoding if no drafter is given."""
    causal = isinstance(target, NextStepTarget)
    head, schedule = (target.model.image_head, FLOW) if causal else (target.model.diffloss, DDPM)
    sampler: Any = DenoisingSampler(source=head, schedule=schedule, guidance_scale=scale)
    rows = [request.prompt_tokens for request in requests]
    canvas = VectorCanvas(rows, Stopping(SIDE**2), DecodingStats(), target.device, SIZE)
    decoder = Decoder((drafter or NoDrafter()).fit(target), rule or SampleAndMatch())
    random = RandomStream.from_seed(seed, len(rows))
    for _ in speculate(target, decoder, sampler, requests, canvas, random):
        assert canvas.stats.target_forwards < 99, "places stay open for ever"
    return canvas


def prompts(guided: bool = False) -> list[Request]:
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    negative = {"input_ids": torch.tensor([NEGATIVE])} if guided else None
    return [Request({"input_ids": each}, negative_inputs=negative) for each in ids]


def labels(guided: bool = False) -> list[Request]:
    nothing = {"input_ids": torch.tensor([[5]])} if guided else None
    grid = ImageGrid(SIDE, SIDE, 1)
    return [
        Request({"input_ids": torch.tensor([[n]])}, negative_inputs=nothing, layout=grid) for n in (0, 3, 4)
    ]


def noise(row: int, place: int, steps: int) -> Tensor:
    """[1, S + 1, d] what the loop draws the vector at a place of a row with."""
    random = RandomStream(RandomStream.from_seed(0, 3).keys[row : row + 1])
    return random.normal(torch.tensor([[place]]), Purpose.TARGET, (steps + 1) * SIZE, torch.float32).view(
        1, steps + 1, SIZE
    )


@torch.no_grad()
def naive_nextstep(row: int, scale: float) -> Tensor:
    """[N, d] an image of one row, each vector from a forward over everything before it."""
    model, vectors = nextstep().model, list[Tensor]()
    for place in range(SIDE**2):
        conditions = []
        for ids in (PROMPTS[row], NEGATIVE)[: 1 + (scale != 1.0)]:
            rows = [model.embed(torch.tensor([ids])), *(model.embed(v[None]) for v in vectors)]
            hidden = model.get_decoder()(inputs_embeds=torch.cat(rows, 1)).last_hidden_state[:, -1]
            conditions.append(model.image_out_projector(hidden + model.gen_pos_embed[0, place]))
        unconditional = conditions[1] if scale != 1.0 else None
        process = model.image_head.process(conditions[0], unconditional, scale, 1.0, FLOW)
        vectors.append(process.run(noise(row, place, FLOW.steps))[:, -1])
    return torch.cat(vectors)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_plain_decoding_of_nextstep_equals_the_naive_way(scale: float) -> None:
    canvas = decode(nextstep(), prompts(scale != 1.0), scale=scale)
    for row, image in enumerate(canvas.outputs()):
        torch.testing.assert_close(image, naive_nextstep(row, scale), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_windows_are_plain_decoding(scale: float) -> None:
    requests = prompts(scale != 1.0)
    expected = decode(nextstep(), requests, scale=scale).outputs()
    canvas = decode(nextstep(), requests, VectorWindowDrafter(4), SharedNoise(1e-4), scale)
    for image, plain in zip(canvas.outputs(), expected, strict=True):
        torch.testing.assert_close(image, plain, atol=1e-3, rtol=1e-3)
    assert canvas.stats.target_forwards < SIDE**2


@torch.no_grad()
def test_mar_equals_the_naive_way() -> None:
    target = mar()
    for iterations, scale in ((SIDE**2, 1.0), (4, 1.0), (4, 3.0)):
        canvas = decode(target, labels(scale != 1.0), CellOrderDrafter(iterations), scale=scale)
        assert canvas.stats.target_forwards == len(cells_by_forward(SIDE**2, iterations))
        for row, (label, image) in enumerate(zip((0, 3, 4), canvas.outputs(), strict=True)):
            stream = RandomStream(RandomStream.from_seed(0, 3).keys[row : row + 1])
            rank = stream.uniform(torch.arange(SIDE**2)[None], Purpose.ORDER, 1, torch.float64)
            order = rank[0, :, 0].argsort()
            tokens = torch.zeros(1, SIDE**2, SIZE)
            known = torch.zeros(1, SIDE**2, dtype=torch.bool)
            for count in cells_by_forward(SIDE**2, iterations):
                cells, order = order[:count], order[count:]
                z = [
                    target.model.conditions(tokens, known, torch.tensor([n]))[0, cells]
                    for n in (label, 5)[: 1 + (scale != 1.0)]
                ]
                process = target.model.diffloss.process(
                    z[0], z[1] if scale != 1.0 else None, scale, 1.0, DDPM
                )
                noises = torch.cat([noise(row, int(cell), DDPM.steps) for cell in cells])
                tokens[0, cells], known[0, cells] = process.run(noises)[:, -1], True
            torch.testing.assert_close(image, tokens[0], atol=1e-4, rtol=1e-4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="MAR"):
        decode(nextstep(), prompts(), CellOrderDrafter())
    with pytest.raises(InputError, match="iterations"):
        decode(mar(), labels(), CellOrderDrafter(SIDE**2 + 1))
    with pytest.raises(InputError, match="order"):
        CellOrderDrafter(order="spiral")
    with pytest.raises(InputError, match="window"):
        VectorWindowDrafter(0)
    with pytest.raises(InputError, match="tolerance"):
        SharedNoise(-1.0)
