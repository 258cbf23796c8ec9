"""With logits that are not finite, a row ends with an error, and the other rows continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mmspec.core.draft import Draft, DraftKind
from mmspec.core.interfaces import PromptOutput, TargetOutput
from mmspec.core.sampling import Sampler
from mmspec.errors import NumericalError
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.plugins import RULES
from mmspec.targets import CausalTarget
from mmspec.targets.causal import CausalState
from tests.contracts import edge_checks
from tests.contracts.checks import PROMPTS, VOCABULARY, precise
from tests.contracts.running import decode, futures
from tests.contracts.toy import dirichlet
from tests.oracles import OracleDrafter, RandomTreeDrafter, SampledTreeDrafter
from tests.tiny_models import tiny_lm
from tests.trees.codes import fitted

LIMIT = 24


class Poisoned(CausalTarget):
    """A target whose logits in row 1 are bad once the cache holds `after` tokens."""

    def __init__(self, bad: Tensor, after: int) -> None:
        super().__init__(tiny_lm())
        self.bad, self.after = bad, after

    def score(self, state: CausalState, draft: Draft) -> TargetOutput:
        logits = super().score(state, draft).logits.clone()
        position = state.cache.lengths[1] + draft.depth[1]
        logits[1] = torch.where((position >= self.after)[:, None], self.bad, logits[1])
        return TargetOutput(logits)


def bad_logits(name: str) -> Tensor:
    values = torch.zeros(VOCABULARY, dtype=torch.float64)
    values[3 if name == "one NaN" else slice(None)] = float("-inf" if name == "all -inf" else "nan")
    if name == "one inf":
        values = torch.zeros_like(values)
        values[5] = float("inf")
    return values


@pytest.mark.parametrize(
    ("name", "temperature"), [("all NaN", 0.0), ("one NaN", 0.8), ("one inf", 0.0), ("all -inf", 0.8)]
)
@pytest.mark.every(2)
def test_a_bad_row_ends_with_an_error_and_the_others_go_on(name: str, temperature: float) -> None:
    """transformers repeats one id, or ends the process with a device assert."""
    sampler = Sampler(temperature)
    known = futures(precise(), PROMPTS, sampler, max_new_tokens=LIMIT)
    plain = list(known.values())
    position = 9
    target = Poisoned(bad_logits(name), len(PROMPTS[1]) + position - 1)
    for drafter in (
        None,
        OracleDrafter(known, 4, VOCABULARY, corruption=0.3),
        RandomTreeDrafter(6, VOCABULARY, hints=known),
    ):
        run = decode(target, PROMPTS, drafter, sampler=sampler, max_new_tokens=LIMIT)
        error = run.canvas.errors[1]
        assert run.outputs[0] == plain[0] and run.outputs[2] == plain[2]
        assert run.canvas.finish_reasons == ["length", "error", "length"]
        assert isinstance(error, NumericalError) and error.row == 1
        assert run.outputs[1] == plain[1][: error.position], "what was emitted before stands"
        assert position - 5 <= error.position <= position, "a block that touches the fault is not emitted"


@pytest.mark.parametrize("name", ["speculative_sampling", "budget"])
def test_rejection_rules_keep_bad_rows_apart(name: str) -> None:
    drafter = SampledTreeDrafter(dirichlet(VOCABULARY, VOCABULARY, seed=4), (1, 1), DraftKind.IID)
    rule, sampler = fitted(RULES[name](), VOCABULARY), Sampler(0.8)
    plain = decode(precise(), PROMPTS, drafter, rule, sampler, max_new_tokens=LIMIT).outputs
    target = Poisoned(bad_logits("all NaN"), len(PROMPTS[1]) + 9)
    run = decode(target, PROMPTS, drafter, rule, sampler, max_new_tokens=LIMIT)
    assert run.outputs[0] == plain[0] and run.outputs[2] == plain[2]
    assert run.canvas.finish_reasons == ["length", "error", "length"]


def test_processors_that_exclude_every_token_end_that_row_alone() -> None:
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, float("-inf"))

    plain = decode(precise(), PROMPTS, max_new_tokens=5).outputs
    processors = [LogitsProcessorList([*([Nothing()] if row == 1 else [])]) for row in range(3)]
    run = decode(precise(), PROMPTS, sampler=Sampler(processors=processors), max_new_tokens=5)
    assert run.outputs == [plain[0], [], plain[2]]
    assert isinstance(run.canvas.errors[1], NumericalError) and run.canvas.errors[1].position == 0


def test_a_row_that_fails_at_its_first_token_leaves_the_draft_of_the_others_alone() -> None:
    """A prompt of one token has no token before the newest."""

    class FailsOnThree(CausalTarget):
        def prefill(
            self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
        ) -> tuple[CausalState, PromptOutput]:
            state, output = super().prefill(prompts, capacity, taps)
            bad = torch.tensor([int(prompt["input_ids"][0, -1]) == 3 for prompt in prompts])
            return state, PromptOutput(output.logits.masked_fill(bad[:, None, None], float("nan")))

    plain = decode(precise(), [(5,)], max_new_tokens=12).outputs
    run = decode(FailsOnThree(tiny_lm()), [(3,), (5,)], DraftModelDrafter(precise(), 3), max_new_tokens=12)
    assert run.outputs == [[], *plain] and run.canvas.finish_reasons == ["error", "length"]


def test_faults_of_the_draft_model_are_counted_and_change_nothing() -> None:
    edge_checks.faults_of_the_draft_are_dropped()
