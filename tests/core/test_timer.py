"""The parts of a round's time: what each is of, by a clock that only the parts advance, and by events."""

import pytest
import torch

from mmspec.core import statistics
from mmspec.core.statistics import PARTS, DecodingStats, Timer, timed_by_device
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.targets import CausalTarget
from tests.contracts.running import decode
from tests.tiny_models import tiny_lm


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def slowed(clock, function, seconds):
    def run(*arguments, **keywords):
        clock.now += seconds
        return function(*arguments, **keywords)

    return run


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(statistics, "perf_counter", made)
    return made


def test_every_second_of_a_round_goes_to_its_part(clock, monkeypatch):
    target, drafter = CausalTarget(tiny_lm()), CopyDrafter()
    for name, seconds in {"prefill": 1000.0, "score": 100.0, "commit": 1.0}.items():
        monkeypatch.setattr(target, name, slowed(clock, getattr(target, name), seconds))
    start = drafter.start

    def started(*arguments):
        clock.now += 30.0
        session = start(*arguments)
        session.propose = slowed(clock, session.propose, 10.0)
        session.observe = slowed(clock, session.observe, 5.0)
        return session

    drafter.start = started
    stats = decode(target, [[1, 2, 3]], drafter, max_new_tokens=12).stats
    rounds = stats.target_forwards - 1
    assert rounds > 1
    assert stats.prompt_seconds == 1000.0
    assert stats.target_seconds == 100.0 * rounds
    assert stats.draft_seconds == 30.0 + 15.0 * rounds
    assert stats.verify_seconds == 1.0 * rounds
    assert sum(getattr(stats, f"{part}_seconds") for part in PARTS) == clock.now


class Event:
    """An event of a GPU: only the test advances its time, and it says nothing until the host has waited."""

    now, waited = 0.0, False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.at = Event.now

    def elapsed_time(self, other: "Event") -> float:
        assert Event.waited
        return 1000 * (other.at - self.at)


def test_events_are_read_once_when_the_loop_has_ended_and_only_where_they_were_asked_for(monkeypatch, clock):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: setattr(Event, "waited", True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    stats, cuda = DecodingStats(), torch.device("cuda:1")
    with timed_by_device(), Timer(stats, cuda) as timed:
        Event.now = 2.0
        timed.end("target")
        assert stats.target_seconds == 0.0
        Event.now = 5.0
        timed.end("verify")
        assert not Event.waited
    assert (stats.target_seconds, stats.verify_seconds) == (2.0, 3.0)
    Event.waited, clock.now = False, 0.0
    with Timer(stats, cuda) as timed:
        clock.now = 1.0
        timed.start()  # what came before belongs to no part
        clock.now = 5.0
        timed.end("draft")
    assert stats.draft_seconds == 4.0
    assert not Event.waited
