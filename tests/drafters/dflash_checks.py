"""Checks of DFlash and DSpark, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft
from mmspec.decoding.interfaces import Drafter, DraftSession, Request, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.dflash import DFlashDrafter, DSparkDrafter
from mmspec.models.dflash import DFlashConfig, DFlashHead, DSparkConfig, DSparkHead
from mmspec.targets import CausalTarget
from tests.drafters.eagle_checks import Gullible
from tests.drafters.flash_checks import answer, inputs_of, target_of
from tests.drafters.naive_dflash import naive_block

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"block": 5},
    "dflash, noise of the target": {"block": 5, "mask_token": 7, "num_layers": 1},
    "dflash, windows": {
        "block": 5,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "causal": [True, False],
        "sinks": True,
        "rotary": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        | {"partial_rotary_factor": 0.5},
    },
    "dspark": {"block": 4},
    "dspark, gated": {"block": 4, "markov": "gated"},
    "dspark, rnn": {"block": 4, "markov": "rnn"},
    "dspark, domino": {"block": 4, "markov": "domino", "memory": 5, "plain_slots": 1, "confidence": False},
}

NEW_TOKENS = 14


def head_for(target: CausalTarget, kind: str = "dflash", seed: int = 3, **settings: Any) -> DFlashHead:
    """A head of random weights, two layers and one key head for each two that ask."""
    made = {"num_layers": 2, "markov_rank": 6, **KINDS[kind], **settings}
    config_class, head_class = (
        (DFlashConfig, DFlashHead) if kind.startswith("dflash") else (DSparkConfig, DSparkHead)
    )
    config = config_class.for_target(target.config, target.vocabulary, **made)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = head_class(config).to(target.dtype)
        for parameter in head.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    return head.eval().requires_grad_(False)


def drafter_for(target: CausalTarget, kind: str = "dflash", **shape: Any) -> DFlashDrafter:
    drafts = DFlashDrafter if kind.startswith("dflash") else DSparkDrafter
    return drafts(head_for(target, kind), **shape).fit(target)


class Compared(Drafter, DraftSession):
    """A drafter whose first level is compared with a computation of each row by itself, nothing cached."""

    def __init__(self, inner: DFlashDrafter, prompts: list[dict[str, Any]]) -> None:
        self.inner, self.prompts, self.drafts, self.worst = inner, prompts, 0, 0.0
        self.kind, self.max_nodes, self.taps = inner.kind, inner.max_nodes, inner.taps

    def start(
        self, requests: Sequence[Request], prefill: TargetOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        self.session = self.inner.start(requests, prefill, sampler, random)
        return self

    def observe(self, *args: Any) -> None:
        self.session.observe(*args)

    def propose(self, canvas: Canvas) -> Draft:
        hidden: list[Tensor] = []
        real = self.session._denoise  # type: ignore[attr-defined]
        self.session._denoise = lambda canvas: hidden.append(real(canvas)) or hidden[-1]  # type: ignore[attr-defined]
        draft = self.session.propose(canvas)
        self.session._denoise = real  # type: ignore[attr-defined]
        for row, prompt in enumerate(self.prompts):
            if len(canvas.ids[row]) - prompt["input_ids"].shape[1] >= NEW_TOKENS:
                continue  # what a finished row is told does not matter
            due = alone(self.inner.model, self.inner.target, prompt, canvas.ids[row])
            self.worst = max(self.worst, float((hidden[0][row] - due).abs().max()))
        self.drafts += 1
        return draft


def alone(head: DFlashHead, target: Any, prompt: dict[str, Any], tokens: Sequence[int]) -> Tensor:
    """[n, d] states of the block behind a sequence [L + 1], read whole."""
    ids = torch.tensor([list(tokens)])
    length = prompt["input_ids"].shape[1]
    more = {"input_ids": ids[:, :-1]}
    if "mm_token_type_ids" in prompt:
        grown = torch.zeros(1, ids.shape[1] - 1, dtype=torch.long)
        grown[:, :length] = prompt["mm_token_type_ids"]
        more["mm_token_type_ids"] = grown
    whole = {**prompt, **more}
    whole.pop("attention_mask", None)
    read = target.read([whole], tuple(head.taps))
    context = head.join([read[tap] for tap in head.taps])
    block = head.slots(ids[:, -1], target.embed)
    return naive_block(head, context[0], block[0])


def blocks_are_those_of_each_row_alone(kind: str = "dflash", family: str = "llava") -> None:
    """Ragged prompts with images and accepted paths, in float64."""
    target = target_of(family, torch.float64)
    inputs = inputs_of(family, torch.float64)
    cases = [inputs[case] for case in ("two images", "no image", "several turns")]
    compared = Compared(drafter_for(target, kind), cases)
    canvas = answer(target, compared, cases, Sampler(0.9), NEW_TOKENS, Gullible())
    assert compared.drafts >= 3, "some drafts were compared"
    assert max(canvas.stats.accepted_histogram) >= 2, "a path of several candidates was accepted"
    assert compared.worst < 2e-6  # the norms of transformers compute in single precision
