"""Models that predict many cells per forward pass give the images of plain loops as in their papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.interfaces import Request
from mmspec.core.loop import speculate
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.families.images import image_target
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.lpd.modeling import LPDConfig, LPDForCausalLM
from mmspec.families.par.modeling import PARConfig
from mmspec.families.parallel_images.orders import DecodingOrder, cells_by_forward
from mmspec.families.parallel_images.target import CellSampler, ParallelImageTarget
from mmspec.pipelines.image_prompts import image_requests
from mmspec.pipelines.image_settings import sampling_defaults
from tests.families.converted import convert_and_load
from tests.families.official_layout import GRID, HEADS, VOCABULARY
from tests.families.parallel_layout import (
    CELLS,
    lpd_state,
    naive_lpd,
    naive_maskgit,
    naive_nar,
    naive_par,
    nar_state,
    par_state,
)
from tests.tiny_models import randomise

LABELS, SEEDS = (0, 3, 1), (11, 4, 7)
STATES = {"lpd": lpd_state(), "nar": nar_state(), "par": par_state()}
SCALE = 2.5


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParallelImageTarget]:
    """Of official files, converted and loaded in double precision."""
    return {
        name: image_target(convert_and_load(tmp_path_factory.mktemp(name), state, dtype=torch.float64))
        for name, state in STATES.items()
    }


def images(
    target: ParallelImageTarget,
    name: str = "none",
    rows: Sequence[int] = (0, 1, 2),
    scale: float = SCALE,
    schedule: str = "constant",
    temperature: float = 1.0,
    **options: Any,
) -> tuple[list[list[int]], DecodingStats]:
    """Images of some labels and seeds, decoded together."""
    asked = image_requests(
        target,
        None,
        class_labels=[LABELS[row] for row in rows],
        negative_prompt=None,
        grid=target.grid,
        guided=True,
        num_images_per_prompt=1,
        tokenizer=None,
    )
    seeds = [SEEDS[row] for row in rows]
    return decode(target, name, asked, seeds, scale, schedule, temperature, **options)


def decode(
    target: ParallelImageTarget,
    name: str,
    asked: Sequence[Request],
    seeds: Sequence[int],
    scale: float,
    schedule: str = "constant",
    temperature: float = 1.0,
    **options: Any,
) -> tuple[list[list[int]], DecodingStats]:
    accelerator, stats = build_accelerator(name, **options).fit(target), DecodingStats()
    sampler = CellSampler(temperature, guidance_scale=scale, guidance_schedule=schedule)
    canvas = Canvas([each.prompt_tokens for each in asked], Stopping(CELLS), stats, target.device)
    roles = target, accelerator.decoder, sampler
    for _ in speculate(*roles, asked, canvas, RandomStream.from_seed(list(seeds), len(seeds))):
        pass
    return canvas.outputs(), stats


class Noise:
    """Chooses tokens with the noise of their cells, as the library does."""

    def __init__(self, seed: int) -> None:
        self.random = RandomStream.from_seed([seed], 1)

    def gumbel(self, cell: int, purpose: Purpose, count: int, step: int = 0) -> Tensor:
        place = torch.tensor([[cell]])
        return self.random.at(step).gumbel(place, purpose, count, torch.float64)[0, 0]

    def choose(self, cell: int, logits: Tensor) -> int:
        return int((logits + self.gumbel(cell, Purpose.TARGET, len(logits))).argmax())


def groups_of(order: DecodingOrder, target: ParallelImageTarget, seed: int) -> list[list[int]]:
    cells = order.draw(target.grid, RandomStream.from_seed([seed], 1))[0].tolist()
    groups = []
    for count in order.counts(target.grid):
        groups.append(cells[:count])
        cells = cells[count:]
    return groups


def rising(decided: int) -> float:
    return 1 + (SCALE - 1) * decided / CELLS


ORDERS: list[dict[str, Any]] = [
    {},
    {"generation_steps": 3, "repulsion_threshold": 0},
    {"order": "raster"},
    {"order": "diagonal"},
    {"order": "random", "generation_steps": 6},
    {"order": "checkerboard"},
    {"order": "regions", "regions": 4},
    {"order": "blocks"},
]


@pytest.mark.parametrize("options", ORDERS, ids=lambda options: "-".join(map(str, options.values())) or "own")
@pytest.mark.parametrize("schedule", ["constant", "rising"])
@pytest.mark.every(4)
def test_lpd_is_a_plain_loop_over_groups_of_queries(
    targets: dict[str, ParallelImageTarget], options: dict[str, Any], schedule: str
) -> None:
    target = targets["lpd"]
    found, stats = images(target, "lpd", schedule=schedule, **options)
    order = DecodingOrder(**options)
    assert stats.target_forwards == len(order.counts(target.grid))
    for row, (label, seed) in enumerate(zip(LABELS, SEEDS, strict=True)):
        groups = groups_of(order, target, seed)
        guide = rising if schedule == "rising" else lambda decided: SCALE
        assert found[row] == naive_lpd(STATES["lpd"], label, groups, guide, Noise(seed).choose)


@pytest.mark.parametrize(("iterations", "heat", "schedule"), [(4, 0.0, "rising"), (6, 4.5, "constant")])
def test_maskgit_is_a_plain_loop_over_all_open_cells(
    targets: dict[str, ParallelImageTarget], iterations: int, heat: float, schedule: str
) -> None:
    target, counts = targets["lpd"], cells_by_forward(CELLS, iterations)
    options: dict[str, Any] = {"iterations": iterations, "choice_temperature": heat}
    found, stats = images(target, "maskgit", schedule=schedule, **options)
    assert stats.target_forwards == iterations
    for row, (label, seed) in enumerate(zip(LABELS, SEEDS, strict=True)):
        noise = Noise(seed)

        def draw(iteration: int, cell: int, logits: Tensor, noise: Noise = noise) -> tuple[int, float]:
            token = int((logits + noise.gumbel(cell, Purpose.REDRAW, len(logits), iteration)).argmax())
            left = CELLS - sum(counts[: iteration + 1])
            share = 1 - 2 / math.pi * math.acos(left / CELLS)
            more = heat * share * noise.gumbel(cell, Purpose.ACCEPT, 1, iteration)
            return token, float(logits.log_softmax(-1)[token] + more)

        guide = rising if schedule == "rising" else lambda decided: SCALE
        assert found[row] == naive_maskgit(STATES["lpd"], label, counts, guide, draw)


@pytest.mark.parametrize(
    ("options", "schedule", "temperature"),
    [
        ({"order": "raster"}, "rising", 1.0),
        ({"order": "raster"}, "constant", 0.0),
        ({"order": "random", "generation_steps": CELLS}, "constant", 1.0),
        ({"order": "random", "generation_steps": 7}, "rising", 1.0),
    ],
)
def test_guessed_states_give_the_images_of_one_group_a_forward(
    targets: dict[str, ParallelImageTarget], options: dict[str, Any], schedule: str, temperature: float
) -> None:
    """Rows of a batch advance by different numbers of groups, as in single runs."""
    how: dict[str, Any] = {"schedule": schedule, "temperature": temperature, **options}
    plain, slow = images(targets["lpd"], "lpd", **how)
    for states in (2, CELLS):
        found, stats = images(targets["lpd"], "lpd", states=states, **how)
        assert found == plain
        assert 0 < sum(stats.accepted) < sum(stats.drafted)
        assert slow.target_forwards < CELLS or max(stats.nfe) < CELLS
    assert images(targets["lpd"], "lpd", (1,), states=5, **how)[0] == plain[1:2]


def test_nar_is_a_plain_loop_over_diagonals(targets: dict[str, ParallelImageTarget]) -> None:
    found, stats = images(targets["nar"])
    assert stats.target_forwards == 2 * GRID - 1
    for row, (label, seed) in enumerate(zip(LABELS, SEEDS, strict=True)):
        assert found[row] == naive_nar(STATES["nar"], label, SCALE, Noise(seed).choose)


@pytest.mark.parametrize("regions", [1, 16])
def test_par_is_a_plain_loop_over_regions(tmp_path: Path, regions: int) -> None:
    state = par_state(regions=regions)
    target: Any = image_target(convert_and_load(tmp_path, state, dtype=torch.float64))
    found, stats = images(target)
    assert stats.target_forwards == regions + (CELLS - regions) // regions
    for row, (label, seed) in enumerate(zip(LABELS, SEEDS, strict=True)):
        assert found[row] == naive_par(state, label, regions, SCALE, Noise(seed).choose)


def test_an_image_of_maskgit_does_not_depend_on_its_batch(targets: dict[str, ParallelImageTarget]) -> None:
    together, _ = images(targets["lpd"], "maskgit", iterations=5)
    other_way, _ = images(targets["lpd"], "maskgit", (2, 0), iterations=5)
    assert other_way == [together[2], together[0]]
    for row in range(3):
        assert images(targets["lpd"], "maskgit", (row,), iterations=5)[0] == [together[row]]


def test_plain_decoding_fits_its_own_model_again(targets: dict[str, ParallelImageTarget]) -> None:
    """Required when a pipeline moves to another device; `lpd` with the same order is still refused."""
    for name in ("nar", "par"):
        fitted = build_accelerator("none").fit(targets[name])
        assert fitted.fit(targets[name]).exactness == "exact"
        with pytest.raises(InputError, match="an order of its own"):
            build_accelerator("lpd").fit(targets[name])


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("lpd", "lpd", {"order": "random", "generation_steps": 5}),
    ("lpd", "lpd", {"order": "random", "generation_steps": 10, "states": 3}),
    ("lpd", "maskgit", {"iterations": 4}),
    ("nar", "none", {}),
    ("par", "none", {}),
]


@pytest.mark.parametrize(("name", "accelerator", "options"), CASES)
def test_a_cell_sees_all_that_was_decided_before_and_nothing_else(
    targets: dict[str, ParallelImageTarget],
    name: str,
    accelerator: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys of queries and later cells have no effect, but a changed decided token changes the output."""
    target = targets[name]
    expected = images(target, accelerator, (0, 1), **options)[0]
    whole, forwards = target.score, 0

    def score(state: Any, draft: Any, spoil: bool, changed: int) -> Any:
        nonlocal forwards
        forwards += 1
        if forwards == changed:
            draft = replace(draft, tokens_of_fresh=(draft.tokens_of_fresh + 1) % VOCABULARY)
        output = whole(state, draft)
        seen = draft.kept.clone().scatter_(1, draft.fresh, True)[:, :CELLS]
        for layer in state.cache.ragged if spoil else ():
            for row, start in enumerate(state.cache.lengths.tolist()):
                for buffer in (layer.keys, layer.values):
                    buffer[row, start : start + CELLS][~seen[row % len(seen)]] = 1e6
        return output

    for spoil, changed in ((True, 0), (False, 2), (False, 3)):
        forwards = 0
        monkeypatch.setattr(target, "score", lambda *draft, how=(spoil, changed): score(*draft, *how))
        found = images(target, accelerator, (0, 1), **options)[0]
        assert (found == expected) == (not changed)


#: As the scripts in scripts/eval of github.com/mit-han-lab/lpd have them.
LPD_CHECKPOINTS = {
    "lpd_l_256": ((24, 1024, 16, 16), 4.8, 2),
    "lpd_xl_256": ((36, 1280, 20, 16), 4.9, 2),
    "lpd_xxl_256": ((48, 1536, 24, 16), 5.9, 3),
    "lpd_l_512": ((24, 1024, 16, 32), 7.3, 4),
    "lpd_xl_512": ((36, 1280, 20, 32), 6.0, 4),
}


def shapes_alone(config: LlamaGenConfig) -> ParallelImageTarget:
    """A target without weights."""
    with torch.device("meta"):
        target: ParallelImageTarget = image_target(AutoModelForCausalLM.from_config(config))
    return target


def lpd_of(layers: int, width: int, heads: int, grid: int, **more: Any) -> ParallelImageTarget:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return shapes_alone(LPDConfig(grid_size=grid, **shape, **({"body": "vit"} | more)))


@pytest.mark.parametrize("name", LPD_CHECKPOINTS)
def test_a_published_lpd_is_decoded_with_its_own_guidance_and_repulsion(name: str) -> None:
    shape, guidance_scale, repulsion = LPD_CHECKPOINTS[name]
    target = lpd_of(*shape)
    assert sampling_defaults(target)["guidance_scale"] == guidance_scale
    assert build_accelerator("none").fit(target).drafter.order.repulsion_threshold == repulsion
    accelerator = build_accelerator("lpd").fit(target)
    assert accelerator.exactness == "exact" and accelerator.drafter.order.repulsion_threshold == repulsion


@pytest.mark.parametrize(
    ("layers", "width", "heads", "regions", "guidance_scale"),
    [(36, 1280, 20, 4, 1.5), (48, 1536, 24, 4, 1.435), (24, 3200, 32, 4, 1.345), (24, 3200, 32, 16, 1.5)],
)
def test_a_published_par_is_decoded_with_its_own_guidance(
    layers: int, width: int, heads: int, regions: int, guidance_scale: float
) -> None:
    """As the README.md of github.com/YuqingWang1029/PAR has them."""
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    target = shapes_alone(PARConfig(grid_size=24, regions=regions, **shape))
    assert sampling_defaults(target) == {"guidance_scale": guidance_scale, "top_k": 0}


def test_captions_of_several_lengths_are_read_with_the_first_queries() -> None:
    config = LPDConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        grid_size=GRID,
        condition_type="caption",
        caption_length=6,
        caption_dim=12,
    )
    model = randomise(LPDForCausalLM(config).double(), 3)
    target: Any = image_target(model)
    features = [torch.randn(1, length, 12, dtype=torch.float64) for length in (2, 6, 4)]
    asked = []
    for one in features:
        ids = torch.full((1, one.shape[1]), VOCABULARY)
        prompt = {"input_ids": ids, "caption_features": one}
        negative = {"input_ids": ids, "caption_features": torch.zeros_like(one) + 0.5}
        asked.append(Request(prompt, negative_inputs=negative, layout=target.grid))
    together, stats = decode(target, "none", asked, SEEDS, SCALE)
    assert stats.target_forwards == len(DecodingOrder().counts(target.grid))
    assert decode(target, "lpd", asked, SEEDS, SCALE, states=3)[0] == together
    for row, request in enumerate(asked):
        assert decode(target, "none", [request], SEEDS[row : row + 1], SCALE)[0] == [together[row]]
        # the model's own forward over prompt and queries of the first group
        first = DecodingOrder().draw(target.grid, RandomStream.from_seed([SEEDS[row]], 1))[0, 0]
        slots = features[row].shape[1]
        vectors = torch.cat(
            [model.model.embed(request.inputs["input_ids"], features[row]), model.model.mask_token[None]], 1
        )
        places = torch.cat([torch.arange(6 - slots, 6), first[None] + 6])[None]
        sees = torch.ones(1 + slots, 1 + slots, dtype=torch.bool).tril()[None, None]
        logits = []
        for one in (features[row], torch.zeros_like(features[row]) + 0.5):
            vectors[:, :slots] = model.model.embed(request.inputs["input_ids"], one)
            read = model(inputs_embeds=vectors, position_ids=places, attention_mask=sees, use_cache=False)
            logits.append(read.logits[0, -1])
        mixed = logits[1] + SCALE * (logits[0] - logits[1])
        assert together[row][int(first)] == Noise(SEEDS[row]).choose(int(first), mixed)


def test_what_such_a_model_cannot_do_is_refused(targets: dict[str, ParallelImageTarget]) -> None:
    for name in ("sjd", "zipar", "copy"):
        with pytest.raises(InputError, match="decide places together"):
            build_accelerator(name).fit(targets["lpd"])
    for name in ("lpd", "maskgit"):
        with pytest.raises(InputError, match="an order of its own"):
            build_accelerator(name).fit(targets["nar"])
    with pytest.raises(InputError, match="generation_steps"):
        build_accelerator("lpd", generation_steps=CELLS + 1).fit(targets["lpd"])
    with pytest.raises(InputError, match="regions"):
        build_accelerator("lpd", order="regions", regions=9).fit(targets["lpd"])
    with pytest.raises(InputError, match="order"):
        build_accelerator("lpd", order="spiral")
    with pytest.raises(InputError, match="states"):
        build_accelerator("lpd", states=0)
