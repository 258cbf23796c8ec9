"""The vertical head learns from images that the target draws itself, cell by cell."""

from __future__ import annotations

import pytest
import torch

from extras.tests.test_ssd import head_for
from mmspec.core.image_grid import FREE
from mmspec.core.interfaces import Request
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.training.data.sequences import Trial, decode
from mmspec.training.recipes import RECIPES
from mmspec_extras.methods.ssd import loss as ssd
from mmspec_extras.methods.ssd.loss import CellBatch, VerticalLoss
from tests.contracts.checks import PROMPTS
from tests.tiny_models.llamagen import tiny_llamagen
from tests.training.test_cjd_loss import Prompts
from tests.trees.jacobi_checks import GRID, images

GUIDANCE = 3.0


class RowsWithEnds:
    """Two images of a toy model whose rows end in a syntax token."""

    def prompts(self, step: int, process: int) -> Trial:
        conditional, negative = (
            {"input_ids": torch.tensor([list(PROMPTS[row])])} for row in (1 + step % 2, 0)
        )
        request = Request(conditional, negative_inputs=negative, layout=GRID)
        return Trial([request] * 2, Sampler(1.0, guidance_scale=GUIDANCE), GRID.length)


@torch.no_grad()
def test_cells_are_those_of_the_images_that_came_out() -> None:
    """States and goals equal those of one forward pass over each image."""
    target, data = images(), RowsWithEnds()
    loss = VerticalLoss(head_for(target), target)
    batch = loss.make(data, 0, 0)
    trial = data.prompts(0, 0)
    drawn = decode(target, NoDrafter(), trial, 0).outputs()
    free = [place for place, token in enumerate(GRID.forced) if token == FREE]
    above = [place for place in free if place + GRID.stride in free]
    assert batch.goal.shape[:2] == (2, len(above)) and len(above) == GRID.cells - GRID.columns
    for row, tokens in enumerate(drawn):
        states = []
        for inputs in (trial.requests[row].inputs, trial.requests[row].negative_inputs):
            assert inputs is not None
            ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], 1)
            states.append(target.read([{"input_ids": ids}], (-1,))[-1][:, inputs["input_ids"].shape[1] :])
        read = torch.cat(states, -1)[0, above]
        logits, unconditional = (target.head(each)[0] for each in states)
        due = (unconditional + GUIDANCE * (logits - unconditional))[[at + GRID.stride - 1 for at in above]]
        # cells have a random order, so that each is found by its states
        found = torch.cdist(batch.states[row], read).argmin(-1)
        assert sorted(found.tolist()) == list(range(len(above)))
        assert torch.allclose(batch.states[row], read[found], atol=1e-6)
        codes = batch.is_code[0, 0]
        assert int(codes.sum()) == GRID.codebook_size
        assert torch.allclose(
            batch.goal[row][:, codes].softmax(-1), due[found][:, codes].softmax(-1), atol=1e-6
        )


@pytest.fixture(scope="module")
def batch() -> tuple[LlamaGenTarget, CellBatch]:
    target = LlamaGenTarget(tiny_llamagen("class"))
    return target, VerticalLoss(head_for(target), target).make(Prompts(target), 0, 0)


def test_it_learns(batch: tuple[LlamaGenTarget, CellBatch]) -> None:
    target, cells = batch
    torch.manual_seed(0)
    head = RECIPES["ssd"].build(target, width=64)
    loss = RECIPES["ssd"].learn(head, target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    told = []
    for _ in range(40):
        value, figures = loss(cells)
        told.append(float(figures["distance"]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert told[-1] < 0.7 * told[0]


def test_excluded_tokens_give_gradients_that_are_numbers(batch: tuple[LlamaGenTarget, CellBatch]) -> None:
    target, cells = batch
    loss = VerticalLoss(head_for(target), target)
    goal = cells.goal.index_fill(-1, torch.tensor([3, 4]), -torch.inf)
    is_code = cells.is_code.index_fill(-1, torch.tensor([5]), False)
    value, _ = loss(CellBatch(cells.states, goal, is_code))
    value.backward()
    gradients = [weight.grad for weight in loss.head.parameters() if weight.grad is not None]
    assert value.isfinite() and gradients and all(gradient.isfinite().all() for gradient in gradients)


def test_a_step_learns_from_some_cells_of_some_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of cells is limited for any image size; a run that continues from any step draws images."""
    monkeypatch.setattr(ssd, "CELLS", 10)
    target, data = images(), RowsWithEnds()
    loss = VerticalLoss(head_for(target), target)
    assert loss.make(data, 3, 0).states.shape[:2] == (2, 5) and len(loss.drawn) == 1
    loss.make(data, 4, 0)
    assert len(loss.drawn) == 1
    loss.make(data, 8, 0)
    assert len(loss.drawn) == 2
    assert loss.measure([]) == {"columns": GRID.columns, "codebook": []}
