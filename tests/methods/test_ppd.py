"""PPD: trained prompt tokens after candidates, which draft in the target's forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.methods.ppd.drafter import PromptTokensDrafter, PromptTokensSession, place_probes
from mmspec.methods.ppd.head import PromptTokens, PromptTokensConfig
from mmspec.methods.ppd.loss import PromptTokensLoss
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from tests.contracts.checks import PROMPTS, llama, precise
from tests.contracts.running import decode, generate
from tests.methods.heads_checks import randomise
from tests.tiny_models import tiny_llama
from tests.trees.length_checks import paced


def drafter_for(target: CausalTarget, **shape: Any) -> PromptTokensDrafter:
    """A drafter with prompt tokens that are random, but as large as the target's own."""
    with torch.random.fork_rng():
        head = PromptTokens(PromptTokensConfig.for_target(target.config, target.vocabulary))
    randomise(head, target, 3)
    words = target.embed(torch.arange(4))
    head.embeddings.mul_(words.norm(dim=-1).mean() / head.embeddings.norm(dim=-1).mean())
    return PromptTokensDrafter(head, **shape).fit(target)


class Drafts(list[Any]):
    """The drafts of a drafter's sessions, with the output before each."""

    def watch(self, drafter: PromptTokensDrafter) -> PromptTokensDrafter:
        def session(*made: Any) -> PromptTokensSession:
            opened = PromptTokensSession(*made)
            propose = opened.propose

            def watched(canvas: Any) -> Any:
                draft = propose(canvas)
                self.append((canvas.tokens.clone(), canvas.emitted.clone(), draft))
                return draft

            opened.propose = watched  # type: ignore[method-assign]
            return opened

        drafter.session = session
        return drafter


@pytest.mark.parametrize(
    "shape", [{}, {"num_draft_tokens": 5, "probes_per_node": 0.3}, {"tree": "3x2"}], ids=str
)
def test_greedy_output_of_a_ragged_batch_is_that_of_generate(shape: dict[str, Any]) -> None:
    expected = [generate(llama().model, prompt, 24) for prompt in PROMPTS]
    drafter = drafter_for(llama(), **shape)
    run = decode(llama(), PROMPTS, drafter, max_new_tokens=24)
    assert run.outputs == expected and sum(run.stats.accepted) > 0
    assert decode(llama(), PROMPTS, paced(drafter), max_new_tokens=24).outputs == expected


@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
def test_sampled_output_is_bitwise_that_of_plain_decoding(sampling: str) -> None:
    rows: Any = {"sampler": Sampler(0.9, top_p=0.95), "max_new_tokens": 24, "seed": [7, 8, 9]}
    drafter = drafter_for(precise(), sampling=sampling, num_draft_tokens=7)
    assert (
        decode(precise(), PROMPTS, drafter, **rows).outputs
        == decode(precise(), PROMPTS, NoDrafter(), **rows).outputs
    )


def test_levels_are_what_the_target_says_of_its_output_and_the_prompt_tokens() -> None:
    """Compared with forward passes without a cache, with prompt tokens in place of the root."""
    target, seen = precise(), Drafts()
    drafter = seen.watch(drafter_for(target, num_draft_tokens=6, depth=3, top_k=2, probes_per_node=3))
    decode(target, [PROMPTS[0]], drafter, max_new_tokens=24)
    for tokens, emitted, draft in seen[1:]:
        before = [*PROMPTS[0], *tokens[0, : int(emitted[0]) - 1].tolist()]
        known = target.embed(torch.tensor([before]))
        embeddings = torch.cat([known, drafter.model.embeddings[None]], 1)
        logits = target.model(inputs_embeds=embeddings).logits[0, len(before) :]
        for level in range(3):
            at = (draft.depth[0] == level + 1).nonzero().flatten()
            likeliest = logits[level].topk(2).indices.tolist()
            assert set(draft.tokens[0, at].tolist()) <= set(likeliest) and draft.valid[0, at].all()
    assert len(seen) > 5


def test_probes_stand_where_a_round_is_likely_to_end() -> None:
    parents = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 2]])
    paths = torch.tensor([[1.0, 0.6, 0.3, 0.5], [1.0, 1.0, 1.0, 1.0]]).log()
    hosts, steps = place_probes(parents, paths, [0.5, 0.25], 4)
    # ends: .1, .1, .3, .5; a chain that is sure ends at its last node, and what is left goes to the first
    assert hosts.tolist() == [[2, 2, 3, 3], [0, 0, 3, 3]] and steps.tolist() == [[0, 1, 0, 1]] * 2


def test_drawn_candidates_deeper_trees_and_nan_are_refused() -> None:
    model = drafter_for(llama()).model
    for argument, value in (("sampling", "sampled"), ("depth", 4), ("probes_per_node", 3.5)):
        shape: dict[str, Any] = (
            {argument: value, "tree": "2x2"} if argument == "sampling" else {argument: value}
        )
        with pytest.raises(InputError) as caught:
            PromptTokensDrafter(model, **shape)
        assert caught.value.argument == argument
    model.embeddings[0, 0] = torch.nan
    with pytest.raises(InputError, match="finite"):
        PromptTokensDrafter(model).fit(llama())


def test_prompt_tokens_that_know_a_periodic_text_give_all_their_levels_in_a_forward() -> None:
    """The model was trained on inputs with blanks, which the prompt tokens learn to imitate."""
    text = torch.arange(40) % 3 + 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tiny_llama(vocab=8).requires_grad_(True)
        rows = torch.stack([text[start : start + 30] for start in range(3)])
        learn(model, 60, 0.01, lambda: model(rows.where(torch.rand(rows.shape) > 0.4, 0), labels=rows).loss)
        target, prompt = CausalTarget(model.requires_grad_(False).eval()), text[:6].tolist()
        drafter = drafter_for(target, num_draft_tokens=3, top_k=1)
        loss = PromptTokensLoss(drafter.model.requires_grad_(True), target, cuts=20)
        example = TrainingExample({"input_ids": text[None]}, 6)
        learn(drafter.model, 30, 0.1, lambda: loss(DrafterBatch((example,), 0))[0])
    run = decode(target, [prompt], drafter, max_new_tokens=30)
    assert run.outputs == [text[6:36].tolist()]
    # the first round has no predictions yet
    assert run.stats.accepted_histogram == {0: 1, 3: 7}


def learn(model: torch.nn.Module, steps: int, rate: float, loss: Callable[[], torch.Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
