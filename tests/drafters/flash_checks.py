"""What must hold of the FLASH drafter, as functions: tests run them on the code, planted bugs on mutants."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.canvas import Canvas, Stopping
from mmspec.decoding.draft import Draft
from mmspec.decoding.interfaces import (
    AcceptanceRule,
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    list_prompts,
)
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.speculative import speculate
from mmspec.decoding.stats import DecodingStats
from mmspec.drafters.flash import FlashDrafter
from mmspec.models.flash import FlashConfig, FlashHead
from mmspec.targets import VisionLanguageTarget
from mmspec.targets.causal import CausalTarget
from tests.contracts.running import decode, random_prompts
from tests.drafters.eagle_checks import WORDS, Gullible, few_words, paths_of
from tests.drafters.naive_flash import NaiveFlash
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, encode, tiny_images, user_message

QUESTION = "what is there ?"
IMAGES = tiny_images()
MESSAGES = {
    "one image": user_message(QUESTION, IMAGES[:1]),
    "two images": user_message("which one is red ?", IMAGES[1:3]),
    "no image": user_message(QUESTION),
    "several turns": [
        *user_message(QUESTION, IMAGES[:1]),
        {"role": "assistant", "content": [{"type": "text", "text": "a red circle"}]},
        *user_message("and there ?", IMAGES[2:3]),
    ],
}


def head_for(target: CausalTarget, seed: int = 3, **settings: Any) -> FlashHead:
    """A head of random weights, in the target's dtype."""
    settings = {"compressor_options": {"tokens": 2}, "block": 4} | settings
    config = FlashConfig.for_target(target.config, target.vocabulary, **settings)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = FlashHead(config).to(target.dtype)
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1 and "compressor" not in name:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


@functools.cache
def target_of(family: str, dtype: torch.dtype = torch.float32) -> VisionLanguageTarget:
    model, _ = VISION_LANGUAGE_FAMILIES[family]()
    return VisionLanguageTarget(model.to(dtype))


@functools.cache
def inputs_of(family: str, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """The model's inputs for every one of `MESSAGES`."""
    _, processor = VISION_LANGUAGE_FAMILIES[family]()
    made = {case: dict(encode(processor, messages)) for case, messages in MESSAGES.items()}
    return {
        case: {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        for case, inputs in made.items()
    }


def answer(
    target: CausalTarget,
    drafter: Drafter,
    inputs: Sequence[dict[str, Any]],
    sampler: Sampler,
    new_tokens: int,
    rule: AcceptanceRule | None = None,
    seed: int | Sequence[int] = 5,
) -> Canvas:
    """Run the loop on prompts with images."""
    requests = [Request(each) for each in inputs]
    prompts = [request.prompt_tokens for request in requests]
    canvas = Canvas(prompts, Stopping(new_tokens), DecodingStats(), target.device)
    random = RandomStream.from_seed(seed, len(requests))
    for _ in speculate(target, drafter, rule or SampleAndMatch(), sampler, requests, canvas, random):
        pass
    return canvas


class Examined(Drafter, DraftSession):
    """A FLASH drafter every one of whose drafts is compared with the slow way."""

    def __init__(self, inner: FlashDrafter, new_tokens: int) -> None:
        self.inner, self.new_tokens, self.drafts = inner, new_tokens, 0
        self.kind, self.max_nodes, self.taps, self.branches = inner.kind, inner.max_nodes, inner.taps, True

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        assert self.inner.target is not None
        self.session = self.inner.start(requests, prefill, sampler, random)
        prompts = list_prompts(requests, sampler)
        head, target, block = self.inner.model, self.inner.target, self.inner.block
        self.naive = [
            NaiveFlash(head, target, [dict(each) for each in prompts[row :: len(requests)]], sampler, block)
            for row in range(len(requests))
        ]
        self.observe = self.session.observe  # type: ignore[method-assign]
        return self

    def propose(self, canvas: Canvas) -> Draft:
        draft = self.session.propose(canvas)
        assert not draft.faulty.any()
        for row, output in enumerate(canvas.outputs()):
            if len(output) >= self.new_tokens:
                continue  # finished: what it drafts does not matter
            expected = self.naive[row].dynamic(output, self.inner.shape)
            assert paths_of(draft, row) == expected, f"row {row} after {len(output)} tokens"
            self.drafts += 1
        return draft


def drafts_are_those_of_the_slow_way(
    family: str = "llava", block: int = 2, top_k: int = 2, **settings: Any
) -> None:
    """Ragged prompts with images and accepted paths, in float64: rows, positions and masks are right."""
    target = target_of(family, torch.float64)
    head = head_for(target, **settings)
    nodes = 5 if top_k == 1 else 9
    drafter = FlashDrafter(head, nodes, depth=5, top_k=top_k, block=block).fit(target)
    examined, inputs = Examined(drafter, 10), inputs_of(family, torch.float64)
    cases = [inputs[case] for case in ("two images", "no image", "several turns")]
    canvas = answer(target, examined, cases, Sampler(0.9), 10, Gullible())
    assert examined.drafts >= 6, "some drafts were compared"
    assert max(canvas.stats.accepted_histogram) >= 3, "a path longer than a block of two was accepted"


def guided_drafts_are_those_of_the_slow_way(nodes: int = 8, top_k: int = 3) -> None:
    target = few_words()
    drafter = FlashDrafter(head_for(target), nodes, depth=3, top_k=top_k, block=2).fit(target)
    examined = Examined(drafter, 10)
    decode(
        target,
        random_prompts(2, WORDS, longest=6, seed=4),
        examined,
        Gullible(),
        Sampler(1.0, guidance_scale=3.0),
        max_new_tokens=10,
        negatives=random_prompts(2, WORDS, longest=6, seed=9),
    )
    assert examined.drafts >= 4
