"""Checks of the loop, as functions. Tests run them on the code, and on mutations of it with planted bugs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from mmspec.core import cache as cache_module
from mmspec.core.canvas import Canvas
from mmspec.core.draft import DraftKind
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.sampling import Sampler
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.transformers_versions import CACHE
from mmspec.trees.rejection import KSequential, RecursiveRejection, SpeculativeSampling
from tests.contracts import distributions
from tests.contracts.distributions import SAMPLES
from tests.contracts.running import (
    FanOutTarget,
    Prompt,
    Recorder,
    Run,
    decode,
    futures,
    generate,
    random_prompts,
)
from tests.contracts.toy import toy_distribution, toy_target
from tests.oracles import OracleDrafter, RandomTreeDrafter, SampledTreeDrafter, ragged_tree, tree_of
from tests.tiny_models import tiny_llama, tiny_lm, tiny_lm_v8, tiny_mistral_sliding

IID, WITHOUT = DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT
VOCABULARY = 64
PROMPTS = random_prompts(3, seed=4)


@functools.cache
def llama() -> CausalTarget:
    return CausalTarget(tiny_llama())


@functools.cache
def precise() -> CausalTarget:
    """A target in float64, for sampling: entropy about two nats."""
    return CausalTarget(tiny_lm())


def tree_distribution(
    rule: AcceptanceRule, widths: Sequence[int], kind: DraftKind, samples: int, temperature: float = 1.0
) -> None:
    drafter = SampledTreeDrafter(toy_distribution(), widths, kind)
    distributions.check_distribution(toy_target(), drafter, rule, Sampler(temperature), samples=samples)


def speculative_distribution(samples: int = SAMPLES) -> None:
    tree_distribution(SpeculativeSampling(), (1, 1, 1), IID, samples)


def speculative_distribution_at_low_temperature(samples: int = SAMPLES) -> None:
    tree_distribution(SpeculativeSampling(), (1, 1, 1), IID, samples, 0.6)


def recursive_distribution_of_iid_siblings(samples: int = SAMPLES) -> None:
    tree_distribution(RecursiveRejection(), (3, 2), IID, samples)


def recursive_distribution_without_replacement(samples: int = SAMPLES) -> None:
    tree_distribution(RecursiveRejection(), (3, 2), WITHOUT, samples)


def k_sequential_distribution(samples: int = SAMPLES) -> None:
    tree_distribution(KSequential(), (3, 2), IID, samples)


def joint_of(target: CausalTarget, prompt: Prompt, length: int, sampler: Sampler) -> Tensor:
    """[V] * length: exact joint distribution of a model's next tokens, every prefix read without a cache."""
    size = target.vocabulary
    tails = torch.cartesian_prod(*[torch.arange(size)] * (length - 1))
    ids = torch.cat([torch.tensor([list(prompt)]).expand(len(tails), -1), tails], 1)
    logits = target.model(ids).logits[:, len(prompt) - 1 :]
    steps = distributions.reference_distribution(logits.flatten(0, 1)[None], sampler).view(
        len(tails), length, size
    )
    shape = [size] * (length - 1)
    joint = torch.ones(*shape, dtype=steps.dtype)
    for index in range(length - 1):
        joint = joint * steps[:, index].gather(1, tails[:, index : index + 1]).view(shape)
    return joint[..., None] * steps[:, -1].view(*shape, size)


def check_words(
    target: FanOutTarget,
    drafter: Drafter,
    rule: AcceptanceRule,
    sampler: Sampler,
    rows: int = 12_000,
    length: int = 5,
    grid: ImageGrid | None = None,
) -> Run:
    """Assert that words after a prompt have the model's probabilities; the rows of a batch are the sample."""
    prompt = (3, 1, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "CAPACITY_BLOCK", 16)  # 12,000 rows of 256 places would be gigabytes
        how = {"max_new_tokens": length, "seed": 7, "grid": grid}
        run = decode(target, [prompt] * rows, drafter, rule, sampler, **how)  # type: ignore[arg-type]
    joint = joint_of(target, prompt, length, sampler)
    distributions.check_outputs(run, joint, f"{type(drafter).__name__}, {sampler}")
    return run


def real_model_distribution(
    sampling: str = "sampled", sampler: Sampler | None = None, rows: int = 12_000
) -> None:
    """Check the output distribution with a real model as drafter: its cache, its positions and its q."""
    target, small = FanOutTarget(tiny_lm_v8()), FanOutTarget(tiny_lm_v8(seed=5))
    drafter = DraftModelDrafter(small, 3, sampling)
    check_words(target, drafter, SpeculativeSampling(), sampler or Sampler(1.0), rows)


def identity_on_trees() -> None:
    """Deep accepted paths among wrong siblings, and different random trees in the rows, equal `generate`."""
    target = llama()
    expected = [generate(target.model, prompt) for prompt in PROMPTS]
    known = {tuple(prompt): output for prompt, output in zip(PROMPTS, expected, strict=True)}
    for drafter in (
        OracleDrafter(known, 4, VOCABULARY, corruption=0.2, siblings=2),
        RandomTreeDrafter(7, VOCABULARY, hints=known),
    ):
        assert decode(target, PROMPTS, drafter).outputs == expected, type(drafter).__name__


def sliding_identity_on_trees() -> None:
    """With a path longer than the window, distances count tokens on the path, not columns of the buffer."""
    target = CausalTarget(tiny_mistral_sliding(window=4))
    expected = [generate(target.model, prompt, 40) for prompt in PROMPTS]
    known = {tuple(prompt): output for prompt, output in zip(PROMPTS, expected, strict=True)}
    drafter = OracleDrafter(known, 7, VOCABULARY, corruption=0.1, siblings=2)
    assert decode(target, PROMPTS, drafter, max_new_tokens=40).outputs == expected


def gumbel_exactness() -> None:
    """Sample-and-match equals plain sampling bitwise: with chains, trees, and different trees in the rows."""
    sampler = Sampler(0.8, top_k=20)
    known = futures(precise(), PROMPTS, sampler, max_new_tokens=24, seed=5)
    expected = list(known.values())
    for drafter in (
        OracleDrafter(known, 3, VOCABULARY, corruption=0.3),
        OracleDrafter(known, 3, VOCABULARY, corruption=0.3, siblings=1),
        RandomTreeDrafter(6, VOCABULARY, hints=known),
    ):
        run = decode(precise(), PROMPTS, drafter, sampler=sampler, max_new_tokens=24, seed=5)
        assert run.outputs == expected, type(drafter).__name__


def rows_are_independent() -> None:
    """Each row of a batch equals its single run, for any other rows and any order of the rows."""
    sampler, seeds = Sampler(0.9), [3, 5, 8]
    drafter = DraftModelDrafter(CausalTarget(tiny_lm(seed=22)), 3, "sampled")

    def run(order: Sequence[int]) -> list[list[int]]:
        prompts, keys = [PROMPTS[i] for i in order], [seeds[i] for i in order]
        rule = SpeculativeSampling()
        return decode(precise(), prompts, drafter, rule, sampler, max_new_tokens=16, seed=keys).outputs

    alone = [run([row])[0] for row in range(3)]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        assert run(order) == [alone[row] for row in order], f"order {order}"


def cache_equals_a_fresh_prefill() -> None:
    """After every round, keys and values equal those of one prefill of the emitted tokens, to 1e-9."""
    target = Recorder(tiny_lm())
    known = futures(precise(), PROMPTS, max_new_tokens=24)

    def watch(canvas: Canvas) -> None:
        cache = target.state.cache
        for row, tokens in enumerate(canvas.ids):
            if canvas.finish_reasons[row] is not None:
                continue
            length = len(tokens) - 1
            assert int(cache.lengths[row]) == length, "all committed tokens but the root are cached"
            assert cache.longest >= length
            fresh = getattr(target.model(torch.tensor([tokens[:-1]]), use_cache=True), CACHE)
            for layer, reference in zip(cache.layers, fresh.layers, strict=True):
                for ours, theirs in ((layer.keys, reference.keys), (layer.values, reference.values)):
                    gap = (ours[row, :length].transpose(0, 1) - theirs[0]).abs().max()
                    assert gap < 1e-9, f"row {row}, {length} tokens: {gap}"

    for drafter in (
        OracleDrafter(known, 4, VOCABULARY, corruption=0.3),
        OracleDrafter(known, 3, VOCABULARY, corruption=0.3, siblings=2),
        RandomTreeDrafter(7, VOCABULARY, hints=known),
    ):
        decode(target, PROMPTS, drafter, max_new_tokens=24, watch=watch)


def processors_see_the_path() -> None:
    """A penalty on earlier tokens, applied along accepted drafts, equals `generate` with the same setting."""
    target = llama()
    expected = [generate(target.model, prompt, 32, repetition_penalty=1.7) for prompt in PROMPTS]
    known = {tuple(prompt): output for prompt, output in zip(PROMPTS, expected, strict=True)}
    sampler = Sampler(processors=[LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])] * 3)
    for drafter in (
        OracleDrafter(known, 4, VOCABULARY),
        OracleDrafter(known, 3, VOCABULARY, 0.2, siblings=1),
    ):
        assert decode(target, PROMPTS, drafter, sampler=sampler, max_new_tokens=32).outputs == expected


def tree_logits_are_path_logits() -> None:
    """Each node's logits equal those of a forward pass over its path alone."""
    generator = torch.Generator().manual_seed(2)
    for backend in ("sdpa", "eager"):
        model = tiny_llama()
        model.set_attn_implementation(backend)
        target = CausalTarget(model)
        prompts = [{"input_ids": torch.tensor([list(prompt)])} for prompt in PROMPTS]
        state, _ = target.prefill(prompts, 64)
        draft = tree_of(
            torch.randint(VOCABULARY, (3, 8), generator=generator), [0, 0, 0, 1, 1, 2, 4, 6], DraftKind.POINT
        )
        logits = target.score(state, draft).logits
        for row, prompt in enumerate(PROMPTS):
            for node in range(8):
                path = draft.tokens[row][draft.ancestors[row, node]].tolist()
                alone = model(torch.tensor([[*prompt, *path]])).logits[0, -1]
                gap = (logits[row, node] - alone).abs().max()
                assert gap <= 1e-5, f"{backend}, row {row}, node {node}: {gap}"


def ragged_ancestors_are_found() -> None:
    """Pointer doubling equals walking up, in a batch whose rows have different trees."""
    parents = torch.tensor([[0, 0, 1, 2, 3], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 2]])
    draft = ragged_tree(
        torch.zeros(4, 5, dtype=torch.long), parents, torch.ones(4, 5).bool(), DraftKind.POINT
    )
    for row in range(4):
        for node in range(5):
            walked = {node, 0}
            at = node
            while at:
                at = int(parents[row, at])
                walked.add(at)
            assert set(draft.ancestors[row, node].nonzero()[:, 0].tolist()) == walked
            assert int(draft.depth[row, node]) == len(walked) - 1
