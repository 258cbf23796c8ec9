"""Rounds give the same results if the host reads them after the next round has started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from mmspec.core import loop
from mmspec.core.canvas import Canvas
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.sampling import Sampler
from mmspec.targets import CausalTarget
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.checks import PROMPTS, precise
from tests.contracts.running import Run, decode
from tests.contracts.test_drafters import REGISTERED

SAMPLER = Sampler(temperature=0.9, top_p=0.95)
ENDS = (1, 5, 9)
CASES: dict[str, Callable[[], tuple[Drafter, AcceptanceRule | None]]] = {
    **{name: lambda build=build: (build(3, torch.float64), None) for name, build in REGISTERED.items()},
    "draft_model, sampled": lambda: (
        REGISTERED["draft_model, sampled"](3, torch.float64),
        SpeculativeSampling(),
    ),
    "jacobi": lambda: (JacobiDrafter(5), SpeculativeSampling()),
    "jacobi, exact, with a tree": lambda: (JacobiDrafter(5, "exact", front="3x2"), None),
}
#: Drafts of changing sizes have others on a GPU: see `tests/trees/test_length_on_gpus.py`.
AHEAD = [name for name, build in CASES.items() if "changing" not in name and build()[0].runs_ahead]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an asynchronous device."""
    monkeypatch.setattr(loop, "runs_by_itself", lambda device: True)


def run(name: str, **settings: Any) -> Run:
    drafter, rule = CASES[name]()
    sampler = settings.pop("sampler", SAMPLER)
    return decode(precise(), PROMPTS, drafter, rule, sampler, seed=[7, 8, 9], **settings)


def same(one: Run, other: Run) -> bool:
    counted = [
        (each.stats.target_forwards, each.stats.rounds, each.stats.drafted, each.stats.accepted)
        for each in (one, other)
    ]
    records = [(each.outputs, each.canvas.finish_reasons, each.canvas.drafted) for each in (one, other)]
    return counted[0] == counted[1] and records[0] == records[1] and one.emissions == other.emissions


@pytest.mark.parametrize(
    ("name", "end"),
    [*((name, ENDS) for name in AHEAD), *((name, ()) for name in ("none", "eagle", "jacobi"))],
)
@pytest.mark.every(6)
def test_nothing_but_the_time_of_reading_changes(name: str, end: tuple[int, ...], request: Any) -> None:
    at_once = run(name, end=end, max_new_tokens=24)
    request.getfixturevalue("gpu")
    assert same(run(name, end=end, max_new_tokens=24), at_once)


def order_of(name: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    """Return the order of events in a call: s for a scoring forward pass, r for a read."""
    events: list[str] = []
    for owner, method, letter in ((CausalTarget, "score", "s"), (Canvas, "read", "r")):
        real = getattr(owner, method)

        def noted(*args: Any, real: Any = real, letter: str = letter) -> Any:
            events.append(letter)
            return real(*args)

        monkeypatch.setattr(owner, method, noted)
    run(name, max_new_tokens=4, **settings)
    return "".join(events)


class Never(StoppingCriteria):
    """A criterion that never stops, but must be called."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_rounds_are_read_late_where_nothing_on_the_host_decides(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        assert order_of("none", patch) == "r" + "s" + "sr" * 3
    with monkeypatch.context() as patch:
        assert order_of("none", patch, criteria=[Never()]) == "r" + "sr" * 3
    with monkeypatch.context() as patch:
        assert "ss" not in order_of("copy", patch), "it looks at the host's record"


def test_bounds_that_forget_what_is_unread_are_noticed(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = run("draft_model", max_new_tokens=24, sampler=Sampler())
    monkeypatch.setattr(Canvas, "length_bounds", property(lambda canvas: list(canvas.output_lengths)))
    try:
        late = run("draft_model", max_new_tokens=24, sampler=Sampler())
    except (RuntimeError, IndexError):
        return
    assert not same(late, at_once)
