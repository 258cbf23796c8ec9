"""The filter of Learn2PD: replays with an oracle, training, and decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.errors import CheckpointError, InputError
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.pipelines import MMSpecPipeline
from mmspec_extras.methods.learned import training
from mmspec_extras.methods.learned.filter import CommitFilter, CommitFilterConfig
from mmspec_extras.methods.learned.policy import Learned
from mmspec_extras.methods.learned.training import Replay, replay, train_filter
from tests.tiny_models import save_masked

PROMPTS = [
    "what colour is the circle ?",
    "how many",
    "is the red star left of the small square ?",
    "where is it ?",
]


def call_of(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "apply_chat_template": False, "do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained(save_masked("sdar", tmp_path_factory.mktemp("sdar")))


def test_the_oracle_decodes_the_same_in_no_more_forwards(pipe: Any) -> None:
    for prompt in PROMPTS:
        pipe.set_accelerator("none")
        plain = pipe(**call_of(prompt))
        seen = Replay.of(replay(pipe, call_of(prompt), UnmaskingDrafter(), "right"))
        assert len(seen.confidence) <= plain.stats.target_forwards
        assert seen.confidence.shape == seen.right.shape == seen.counted.shape
        # every place of the output is right, or was decided as the surest, in its last forward pass
        assert int(seen.counted.any(-1).sum()) == len(seen.confidence)
        pipe.set_accelerator("none")
        assert pipe(**call_of(prompt)).tokens == plain.tokens


def test_a_filter_is_trained_and_decodes(pipe: Any, tmp_path: Path) -> None:
    """Thresholds from one place per forward pass to all places."""
    folder = train_filter(pipe, [call_of(prompt) for prompt in PROMPTS * 3], tmp_path / "filter", epochs=40)
    record = json.loads((folder / "training.json").read_text())
    assert 0 <= record["false_positives"] <= 1 and record["forwards"] > 10
    pipe.set_accelerator("none")
    plain = pipe(**call_of(PROMPTS[0]))
    forwards = []
    for threshold in (1.5, 0.5, 0.0):
        pipe.set_accelerator("learned", filter=str(folder), threshold=threshold)
        output = pipe(**call_of(PROMPTS[0]))
        forwards.append(output.stats.target_forwards)
        if threshold > 1:
            assert output.tokens == plain.tokens
    assert forwards[0] == plain.stats.target_forwards >= forwards[1] >= forwards[2]
    begins = len(pipe.tokenizer(PROMPTS[0])["input_ids"]) % 4
    assert forwards[2] == -(-(12 + begins) // 4)


def test_a_head_learns_the_order_and_spot_guesses_by_it(pipe: Any, tmp_path: Path) -> None:
    """The output is that of plain decoding, whatever the head predicts."""
    calls = [call_of(prompt) for prompt in PROMPTS * 3]
    orders = Replay.of(replay(pipe, calls[0], UnmaskingDrafter(), "order"))
    assert (orders.right.sum(-1) == 1).all() and (orders.right <= orders.counted).all()
    assert (orders.counted <= (orders.confidence < 1)).all()
    folder = train_filter(pipe, calls, tmp_path / "head", epochs=60, learn="order")
    record = json.loads((folder / "training.json").read_text())
    assert record["by_confidence"] == 1.0 and 0 <= record["next"] <= 1
    pipe.set_accelerator("none")
    plain = [pipe(**call).tokens for call in calls[:4]]
    pipe.set_accelerator("spot", head=str(folder), states=4)
    for call, tokens in zip(calls[:4], plain, strict=True):
        output = pipe(**call)
        assert output.tokens == tokens and output.stats.exactness == "exact"
    with pytest.raises(InputError, match="learn"):
        train_filter(pipe, calls, tmp_path / "head", learn="wrong")


def test_every_tenth_example_is_held_out(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file sorted by task has prompts of all tasks in both parts."""

    def numbered(pipe: Any, call: dict[str, Any], drafter: object, learn: str) -> list[training.Pass]:
        open_places = torch.ones(1, 4, dtype=torch.bool)
        return [(torch.full((1, 4), call["number"] / 100), open_places, open_places)]

    parts: list[list[int]] = []
    measured = Replay.of

    def noted(passes: Sequence[training.Pass]) -> Replay:
        parts.append([round(100 * float(confidence[0, 0])) for confidence, _, _ in passes])
        return measured(passes)

    monkeypatch.setattr(training, "replay", numbered)
    monkeypatch.setattr(Replay, "of", noted)
    train_filter(pipe, [{"number": number} for number in range(22)], tmp_path / "filter", epochs=1)
    assert parts == [[0, 10, 20], [number for number in range(22) if number % 10]]


def test_fitting_a_rule_leaves_the_users_filter_alone(pipe: Any) -> None:
    own = CommitFilter(CommitFilterConfig(block_length=4)).double()
    rule = Learned(filter=own)
    fitted = rule.fit(pipe.target)
    assert rule.model is own and fitted.model is not own
    fitted.model.float()
    assert next(own.parameters()).dtype == torch.float64


def test_what_cannot_be_trained_or_read_is_refused(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="samples"):
        train_filter(pipe, [call_of("how many")], tmp_path / "filter")
    with pytest.raises(CheckpointError, match="filter"):
        Learned(filter=tmp_path)
    with pytest.raises(InputError, match="filter"):
        build_accelerator("learned").fit(pipe.target)
    with pytest.raises(InputError, match="head"):
        build_accelerator("spot").fit(pipe.target)
    with pytest.raises(InputError, match="threshold"):
        Learned(threshold=-1.0)
