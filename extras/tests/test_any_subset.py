"""Gaps of a text, filled by an XLNet: plain decoding, self-drafting, and the joint distribution."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, XLNetConfig, XLNetLMHeadModel

from extras.benchmarks.gaps import hide, loss_of, main
from mmspec.accelerators import build_accelerator
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.targets import CausalTarget, adapt
from mmspec_extras.families.xlnet.target import AnySubsetTarget
from tests.contracts.running import Run, decode
from tests.tiny_models import randomise, tiny_llama

WORDS, MASK, END = 12, 6, 2
PROMPTS = [[3, MASK, 4, MASK, MASK, 5, MASK], [MASK, 9, MASK, 8], [7, 7, MASK, MASK, MASK, 1, 3, 3]]
GAPS = [4, 2, 3]


@functools.cache
def model() -> PreTrainedModel:
    config = XLNetConfig(
        vocab_size=WORDS, d_model=32, n_layer=2, n_head=4, d_inner=48, eos_token_id=END, dropout=0.0
    )
    made: PreTrainedModel = randomise(XLNetLMHeadModel(config), 4)
    made.lm_loss.weight.data *= 0.5
    return made.eval()


@functools.cache
def target() -> AnySubsetTarget:
    made = adapt(model())
    assert isinstance(made, AnySubsetTarget)
    return made


def slow(tokens: list[int], gap: int) -> Tensor:
    """Logits of a gap, given the tokens of all places without a mask."""
    place = torch.arange(len(tokens))
    known = torch.tensor(tokens) != MASK
    hidden = (~known)[None, None].expand(1, len(tokens), -1).float().clone()
    mapping = (place == gap)[None, None].float()
    # known tokens are read in the order of decisions: the prompt first, then gaps from left to right
    logits = model()(torch.tensor([tokens]), perm_mask=hidden, target_mapping=mapping, use_mems=False).logits
    found: Tensor = logits[0, 0].index_fill(0, torch.tensor(MASK), -torch.inf)
    return found


def run_of(accelerator: Any, sampler: Sampler, rows: list[int], **more: Any) -> Run:
    made = accelerator.fit(target())
    prompts = [PROMPTS[row] for row in rows]
    settings = {"max_new_tokens": 9, "seed": rows, "end": [END], **more}
    return decode(target(), prompts, made.drafter, made.rule, sampler, **settings)


def test_the_first_gap_is_what_the_model_says_of_it() -> None:
    """Later gaps read the tokens of gaps in the order of decisions; see the next tests."""
    state, output = target().prefill([{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS], 0)
    for row, prompt in enumerate(PROMPTS):
        found = slow(prompt, prompt.index(MASK))
        torch.testing.assert_close(output.logits[row, 0], found, atol=1e-4, rtol=1e-4)
    assert state.count.tolist() == GAPS


def test_gaps_are_filled_and_the_output_ends() -> None:
    run = run_of(build_accelerator("none"), Sampler(), [0, 1, 2])
    for output, gaps in zip(run.outputs, GAPS, strict=True):
        assert output.index(END) <= gaps and len(output) <= gaps + 1
    for row in range(3):
        assert run_of(build_accelerator("none"), Sampler(), [row]).outputs == [run.outputs[row]]


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0)], ids=["greedy", "sampled"])
def test_coupled_drafts_give_the_output_of_plain_decoding(count: int, sampler: Sampler) -> None:
    plain = run_of(build_accelerator("none"), sampler, [0, 1, 2])
    made = build_accelerator("assd", num_draft_tokens=count, sampling="coupled")
    fast = run_of(made, sampler, [0, 1, 2])
    assert fast.outputs == plain.outputs and fast.stats.draft_passes > 0
    assert sum(fast.stats.accepted) >= 3, "the first candidate has the same context in both forward passes"


def test_the_first_candidate_of_a_round_is_always_accepted() -> None:
    run = run_of(build_accelerator("assd", num_draft_tokens=3), Sampler(1.0), [0, 2], end=())
    accepted = [histogram for histogram in run.stats.accepted_histograms]
    assert all(min(each) >= 1 for each in accepted if each)


def test_the_joint_distribution_is_that_of_the_model() -> None:
    """The distribution of two gaps over all pairs of words; independent draws would be further away."""
    rows, prompt = 4000, [3, MASK, MASK, 5]
    made = build_accelerator("assd", num_draft_tokens=2).fit(target())
    how: dict[str, Any] = {"max_new_tokens": 2, "seed": [*range(rows)]}
    run = decode(target(), [prompt] * rows, made.drafter, made.rule, Sampler(1.0), **how)
    state, first = target().prefill([{"input_ids": torch.tensor([prompt])}], 0)
    second = torch.tensor([[1]])
    p, exact = first.logits[0, 0].softmax(-1), torch.zeros(WORDS, WORDS)
    for word in range(WORDS):
        tokens = target().filled(state, torch.tensor([[word]]), torch.tensor([[0]]))
        exact[word] = p[word] * target().predict(state, tokens, state.ranks, second)[0, 0].softmax(-1)
    counts = torch.zeros(WORDS, WORDS)
    for one, two in run.outputs:
        counts[one, two] += 1 / rows
    noise = float((exact * (1 - exact) / rows).sqrt().sum())
    alone = target().predict(state, state.tokens, state.ranks.clamp_max(0), second)[0, 0].softmax(-1)
    distance = float((counts - exact).abs().sum() / 2)
    assert made.exactness == "exact" and distance < 0.6 * noise
    assert float((p[:, None] * alone - exact).abs().sum() / 2) > 2 * distance


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="assd"):
        build_accelerator("assd").fit(CausalTarget(tiny_llama()))
    with pytest.raises(InputError, match="gap"):
        target().arrange([{"input_ids": torch.tensor([[1, 2]])}])
    with pytest.raises(InputError, match="sampling"):
        build_accelerator("assd", sampling="greedy")


def test_the_loss_is_that_of_the_gaps_as_they_are_filled() -> None:
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(MASK + 1, WORDS, (2, 7), generator=noise)
    gaps = hide(tokens, torch.tensor([0.5, 0.9]), noise)
    assert gaps.sum(-1).tolist() == [3, 6]
    made = AnySubsetTarget(model())
    nats = list[float]()
    for row, hidden in zip(tokens, gaps, strict=True):
        prompt = row.masked_fill(hidden, MASK)
        state = made.arrange([{"input_ids": prompt[None]}])
        filled = made.filled(state, row[hidden][None], torch.arange(int(hidden.sum()))[None])
        ahead = torch.arange(int(hidden.sum()))[None]
        log_p = made.predict(state, filled, state.ranks, ahead).log_softmax(-1)[0]
        nats += (-log_p.gather(1, row[hidden][:, None]))[:, 0].tolist()
    assert float(loss_of(model(), tokens, gaps, MASK)) == pytest.approx(sum(nats) / len(nats), abs=1e-4)


def test_a_model_is_made_loaded_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config of an XLNet has -1 positions, because their number has no limit."""
    main(minutes=0.0, layers=1, width=32, texts=1, out=tmp_path)
    assert "assd" in capsys.readouterr().out
