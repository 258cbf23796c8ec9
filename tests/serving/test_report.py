"""The report: what drafts gave, equal to the sums over the answers."""

import functools

import pytest
import torch

from mmspec.core.statistics import merge_stats
from mmspec.pipelines import MMSpecPipeline
from mmspec.serving.metrics import Metrics
from mmspec.serving.report import report_of, report_text
from tests.serving.conftest import running

PROMPTS = ["Describe the picture.", "write a long description of the picture.", "Describe the picture."]


@functools.cache
def pipeline(accelerator: str) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained("assets/scenes-llava", accelerator=accelerator, dtype=torch.float32)


@pytest.mark.every(3)
@pytest.mark.parametrize("accelerator", ["none", "copy", "flash"])
def test_the_report_is_that_of_the_answers(accelerator):
    alone = merge_stats([pipeline(accelerator)(prompt, max_new_tokens=60).stats for prompt in PROMPTS])
    with running(pipelines={"scenes-llava": pipeline(accelerator)}) as server:
        for prompt in PROMPTS:
            server.chat(prompt, max_tokens=60)
        report = report_of(server.metrics, "scenes-llava")
    assert sum(report.rows.values()) == len(PROMPTS)
    assert (report.new_tokens, report.rounds) == (sum(alone.new_tokens), sum(alone.rounds))
    assert report.tokens_per_forward_pass == pytest.approx(alone.acceptance_length)
    assert (report.drafted, report.accepted) == (sum(alone.drafted), sum(alone.accepted))
    assert sum(report.per_position) == report.accepted
    assert report.per_position == sorted(report.per_position, reverse=True)
    assert bool(report.drafted_rounds) == (accelerator != "none")
    assert max(report.per_position, default=0) <= report.drafted_rounds <= report.rounds


def test_a_round_without_a_draft_is_not_a_round_that_drafted():
    """`copy` has no draft where nothing in the text repeats, which the sizes of its drafts show."""
    pipe, sizes = pipeline("copy"), []
    score = pipe.target.score

    def noted(state, draft):
        sizes.append(int(draft.valid[0, 1:].sum()))
        return score(state, draft)

    pipe.target.score = noted
    stats = pipe(PROMPTS[1], max_new_tokens=60).stats
    del pipe.target.score
    assert 0 < stats.drafted_rounds[0] < stats.rounds[0]
    assert stats.drafted_rounds[0] == sum(size > 0 for size in sizes)


def test_the_text_of_a_report():
    metrics = Metrics()
    metrics.of_model("x"), metrics.of_model("y")
    assert report_text(metrics, ["x", "y"]) == (
        "x: 0 rows finished, 0 failed, 0 cancelled\n"
        "  0 tokens, 1.00 per forward pass; 0% of 0 rounds drafted\n"
        "y: 0 rows finished, 0 failed, 0 cancelled\n"
        "  0 tokens, 1.00 per forward pass; 0% of 0 rounds drafted"
    )
    drafts = {"drafts": 4, "draft_tokens": 12, "accepted": 5, "rounds": 10, "tokens": 16, "forwards": 11}
    for name, value in drafts.items():
        getattr(metrics, name).labels("x").inc(value)
    metrics.accepted_per_position.labels("x", "0").inc(4)
    metrics.accepted_per_position.labels("x", "1").inc(1)
    metrics.finished.labels("x", "stop").inc()
    assert str(report_of(metrics, "x")) == (
        "x: 1 rows finished (1 stop), 0 failed, 0 cancelled\n"
        "  16 tokens, 1.50 per forward pass; 40% of 10 rounds drafted\n"
        "  5 of 12 draft tokens accepted; by position: 100% 25%"
    )
