"""Tokens coloured by their source, the drafter or the target."""

import re
from collections.abc import Iterator
from html import unescape

from mmspec.core.statistics import DecodingStats
from mmspec.demo.talk import EMPTY, Lane, coloured_text, race, transcript, turn
from mmspec.pipelines import TextOutput


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(map(self.convert_ids_to_tokens, tokens))

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(97 + token)


def rounds(seconds: float, size: int, letters: int) -> Iterator[TextOutput]:
    """Outputs of a model that takes as long for each round, and gives `size` tokens in it."""
    try:
        for count in range(size, letters + 1, size):
            stats = DecodingStats("x", "exact", seconds=seconds * count / size, new_tokens=[count])
            stats.rounds, stats.target_forwards = [count // size], count // size
            tokens = list(range(count))
            drafted = [bool(token % size) for token in tokens]
            yield TextOutput([Letters().decode(tokens)], [tokens], stats, ["interrupted"], [drafted])
    finally:
        CLOSED.append(size)


CLOSED: list[int] = []


def test_the_text_is_whole_and_no_markup_of_the_model_gets_through() -> None:
    pieces = ["<script>", "", "alert('x')", " & more", "\n"]
    html = coloured_text(pieces, [True, False, True, False, True])
    assert re.findall(r"</?(\w+)", html) == ["span"] * 4
    assert unescape(re.sub(r"</?span[^>]*>", "", html)) == "".join(pieces)


def test_a_race_is_even_by_the_clocks_of_the_lanes() -> None:
    slow, fast = Lane("none", rounds(0.3, 1, 6), Letters()), Lane("flash", rounds(0.1, 2, 6), Letters())
    order = [(lane.name, "".join(lane.pieces)) for lane in race([slow, fast]) if not lane.finished]
    assert order[:5] == [
        ("none", "a"),
        ("flash", "ab"),
        ("flash", "abcd"),
        ("flash", "abcdef"),
        ("none", "ab"),
    ]
    assert slow.finished and fast.finished
    assert slow.pieces == fast.pieces == list("abcdef")
    CLOSED.clear()
    running = race([Lane("a", rounds(1, 1, 9), Letters()), Lane("b", rounds(1, 3, 9), Letters())])
    next(running), next(running)
    running.close()
    assert sorted(CLOSED) == [1, 3], "closing a race closes its lanes"


def test_a_turn_shows_question_answer_and_figures() -> None:
    lanes = [Lane("none", rounds(0.3, 1, 6), Letters()), Lane("flash", rounds(0.1, 2, 6), Letters())]
    assert transcript([]) == EMPTY
    for _ in race(lanes):
        pass
    outputs = [lane.output for lane in lanes if lane.output is not None]
    for output in outputs:
        output.finish_reasons = ["eos"]
    html = transcript([turn("what is <this>?", lanes)])
    assert "what is &lt;this&gt;?" in html
    assert "The same tokens in 3 forward passes instead of 6, 6.0 times as fast as plain decoding." in html
    assert "mm-slow" not in html
    slower = turn("?", lanes[::-1])
    assert "mm-slow" in slower and "slower than plain decoding: 0.17 times its speed" in slower
    outputs[1].tokens = [[0]]
    assert "Other tokens" in turn("?", lanes)
