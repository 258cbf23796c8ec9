"""Chats by OpenAI's own client, against a real server; stop strings in text, however it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from mmspec.pipelines import VisionLanguagePipeline
from mmspec.serving.chat import StopText
from tests.pipelines.byte_level import TEMPLATE
from tests.pipelines.published_configs import EVERY
from tests.serving.conftest import reference, running
from tests.tiny_models import tiny_llama, tiny_tokenizer

PROMPT = "Describe the picture."


def asked(text: str, url: str) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def test_an_answer_is_that_of_the_pipeline(server, scene, scene_url):
    expected = reference("scenes-llava")(PROMPT, images=scene, max_new_tokens=60)
    answer = server.client.chat.completions.create(
        model="scenes-llava", messages=asked(PROMPT, scene_url), max_tokens=60
    )
    (choice,) = answer.choices
    assert choice.message.content == expected.text[0]
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(expected.tokens[0])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 20  # visual tokens included
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == expected.stats.accepted[0]


def test_a_stream_gives_the_same_text_and_its_usage(server, scene_url):
    long = "write a long description of the picture."
    what = {"model": "scenes-llava", "messages": asked(long, scene_url), "max_completion_tokens": 200}
    whole = server.client.chat.completions.create(**what)
    chunks = list(
        server.client.chat.completions.create(**what, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert sum(map(bool, texts)) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_ends_before_a_stop_string(server, scene_url, stream):
    what = {"model": "scenes-llava", "messages": asked(PROMPT, scene_url), "max_tokens": 60}
    text = server.client.chat.completions.create(**what).choices[0].message.content
    stop = text[len(text) // 2 :].strip()[:6]
    answer = server.client.chat.completions.create(**what, stop=["never this", stop], stream=stream)
    if stream:
        deltas = [(chunk.choices[0].delta.content or "", chunk.choices[0].finish_reason) for chunk in answer]
        found, reason = "".join(delta for delta, _ in deltas), deltas[-1][1]
    else:
        found, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert found == text[: text.index(stop)]
    assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_in_the_answer_alone(server, scene_url, stream):
    """Not where it begins in the turn that is continued."""
    what = {"model": "scenes-llava", "max_tokens": 60, "messages": asked(PROMPT, scene_url)}
    words = server.client.chat.completions.create(**what).choices[0].message.content.split()
    what["messages"] = [*what["messages"], {"role": "assistant", "content": " ".join(words[:2])}]
    what["extra_body"] = {"continue_final_message": True}

    def said(**more):
        answer = server.client.chat.completions.create(**what, stream=stream, **more)
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    whole = said()
    count = next(count for count in range(1, 20) if " ".join([words[1], *whole.split()[:count]]) not in whole)
    over = " ".join([words[1], *whole.split()[:count]])
    assert said(stop=over) == whole
    assert said(stop=[over, f" {whole.split()[count]}"]) == whole[: whole.index(f" {whole.split()[count]}")]


def test_a_conversation_is_read_as_the_pipeline_reads_it(server):
    messages = [
        {"role": "user", "content": "What color is the ring?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "text", "text": "How many are there?"}]},
    ]
    expected = reference("scenes-llava")(messages, max_new_tokens=8)
    answer = server.client.chat.completions.create(model="scenes-llava", messages=messages, max_tokens=8)
    assert answer.choices[0].message.content == expected.text[0]


words = st.text("ab", max_size=12)


@given(st.lists(words), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_text_is_what_stands_before_the_first_stop_string(pieces, stops):
    text = "".join(pieces)
    cut = StopText(stops)
    sent = []
    for piece in pieces:
        sent.append(cut.add(piece))
        assert not any(stop in "".join(sent) for stop in stops)
    whole = "".join(sent) + cut.finish()
    assert cut.has_ended == any(stop in text for stop in stops)
    # a stop string that is complete earlier ends the text, though a longer one may begin before it
    assert text.startswith(whole) and not any(stop in whole for stop in stops)
    assert cut.has_ended or whole == text


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


def test_the_server_answers_by_every_published_config():
    """One model and one server, whose config is exchanged between requests."""
    model, tokenizer = tiny_llama(vocab=128), tiny_tokenizer()
    model.config.max_position_embeddings, tokenizer.chat_template = 28, TEMPLATE
    with running(pipelines={"tiny": VisionLanguagePipeline(model, tokenizer, "copy")}, rows=2) as tiny:
        for published in EVERY:
            model.generation_config = GenerationConfig(**{**published.values, "guidance_scale": None})
            given = tiny.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "what is there ?"}], seed=1
            )
            assert given.usage.completion_tokens > 0, published.family
            assert given.choices[0].finish_reason in ("length", "stop"), published.family
