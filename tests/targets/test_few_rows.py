"""Linear layers of few rows on a CPU: the same product in another order, and for a while alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmspec.decoding.draft import DraftKind, Tree
from mmspec.targets import CausalTarget, few_rows
from mmspec.targets.few_rows import FewRows, few_rows_linear, width
from tests.tiny_models.text import tiny_llama


@pytest.fixture(params=[1, 4], ids="threads={}".format)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(few_rows, "turning_pays", lambda threads: True)
    count: int = request.param
    return count


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_those_of_the_layer(threads: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    for rows in range(1, 40):
        x = torch.randn(rows, 24, generator=generator)
        expected = layer(x)
        for given in (x, x.T.contiguous().T, x[None], x.view(rows, 1, 24)):
            found = few_rows_linear(given, layer.weight, layer.bias)
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected.view(found.shape), atol=1e-5, rtol=1e-5)


def test_widths_hold_all_rows() -> None:
    """Up to six rows are turned on one thread, up to 32 on several; a single one on several alone."""
    assert [rows for rows in range(1, 99) if width(rows, 1)] == [2, 3, 4, 5, 6]
    assert [rows for rows in range(1, 99) if width(rows, 2)] == [*range(1, 33)]
    assert all(width(rows, 2) >= rows for rows in range(1, 33))


def test_layers_are_turned_for_a_while(threads: int) -> None:
    """But not those of another dtype, and not those whose forward is another's."""

    def of_others(x: Tensor) -> Tensor:
        return x

    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8)])
    turned = FewRows(model)
    model[2].forward = of_others
    x = torch.randn(4, 8)
    with turned():
        assert "forward" in vars(model[0])
        assert torch.equal(model[1](x.double()), linear(x.double(), model[1].weight, model[1].bias))
        assert model[2](x) is x
    assert "forward" not in vars(model[0]) and model[2].forward is of_others
    with pytest.raises(ZeroDivisionError), turned():
        raise ZeroDivisionError
    assert "forward" not in vars(model[0])


def test_a_target_turns_the_layers_of_its_drafts(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(x.numel() // x.shape[-1])
        return few_rows_linear(x, weight, bias)

    monkeypatch.setattr(few_rows, "few_rows_linear", noted)
    target = CausalTarget(tiny_llama())
    state, _ = target.prefill([{"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}], 16)
    assert not seen  # prompts are read as ever
    draft = Tree.chain(torch.tensor([[9, 2, 6]]), DraftKind.POINT)
    turned = target.score(state, draft).logits
    layers = [each for each in target.model.modules() if type(each) is nn.Linear]
    assert seen == [3] * len(layers)
    monkeypatch.setattr(few_rows, "turning_pays", lambda threads: False)
    torch.testing.assert_close(turned, target.score(state, draft).logits)
    assert seen == 2 * [3] * len(layers)
