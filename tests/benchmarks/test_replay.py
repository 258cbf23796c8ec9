"""Replies decoded again on a clock: the drafts are those of real decoding, and forwards cost what is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.replay import Costs, Recording, Replay, measure_costs, record_replies, replayed
from mmspec import MMSpecPipeline
from mmspec.evaluation.contenders import Contender, contender, decode_conversations
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.timing import TimedRun
from tests.drafters.eagle_checks import head_for
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_llama

TOKENS = 24
EXAMPLES = [Example((text,), category="text") for text in ("abcabcab", "zyxw" * 20, "?")]
SECONDS = 1000.0  # beside which everything but a forward takes no time


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(vocab=300).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return MMSpecPipeline.from_pretrained(folder, accelerator="none")


@pytest.fixture(scope="module")
def contenders(pipe: Any) -> dict[str, Contender]:
    head = head_for(pipe.target)
    return {
        "none": contender(pipe, "none"),
        "draft_model": contender(
            pipe, "draft_model", drafter=tiny_llama(vocab=300), length="cost", num_draft_tokens=4
        ),
        "eagle": contender(pipe, "eagle", drafter=head, length="fixed", num_draft_tokens=6, depth=3),
    }


@pytest.fixture(scope="module")
def recordings(pipe: Any, contenders: dict[str, Contender]) -> list[Recording]:
    taps = contenders["eagle"].accelerator.drafter.taps
    return record_replies(contenders["none"].enter(), EXAMPLES, TOKENS, taps)


def played(pipe: Any, contenders: Any, recordings: Any, costs: Costs) -> dict[str, list[TimedRun]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prefill", "score", "commit"):
            patch.setattr(pipe.target, name, getattr(pipe.target, name), raising=False)
        fresh = {
            label: replace(one, accelerator=one.accelerator.fit(pipe.target))
            for label, one in contenders.items()
        }
        runs = list(replayed(fresh, EXAMPLES, recordings, Replay(pipe.target, costs), TOKENS))
    return {label: [run for run in runs if run.accelerator == label] for label in contenders}


def test_drafts_are_those_of_real_decoding(pipe: Any, contenders: Any, recordings: Any) -> None:
    runs = played(pipe, contenders, recordings, Costs({1: SECONDS, 64: SECONDS}, SECONDS))
    for label in ("none", "eagle"):
        for example, run in zip(EXAMPLES, runs[label], strict=True):
            real = decode_conversations(
                contenders[label].enter(), [example], max_new_tokens=TOKENS, temperature=0.0
            )
            assert run.decoded.tokens == real.tokens
            (ours,), (theirs,) = run.decoded.stats, real.stats
            assert ours.accepted_histogram == theirs.accepted_histogram
            assert ours.target_forwards == theirs.target_forwards


def test_time_is_what_forwards_cost(pipe: Any, contenders: Any, recordings: Any) -> None:
    costs = Costs({1: SECONDS, 3: 2 * SECONDS, 7: 3 * SECONDS}, SECONDS / 10)
    runs = played(pipe, contenders, recordings, costs)
    for recording, plain, eagle in zip(recordings, runs["none"], runs["eagle"], strict=True):
        prompt = recording.prompt_length * SECONDS / 10
        assert plain.seconds == pytest.approx(prompt + (TOKENS - 1) * SECONDS, abs=SECONDS / 10)
        rounds = eagle.decoded.stats[0].target_forwards - 1
        assert eagle.seconds == pytest.approx(prompt + rounds * 3 * SECONDS, abs=SECONDS / 10)


def test_drafts_are_as_long_as_pays_on_that_clock(pipe: Any, contenders: Any, recordings: Any) -> None:
    """A draft model that is always right drafts what is free, and not what costs fifty tokens a candidate."""

    def forwards(costs: Costs) -> int:
        runs = played(pipe, contenders, recordings, costs)["draft_model"]
        return sum(run.decoded.stats[0].target_forwards for run in runs)

    plain = len(EXAMPLES) * TOKENS
    assert forwards(Costs({1: SECONDS, 64: SECONDS}, SECONDS)) < plain / 3
    assert forwards(Costs({1: SECONDS, 2: 50 * SECONDS, 64: 99 * SECONDS}, SECONDS)) > 0.9 * plain


def test_forwards_are_measured_by_their_nodes(pipe: Any, recordings: list[Recording]) -> None:
    costs = measure_costs(pipe.target, [each.prompt for each in recordings], largest=5)
    assert list(costs.scores) == [1, 2, 3, 4, 6] and min(costs.scores.values()) > 0 < costs.token
    known = Costs({1: 1.0, 3: 2.0}, 0.5)
    assert [known.score(nodes) for nodes in (1, 2, 3)] == [1.0, 1.5, 2.0]
