"""Continuous tokens in the one loop: a Gaussian head, a worse draft, the joint distribution of vectors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmspec.acceptance.matching import SampleAndMatch
from mmspec.acceptance.rejection import SpeculativeSampling
from mmspec.decoding import cache as cache_module
from mmspec.decoding import distribution
from mmspec.decoding.canvas import Stopping, VectorCanvas
from mmspec.decoding.interfaces import AcceptanceRule, Drafter, PromptOutput
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.speculative import speculate
from mmspec.decoding.stats import DecodingStats
from mmspec.decoding.vector_sampling import GaussianSampler
from mmspec.drafters.none import NoDrafter
from mmspec.drafters.vectors import VectorModelDrafter
from mmspec.errors import InputError
from mmspec.models.continuous import ContinuousConfig, ContinuousForCausalLM
from mmspec.targets import CausalTarget
from mmspec.targets.causal import CausalState
from mmspec.targets.continuous import ContinuousTarget
from tests.contracts.running import as_request, fan_out
from tests.tiny_models import tiny_llama

SIZE, ROWS, LENGTH = 2, 3_000, 3
PROMPTS = [[1, 2, 3], [4], [5, 6]]
ALARM = 1e-7  # of some twenty statistics


def tiny(change: float = 0.0, dtype: torch.dtype = torch.float32) -> ContinuousForCausalLM:
    """A model whose next vector depends on those before: means of about 1, deviations of about 0.7.

    Args:
        change: how far its weights are from those of the target.
        dtype: of the weights.
    """
    config = ContinuousConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        latent_size=SIZE,
    )
    model = ContinuousForCausalLM(config).to(dtype).eval()
    own, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    for weight in model.parameters():
        values = torch.randn(weight.shape, generator=own, dtype=torch.float64)
        values += change * torch.randn(weight.shape, generator=other, dtype=torch.float64)
        weight.data = values.to(dtype) * 0.35
    model.head.bias.data[SIZE:] = -0.4
    return model


class FanOut(ContinuousTarget):
    """Reads equal prompts once, so that thousands of rows start in a moment."""

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[CausalState, PromptOutput]:
        if len(prompts) <= len(PROMPTS):
            return super().prefill(prompts, capacity, taps)
        rows = len(prompts)
        one, output = super().prefill(prompts[:1], capacity, taps)
        many = fan_out(one.cache, self, rows, capacity)
        offset, lengths = one.offset.repeat(rows), one.prompt_lengths * rows
        state = replace(one, cache=many, offset=offset, prompt_lengths=lengths)
        return state, PromptOutput(output.logits.expand(rows, -1, -1))


@functools.cache
def target() -> FanOut:
    return FanOut(tiny())


@functools.cache
def worse() -> VectorModelDrafter:
    """Another model: about half of its vectors are accepted."""
    return VectorModelDrafter(FanOut(tiny(0.3)), 2)


def decode(
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    rule: AcceptanceRule | None = None,
    sampler: GaussianSampler | None = None,
    length: int = LENGTH,
    seed: int = 0,
    model: ContinuousTarget | None = None,
) -> VectorCanvas:
    """Decode a batch to its end. The defaults are plain sampling."""
    model = model or target()
    known = {tuple(prompt): as_request(prompt) for prompt in prompts}
    requests = [known[tuple(prompt)] for prompt in prompts]
    rows = [list(prompt) for prompt in prompts]
    canvas = VectorCanvas(rows, Stopping(length), DecodingStats(), model.device, SIZE, model.dtype)
    roles = model, drafter or NoDrafter(), rule or SampleAndMatch(), sampler or GaussianSampler()
    random = RandomStream.from_seed(seed, len(rows))
    pieces: list[list[Tensor]] = [[] for _ in rows]
    for step in speculate(*roles, requests, canvas, random):  # type: ignore[arg-type]
        assert canvas.stats.target_forwards < 40, "places stay open for ever"
        for row, new in enumerate(step.emission.tokens):
            pieces[row] += [new] if len(new) else []
    assert all(torch.equal(torch.cat(p), out) for p, out in zip(pieces, canvas.outputs(), strict=True))
    assert canvas.finish_reasons == ["length"] * len(rows)
    return canvas


@functools.cache
def direct() -> Tensor:
    """[ROWS, LENGTH, SIZE] drawn without a cache, a loop or our noise."""
    generator, model = torch.Generator().manual_seed(9), target().model
    rows = model.embed(torch.tensor([PROMPTS[0]]).expand(ROWS, -1))
    vectors: list[Tensor] = []
    with torch.no_grad():
        for _ in range(LENGTH):
            hidden = model.model(inputs_embeds=rows, use_cache=False).last_hidden_state[:, -1]
            mean, log_std = model.head(hidden).chunk(2, -1)
            vectors.append(mean + log_std.exp() * torch.randn(mean.shape, generator=generator))
            rows = torch.cat([rows, model.read(vectors[-1])[:, None]], 1)
    return torch.stack(vectors, 1)


def statistics(vectors: Tensor) -> dict[str, Tensor]:
    """Numbers of each row whose distributions are compared: coordinates, and products of neighbours."""
    flat = vectors.flatten(1).double()
    found = {f"coordinate {i}": flat[:, i] for i in range(flat.shape[1])}
    for place in range(LENGTH - 1):
        here, after = vectors[:, place].double(), vectors[:, place + 1].double()
        for i in range(SIZE):
            found |= {f"{place}.{i} x {j}": here[:, i] * after[:, j] for j in range(SIZE)}
        found[f"{place}: distance"] = (here - after).norm(dim=-1)
    directions = torch.randn(
        4, flat.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return found | {f"direction {i}": flat @ each for i, each in enumerate(directions)}


def two_samples(x: Tensor, y: Tensor) -> float:
    """p-value of the two-sample test of Kolmogorov and Smirnov, by its limit for large samples."""
    values = torch.cat([x, y]).sort().values
    below = [torch.searchsorted(each.sort().values, values, right=True) / len(each) for each in (x, y)]
    size = len(x) * len(y) / (len(x) + len(y))
    scaled = float((below[0] - below[1]).abs().max()) * (math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size))
    total = sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, 2 * total)


def same_distribution(vectors: Tensor) -> None:
    """Moments and a two-sample test of every statistic."""
    ours, theirs = statistics(vectors), statistics(direct())
    for name, values in ours.items():
        reference = theirs[name]
        spread = math.sqrt((values.var() + reference.var()) / len(values))
        assert abs(values.mean() - reference.mean()) < 5.5 * spread, name
        assert two_samples(values, reference) > ALARM, name


def test_a_worse_draft_and_rejection_follow_the_target() -> None:
    """Three vectors by rejection are distributed as three drawn one after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "CAPACITY_BLOCK", 16)
        canvas = decode([PROMPTS[0]] * ROWS, worse(), SpeculativeSampling())
    stats = canvas.stats
    assert 0.2 < stats.acceptance_rate < 0.9, "the test needs acceptance and refusal"
    same_distribution(torch.stack(canvas.outputs()))


def test_a_round_makes_a_fixed_number_of_proposals_and_goes_on_in_the_next() -> None:
    """With one proposal of the residual a round, many places stay open, and the distribution is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution, "PROPOSALS", 1)
        patch.setattr(cache_module, "CAPACITY_BLOCK", 16)
        canvas = decode([PROMPTS[0]] * ROWS, worse(), SpeculativeSampling())
    assert canvas.stats.target_forwards > LENGTH + 2, "some rows took rounds that decided nothing"
    same_distribution(torch.stack(canvas.outputs()))


def test_plain_decoding_follows_the_target() -> None:
    same_distribution(torch.stack(decode([PROMPTS[0]] * ROWS).outputs()))


def test_the_targets_own_draft_is_accepted_whole() -> None:
    drafter = VectorModelDrafter(FanOut(tiny(dtype=torch.float64)), 3)
    model = FanOut(tiny(dtype=torch.float64))
    canvas = decode(PROMPTS, drafter, SpeculativeSampling(), length=13, model=model)
    assert canvas.stats.acceptance_rate == 1.0 and canvas.stats.target_forwards == 4
    assert canvas.drafted[0].count(True) == 9


def test_matching_gives_plain_decoding_bit_for_bit_and_means_at_temperature_0() -> None:
    """The means of another model are never the target's own; its own are."""
    plain = decode(PROMPTS, sampler=GaussianSampler(0.0), length=8)
    for drafter in (worse(), VectorModelDrafter(target(), 2)):
        found = decode(PROMPTS, drafter, SampleAndMatch(), GaussianSampler(0.0), length=8)
        for ours, theirs in zip(found.outputs(), plain.outputs(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_rows_of_a_batch_are_rows_alone() -> None:
    together = decode(PROMPTS, worse(), SpeculativeSampling(), length=9, seed=3).outputs()
    for row, prompt in enumerate(PROMPTS):
        torch.manual_seed(0)
        alone = decode_alone(prompt, row)
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-4)


def decode_alone(prompt: Sequence[int], row: int) -> Tensor:
    """The output of one row, with the keys that it has in the batch."""
    keys = RandomStream.from_seed(3, len(PROMPTS)).keys[row : row + 1]
    canvas = VectorCanvas([list(prompt)], Stopping(9), DecodingStats(), target().device, SIZE)
    roles = target(), worse(), SpeculativeSampling(), GaussianSampler()
    for _ in speculate(*roles, [as_request(prompt)], canvas, RandomStream(keys)):  # type: ignore[arg-type]
        pass
    output: Tensor = canvas.outputs()[0]
    return output


def test_normal_numbers_are_normal_and_keyed_by_place() -> None:
    stream = RandomStream.from_seed(0, 200)
    places = torch.arange(50).expand(200, 50)
    numbers = stream.normal(places, Purpose.DRAFT, 3, torch.float64)
    assert two_samples(numbers.flatten(), torch.randn(30_000, dtype=torch.float64)) > ALARM
    assert torch.equal(numbers[:, 7:8], stream.normal(places[:, 7:8], Purpose.DRAFT, 3, torch.float64))
    assert abs(torch.corrcoef(numbers.flatten(0, 1).T) - torch.eye(3)).max() < 0.05


def test_vectors_of_another_size_and_models_of_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="vectors of size 2"):
        worse().fit(CausalTarget(tiny_llama()))
