"""Hidden states that one training stores and later ones read equal those of the target."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmspec.heads.model import HIDDEN
from mmspec.training.data.states import StoredStates
from mmspec.training.drafter import train_drafter
from tests.methods.flash_checks import target_of
from tests.tiny_models import save_family, tiny_image
from tests.training.own_answers import own_answers


@contextmanager
def forwards() -> Iterator[list[nn.Module]]:
    """The models that run, once for each forward of one."""
    ran: list[nn.Module] = []

    def note(module: nn.Module, *_: object) -> None:
        if isinstance(module, PreTrainedModel) and hasattr(module, "get_decoder"):
            ran.append(module)

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield ran
    finally:
        handle.remove()


def sequences() -> list[dict[str, Tensor]]:
    """Of three lengths: with two images, with none, and of several turns."""
    return [example.inputs for example in own_answers("llava", torch.float32).examples]


def assert_read(states: StoredStates, taps: tuple[int, ...], runs: bool) -> None:
    """The states of a batch are the target's, bit for bit."""
    expected = states.target.read(sequences(), taps)
    with forwards() as ran:
        found = states.read(sequences(), taps)
    assert bool(ran) == runs
    assert list(found) == list(taps) and all(torch.equal(found[tap], expected[tap]) for tap in taps)


def test_stored_states_are_those_that_the_target_reads(tmp_path: Path) -> None:
    """With images and without; a tap that is not there is added; embeddings of text are the table's."""
    target = target_of("llava", torch.float32)
    for taps, runs in (((0, -1), True), ((-1, 0), False), ((0, 1, -1), True), ((0, 1, -1), False)):
        assert_read(StoredStates(target, tmp_path), taps, runs)
    kept = []
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as states:
            kept.append(sorted(states.keys()))
    assert sorted(kept) == [["-1", "0", "1"], ["-1", "0", "1"], ["-1", "1"]]
    assert len(list(tmp_path.iterdir())) == 4, "a file for each sequence, and the target's"


def test_summaries_are_of_the_logits_and_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, given = StoredStates(target_of("llava", torch.float32), tmp_path), sequences()
    hidden = states.read(given, (HIDDEN,))[HIDDEN]
    logits = states.target.head(hidden).float()
    first = states.summary(given, hidden)
    monkeypatch.setattr(states.target, "head", None)
    again = states.summary(given, hidden)
    for row, inputs in enumerate(given):
        length = inputs["input_ids"].shape[1]
        for found in (first, again):
            assert torch.equal(found.likeliest[row, :length], logits[row, :length].argmax(-1))
            assert torch.equal(found.total[row, :length], logits[row, :length].logsumexp(-1))


@pytest.mark.parametrize("left", [0, 6, -8])
def test_a_torn_file_is_read_anew(left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = target_of("llava", torch.float32)
    states, given = StoredStates(target, tmp_path), sequences()[1:2]
    states.read(given, (0, -1))
    (file,) = tmp_path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    with caplog.at_level(logging.WARNING), forwards() as ran:
        found = states.read(given, (0, -1))
    assert ran and "is damaged" in caplog.text and file.read_bytes() == whole
    assert torch.equal(found[-1], target.read(given, (-1,))[-1])


def test_a_second_training_never_runs_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second head on the same data; both equal the heads trained without stored states, bitwise."""
    monkeypatch.setattr("mmspec.training.drafter.acceptance_length", lambda *_: 1.0)
    monkeypatch.setattr("mmspec.training.drafter.MEASURED_BATCHES", 1)
    target = save_family("llava", tmp_path / "target")
    said = [{"prompt": "describe the circle", "response": "red and " * (1 + row)} for row in range(7)]
    said[1]["image"] = said[2]["image"] = tiny_image(1)

    def train(method: str, states: Path | None) -> tuple[list[float], dict[str, Tensor], list[nn.Module]]:
        losses: list[float] = []
        # one row at a time, so that the batch of a row is the same in every run
        how: dict[str, Any] = {"steps": 3, "batch_size": 1, "method": method, "states": states}
        how["on_step"] = lambda step, loss: losses.append(loss)
        with forwards() as ran:
            out = train_drafter(target, tmp_path / f"{method}-{states is None}", said, **how)
        return losses, load_file(out / "model.safetensors"), ran

    for method, runs in (("medusa", True), ("hydra", False)):
        losses, weights, _ = train(method, None)
        found, ours, ran = train(method, tmp_path / "states")
        assert found == losses and all(torch.equal(ours[name], weight) for name, weight in weights.items())
        assert any(type(model).__name__.startswith("Llava") for model in ran) == runs
