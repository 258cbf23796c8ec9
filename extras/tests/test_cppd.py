"""CPPD: lines are read in one forward pass; a short training reads rendered words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from extras.reference.words import render_word, sample_word, train_words
from mmspec.errors import InputError
from mmspec_extras.cppd import CPPD, CPPDConfig
from mmspec_extras.cppd.modeling import pixels_of

LETTERS = "ab"


def small() -> CPPD:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CPPD(CPPDConfig(alphabet=LETTERS, positions=5, hidden_size=32, layers=1))


def test_a_short_training_reads_rendered_words() -> None:
    model, words = small(), ["a", "b", "ab", "ba", "bba"]
    lines = [render_word(word, index) for index, word in enumerate(words)]
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model.loss(pixels_of(lines), words).backward()
        optimizer.step()
    assert model.eval().recognise(lines) == words
    passes = list[int]()
    model.encoder.register_forward_hook(lambda *args: passes.append(1))
    model.counter.register_forward_hook(lambda *args: pytest.fail("counts are read in training alone"))
    model.recognise(lines)
    assert len(passes) == 1


def test_lines_keep_their_proportions_unless_they_are_too_long() -> None:
    half = Image.new("L", (100, 50), 255)
    half.paste(0, (0, 0, 50, 50))
    short, tall, long = pixels_of([half, half.resize((50, 50)), half.resize((900, 50))])[:, 0]
    assert [int((pixels[16] < 0).sum()) for pixels in (short, tall, long)] == [32, 16, 64]
    assert bool((short[:, 40:] == 1).all())


def test_what_follows_the_end_does_not_count() -> None:
    model, line = small().eval(), render_word("ab", 0)
    forced = torch.full((1, 5, 3), -1.0)
    for position, letter in enumerate((0, 1, 2, 0, 1)):
        forced[0, position, letter] = 1.0
    model.forward = lambda pixels: forced  # type: ignore[method-assign]
    assert model.recognise([line]) == ["ab"]


def test_a_training_saves_a_recogniser(tmp_path: Path) -> None:
    train_words(tmp_path / "one", alphabet=LETTERS, hidden_size=16, steps=2, batch_size=2)
    assert CPPD.from_pretrained(tmp_path / "one").config.alphabet == LETTERS
    (stage,) = json.loads((tmp_path / "one" / "training.json").read_text())["stages"]
    assert stage["steps"] == 2 and 0 <= stage["right"] <= 1


def test_words_have_a_seed_and_texts_that_cannot_be_read_are_refused() -> None:
    words = [sample_word(seed, LETTERS, 4) for seed in range(40)]
    assert words == [sample_word(seed, LETTERS, 4) for seed in range(40)]
    assert {len(word) for word in words} == {1, 2, 3, 4} and set("".join(words)) == set(LETTERS)
    for text in ("c", "aaaaa"):
        with pytest.raises(InputError, match="texts"):
            small().loss(pixels_of([Image.new("L", (50, 20))]), [text])
