"""Heads that draft frequent tokens alone, by rows of their target's output matrix (FR-Spec, 2502.14856)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspec.core.sampling import Sampler
from mmspec.targets import CausalTarget
from tests.contracts.checks import PROMPTS, precise
from tests.contracts.running import decode
from tests.contracts.test_drafters import HEADS
from tests.heads.frequent_checks import FEW, KINDS, few_for, same_of_all
from tests.methods.eagle_checks import Gullible
from tests.tiny_models import tiny_llama


def drafter_for(name: str, target: CausalTarget, few: int = FEW) -> Any:
    kind, _, shape = KINDS[name]
    return HEADS[kind][0](few_for(name, target, few), **shape).fit(target)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(2)
def test_drafts_are_those_of_all_logits_without_the_other_tokens(name: str) -> None:
    """Any path of a draft is accepted, so that the outputs consist of drafted tokens."""
    kind, _, shape = KINDS[name]
    target, drafter = precise(), drafter_for(name, precise())
    tokens = drafter.model.draft_tokens
    others = torch.ones(target.vocabulary, dtype=torch.bool).index_fill(0, tokens, False)
    whole = HEADS[kind][0](same_of_all(name, target, drafter.model), **shape).fit(target)
    whole.read_out = lambda hidden: target.head(hidden).masked_fill(others, -torch.inf)
    how: dict[str, Any] = {"rule": Gullible(), "sampler": Sampler(0.9), "max_new_tokens": 16}
    run = decode(target, PROMPTS, drafter, **how)
    assert run.outputs == decode(target, PROMPTS, whole, **how).outputs
    drafted = {
        token
        for tokens, flags in zip(run.outputs, run.canvas.drafted, strict=True)
        for token, is_drafted in zip(tokens, flags, strict=True)
        if is_drafted
    }
    assert len(drafted) > 1 and drafted <= {*tokens.tolist()}


def with_bias(target: CausalTarget) -> None:
    output = nn.Linear(32, 64).requires_grad_(False)
    output.weight.copy_(target.model.lm_head.weight)
    target.model.lm_head = output


def hooked(target: CausalTarget) -> None:
    target.model.lm_head.register_forward_hook(lambda module, args, logits: 5 * logits.tanh())


class Halved(nn.Linear):
    """A linear layer that computes more than a product with its weights, like quantised layers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) / 2


def of_another_type(target: CausalTarget) -> None:
    target.model.lm_head.__class__ = Halved


@pytest.mark.parametrize(
    ("change", "is_open"), [(None, True), (with_bias, True), (hooked, False), (of_another_type, False)]
)
def test_rows_read_out_what_all_logits_say_of_their_tokens(change: Any, is_open: bool) -> None:
    target, tokens = CausalTarget(tiny_llama().requires_grad_(False)), torch.tensor([3, 60, 17])
    if change is not None:
        change(target)
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    read_out, due = target.head_of(tokens), target.head(hidden)
    torch.testing.assert_close(read_out(hidden), due[..., tokens])
    assert torch.equal(target.head_of(None)(hidden), due)
    rows = target.output_rows(tokens)
    assert (rows is not None) == is_open
    target.model.get_output_embeddings().weight.zero_()
    gathered = torch.allclose(read_out(hidden), due[..., tokens], atol=1e-5)
    assert gathered == is_open, "rows are gathered once, and nothing else is kept"
