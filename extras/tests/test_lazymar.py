"""Feature caching of MAR: exact cases, the size of errors in others, and the saved work."""

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
from mmspec.core.random_stream import RandomStream
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.families.mar.cells import CellOrderDrafter
from mmspec.families.mar.modeling import MARConfig, MARForImageGeneration
from mmspec.families.mar.target import MARSampler, MARTarget
from mmspec.pipelines import MMSpecPipeline
from mmspec.trees.matching import SampleAndMatch
from mmspec.vectors.denoising_head import DDPMSchedule
from mmspec_extras.methods.lazymar import feature_cache
from mmspec_extras.methods.lazymar.drafter import LazyCellDrafter
from mmspec_extras.methods.lazymar.feature_cache import FeatureCache, FeatureCaching
from tests.tiny_models.continuous import folder_of

SIDE, SIZE, CLASSES, BUFFER = 16, 4, 5, 8
CELLS = SIDE**2
ITERATIONS = 12
LABELS = [0, 3, 4]
EVERY = FeatureCaching(refresh=1, warm_up=1, test_layer=1)
SOME = FeatureCaching(refresh=1000, warm_up=1, share=0.2, test_layer=1)  # one full forward pass
ROUNDING = 1e-5  # of float32 through four blocks; conditions have size 1 and errors of 4e-7


@functools.cache
def model() -> MARForImageGeneration:
    """Width 64, 2 + 2 blocks, 16 x 16 cells; weights large enough that tokens influence each other."""
    config = MARConfig(
        hidden_size=64,
        encoder_layers=2,
        decoder_layers=2,
        num_attention_heads=4,
        token_size=SIZE,
        grid_size=SIDE,
        buffer_size=BUFFER,
        num_classes=CLASSES,
        head_width=16,
        head_depth=1,
    )
    made = MARForImageGeneration(config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in made.named_parameters():
        if "norm" not in name:
            weight.data = torch.randn(weight.shape, generator=generator) * (0.2 if weight.dim() > 1 else 0.05)
    return made.eval()


def decode(
    caching: FeatureCaching | None, labels: list[int], scale: float = 1.0, rows: slice = slice(None)
) -> list[Tensor]:
    """Images of a batch; those of `rows` alone are decoded with the random numbers of the whole batch."""
    target = MARTarget(model())
    nothing = {"input_ids": torch.tensor([[CLASSES]])} if scale != 1.0 else None
    grid = ImageGrid(SIDE, SIDE, 1)
    requests = [
        Request({"input_ids": torch.tensor([[n]])}, negative_inputs=nothing, layout=grid)
        for n in labels[rows]
    ]
    schedule = DDPMSchedule(2, last_step_noise=True)
    sampler: Any = MARSampler(source=model().diffloss, schedule=schedule, guidance_scale=scale)
    prompts = [request.prompt_tokens for request in requests]
    canvas = VectorCanvas(prompts, Stopping(CELLS), DecodingStats(), target.device, SIZE)
    random = RandomStream(RandomStream.from_seed(0, len(labels)).keys[rows])
    made = CellOrderDrafter(ITERATIONS)
    if caching is not None:
        made = LazyCellDrafter(ITERATIONS)
        made.caching = caching
    decoder = Decoder(made.fit(target), SampleAndMatch())
    for _ in speculate(target, decoder, sampler, requests, canvas, random):
        assert canvas.stats.target_forwards <= ITERATIONS
    return canvas.outputs()


@functools.cache
def plain(scale: float) -> list[Tensor]:
    return decode(None, LABELS, scale)


def same_bits(images: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(image, other) for image, other in zip(images, expected, strict=True))


def scene(uneven: bool = False) -> tuple[Tensor, list[Tensor], Tensor]:
    """Tokens [3, N, d], known cells [3, N] in each of four forward passes, cells [3, 6] requested last."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(3, CELLS, SIZE, generator=generator)
    order = torch.rand(3, CELLS, generator=generator).argsort(1)
    counts = [[40, 40, 40], [45, 45, 45], [52, 52, 52], [60, 60, 60]]
    if uneven:
        counts = [[40, 3, 0], [45, 3, 0], [52, 9, 1], [60, 15, 1]]
    rank = order.argsort(1)
    known = [rank < torch.tensor(each)[:, None] for each in counts]
    return tokens, known, order[:, 60:66]


@torch.no_grad()
def last_conditions(caching: FeatureCaching, uneven: bool = False, rows: slice = slice(None)) -> Tensor:
    """[B, 6, D] conditions of the requested cells in the last of four forward passes."""
    tokens, known, cells = (each if isinstance(each, list) else each[rows] for each in scene(uneven))
    labels = torch.tensor(LABELS)[rows]
    cache = FeatureCache(model(), caching, len(labels), 1)
    for each in known:
        conditions = cache.conditions(tokens, each[rows], labels, cells)
    return conditions.gather(1, cells[..., None].expand(-1, -1, conditions.shape[-1]))


@torch.no_grad()
def exact_conditions(uneven: bool = False) -> Tensor:
    tokens, known, cells = scene(uneven)
    conditions = model().conditions(tokens, known[-1], torch.tensor(LABELS))
    return conditions.gather(1, cells[..., None].expand(-1, -1, conditions.shape[-1]))


def error(share: float, uneven: bool = False) -> float:
    """Root mean square error of conditions after three partial forward passes in a row."""
    caching = FeatureCaching(refresh=1000, warm_up=1, share=share, test_layer=1)
    return float((last_conditions(caching, uneven) - exact_conditions(uneven)).square().mean().sqrt())


@pytest.mark.parametrize(
    ("caching", "scale"),
    [(EVERY, 3.0), (FeatureCaching(warm_up=ITERATIONS, test_layer=1), 1.0)],
    ids=["refresh=1", "all warm up"],
)
def test_computing_all_in_every_forward_is_no_caching_bit_for_bit(caching, scale):
    assert same_bits(decode(caching, LABELS, scale), plain(scale))


def test_a_full_forward_is_the_models_own_for_rows_that_know_different_numbers():
    assert torch.equal(last_conditions(EVERY, uneven=True), exact_conditions(uneven=True))


def test_a_share_of_one_is_exact() -> None:
    for uneven in (False, True):
        assert error(1.0, uneven) < ROUNDING


def test_errors_shrink_as_the_share_grows() -> None:
    for uneven in (False, True):
        errors = [error(share, uneven) for share in (0.0, 0.2, 0.5, 0.8, 1.0)]
        assert all(more > 1.2 * less for more, less in zip(errors, errors[1:], strict=False)), errors
        assert errors[0] > 1000 * ROUNDING, "without an effect of caching, nothing is tested"


def test_forwards_between_compute_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, finish = list[int](), feature_cache.finish

    def counted(block: Any, hidden: Tensor, *more: Any) -> Tensor:
        counts.append(hidden.shape[1])
        return finish(block, hidden, *more)

    monkeypatch.setattr(feature_cache, "finish", counted)
    last_conditions(FeatureCaching(refresh=1000, warm_up=1, share=0.1, test_layer=1))
    places = BUFFER + CELLS
    assert counts[:2] == [BUFFER + 40, places]
    new, others = 8, BUFFER + 52  # in the last forward pass, which also has six requested cells
    asked = new + 6
    assert counts[-2:] == [new + round(0.1 * others), asked + round(0.1 * (places - asked))]


def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    for uneven in (False, True):
        together = last_conditions(SOME, uneven)
        for row in range(3):
            alone = last_conditions(SOME, uneven, slice(row, row + 1))
            torch.testing.assert_close(together[row], alone[0], atol=ROUNDING, rtol=0)


def test_images_of_a_batch_are_what_they_are_alone():
    scale = 3.0
    caching = FeatureCaching(refresh=4, warm_up=2, share=0.2, test_layer=1)
    together = decode(caching, LABELS, scale)
    assert not same_bits(together, plain(scale))
    for row, image in enumerate(together):
        alone = decode(caching, LABELS, scale, slice(row, row + 1))[0]
        assert (image - alone).norm() < 1e-4 * image.norm()


@torch.no_grad()
def guided_conditions(caching: FeatureCaching | None) -> Tensor:
    """[2, 3, 6, D] conditional and unconditional conditions of the last forward pass of the scene."""
    tokens, known, cells = scene()
    labels = torch.tensor([*LABELS, *[CLASSES] * 3])
    cache = FeatureCache(model(), caching or EVERY, 3, 2)
    for each in known:
        conditions = cache.conditions(tokens.repeat(2, 1, 1), each.repeat(2, 1), labels, cells)
    asked = cells.repeat(2, 1)[..., None].expand(-1, -1, conditions.shape[-1])
    return conditions.gather(1, asked).unflatten(0, (2, 3))


def test_guidance_is_reused() -> None:
    """Conditional rows equal those without guidance; the difference is that of the last full forward pass."""
    caching = FeatureCaching(refresh=1000, warm_up=1, share=1.0, test_layer=1)
    conditional, unconditional = guided_conditions(caching)
    torch.testing.assert_close(conditional, exact_conditions(), atol=ROUNDING, rtol=0)
    exact = guided_conditions(None)
    tokens, known, cells = scene()
    with torch.no_grad():
        first = model().conditions(
            tokens.repeat(2, 1, 1), known[0].repeat(2, 1), torch.tensor([*LABELS, *[CLASSES] * 3])
        )
    asked = cells.repeat(2, 1)[..., None].expand(-1, -1, first.shape[-1])
    before = first.gather(1, asked).unflatten(0, (2, 3))
    torch.testing.assert_close(conditional - unconditional, before[0] - before[1], atol=ROUNDING, rtol=0)
    off, size = (unconditional - exact[1]).norm(), (exact[0] - exact[1]).norm()
    assert 100 * ROUNDING < off / size < 0.8  # closer than without guidance


@torch.no_grad()
def test_a_forward_with_nothing_new_and_nothing_asked_for_changes_nothing():
    tokens, known, cells = scene()
    cache = FeatureCache(model(), FeatureCaching(1000, 1, share=0.0, test_layer=1), 3, 1)
    before = cache.conditions(tokens, known[0], torch.tensor(LABELS), cells)
    assert torch.equal(cache.conditions(tokens, known[0], torch.tensor(LABELS), cells[:, :0]), before)


@pytest.mark.parametrize("uneven", [False, True])
def test_the_host_reads_the_device_once_in_a_forward(uneven, monkeypatch):
    reads: list[str] = []
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        real = getattr(Tensor, name)

        def spy(self: Tensor, *args: Any, real: Any = real, name: str = name) -> Any:
            reads.append(name)
            return real(self, *args)

        monkeypatch.setattr(Tensor, name, spy)
    last_conditions(SOME, uneven)
    assert reads == ["tolist"] * 4


def test_full_forwards_are_the_first_ones_and_then_one_of_so_many():
    caching = FeatureCaching(refresh=3, warm_up=2)
    assert [n for n in range(10) if caching.is_full(n)] == [0, 1, 4, 7]
    assert [n for n in range(30) if FeatureCaching().is_full(n)] == [0, 1, 2, 3, 4, 5, 14, 23]  # as published


@torch.no_grad()
def test_bytes_of_the_cache_are_counted():
    target = MARTarget(model())
    state, _ = target.prefill([{"input_ids": torch.tensor([[0]])}], CELLS)
    before = state.nbytes()
    state.reader = FeatureCache(model(), FeatureCaching(test_layer=1), 1, 1)
    kept = 2 * 2 + 2 + 2  # keys and values of two blocks, their tested values, features and outputs
    assert state.nbytes() - before == kept * (BUFFER + CELLS + 1) * 64 * 4 + CELLS


def test_settings_outside_their_range_are_refused():
    for name, value in (("refresh", 0), ("warm_up", 0), ("share", float("nan")), ("test_layer", 0)):
        with pytest.raises(InputError, match=name):
            FeatureCaching(**{name: value})
    with pytest.raises(InputError, match="test_layer must be between 1 and 1"):
        LazyCellDrafter(test_layer=2).fit(MARTarget(model()))
    with pytest.raises(InputError, match="cannot be used"):
        FeatureCaching(test_layer=1).check(MARConfig(encoder_layers=1, decoder_layers=12))


def test_a_pipeline_draws_with_cached_features() -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(folder_of("mar"))
    pipe.set_accelerator("lazymar", iterations=8, refresh=2, test_layer=1)
    stats = pipe(class_labels=[0, None], num_inference_steps=6, output_type="latent", seed=0).stats
    assert stats.nfe == [8, 8] and stats.exactness == "approximate"
