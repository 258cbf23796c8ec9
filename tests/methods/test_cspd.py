"""CSpD on cells: exact by default, and a measurable bias if drafts after a rejected cell are kept."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator, promise_of
from mmspec.cli.accelerators import stated
from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.families.mar.cells import ORDERS, CellModelDrafter, CellModelSession
from mmspec.families.mar.modeling import MARForImageGeneration
from mmspec.families.mar.target import MARTarget
from mmspec.plugins import METHODS
from mmspec.targets import CausalTarget
from mmspec.trees.rejection import SpeculativeSampling
from mmspec.vectors.denoising import Denoising
from mmspec.vectors.denoising_head import DDPMSchedule
from mmspec.vectors.rules import CSpD, LastStep
from tests.families.test_nextstep_target import SIDE, mar, random_weights
from tests.tiny_models import tiny_llama
from tests.vectors.fields import Chain, Field, Head, cells_of, decode_cells
from tests.vectors.test_rules import distance

ROWS, ALARM = 8_000, 1e-5  # for each of eleven statistics and three seeds


def field(*settings: Any, **named: Any) -> MARTarget:
    model: Any = Field(*settings, **named)
    return MARTarget(model)


@functools.cache
def target() -> MARTarget:
    return field(pull=1.0)


@functools.cache
def worse() -> MARTarget:
    """A drafter field of which about half of the cells are accepted; its steps have other deviations too."""
    return field(pull=0.5, bias=0.7, std=0.66)


@functools.cache
def plain() -> Tensor:
    """[ROWS, N] one cell in each forward."""
    return in_order(cells_of(decode_cells(target(), ROWS, seed=100)), 100)


def in_order(cells: Tensor, seed: int) -> Tensor:
    """Cells [B, N] in the order in which they were decided."""
    place = torch.arange(cells.shape[1]).expand_as(cells)
    rank = RandomStream.from_seed(seed, len(cells)).uniform(place, Purpose.ORDER, 1, torch.float64)
    return cells.gather(1, rank[..., 0].argsort(-1))


def statistics(cells: Tensor) -> dict[str, Tensor]:
    """Numbers of each image whose distributions are compared: cells, and pairs of neighbours."""
    pairs = list(enumerate(zip(cells.T, cells.T[1:], strict=False)))
    found = {f"cell {i}": cell for i, cell in enumerate(cells.T)} | {"sum": cells.sum(1)}
    found |= {f"difference {i}": after - here for i, (here, after) in pairs}
    return found | {f"product {i}": here * after for i, (here, after) in pairs}


def distances(seed: int, rule: AcceptanceRule, **options: Any) -> dict[str, float]:
    """Distances between decoding with three drafts a round and plain decoding with other noise."""
    drafter = CellModelDrafter(worse(), 3, 0.0, **options)
    canvas = decode_cells(target(), ROWS, drafter, rule, seed)
    assert canvas.stats.acceptance_rate > 0.05
    found, expected = statistics(in_order(cells_of(canvas), seed)), statistics(plain())
    return {name: distance(values, expected[name]) for name, values in found.items()}


@pytest.mark.parametrize("rule", [CSpD(), SpeculativeSampling()])
@pytest.mark.every(2)
def test_joint_distribution_is_that_of_plain_decoding(rule: AcceptanceRule) -> None:
    alarm = math.sqrt(math.log(2 / ALARM) / ROWS)
    for name, found in distances(0, rule).items():
        assert found < alarm, name


def test_prefill_is_plain_decoding_of_the_first_cells() -> None:
    drafter = CellModelDrafter(worse(), 3, prefill=0.5)
    expected = in_order(cells_of(decode_cells(target(), 50)), 0)[:, :2]
    found = in_order(cells_of(decode_cells(target(), 50, drafter, CSpD())), 0)[:, :2]
    assert torch.equal(found, expected)


def test_keeping_what_was_drafted_behind_a_refused_cell_is_a_bias_that_shows() -> None:
    assert distances(0, CSpD(), rollback=False)["difference 0"] > 0.05


def ratios(rule: CSpD, rows: int = 50_000) -> Tensor:
    """Return the acceptance ratios [rows] of candidates with another mean and deviation."""
    random, place = RandomStream.from_seed(1, rows), torch.zeros(rows, 1, dtype=torch.long)
    p, q = (
        Denoising(Head(), None, torch.tensor([[[mean, std]]]).expand(rows, 1, 2), None, 1.0, 1.0)
        for mean, std in ((0.0, 1.0), (0.3, 1.1))
    )
    x, q = q.candidate(random, place, Purpose.DRAFT)
    own = p.draw(random, place, Purpose.DRAFT)
    assert q.drawn is not None and torch.equal(own[..., 0, :], q.drawn[..., 0, :])  # the noise is the draft's
    return (rule.last(p, own).log_density(x) - rule.last(q, q.drawn).log_density(x)).exp()[:, 0]


def test_ratios_of_drafts_have_mean_one_and_those_with_a_variance_factor_another() -> None:
    """With a variance factor, the mean is that of two steps of 1.1 times the deviation."""
    for factor, mean in (("none", 1.0), ("published", 1.1**2), ("released", 1.1**-2)):
        found = ratios(CSpD(variance_factor=factor, max_tries=100))
        error = float(found.std()) / len(found) ** 0.5
        assert abs(float(found.mean()) - mean) < 3 * error
        assert (abs(float(found.mean()) - 1) > 10 * error) == (factor != "none")


@dataclass
class ReadOut(Head):
    """Head whose conditions hold a mean of four numbers."""

    def process(
        self, condition: Tensor, unconditional: Tensor | None, scale: Any, temperature: Any, schedule: Any
    ) -> Chain:
        mean, other = condition[..., :4], unconditional
        if other is not None:
            mean = other[..., :4] + scale * (mean - other[..., :4])
        return Chain(mean, torch.full_like(mean, 0.5) * temperature, self.steps, self.keeps, 4)


@functools.cache
def masked(change: float = 0.0) -> MARTarget:
    """A tiny MAR with that head, whose cells depend on each other, and hardly on the class.

    Args:
        change: how far its weights are from those of the target.
    """
    model: Any = random_weights(MARForImageGeneration(mar().model.config), 0)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data = 3 * weight + change * torch.randn(weight.shape, generator=generator)
    del model.diffloss
    model.diffloss = ReadOut()
    return MARTarget(model)


def first_draft(**options: Any) -> Draft:
    """The first draft of five cells of three images of a tiny MAR."""
    seen, propose = list[Draft](), CellModelSession.propose

    def keep(self: CellModelSession, canvas: Canvas) -> Draft:
        seen.append(propose(self, canvas))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CellModelSession, "propose", keep)
        decode_cells(masked(), 3, CellModelDrafter(masked(0.1), 5, 0.0, **options), CSpD())
    return seen[0]


@torch.inference_mode()
def conditions(draft: Draft) -> Tensor:
    """[B, L, D] of the cells that roots predict, before anything is known."""
    state, _ = masked().prefill([{"input_ids": torch.tensor([[0]])}] * 3, SIDE**2)
    return masked().score(state, draft).logits[:, ::2]


@torch.inference_mode()
def test_the_target_sees_the_candidates_before_each_cell() -> None:
    draft = first_draft()
    slots, tokens = draft.nodes.slots[:, ::2], draft.nodes.tokens[:, 1::2]
    found = conditions(draft)
    for row in range(3):
        image, known = torch.zeros(1, SIDE**2, tokens.shape[-1]), torch.zeros(1, SIDE**2, dtype=torch.bool)
        for lane in range(5):
            cell = slots[row, lane]
            expected = masked().model.conditions(image, known, torch.tensor([0]))[0, cell]
            assert torch.allclose(found[row, lane], expected, atol=1e-5), (row, lane)
            image[0, cell], known[0, cell] = tokens[row, lane], True


def test_the_target_as_its_own_draft_is_accepted_whole() -> None:
    settings: dict[str, Any] = {"guidance_scale": 1_000.0, "guidance_schedule": "rising"}
    canvas = decode_cells(masked(), 20, CellModelDrafter(masked(), 4, 0.1), CSpD(), **settings)
    assert canvas.stats.acceptance_rate > 0.99  # but for the rounding of forwards with more rows
    if canvas.stats.acceptance_rate == 1.0:
        assert (canvas.stats.target_forwards, canvas.stats.draft_passes) == (3, 8)


def test_the_guidance_scale_of_a_cell_is_that_of_its_place_in_the_order() -> None:
    """One image of nine cells, the first two by the target alone, then drafts of four and three."""
    scales, rule = list[Tensor](), CSpD()

    class Watching(LastStep):
        def compared(self, draft: Draft, scores: Denoising, *rest: Any) -> Any:
            assert isinstance(scores.scale, Tensor)
            scales.append(scores.scale[:, 0, 0])
            return rule.compared(draft, scores, *rest)

    settings: dict[str, Any] = {"guidance_scale": 3.0, "guidance_schedule": "rising"}
    decode_cells(masked(), 1, CellModelDrafter(masked(), 4, 0.2), Watching(), **settings)
    known = torch.tensor([3, 4, 5, 6, 7, 8, 8])  # with the cell itself; at most all but one, as published
    torch.testing.assert_close(torch.cat(scales)[:7], 1 + 2 * known / 9)  # the last one has no cell left


def test_what_exact_refers_to_is_named_as_forwards_of_several_cells_and_of_one_differ() -> None:
    cells = {order: CellModelDrafter(worse(), order=order) for order in ORDERS}
    kept = {
        "masked": build_accelerator("masked").keeps,
        "draft_model": Accelerator("draft_model", cells["random"], SpeculativeSampling()).keeps,
        **{order: Accelerator("cspd", cells[order], CSpD()).keeps for order in ORDERS},
    }
    assert "drawn independently" in kept["masked"]
    assert kept["random"] == kept["draft_model"] and "each given all before it" in kept["random"]
    assert kept["checkerboard"] == f"{kept['random']}, in checkerboard order"
    for accelerator in (build_accelerator("masked", iterations=4), build_accelerator("none")):
        assert accelerator.keeps == "", "no claim, or nothing to tell apart"
    shown = [stated(*promise_of(method)) for method in METHODS.values()]
    assert any(kept["masked"] in one for one in shown)
    assert sum(kept["random"] in one for one in shown) == 2
    assert cells["checkerboard"].reference == f"masked:iterations={worse().grid.cells}:order=checkerboard"
    assert build_accelerator("masked").drafter.reference == "none"


def test_what_cannot_be_is_refused() -> None:
    llama: Any = CausalTarget(tiny_llama())
    cases: dict[str, Any] = {
        "temperature": lambda: CSpD(temperature=0.0),
        "variance_factor": lambda: CSpD(variance_factor="correct", max_tries=9),
        "max_tries": lambda: CSpD(variance_factor="published"),
        "prefill": lambda: CellModelDrafter(worse(), prefill=1.5),
        "num_draft_tokens": lambda: CellModelDrafter(worse(), 0),
        "accelerator": lambda: Accelerator("cspd", CellModelDrafter(worse()), CSpD()).fit(llama),
        "drafter": lambda: CellModelDrafter(worse()).fit(mar()),
        "schedule": lambda: decode_cells(
            mar(), 1, CellModelDrafter(mar()), CSpD(), schedule=DDPMSchedule(steps=4)
        ),
        "rollback": lambda: CellModelDrafter(worse(), rollback=cast(Any, 0)),
    }
    for name, case in cases.items():
        with pytest.raises(InputError) as caught:
            case()
        assert name in str(caught.value)
