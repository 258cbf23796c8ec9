"""Structured output: exact for every drafter, against a processor of the tests' own in transformers' loop."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import mmspec
from mmspec.core import grammar as core
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Categorical
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.grammar import GrammarProcessor, with_certain
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, MissingDependencyError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.pipelines.response_format import grammar_processor, grammar_source
from mmspec.plugins import RULES
from mmspec.targets import CausalTarget
from mmspec.trees.pacing import PacedDrafter
from tests.methods.eagle_checks import head_for
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_llama

guidance = pytest.importorskip("llguidance")

TOKENIZER = byte_level_tokenizer()
VOCABULARY, END, NEW = 300, 0, 60
SCHEMA = {
    "type": "object",
    "properties": {"there": {"enum": ["the", "then", "no"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["there", "count"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
FORMATS: list[Any] = [
    JSON,
    {"type": "regex", "regex": "(red|there)[0-9]{3}, then [a-c]{4}"},
    None,
    {"type": "choice", "choice": ["the red star", "the blue star", "a"]},
    {"type": "grammar", "grammar": 'root ::= "é" ("😀" | "the" root2)\nroot2 ::= " the"'},
]
PROMPTS = ["the red", "a blue star, a blue", "é", "there there", "count"]
RAW: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": NEW}
DRAWN: dict[str, Any] = {"temperature": 1.3, "seed": 5}


class Oracle(LogitsProcessor):
    """One row: a new matcher for every token, and the rule in its own words."""

    def __init__(self, source: str, start: int) -> None:
        self.tokenizer = guidance.hf.from_tokenizer(TOKENIZER, eos_token=[END])
        self.source, self.start = source, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        (row,) = input_ids[:, self.start :].tolist()
        matcher = guidance.LLMatcher(self.tokenizer, self.source)
        assert matcher.consume_tokens(row)
        if forced := matcher.compute_ff_tokens():
            allowed = forced[:1]
        else:
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [token for token in range(len(TOKENIZER)) if bits >> token & 1]
        return torch.full_like(scores, -torch.inf).index_copy(
            1, torch.tensor(allowed), scores[:, torch.tensor(allowed)]
        )


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(vocab=VOCABULARY).double()


@pytest.fixture(scope="module")
def drafters(model: Any) -> dict[str, tuple[str, Any, dict[str, Any]]]:
    head = head_for(CausalTarget(model))
    small = tiny_llama(vocab=VOCABULARY, layers=1).double()
    return {
        "copy": ("copy", None, {"length": "fixed"}),
        "draft model": ("draft_model", small, {"length": "fixed"}),
        "the target as draft model": ("draft_model", model, {}),
        "tree of a draft model": ("draft_model", small, {"tree": "3x2"}),
        "head": ("eagle", head, {"length": "fixed"}),
    }


@pytest.fixture(scope="module")
def plain(model: Any) -> VisionLanguagePipeline:
    return VisionLanguagePipeline(model, TOKENIZER, "none")


def by_transformers(model: Any, prompt: str, form: Any) -> list[int]:
    """Greedy tokens of `generate` under the oracle."""
    ids = torch.tensor([TOKENIZER(prompt).input_ids])
    source = grammar_source(form)
    own = [] if source is None else [Oracle(source, ids.shape[1])]
    settings: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": END, "do_sample": False}
    output = model.generate(ids, logits_processor=LogitsProcessorList(own), **settings)
    return output[0, ids.shape[1] :].tolist()


def call(pipe: Any, form: Any = FORMATS, prompt: Any = PROMPTS, **more: Any) -> Any:
    return pipe(prompt, response_format=form, eos_token_id=END, **RAW, **more)


def test_plain_decoding_equals_generate_under_the_oracle(model: Any, plain: Any) -> None:
    found = call(plain, temperature=0.0)
    for prompt, form, tokens in zip(PROMPTS, FORMATS, found.tokens, strict=True):
        assert tokens == by_transformers(model, prompt, form)
    assert found.finish_reasons[:2] == ["eos", "eos"]
    value = json.loads(found.text[0])
    assert value["there"] in SCHEMA["properties"]["there"]["enum"] and value["count"] <= 99  # type: ignore[index]


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "name", ["copy", "draft model", "the target as draft model", "tree of a draft model", "head"]
)
def test_drafts_give_the_tokens_of_plain_decoding(
    model: Any, plain: Any, drafters: Any, name: str, settings: dict[str, Any]
) -> None:
    method, drafter, options = drafters[name]
    if method == "eagle" and settings is DRAWN:
        options = {**options, "acceptance": "sample_and_match"}
    pipe = VisionLanguagePipeline(model, TOKENIZER, method, drafter=drafter, **options)
    expected, found = call(plain, **settings), call(pipe, **settings)
    assert found.tokens == expected.tokens and found.finish_reasons == expected.finish_reasons
    for row, form in enumerate(FORMATS):
        rounds = found.stats.rounds[row], expected.stats.rounds[row]
        assert rounds[0] < rounds[1] or form is None or len(found.tokens[row]) < 4
    alone = call(pipe, FORMATS[0], PROMPTS[0], **settings)  # the first row has the same random numbers
    assert alone.tokens[0] == found.tokens[0]


def test_a_forced_text_costs_one_forward_pass(
    model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = VisionLanguagePipeline(model, TOKENIZER, "copy", length="fixed")
    form = {"choice": ["the only text there is"]}
    expected = call(plain, form, "the", temperature=0.0)
    found = call(pipe, form, "the", temperature=0.0)
    assert found.text == expected.text == ["the only text there is"]
    assert found.stats.target_forwards == 2 < expected.stats.target_forwards == len(expected.tokens[0])
    monkeypatch.setattr(core, "MOST_CERTAIN", 2)
    assert call(pipe, form, "the", temperature=0.0).stats.target_forwards > 2


def test_custom_generate_and_generate_take_the_processor(model: Any, plain: Any) -> None:
    rows = [TOKENIZER(text).input_ids for text in PROMPTS[:2]]
    longest = max(map(len, rows))
    ids = torch.tensor([[1] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    expected = call(plain, FORMATS[:2], PROMPTS[:2], temperature=0.0).tokens
    loop = mmspec.accelerate("copy")
    for how in (None, loop):
        processor = mmspec.grammar_processor(FORMATS[:2], TOKENIZER)
        output = model.generate(
            ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([processor]),
            max_new_tokens=NEW,
            eos_token_id=END,
            pad_token_id=1,
            do_sample=False,
            custom_generate=how,
        )
        for tokens, own in zip(output[:, longest:].tolist(), expected, strict=True):
            assert tokens[: len(own)] == own and set(tokens[len(own) :]) <= {1}
    assert loop.stats.target_forwards < max(map(len, expected))  # type: ignore[attr-defined]


def test_nothing_but_end_tokens_follows_the_end(model: Any) -> None:
    pipe = VisionLanguagePipeline(model, TOKENIZER, "copy", length="fixed")
    form = {"type": "regex", "regex": "re(d|e)?"}
    for ends in (END, [END, 1]):
        output = pipe(
            "the", response_format=form, eos_token_id=ends, min_new_tokens=9, temperature=0.0, **RAW
        )
        assert output.finish_reasons == ["eos"] and output.text[0] in ("red", "ree")
        assert output.tokens[0][-1] in (END, 1) and len(output.tokens[0]) == 3  # "re", a letter, the end


def test_cuts_stop_strings_and_streams(model: Any, plain: Any) -> None:
    pipe = VisionLanguagePipeline(model, TOKENIZER, "copy", length="fixed")
    whole = call(plain, JSON, "the", temperature=0.0)
    for most in (1, 5, 9):
        cut = pipe(
            "the", **{**RAW, "max_new_tokens": most}, response_format=JSON, eos_token_id=END, temperature=0.0
        )
        assert cut.tokens[0] == whole.tokens[0][:most] and cut.finish_reasons == ["length"]
    stopped = call(pipe, JSON, "the", temperature=0.0, stop_strings='"count')
    assert stopped.finish_reasons == ["stop"] and whole.text[0].startswith(stopped.text[0])
    assert stopped.text[0].endswith('"count')
    deltas = pipe.stream("the", response_format=JSON, eos_token_id=END, temperature=0.0, **RAW)
    assert "".join(deltas) == whole.text[0]


def test_rows_of_a_running_batch_keep_their_grammars(model: Any, drafters: Any) -> None:
    method, drafter, options = drafters["draft model"]
    pipe = VisionLanguagePipeline(model, TOKENIZER, method, drafter=drafter, **options)
    alone = [call(pipe, form, prompt, temperature=0.0) for form, prompt in zip(FORMATS, PROMPTS, strict=True)]
    outputs: dict[int, Any] = {}
    with pipe.running_batch(rows=3) as batch:
        waiting = list(zip(FORMATS, PROMPTS, strict=True))
        while waiting or batch.handles:
            if waiting and batch.free:
                form, prompt = waiting.pop(0)
                batch.enter(prompt, response_format=form, eos_token_id=END, temperature=0.0, **RAW)
            for update in batch.step():
                if update.output is not None:
                    outputs[update.handle] = update.output
    assert [outputs[handle].tokens for handle in sorted(outputs)] == [each.tokens for each in alone]


def test_rounds_with_certain_tokens_are_not_the_cost_of_plain_ones(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that forward passes advance, by the nodes of a row: a plain round has one."""
    now, widths, score = [0.0], list[int](), CausalTarget.score

    def timed(target: CausalTarget, state: Any, draft: Any) -> Any:
        widths.append(draft.valid.shape[1])
        now[0] += widths[-1]
        return score(target, state, draft)

    monkeypatch.setattr(CausalTarget, "score", timed)
    monkeypatch.setattr("mmspec.accelerator.PacedDrafter", partial(PacedDrafter, clock=lambda: now[0]))
    form = {"type": "regex", "regex": "([a-c]{9}there there there ){6}"}
    pipe = VisionLanguagePipeline(model, TOKENIZER, "none")
    pipe.set_accelerator("copy", length="cost")
    with pipe.running_batch(rows=1) as batch:
        for seed in range(3):
            more: Any = {**RAW, "max_new_tokens": 150, "temperature": 2.0, "seed": seed}
            batch.enter(PROMPTS[0], response_format=form, eos_token_id=END, **more)
            while batch.handles:
                batch.step()
    (policy,) = pipe.accelerator.costs.values()
    assert policy.cost.is_measured(0)
    assert set(policy.cost.seconds[0]) == {1.0}
    assert sum(width > 3 for width in widths) > 10, "certain tokens were added"


def test_a_grammar_needs_the_host_and_no_call_for_each_node() -> None:
    processor = grammar_processor(JSON, TOKENIZER)
    sampler = Sampler(processors=[LogitsProcessorList([processor]), LogitsProcessorList()])
    assert sampler.reads_ids and not sampler.calls_by_node and sampler.grammars == [processor, None]
    assert not Sampler(processors=[LogitsProcessorList()]).reads_ids


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", ["speculative_sampling", "recursive_rejection", "k_sequential", "block"])
@pytest.mark.parametrize("planted", [False, True], ids=["", "planted bug"])
def test_drawn_candidates_keep_the_distribution(
    rule: str, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs of `(a|b)c(a|d)`, enumerated; the planted bug removes excluded drawn candidates."""
    rows, first = 2000, TOKENIZER("abcdx").input_ids
    a, b, c, d, x = first
    p = torch.full((VOCABULARY,), -3.0, dtype=torch.float64)
    p[[a, b, d, x]] = torch.tensor([1.0, 0.0, 0.3, 2.0], dtype=torch.float64)
    q = torch.zeros(VOCABULARY, dtype=torch.float64)
    q[[a, b, c, x]] = torch.tensor([0.1, 0.4, 0.1, 0.4], dtype=torch.float64)
    if planted:
        grow = core.grow
        monkeypatch.setattr(core, "grow", lambda *args: grow(*args[:4], False, args[5]))
    form = grammar_processor({"regex": "(a|b)c(a|d)"}, TOKENIZER)
    processors = [form.of_row(0) for _ in range(rows)]
    stats, device = DecodingStats(), torch.device("cpu")
    canvas = Canvas([[1]] * rows, Stopping(9, frozenset({END})), stats, device)
    random = RandomStream.from_seed(3, rows, device)
    for processor in processors:
        assert isinstance(processor, GrammarProcessor)
        processor.matchers([[1]])
    drawn = torch.multinomial(q.expand(rows, -1), 3, True, generator=torch.Generator().manual_seed(1))
    tokens = torch.cat([torch.ones(rows, 1, dtype=torch.long), drawn], 1)
    proposed = Tree.chain(tokens, DraftKind.IID, Categorical(q.expand(rows, 3, -1)))
    draft = with_certain(proposed, processors, canvas, VOCABULARY)
    assert isinstance(draft, Tree)
    sampler = Sampler(1.0, processors=[LogitsProcessorList([each]) for each in processors])
    scores = sampler(p.expand(rows, draft.tokens.shape[1], -1), draft, canvas.history, canvas.emitted)
    path = RULES[rule]().verify(draft, scores, random, canvas.emitted)  # type: ignore[attr-defined]
    seen = Counter(zip(path.values[:, 0].tolist(), path.accepted.tolist(), strict=True))
    share = sum(count for (token, _), count in seen.items() if token == a) / rows
    expected = float(p[[a, b]].softmax(0)[0])
    error = 4 * (expected * (1 - expected) / rows) ** 0.5
    assert (abs(share - expected) > error) is planted
    assert {token for token, _ in seen} == {a, b}
    behind = path.accepted >= 1  # the forced token was accepted behind every accepted one
    assert bool((path.accepted[behind] >= 2).all()) and bool(behind.any())
    third = path.values[path.accepted == 2, 2]
    if not planted:
        assert set(third.tolist()) == {a, d}


def test_formats_in_other_words(plain: Any) -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    same = [
        JSON,
        Model,
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"type": "json_schema", "json_schema": SCHEMA},
    ]
    assert len({grammar_source(each) for each in same}) == 1
    assert grammar_source({"type": "json_object"}) == grammar_source({"json_object": True})
    assert grammar_source({"regex": "a", "choice": None}) == grammar_source({"type": "regex", "regex": "a"})
    assert grammar_source({"type": "text"}) is None is grammar_source(None)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", "response_format must be a pydantic model, or a dictionary"),
        ({"type": "jsonschema"}, "response_format.type must be"),
        ({"type": "regex"}, 'response_format must have the key "regex" with type regex'),
        ({"regex": "a", "choice": ["b"]}, 'response_format must have the key "type", or one of'),
        ({"structural_tag": "{}"}, "response_format.structural_tag is not supported"),
        ({"choice": []}, "response_format.choice must be a list of strings"),
        ({"json": "{"}, "response_format.json must be a JSON schema"),
        ({"json": 3}, "response_format.json must be a JSON schema"),
        ({"regex": "((("}, "response_format must be a grammar that llguidance reads"),
        ({"json": {"type": "foo"}}, "response_format must be a grammar that llguidance reads"),
        ({"grammar": ""}, "response_format.grammar must be a string that is not empty"),
        ([JSON, JSON], "response_format must be one format, or a list with one for each of the 1 prompts"),
    ],
)
def test_errors_name_the_rule(plain: Any, form: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        call(plain, form, "the")
    assert str(caught.value).startswith(text)


def test_a_missing_package_and_a_missing_end_token_are_named(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="eos_token_id must be set with response_format"):
        plain("the", response_format=JSON, eos_token_id=[], **RAW)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(MissingDependencyError, match=r"\[grammar\]"):
        call(plain, JSON, "the")
