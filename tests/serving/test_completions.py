"""Completions by OpenAI's own client: prompts as text and token ids, compared with the pipeline."""

import openai
import pytest

from tests.serving.conftest import post, reference, running

PROMPTS = ["a small red", "what color is the", "two"]


def complete(server, prompt, **settings):
    return server.client.completions.create(model="scenes-llava", prompt=prompt, **settings)


def expected(prompt, **settings):
    raw = {"apply_chat_template": False, "continue_final_message": True}
    return reference("scenes-llava")(prompt, **{"max_new_tokens": 16, **raw, **settings})


def ids_of(prompt: str) -> list[int]:
    return reference("scenes-llava").tokenizer(prompt)["input_ids"]


def test_prompts_in_every_form_are_continued_as_by_the_pipeline(server):
    outputs = [expected(prompt) for prompt in PROMPTS]
    texts = [output.text[0] for output in outputs]
    assert texts[0].startswith(" ") and len(set(texts)) == 3
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert [complete(server, one).choices[0].text for one in (prompt, ids_of(prompt))] == [text] * 2
    for prompts in (PROMPTS, [ids_of(prompt) for prompt in PROMPTS]):
        answer = complete(server, prompts)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
        assert answer.object == "text_completion" and answer.choices[0].logprobs is None
        assert answer.usage.prompt_tokens == sum(len(ids_of(prompt)) for prompt in PROMPTS)
        assert answer.usage.completion_tokens == sum(len(output.tokens[0]) for output in outputs)
    reasons = {"eos": "stop", "length": "length"}
    assert answer.choices[0].finish_reason == reasons[outputs[0].finish_reasons[0]]


def test_choices_have_consecutive_seeds_and_prompts_their_own(server):
    settings = {"n": 2, "temperature": 1.5, "seed": 4, "max_tokens": 8}
    answer = complete(server, PROMPTS[:2], **settings)
    alone = [
        expected(prompt, temperature=1.5, top_k=0, seed=seed, max_new_tokens=8).text[0]
        for prompt in PROMPTS[:2]
        for seed in (4, 5)
    ]
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage.prompt_tokens == sum(len(ids_of(prompt)) for prompt in PROMPTS[:2])


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_gives_the_same_text_and_its_usage(server, echo):
    what = {"prompt": PROMPTS, "temperature": 1.5, "seed": 1, "max_tokens": 12, "echo": echo}
    whole = complete(server, **what)
    chunks = list(complete(server, **what, stream=True, stream_options={"include_usage": True}))
    texts, reasons = [""] * 3, [None] * 3
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert all(text.startswith(prompt) == echo for text, prompt in zip(texts, PROMPTS, strict=True))
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    if echo:
        assert complete(server, ids_of(PROMPTS[0]), echo=True).choices[0].text.startswith(PROMPTS[0])


def test_log_probabilities_in_their_old_form(server):
    prompt, tokenizer = PROMPTS[1], reference("scenes-llava").tokenizer
    output = expected(prompt, logprobs=2, temperature=1.5, top_k=0, seed=2)
    shown = [one for one in output.logprobs[0] if one.token != tokenizer.eos_token_id]
    settings = {"logprobs": 2, "temperature": 1.5, "seed": 2}
    (choice,) = complete(server, prompt, **settings).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text == output.text[0]
    assert found.token_logprobs == pytest.approx([one.logprob for one in shown], abs=1e-4)
    for offset, token in zip(found.text_offset, found.tokens, strict=True):
        assert choice.text[offset:].startswith(token)
    for token, top, one in zip(found.tokens, found.top_logprobs, shown, strict=True):
        likely = {tokenizer.decode([each]) for each, _ in one.top}
        assert {each.strip() for each in top} == likely | {tokenizer.decode([one.token])}
        assert top[token] == pytest.approx(one.logprob, abs=1e-4)
    streamed = [chunk.choices[0].logprobs for chunk in complete(server, prompt, **settings, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in streamed for item in getattr(part, name)] == getattr(found, name)


def test_stop_strings_and_fields_of_vllm_act(server):
    plain = complete(server, PROMPTS[1]).choices[0].text
    word = plain.split()[-1]
    assert complete(server, PROMPTS[1], stop=word).choices[0].text == plain[: plain.index(word)]
    longer = complete(server, PROMPTS[1], extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 16


WRONG = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 3]}, "prompt[1]"),
    ({"prompt": [3, 418]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": "a\0"}, "prompt"),
    ({"prompt": "<image> a"}, "prompt"),
    ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
    ({"suffix": "b"}, "suffix"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"min_tokens": 17}, "min_tokens"),
]


def test_values_that_cannot_be_used_are_refused_by_name(server):
    image = reference("scenes-llava").tokenizer.convert_tokens_to_ids("<image>")
    for body, name in [*WRONG, ({"prompt": [image]}, "prompt")]:
        status, _, got = post(server, {"prompt": "a", **body}, "/v1/completions")
        assert (status, got["error"]["param"]) == (400, name), (body, got)
    assert post(server, {"prompt": "a", "model": "scenes-llamagen"}, "/v1/completions")[0] == 400


def test_routes_that_the_server_lacks_are_refused_with_those_that_it_has(server):
    calls = [
        lambda client: client.embeddings.create(model="scenes-llava", input="a"),
        lambda client: client.responses.create(model="scenes-llava", input="a"),
        lambda client: client.moderations.create(input="a"),
        lambda client: client.audio.speech.create(model="scenes-llava", voice="alloy", input="a"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="POST /v1/completions"):
            call(server.client)
    with running("scenes-llava", api_key="secret") as closed:
        assert post(closed, {"input": "a"}, "/v1/embeddings")[0] == 401
