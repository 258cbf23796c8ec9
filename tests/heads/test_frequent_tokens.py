"""Heads that draft frequent tokens alone, by rows of their target's output matrix (FR-Spec, 2502.14856)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspec.accelerator import Accelerator
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.heads.checkpoint import load_head
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import CausalTarget
from mmspec.training.export import write_checkpoint
from mmspec.training.recipes import RECIPES
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS, llama, precise
from tests.contracts.running import decode, generate
from tests.contracts.test_drafters import HEADS
from tests.heads.frequent_checks import FEW, KINDS, few_for, same_of_all
from tests.methods import heads_checks
from tests.methods.eagle_checks import Gullible, llamagen
from tests.targets.image_loop import draw
from tests.tiny_models import tiny_llama, tiny_lm

SEEDS = [5, 6, 7]


def drafter_for(name: str, target: CausalTarget, few: int = FEW) -> Any:
    kind, _, shape = KINDS[name]
    return HEADS[kind][0](few_for(name, target, few), **shape).fit(target)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(3)
def test_greedy_outputs_are_those_of_generate(name: str) -> None:
    expected = [generate(llama().model, prompt, 20) for prompt in PROMPTS]
    run = decode(llama(), PROMPTS, drafter_for(name, llama()), max_new_tokens=20)
    assert run.outputs == expected and sum(run.stats.drafted) > 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(3)
def test_sampled_outputs_are_bitwise_those_of_plain_decoding(name: str) -> None:
    how: dict[str, Any] = {"sampler": Sampler(1.0), "seed": SEEDS, "max_new_tokens": 16}
    expected = decode(precise(), PROMPTS, **how).outputs
    assert decode(precise(), PROMPTS, drafter_for(name, precise()), **how).outputs == expected


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(3)
def test_drafts_are_those_of_all_logits_without_the_other_tokens(name: str) -> None:
    """Any path of a draft is accepted, so that the outputs are made of the drafts' tokens."""
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


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_head_keeps_its_tokens(name: str, tmp_path: Path) -> None:
    head = few_for(name, llama())
    head.save_pretrained(tmp_path)
    again: Any = load_head(KINDS[name][0], tmp_path, llama().config)
    assert again.config.frequent_tokens == FEW
    assert torch.equal(again.draft_tokens, head.draft_tokens)
    assert all(torch.equal(again.state_dict()[key], own) for key, own in head.state_dict().items())


def test_images_that_are_drawn() -> None:
    """Under guidance; logits of an image's tokens are indexed."""
    target = llamagen()
    requests = image_requests(target, class_labels=[0, 3], guided=True)
    plain, _ = draw(target, Accelerator("none", NoDrafter(), SampleAndMatch()), requests, 3.0, 0.8)
    drafter = drafter_for("eagle", target, 12)
    drawn, stats = draw(target, Accelerator("eagle", drafter, SampleAndMatch()), requests, 3.0, 0.8)
    assert drawn == plain and sum(stats.drafted) > 0


def with_bias(target: CausalTarget) -> None:
    output = nn.Linear(32, 64).requires_grad_(False)
    output.weight.copy_(target.model.lm_head.weight)
    target.model.lm_head = output


def hooked(target: CausalTarget) -> None:
    target.model.lm_head.register_forward_hook(lambda module, args, logits: 5 * logits.tanh())


class Halved(nn.Linear):
    """A matrix that is more than its weights, as quantised ones are."""

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


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    target = CausalTarget(tiny_lm())
    for method, settings in (
        ("medusa", {"frequent_tokens": 65}),
        ("medusa", {"frequent_tokens": -1}),
        ("hydra", {"frequent_tokens": 5, "own_lm_heads": True}),
        ("eagle3", {"frequent_tokens": 5}),
        ("dflash", {"frequent_tokens": 5, "draft_vocabulary": 5}),
    ):
        with pytest.raises(InputError, match="frequent_tokens"):
            RECIPES[method].build(target, **settings)
    head: Any = few_for("mtp", target)
    with pytest.raises(InputError, match="frequent_tokens"):
        write_checkpoint(head, tmp_path, tmp_path)
    with pytest.raises(InputError, match="at most 2"):
        drafter, few = HEADS["medusa"][0], heads_checks.medusa_for(target, frequent_tokens=2)
        drafter(few, num_draft_tokens=3, depth=1, top_k=3).fit(target)
