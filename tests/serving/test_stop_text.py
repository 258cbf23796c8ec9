"""Stop strings in streamed text, however it is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from mmspec.serving.chat import StopText

words = st.text("ab", max_size=12)


@given(st.lists(words), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_text_is_what_stands_before_the_first_stop_string(pieces, stops):
    text = "".join(pieces)
    ends = [text.find(stop) for stop in stops if stop in text]
    cut = StopText(stops)
    sent = []
    for piece in pieces:
        sent.append(cut.add(piece))
        assert not any(stop in "".join(sent) for stop in stops)
    whole = "".join(sent) + cut.finish()
    if not ends:
        assert whole == text
    else:
        assert cut.has_ended
        # a stop string that is complete earlier ends the text, though a longer one may begin before it
        assert text.startswith(whole)
        assert not any(stop in whole for stop in stops)


@given(st.lists(words), st.text("ab", min_size=1, max_size=4))
def test_a_stop_string_that_is_kept_ends_the_text(pieces, stop):
    text = "".join(pieces)
    cut = StopText([stop], keeps=True)
    whole = "".join(map(cut.add, pieces)) + cut.finish()
    assert whole == (text[: text.index(stop)] + stop if stop in text else text)


def test_only_what_may_begin_a_stop_string_is_held_back():
    cut = StopText(["END"])
    assert [cut.add(piece) for piece in ("one E", "x two EN", "Dmore", "rest")] == ["one ", "Ex two ", "", ""]
    assert cut.finish() == ""
