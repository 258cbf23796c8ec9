"""SmolLM2-135M-Instruct: every text drafter gives the output of transformers; calls, streams, the server."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.assets import reference_models
from mmspec.pipelines import MMSpecPipeline
from mmspec.plugins import HEADS
from mmspec.training.recipes import RECIPES
from tests.contracts.running import generate
from tests.serving.conftest import Server, running

pytestmark = pytest.mark.real

LINE = "日本語 – Zürich – 🙂\n"
COPIED = LINE * 3  # the model goes on with it
SAME = "red blue red blue red blue red blue red"  # it goes on with " blue blue blue blue"
CHATS = [
    [{"role": "user", "content": f"Repeat this: {LINE}"}],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Name another one."},
    ],
    [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, three, one, two,"}],
]
RAW: dict[str, Any] = {"apply_chat_template": False}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "max_new_tokens": 12}
OF_TEXT = [name for name, head in HEADS.items() if head.loss is not None and not head.of_images]
SMALL: dict[str, Any] = {"num_draft_tokens": 6, "depth": 3, "top_k": 2}
SHAPES = {"dflash": {"num_draft_tokens": 6}, "dspark": {"num_draft_tokens": 6}}  # a block as a chain


@pytest.fixture(scope="module")
def pipe(smollm2_file: Path) -> Any:
    return MMSpecPipeline.from_pretrained(smollm2_file, accelerator="none")


@pytest.fixture(scope="module")
def said(pipe: Any) -> Any:
    """`said(text, tokens)`: the ids that transformers' own greedy `generate` gives after a text."""

    @functools.cache
    def said(text: str, max_new_tokens: int, **settings: Any) -> list[int]:
        settings = {"eos_token_id": pipe.model.generation_config.eos_token_id} | settings
        return generate(pipe.model, pipe.tokenizer(text).input_ids, max_new_tokens, **settings)

    return said


def templated(pipe: Any, chat: list[dict[str, str]], **settings: Any) -> str:
    if "continue_final_message" not in settings:
        settings = {"add_generation_prompt": True}
    text: str = pipe.tokenizer.apply_chat_template(chat, tokenize=False, **settings)
    return text


def head_of(name: str, pipe: Any) -> Any:
    """A head of random weights; Medusa's change nothing, so that it drafts the same token again."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head: Any = RECIPES[name].build(pipe.target)
    for linear in head.maps if name == "medusa" else ():  # its blocks begin as the identity
        torch.nn.init.eye_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    return head


def first_layers(model: Any, layers: int) -> Any:
    """A model of the first layers of another, whose weights it shares."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    smaller = type(model)(config).eval()
    smaller.load_state_dict(model.state_dict(), strict=False, assign=True)
    return smaller


@pytest.mark.parametrize("name", ["copy", "draft_model", *OF_TEXT])
@pytest.mark.every(5)
def test_greedy_text_is_that_of_generate(name: str, pipe: Any, said: Any) -> None:
    """Of two prompts at once, by drafts of a fixed and of a measured length."""
    options: dict[str, Any] = {}
    if name == "draft_model":
        options = {"drafter": first_layers(pipe.model, 26), "num_draft_tokens": 3}
    elif name in HEADS:
        options = {"drafter": head_of(name, pipe), **SHAPES.get(name, SMALL)}
    prompts = [templated(pipe, CHATS[0]), SAME if name in HEADS else COPIED]
    expected = [said(prompt, 8) for prompt in prompts]
    for length in ("fixed", "cost"):
        pipe.set_accelerator(name, length=length, **options)
        output = pipe(prompts, max_new_tokens=8, **RAW)
        assert output.tokens == expected, length
        if length == "fixed":  # the other uses a measured length, if few rounds are enough for one
            assert output.stats.drafted[1] > 0
        assert output.stats.accepted[1] > 0 or name not in ("copy", "draft_model", "medusa"), length


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["mtp", "ppd"])
def test_shipped_drafters_draft_what_it_says(name: str, pipe: Any, said: Any) -> None:
    """Drafters with random weights have 1.0 tokens per forward pass, those in assets/ 1.6 on Spec-Bench."""
    prompt = templated(pipe, [{"role": "user", "content": "Tell me why the sea is salty."}])
    pipe.set_accelerator(name, drafter=str(reference_models()[f"smollm2-{name}"]), length="fixed")
    output = pipe(prompt, max_new_tokens=32, **RAW)
    assert output.tokens == [said(prompt, 32)] and output.stats.acceptance_length > 1.25


def test_a_call_of_generate_is_accelerated_in_place(pipe: Any, said: Any) -> None:
    inputs = pipe.tokenizer(COPIED, return_tensors="pt")
    drafted: Any = mmspec.accelerate("copy")
    output = pipe.model.generate(**inputs, max_new_tokens=16, do_sample=False, custom_generate=drafted)
    assert output[0, inputs["input_ids"].shape[1] :].tolist() == said(COPIED, 16)
    assert drafted.stats.target_forwards < 8


@pytest.mark.slow
def test_sampled_text_is_bitwise_that_of_plain_decoding(pipe: Any) -> None:
    """Of three prompts at once, each of which has its own seed, and of each by itself."""
    prompts = [COPIED, SAME, templated(pipe, CHATS[0])]
    pipe.set_accelerator("none")
    alone = [pipe(each, seed=seed, **DRAWN, **RAW).tokens[0] for seed, each in enumerate(prompts)]
    pipe.set_accelerator("copy")
    output = pipe(prompts, seed=[0, 1, 2], **DRAWN, **RAW)
    assert output.tokens == alone and output.stats.accepted[0] > 0
    assert pipe(COPIED, seed=5, **DRAWN, **RAW).tokens[0] != alone[0]


def test_chats_are_read_as_the_template_says(pipe: Any, said: Any) -> None:
    """A system turn, two turns, and a reply that goes on: three chats of other lengths at once."""
    texts = [
        *(templated(pipe, chat) for chat in CHATS[:2]),
        templated(pipe, CHATS[2], continue_final_message=True),
    ]
    assert "pirate" in texts[1] and texts[2].endswith("one, two,")
    pipe.set_accelerator("copy")
    assert pipe(CHATS, max_new_tokens=12).tokens == [said(text, 12) for text in texts]
    closed = templated(pipe, CHATS[2])
    assert pipe(CHATS[2], max_new_tokens=6, continue_final_message=False).tokens == [said(closed, 6)]


@pytest.fixture
def server(pipe: Any) -> Iterator[Server]:
    pipe.set_accelerator("copy")
    with running(pipelines={"smollm2": pipe}) as one:
        yield one


def test_the_server_says_what_the_pipeline_says(pipe: Any, server: Server, said: Any) -> None:
    what: dict[str, Any] = {"model": "smollm2", "messages": CHATS[0], "max_tokens": 16}
    prompt = templated(pipe, CHATS[0])
    expected = said(prompt, 16)
    answer = server.client.chat.completions.create(**what)
    assert answer.choices[0].message.content == pipe.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.usage.prompt_tokens == len(pipe.tokenizer(prompt).input_ids)
    assert answer.usage.completion_tokens == len(expected)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.client.chat.completions.create(**what, **more)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == answer.choices[0].message.content and "\ufffd" not in "".join(pieces)
    assert last.usage == answer.usage
