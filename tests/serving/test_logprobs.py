"""Log-probabilities of answers, compared with those of the pipeline; penalties, biases and allowed tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspec.core.logprobs import TokenLogprob
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.pipelines.text_stream import TextDeltas
from mmspec.serving.chat import StopText
from mmspec.serving.token_entries import EntryQueue, Piece, TokenEntry, TokenPieces
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.pipelines.small_tokenizers import TOKENIZERS
from tests.serving.conftest import load, reference, running, without_moves
from tests.tiny_models import tiny_llama

PROMPT = "Describe the picture."


def logged(server, stream: bool, **settings):
    """Text of a chat, and its entries; of the stream, also that entries never run ahead of the text."""
    answer = server.chat(PROMPT, logprobs=True, stream=stream, **settings)
    if not stream:
        (choice,) = answer.choices
        return choice.message.content, choice.logprobs.content
    text, entries = "", []
    for chunk in answer:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        entries += choice.logprobs.content if choice.logprobs else []
        if choice.finish_reason is None:
            sent = joined(entries)
            assert text.encode()[: len(sent)] == sent
    return text, entries


def joined(entries) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in entries)


@pytest.mark.parametrize("kind", ["batch", "turns"])
def test_they_are_those_of_the_pipeline(server, kind):
    if kind == "batch":
        check_values(server)
        return
    with without_moves(load("scenes-llava")) as pipe, running(pipelines={"scenes-llava": pipe}) as in_turn:
        check_values(in_turn)


def check_values(server):
    pipe = reference("scenes-llava")
    for settings in ({}, {"temperature": 1.5, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5}):
        no_limit = {"top_k": 0} if settings else {}
        expected = pipe(PROMPT, logprobs=3, max_new_tokens=24, **no_limit, **settings)
        text, entries = logged(server, False, top_logprobs=3, max_tokens=24, **settings)
        shown = [one for one in expected.logprobs[0] if one.token != pipe.tokenizer.eos_token_id]
        assert text == expected.text[0]
        assert joined(entries) == text.encode()
        assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in shown], abs=1e-4)
        for entry, one in zip(entries, shown, strict=True):
            assert entry.token.strip() == pipe.tokenizer.decode([one.token])
            likely = pipe.tokenizer.batch_decode([[token] for token, _ in one.top])
            assert [top.token.strip() for top in entry.top_logprobs] == likely
            values = [value for _, value in one.top]
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(values, abs=1e-4)
        assert logged(server, True, top_logprobs=3, max_tokens=24, **settings) == (text, entries)


def test_without_alternatives_and_without_log_probabilities(server):
    _, entries = logged(server, False, max_tokens=4)
    assert len(entries) == 4 and all(entry.top_logprobs == [] for entry in entries)
    answer = server.chat(PROMPT, logprobs=False, top_logprobs=0, max_tokens=4)
    assert answer.choices[0].logprobs is None
    assert answer.choices[0].message.content.encode() == joined(entries)


@pytest.mark.parametrize("stream", [False, True])
def test_they_end_with_the_text(server, stream):
    plain, every = logged(server, False, max_tokens=24)
    words = plain.split()
    begun = f"{words[3][:-1]}"  # the token before the stop string is cut
    text, entries = logged(server, stream, max_tokens=24, stop=plain[plain.index(begun) + 2 :][:6])
    assert plain.startswith(text) and joined(entries).startswith(text.encode())
    assert entries == every[: len(entries)] and len(joined(entries[:-1])) < len(text)
    kept = {"max_tokens": 24, "stop": words[3], "extra_body": {"include_stop_str_in_output": True}}
    text, entries = logged(server, stream, **kept)
    assert text.endswith(words[3]) and joined(entries) == text.encode()


def test_special_tokens_that_are_shown_have_an_entry(server):
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    text, entries = logged(server, False, max_tokens=24, extra_body=shown)
    assert text.endswith("<eos>") and entries[-1].token == "<eos>"
    assert joined(entries) == text.encode()


def test_parts_of_characters_have_bytes_and_an_escaped_text():
    model, tokenizer = tiny_llama(vocab=300), byte_level_tokenizer()
    parts = tokenizer.convert_tokens_to_ids(["Ã", "©", "ð", "x"])
    bounds = {"max_tokens": 12, "top_logprobs": 2, "extra_body": {"allowed_token_ids": parts}}
    with running(pipelines={"scenes-llava": VisionLanguagePipeline(model, tokenizer, "copy")}) as tiny:
        for seed in range(4):
            sampled = {**bounds, "temperature": 2.0, "seed": seed}
            text, entries = logged(tiny, False, **sampled)
            assert joined(entries).decode("utf-8", "replace") == text
            assert {entry.token for entry in entries} <= {"\\xc3", "\\xa9", "\\xf0", "x"}
            answer = tiny.chat(PROMPT, logprobs=True, stream=True, **sampled)
            choices = [chunk.choices[0] for chunk in answer]
            assert "".join(one.delta.content or "" for one in choices) == text
            assert [e for one in choices if one.logprobs for e in one.logprobs.content] == entries


NAMES = ["byte level", "byte fallback", "metaspace", "pieces of words", "words of scenes"]


@given(st.sampled_from(NAMES), st.lists(st.lists(st.integers(0, 10**6), max_size=5), max_size=8))
def test_the_pieces_join_to_the_text_and_their_bytes_too(name, rounds):
    tokenizer = TOKENIZERS[name]
    pieces = TokenPieces(tokenizer)
    plain, found, text = TextDeltas(tokenizer), [], ""
    rounds = [[token % len(tokenizer) for token in tokens] for tokens in rounds]
    for tokens in rounds:
        found += pieces.add(tokens, [TokenLogprob(token, float("-inf"), []) for token in tokens])
        text += plain.add(tokens)
    found += pieces.finish()
    text += plain.finish()
    assert "".join(piece.text for piece in found) == text
    entries = [entry for piece in found for entry in piece.entries]
    visible = [token for tokens in rounds for token in tokens if token not in tokenizer.all_special_ids]
    assert len(entries) == len(visible) and {entry.logprob for entry in entries} <= {-9999.0}
    data = b"".join(entry.data for entry in entries)
    assert data.decode("utf-8", "replace") == text


texts = st.lists(st.text("ab", max_size=3), max_size=8)


@given(texts, st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_entries_are_sent_with_their_text_and_end_with_it(tokens, stops):
    cut, queue, sent, given_entries = StopText(stops), EntryQueue(), "", []
    for index, token in enumerate([*tokens, None]):
        text = cut.finish() if token is None else ""
        if token is not None:
            queue.add(Piece(token, [TokenEntry(token.encode(), -1.0 * index)]))
            text = cut.add(token)
        sent += text
        given_entries += queue.take(text, is_last=token is None)
        covered = "".join(entry.data.decode() for _, entry in given_entries)
        assert token is None or sent.startswith(covered)
    assert covered.startswith(sent)
    assert [int(-entry.logprob) for _, entry in given_entries] == list(range(len(given_entries)))
    assert all(place <= len(sent) for place, _ in given_entries)
    if not cut.has_ended:
        assert len(given_entries) == len(tokens)


def test_penalties_and_biases_are_those_of_the_pipeline(server):
    pipe = reference("scenes-llava")

    def said(**settings):
        return server.chat(PROMPT, max_tokens=24, **settings).choices[0].message.content

    def expected(**settings):
        return pipe(PROMPT, max_new_tokens=24, **settings).text[0]

    plain = said()
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 1.0}
    assert said(**penalties) == expected(**penalties) != plain
    first, second = pipe(PROMPT, max_new_tokens=24).tokens[0][:2]
    bias = {"sequence_bias": [[[first], -9.0], [[second], 4.5]]}
    assert said(logit_bias={str(first): -9, str(second): 4.5}) == expected(**bias) != plain
    assert said(logit_bias={str(first): -100}) == expected(bad_words_ids=[[first]]) != plain
    allowed = {first, second, pipe.tokenizer.eos_token_id}
    others = [token for token in range(418) if token not in allowed]
    only = expected(suppress_tokens=others)
    assert said(extra_body={"allowed_token_ids": sorted(allowed)}) == only != plain
    assert said(logit_bias={str(token): 100 for token in allowed} | {"7": 99}) == only
    both = {str(first): 100, str(second): 100}
    words = said(logit_bias=both, extra_body={"allowed_token_ids": [second, 7]}).split()
    assert len(words) == 24 and set(words) == {pipe.tokenizer.decode([second])}
