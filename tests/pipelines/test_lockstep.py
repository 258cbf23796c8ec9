"""Processors and criteria with a state, or with access to the batch, are called as in `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)

import mmspec
from mmspec.pipelines import VisionLanguagePipeline
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_llama

VOCABULARY, NEW, PAD = 300, 24, 0
TOKENIZER = byte_level_tokenizer()
#: Two prompts of their own length.
ROWS = [TOKENIZER(text).input_ids for text in ("the red the red the red", "a blue star, a blue")]


class Matcher(LogitsProcessor):
    """A grammar for each row, advanced by the last token of each call."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.states: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.clone())
        out = torch.full_like(scores, -torch.inf)
        for row, last in enumerate(input_ids[:, -1].tolist()):
            self.states[row] = (3 * self.states[row] + last) % 7 if row in self.states else 0
            keep = [10 + self.states[row], 20 + self.states[row], 40 + self.states[row]]
            out[row, keep] = scores[row, keep]
        return out


class Done(StoppingCriteria):
    """Keeps a flag for each row."""

    def __init__(self, ends: set[int], rows: int) -> None:
        self.ends, self.done, self.calls = ends, [False] * rows, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        for row in range(len(self.done)):
            self.done[row] |= int(input_ids[row, -1]) in self.ends
        return torch.tensor(self.done)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(vocab=VOCABULARY).double()


@pytest.fixture
def pipe(model: PreTrainedModel) -> VisionLanguagePipeline:
    return VisionLanguagePipeline(model, TOKENIZER, "draft_model", drafter=model)


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: PreTrainedModel, rows: list[list[int]], **keywords: Any) -> list[list[int]]:
    """Tokens that `generate` gives for rows."""
    inputs = padded(rows)
    given = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": PAD, **keywords}
    output = model.generate(**inputs, **given)
    return [row[inputs["input_ids"].shape[1] :].tolist() for row in output]


def asked(pipe: Any, rows: list[list[int]], **keywords: Any) -> Any:
    texts = [TOKENIZER.decode(row) for row in rows]
    return pipe(texts, apply_chat_template=False, **{"max_new_tokens": NEW, **keywords})


def filled(tokens: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, tokens))
    return [row + [PAD] * (longest - len(row)) for row in tokens]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "two"])
def test_a_processor_with_a_state_is_called_as_generate_calls_it(
    rows: list[list[int]], pipe: Any, model: PreTrainedModel
) -> None:
    free = generated(model, rows, logits_processor=LogitsProcessorList([Matcher()]))
    for ends in (None, free[-1][5]):
        theirs, ours, inside = Matcher(), Matcher(), Matcher()
        how: dict[str, Any] = {"eos_token_id": ends}
        wanted = generated(model, rows, logits_processor=LogitsProcessorList([theirs]), **how)
        output = asked(pipe, rows, logits_processor=[ours], **how)
        assert filled(output.tokens) == wanted
        assert [ids.tolist() for ids in ours.seen] == [ids.tolist() for ids in theirs.seen]
        assert output.stats.accelerator == "none" and sum(output.stats.drafted) == 0
        method = mmspec.accelerate("copy")
        custom = LogitsProcessorList([inside])
        assert generated(model, rows, logits_processor=custom, custom_generate=method, **how) == wanted
        assert [ids.tolist() for ids in inside.seen] == [ids.tolist() for ids in theirs.seen]
        assert method.stats.accelerator == "none"  # type: ignore[attr-defined]
        assert method.stats.new_tokens == list(map(len, output.tokens))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings",
    [{"guidance_scale": 2.0}, {"watermarking_config": SynthIDTextWatermarkingConfig(3, [654, 400])}],
    ids=["guidance", "SynthID"],
)
def test_transformers_own_processors_with_a_state_work_plainly(
    settings: dict[str, Any], model: PreTrainedModel
) -> None:
    wanted = generated(model, ROWS, **settings)
    assert generated(model, ROWS, **settings, custom_generate=mmspec.accelerate("copy")) == wanted
    torch.manual_seed(3)
    wanted = generated(model, ROWS[:1], **settings, do_sample=True)
    torch.manual_seed(3)
    assert wanted == generated(
        model, ROWS[:1], **settings, do_sample=True, custom_generate=mmspec.accelerate("copy")
    )


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "two"])
def test_criteria_with_a_flag_for_each_row_end_their_own(
    rows: list[list[int]], pipe: Any, model: PreTrainedModel
) -> None:
    free = generated(model, rows)
    ends = {free[0][6], free[-1][11]}
    criteria = [Done(ends, len(rows)) for _ in range(3)]
    wanted = generated(
        model, rows, stopping_criteria=StoppingCriteriaList(criteria[:1]), eos_token_id=VOCABULARY - 1
    )
    output = asked(pipe, rows, stopping_criteria=criteria[1:2])
    assert filled(output.tokens) == wanted and output.finish_reasons == ["stop"] * len(rows)
    assert criteria[1].calls == criteria[0].calls
    assert (output.stats.accelerator == "none") == (len(rows) > 1)  # a row alone keeps its drafts
    how: dict[str, Any] = {"eos_token_id": VOCABULARY - 1, "custom_generate": mmspec.accelerate("copy")}
    inside = generated(model, rows, stopping_criteria=StoppingCriteriaList(criteria[2:]), **how)
    assert inside == wanted and criteria[2].calls == criteria[0].calls


def test_criteria_of_one_answer_end_all_rows_and_those_of_transformers_keep_drafts(
    pipe: Any, model: PreTrainedModel
) -> None:
    calls: list[int] = []

    def after_seven(input_ids: Tensor, scores: Any) -> bool:
        calls.append(len(input_ids))
        return len(calls) == 7

    output = asked(pipe, ROWS, stopping_criteria=[after_seven])
    assert list(map(len, output.tokens)) == [7, 7] and calls == [2] * 7
    texts = [TOKENIZER.decode(token) for token in generated(model, ROWS)[0][2:]]
    string = next(text for text in texts if text and "\ufffd" not in text)
    output = asked(pipe, ROWS, stopping_criteria=[StopStringCriteria(TOKENIZER, [string])])
    assert output.stats.accelerator != "none" and len(output.tokens[0]) < NEW


def test_who_declares_that_the_path_alone_counts_keeps_the_drafts(pipe: Any, model: PreTrainedModel) -> None:
    class Bias(LogitsProcessor):
        depends_on_path_alone = True

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert len(input_ids) == 1
            bias = torch.zeros_like(scores)
            bias[:, 50 + int(input_ids[0, -1]) % 9] = 5.0
            return scores + bias

    def allowed(row: int, ids: Tensor) -> list[int]:
        return list(range(10, 30)) if row == 0 else list(range(60, 80))

    allowed.depends_on_path_alone = True  # type: ignore[attr-defined]

    wanted = [generated(model, [row], logits_processor=LogitsProcessorList([Bias()]))[0] for row in ROWS]
    output = asked(pipe, ROWS, logits_processor=[Bias()])
    assert output.tokens == wanted and sum(output.stats.accepted) > 0
    wanted = generated(model, ROWS, prefix_allowed_tokens_fn=allowed)
    output = asked(pipe, ROWS, prefix_allowed_tokens_fn=allowed)
    assert output.tokens == wanted and output.stats.accelerator != "none"
    method = mmspec.accelerate("copy")
    assert generated(model, ROWS, prefix_allowed_tokens_fn=allowed, custom_generate=method) == wanted
    assert method.stats.accelerator == "copy"  # type: ignore[attr-defined]


def test_requests_in_lock_step_stand_beside_others_in_a_running_batch(model: PreTrainedModel) -> None:
    pipe = VisionLanguagePipeline(model, TOKENIZER, "copy")
    prompts = [TOKENIZER.decode(row) for row in ROWS]
    how: dict[str, Any] = {"max_new_tokens": 14, "apply_chat_template": False}
    ends = {row[4] for row in generated(model, ROWS)}
    alone = pipe("the blue", **how), pipe(prompts, **how, logits_processor=[Matcher()])
    ended = pipe(prompts, **how, stopping_criteria=[Done(ends, 2)])
    with pipe.running_batch(rows=6) as batch:
        batch.enter("the blue", **how)
        outputs: dict[int, Any] = {each.handle: each.output for each in batch.step()}
        batch.enter(prompts, **how, logits_processor=[Matcher()])
        batch.enter(prompts, **how, stopping_criteria=[Done(ends, 2)])
        while batch.handles:
            outputs |= {each.handle: each.output for each in batch.step() if each.output is not None}
    assert [outputs[handle].tokens for handle in range(3)] == [each.tokens for each in (*alone, ended)]
    assert sum(outputs[1].stats.drafted) == 0 and len(ended.tokens[0]) < 14
