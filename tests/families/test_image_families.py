"""Models of image tokens give the images of a naive loop over their modules, with every drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import Request
from mmspec.families.images import image_target
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import ImageTokenTarget
from tests.targets.image_loop import DEPTH, DRAFTERS, accelerator, draw, naive_image
from tests.tiny_models import CODES, tiny_anole, tiny_emu3, tiny_emu3_5, tiny_janus, tiny_lumina

TEXTS = ["a red circle", "blue", "the small green star on a large square"]
K = CODES


@dataclass
class Family:
    """A target, and naive decoding with its model by hand.

    Attributes:
        size: height and width to ask for.
        rows, columns: what the image then has.
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
    last_row_end: int | None = None

    def answer(self, text: str, scale: float) -> list[int]:
        """Return the greedy image of a text, by a naive loop."""
        grid = ImageGrid(self.rows, self.columns, K, self.row_end, self.ending, self.last_row_end)
        words = text.split()
        sides = [self.tokenizer.convert_tokens_to_ids(side(words)) for side in (self.prompt, self.no_prompt)]
        distributions = [
            lambda output, ids=ids: self.logits(self.target.model, ids, list(output)) for ids in sides
        ]
        return naive_image(grid, distributions[0], distributions[1] if scale != 1 else None, scale)

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
    """Return logits of a model whose text vocabulary contains the codes: decoder, then rows of its head."""
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


@torch.no_grad()
def emu3_5_logits(model: Any, prompt: list[int], output: list[int]) -> Tensor:
    config = model.config
    ids = [*range(config.eoi_token_id + 1, config.vocab_size), config.eol_token_id, config.eoi_token_id]
    tokens = torch.tensor([[*prompt, *(ids[token] for token in output)]])
    return model(tokens, use_cache=False).logits[0, -1, ids[:K]]


def emu3_5() -> Family:
    model, tokenizer = tiny_emu3_5()

    def turn(task, words):
        begun = tokenizer.tokenize(f"You are a helpful assistant{task}. USER:")
        answer = [*tokenizer.tokenize("ASSISTANT:"), "<|extra_100|>", "<|image start|>"]
        return ["<|extra_203|>", *begun, *words, *answer, *tokenizer.tokenize("4*3"), "<|image token|>"]

    return Family(
        image_target(model),
        tokenizer,
        (64, 48),
        4,
        3,
        K,
        (),
        ["<|extra_200|>", "<|image end|>"],
        lambda words: turn(" for t2i task", words),
        lambda words: turn("", []),
        emu3_5_logits,
        K + 1,
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
        image_target(model),
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


FAMILIES = {"janus": janus, "emu3": emu3, "emu3_5": emu3_5, "anole": anole, "lumina": lumina}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]()


@pytest.fixture(scope="module")
def answers(family) -> tuple[float, list[list[int]]]:
    """Return a guidance scale, 1 for one family, and the naive images of all texts with it."""
    scale = 1.0 if len(family.ending) == 3 else 3.0
    images = [family.answer(text, scale) for text in TEXTS]
    assert all(len(set(image)) > 4 for image in images)
    return scale, images


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.every(4)
def test_images_are_those_of_the_naive_loop(family, answers, name):
    scale, images = answers
    requests = family.requests(TEXTS, guided=scale != 1)
    outputs, stats = draw(family.target, accelerator(name, requests, images, K), requests, scale)
    assert outputs == images
    if name == "none":
        assert stats.target_forwards == len(images[0])
    if name == "oracle 0 %":
        assert stats.target_forwards == 1 + -(-(len(images[0]) - 1) // (DEPTH + 1))
    made = accelerator(name, requests[1:2], images[1:2], K)
    assert draw(family.target, made, requests[1:2], scale)[0] == images[1:2]


def test_sampled_rows_are_what_they_are_alone_and_drafts_do_not_change_them(family):
    requests = family.requests(TEXTS)
    settings = {"scale": 2.0, "temperature": 1.0}
    plain, _ = draw(family.target, accelerator("none", requests, [], K), requests, **settings)
    assert len({tuple(row) for row in plain}) == 3
    made = accelerator("oracle 30 %", requests, plain, K)
    assert draw(family.target, made, requests, **settings)[0] == plain
    alone = draw(family.target, accelerator("none", requests, [], K), requests[2:], seeds=[2], **settings)[0]
    assert alone == plain[2:]


def test_a_window_over_the_syntax_draws_the_same(family, answers):
    """Jacobi decoding, greedy, and sampled with the noise of plain decoding."""
    scale, images = answers
    requests = family.requests(TEXTS, guided=scale != 1)
    window = build_accelerator("sjd", window=6, coupling="exact", acceptance="sample_and_match")
    outputs, stats = draw(family.target, window.fit(family.target), requests, scale)
    assert outputs == images
    if family.row_end is not None:
        assert stats.target_forwards < len(images[0])
    plain, _ = draw(family.target, build_accelerator("none"), requests, scale, temperature=1.0)
    assert draw(family.target, window.fit(family.target), requests, scale, temperature=1.0)[0] == plain


def test_images_of_several_sizes_in_one_batch():
    family = lumina()
    requests = []
    for text, size in zip(TEXTS, [(32, 64), (32, 32), (64, 32)], strict=True):
        requests += image_requests(
            family.target, text, height=size[0], width=size[1], tokenizer=family.tokenizer
        )
    alone = []
    for request in requests:
        alone += draw(family.target, accelerator("none", [request], [], K), [request], 3.0)[0]
    assert [len(row) for row in alone] == [4 * 9 + 1, 4 * 5 + 1, 8 * 5 + 1]
    made = accelerator("oracle 30 %", requests, alone, K)
    assert draw(family.target, made, requests, 3.0)[0] == alone


def test_codes_become_the_images_of_the_models_own_decoder():
    codes = torch.randint(K, (2, 16), generator=torch.Generator().manual_seed(0))
    family = janus()
    theirs = family.target.model.decode_image_tokens(codes).permute(0, 3, 1, 2)
    assert theirs.abs().max() > 1  # so that the limit has an effect
    own = family.target.decode_tokens(codes)
    assert own.shape == (2, 3, 64, 64) and own.abs().max() == 1
    assert torch.equal(own, theirs.clamp(-1, 1))

    family = emu3()
    (request,) = family.requests(TEXTS[:1])
    image = family.answer(TEXTS[0], 1.0)
    ids = family.target.model_ids[torch.tensor([image])]
    theirs = family.target.model.decode_image_tokens(image_tokens=ids, height=4, width=3)
    own = family.target.decode_tokens(torch.tensor([request.layout.codes(image)]), request.layout)
    assert own.shape == (1, 3, 8, 6)
    assert torch.equal(own, theirs.clamp(-1, 1))


def test_emu3_draws_what_generate_of_transformers_draws():
    family, scale = emu3(), 3.0
    (request,) = family.requests(TEXTS[:1])
    own_ids = family.target.model_ids.tolist()
    ids, negative = (
        side["input_ids"] - family.target.vocabulary for side in (request.inputs, request.negative_inputs)
    )
    guided = {
        "negative_prompt_ids": negative,
        "negative_prompt_attention_mask": torch.ones_like(negative),
        "guidance_scale": scale,
    }

    def allowed(row: int, sequence: Tensor) -> list[int]:
        # counted from the end of the prompt, as in Emu3's own example: row ends first, then the last three
        place = len(sequence) - ids.shape[1] + 1
        if place % 4 == 0:
            return [own_ids[K]]
        return [own_ids[K + place - 16]] if place > 16 else own_ids[:K]

    tokens = family.target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        prefix_allowed_tokens_fn=allowed,
        do_sample=False,
        max_new_tokens=19,
        **guided,
    )
    expected = [own_ids.index(token) for token in tokens[0, ids.shape[1] :].tolist()]
    assert draw(family.target, accelerator("copy", [request], [], K), [request], scale)[0] == [expected]


def test_what_a_drafter_with_a_head_of_its_own_relies_on(family):
    """`embed` returns the input of the first layer, `head` the logits before the grammar."""
    target, requests = family.target, family.requests(TEXTS[:2], guided=False)
    length = requests[0].layout.length
    state, prompt = target.prefill([request.inputs for request in requests], length + 8, taps=(0, -1))
    for request, logits, entering, final in zip(
        requests, prompt.logits, prompt.taps[0], prompt.taps[-1], strict=True
    ):
        assert torch.equal(target.embed(request.inputs["input_ids"]), entering)
        torch.testing.assert_close(target.head(final[:, -1:])[0, :, :K], logits[:, :K])
    tokens = torch.arange(target.vocabulary)[None].expand(2, -1)
    output = target.score(state, Tree.chain(tokens, DraftKind.POINT))
    state.close()
    assert torch.equal(target.embed(tokens), output.taps[0])
    before = target.head(output.taps[-1])
    assert before.shape == output.logits.shape and before.isfinite().all()
    kept = output.logits.isfinite() & (torch.arange(target.vocabulary) < K)
    torch.testing.assert_close(before[kept], output.logits[kept])
