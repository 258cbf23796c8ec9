"""The loss of the gaps benchmark is that of the predictions of `assd`'s target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from extras.benchmarks.gaps import hide, loss_of, main
from extras.tests.test_any_subset import MASK, WORDS, model
from mmspec_extras.families.xlnet.target import AnySubsetTarget


def test_the_loss_is_that_of_the_gaps_as_they_are_filled() -> None:
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(MASK + 1, WORDS, (2, 7), generator=noise)
    gaps = hide(tokens, torch.tensor([0.5, 0.9]), noise)
    assert gaps.sum(-1).tolist() == [3, 6]
    made = AnySubsetTarget(model())
    nats = list[float]()
    for row, hidden in zip(tokens, gaps, strict=True):
        prompt = row.masked_fill(hidden, MASK)
        state = made.arrange([{"input_ids": prompt[None]}])
        filled = made.filled(state, row[hidden][None], torch.arange(int(hidden.sum()))[None])
        ahead = torch.arange(int(hidden.sum()))[None]
        log_p = made.predict(state, filled, state.ranks, ahead).log_softmax(-1)[0]
        nats += (-log_p.gather(1, row[hidden][:, None]))[:, 0].tolist()
    assert float(loss_of(model(), tokens, gaps, MASK)) == pytest.approx(sum(nats) / len(nats), abs=1e-4)


def test_a_model_is_made_loaded_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config of an XLNet has -1 positions, because their number has no limit."""
    main(minutes=0.0, layers=1, width=32, texts=1, out=tmp_path)
    assert "assd" in capsys.readouterr().out
