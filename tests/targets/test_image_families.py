"""Janus, Emu3, Anole and Lumina-mGPT draw what a naive loop over their modules draws, for every drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Request
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import ImageTokenTarget, image_target
from tests.targets.image_loop import DRAFTERS, accelerator, draw, naive_picture
from tests.tiny_models import CODES, tiny_anole, tiny_emu3, tiny_janus, tiny_lumina

TEXTS = ["a red circle", "blue", "the small green star on a large square"]
FLAWS = "lowres, bad anatomy, bad hands, text"
K = CODES


@dataclass
class Family:
    """A target, and how one draws with its model by hand.

    Attributes:
        size: height and width to ask for.
        rows, columns: what the picture then has.
        row_end, ending: the syntax, in compact tokens.
        syntax: names of the compact tokens from K on.
        prompt, no_prompt: words of a text -> its prompt, token by token, and what guidance sets against it.
        logits: (model, ids of a prompt, compact output so far) -> [K] of the next code.
    """

    target: ImageTokenTarget
    tokenizer: Any
    size: tuple[int, int] | None
    rows: int
    columns: int
    row_end: int | None
    ending: tuple[int, ...]
    syntax: list[str]
    prompt: Callable[[list[str]], list[str]]
    no_prompt: Callable[[list[str]], list[str]]
    logits: Callable[[Any, list[int], list[int]], Tensor]

    def answer(self, text: str, scale: float) -> list[int]:
        """The greedy picture of a text, naively."""
        grid = ImageGrid(self.rows, self.columns, K, self.row_end, self.ending)
        words = text.split()
        sides = [self.tokenizer.convert_tokens_to_ids(side(words)) for side in (self.prompt, self.no_prompt)]
        laws = [lambda output, ids=ids: self.logits(self.target.model, ids, list(output)) for ids in sides]
        return naive_picture(grid, laws[0], laws[1] if scale != 1 else None, scale)

    def requests(self, texts: list[str], **settings: Any) -> list[Request]:
        height, width = (None, None) if self.size is None else self.size
        return image_requests(
            self.target, texts, height=height, width=width, tokenizer=self.tokenizer, **settings
        )


@torch.no_grad()
def janus_logits(model: Any, prompt: list[int], output: list[int]) -> Tensor:
    embedded = model.model.language_model.embed_tokens(torch.tensor([prompt]))
    if output:
        codes = model.model.generation_aligner(model.model.generation_embeddings(torch.tensor([output])))
        embedded = torch.cat([embedded, codes], 1)
    hidden = model.model.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return model.model.generation_head(hidden[0, -1])


@torch.no_grad()
def worded_logits(model: Any, prompt: list[int], output: list[int], names: list[str]) -> Tensor:
    """Of a model whose text vocabulary holds the codes: the decoder, then the rows of the head."""
    table = model.config.vocabulary_map
    ids = [table[name] for name in names]
    tokens = [*prompt, *(ids[token] for token in output)]
    decoder = model.model.text_model if hasattr(model.model, "text_model") else model.model
    hidden = decoder(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
    return model.lm_head(hidden[0, -1])[ids[:K]]


def janus() -> Family:
    model, tokenizer = tiny_janus()

    def prompt(words):
        return ["<s>", "<|User|>", ":", *words, "<|Assistant|>", ":", "<begin_of_image>"]

    def no_prompt(words):
        return ["<s>", *["<pad>"] * (len(words) + 4), "<begin_of_image>"]

    target = image_target(model)
    return Family(target, tokenizer, None, 4, 4, None, (), [], prompt, no_prompt, janus_logits)


def emu3() -> Family:
    model, tokenizer = tiny_emu3()
    syntax = ["<|extra_200|>", "<|extra_201|>", "<|image end|>", "</s>"]
    names = [f"<|visual token {code:06}|>" for code in range(K)] + syntax
    flaws = (
        "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, "
        "worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
    )

    def sized(words):
        return ["<s>", *words, "<|image start|>", "4", "<unk>", "3", "<|image token|>"]

    return Family(
        image_target(model),
        tokenizer,
        (8, 6),
        4,
        3,
        K,
        (K + 1, K + 2, K + 3),
        syntax,
        sized,
        lambda words: sized(tokenizer.tokenize(flaws)),
        lambda *arguments: worded_logits(*arguments, names),
    )


def code_names() -> list[str]:
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    return [f"IMGIMG{str(code).translate(letters)}Z" for code in range(K)]


def anole() -> Family:
    model, tokenizer = tiny_anole()
    return Family(
        image_target(model),
        tokenizer,
        None,
        4,
        4,
        None,
        (),
        [],
        lambda words: ["<s>", *words, "<reserved08706>", "<racm3:break>"],
        lambda words: ["<s>", "<racm3:break>"],
        lambda *arguments: worded_logits(*arguments, code_names()),
    )


def lumina() -> Family:
    model, tokenizer = tiny_lumina()
    syntax = ["<reserved08799>", "<eoss>"]
    head = ["<racm3:break>", "<reserved08801>", "<reserved08802>"]
    request = "Generate an image of 64x32 according to the following prompt:"

    def prompt(words):
        return ["<s>", *tokenizer.tokenize(request), *words, "<reserved08706>", *head]

    return Family(
        image_target(model, family="lumina_mgpt"),
        tokenizer,
        (32, 64),
        4,
        8,
        K,
        (K + 1,),
        syntax,
        prompt,
        lambda words: head,
        lambda *arguments: worded_logits(*arguments, code_names() + syntax),
    )


FAMILIES = {"janus": janus, "emu3": emu3, "anole": anole, "lumina": lumina}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]()


@pytest.fixture(scope="module", params=[1.0, 3.0])
def answers(request, family) -> tuple[float, list[list[int]]]:
    """A guidance scale, and the naive pictures of all texts under it."""
    pictures = [family.answer(text, request.param) for text in TEXTS]
    assert all(len(set(picture)) > 4 for picture in pictures)
    return request.param, pictures


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_pictures_are_those_of_the_naive_loop(family, answers, name, attention):
    scale, pictures = answers
    family.target.model.set_attn_implementation(attention)
    requests = family.requests(TEXTS, guided=scale != 1)
    made = accelerator(name, requests, pictures, K)
    outputs, stats = draw(family.target, made, requests, scale)
    assert outputs == pictures
    if name == "none":
        assert stats.target_forwards == len(pictures[0])
    if attention == "sdpa":
        for request, picture in zip(requests, pictures, strict=True):
            assert draw(family.target, made, [request], scale)[0] == [picture]
