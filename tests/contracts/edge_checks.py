"""Checks of edge cases: ends of rows, the effect of a bad row on other rows, prompts of unequal length."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StopStringCriteria

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import TargetOutput
from mmspec.core.sampling import Sampler
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.targets.causal import CausalState
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.checks import PROMPTS, VOCABULARY, llama, precise
from tests.contracts.running import decode, futures, generate, random_prompts
from tests.oracles import OracleDrafter
from tests.tiny_models import tiny_lm


class EndsAfter(StoppingCriteria):
    """A user's criterion: stop as soon as the last two tokens are in order."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return input_ids[:, -1] == input_ids[:, -2] + 1


def end_token_anywhere() -> None:
    """An end token as first, middle or last draft token, as bonus token or as sibling: equals `generate`."""
    target = llama()
    for prompt in PROMPTS:
        plain = generate(target.model, prompt, 16)
        known = {tuple(prompt): plain}
        for end in sorted(set(plain)):
            expected = plain[: plain.index(end) + 1]
            for drafter in (
                OracleDrafter(known, 4, VOCABULARY),
                OracleDrafter(known, 4, VOCABULARY, siblings=1),
                OracleDrafter(known, 4, VOCABULARY, corruption=0.4),
            ):
                run = decode(target, [prompt], drafter, max_new_tokens=16, end=[end])
                assert run.outputs == [expected], f"end token {end} at {len(expected) - 1}"
                assert run.canvas.finish_reasons == ["eos"]


def length_is_cut_inside_a_block() -> None:
    plain = {tuple(prompt): generate(llama().model, prompt, 20) for prompt in PROMPTS}
    for limit in range(12):
        run = decode(llama(), PROMPTS, OracleDrafter(plain, 5, VOCABULARY), max_new_tokens=limit)
        assert run.outputs == [output[:limit] for output in plain.values()]
        assert sum(run.stats.new_tokens) == 3 * limit, "what was cut is not counted"


def finished_rows_leave_the_others_alone() -> None:
    """A row that ends inside a long accepted block has cached more than it keeps; other rows continue."""
    target = llama()
    long, short = random_prompts(2, shortest=58, longest=58, seed=1)[0], random_prompts(1, seed=6)[0]
    plain = [generate(target.model, prompt, 150) for prompt in (long, short)]
    known = {tuple(long): plain[0], tuple(short): plain[1]}
    end = next(token for token in plain[0] if token not in plain[1])
    place = plain[0].index(end)
    assert place < 60, "it ends inside the first block"
    expected = [plain[0][: place + 1], plain[1]]
    for drafter in (OracleDrafter(known, 70, VOCABULARY, corruption=0.02), DraftModelDrafter(target, 70)):
        run = decode(target, [long, short], drafter, max_new_tokens=150, end=[end])
        assert run.outputs == expected, type(drafter).__name__


def guidance_with_a_longer_negative_prompt() -> None:
    """Equals `generate` with `guidance_scale` and `negative_prompt_ids`, whichever prompt is longer."""
    target = llama()
    prompt, longer = random_prompts(1, seed=8)[0], random_prompts(1, shortest=60, longest=60, seed=9)[0]
    for positive, negative in ((prompt, longer), (longer, prompt)):
        ids = torch.tensor([list(negative)])
        expected = generate(
            target.model,
            positive,
            24,
            guidance_scale=2.5,
            negative_prompt_ids=ids,
            negative_prompt_attention_mask=torch.ones_like(ids),
        )
        known = {tuple(positive): expected}
        for drafter in (None, OracleDrafter(known, 3, VOCABULARY, corruption=0.2, siblings=1)):
            sampler = Sampler(guidance_scale=2.5)
            run = decode(
                target,
                [positive],
                drafter,
                SampleAndMatch(),
                sampler,
                max_new_tokens=24,
                negatives=[negative],
            )
            assert run.outputs == [expected]


def letters() -> PreTrainedTokenizerFast:
    """64 tokens of one or two letters, so that a stop string may begin inside a token."""
    alphabet = "abcdefgh"
    pairs = [a + b for a in alphabet for b in alphabet[:7]]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *pairs])}
    tokenizer = Tokenizer(BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def stops_inside_a_block() -> None:
    """Stop strings and a user's criterion end a row at the same token as `generate` without a draft."""
    tokenizer, target, stopped = letters(), llama(), 0
    for prompt in random_prompts(12, seed=12):
        plain = {tuple(prompt): generate(target.model, prompt, 32)}
        text = tokenizer.decode(plain[tuple(prompt)])
        for criterion in (StopStringCriteria(tokenizer, [text[9:12], text[20:22]]), EndsAfter()):
            expected = generate(target.model, prompt, 32, stopping_criteria=[criterion])
            for corruption in (0.0, 0.3):
                drafter = OracleDrafter(plain, 6, VOCABULARY, corruption=corruption)
                run = decode(target, [prompt], drafter, max_new_tokens=32, criteria=[criterion])
                assert run.outputs == [expected], f"{type(criterion).__name__}, corruption {corruption}"
            stopped += run.canvas.finish_reasons == ["stop"]
    assert stopped > 12, "the test must stop somewhere"


class FaultyTarget(CausalTarget):
    """A draft model whose logits are not numbers after every third token."""

    def score_nodes(self, state: CausalState, nodes: Nodes) -> TargetOutput:
        logits = super().score_nodes(state, nodes).logits
        return TargetOutput(logits.masked_fill((nodes.tokens % 3 == 0)[:, :, None], float("nan")))


def faults_of_the_draft_are_dropped() -> None:
    """NaN in the draft model is counted, its tokens are dropped, and the output is that of plain decoding."""
    sampler = Sampler(0.9)
    plain = list(futures(precise(), PROMPTS, sampler, max_new_tokens=32).values())
    for sampling in ("coupled", "greedy", "sampled"):
        drafter = DraftModelDrafter(FaultyTarget(tiny_lm()), 3, sampling)
        run = decode(precise(), PROMPTS, drafter, sampler=sampler, max_new_tokens=32)
        assert run.outputs == plain
        assert 0 < run.stats.draft_faults < sum(run.stats.rounds)
    run = decode(precise(), PROMPTS, drafter, SpeculativeSampling(), sampler, max_new_tokens=32)
    assert run.canvas.errors == [None] * 3 and run.stats.draft_faults > 0
