"""transformers' own `generate` as contenders in a bench, on the same prompts in the same run.

Decoding is greedy, with transformers' defaults otherwise, so that its tokens can be compared with mmspec's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats, Timer
from mmspec.errors import InputError
from mmspec.evaluation.contenders import AnyPipeline, decode_conversations, encode_prompts, prepare_images
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.timing import PEER, Decode, Decoded
from mmspec.open_types import AnyFunction, Keywords, Processor
from mmspec.plugins import family_of, load

__all__ = ["ASSISTED", "COMPILED", "LOOKUP", "MTP", "Peers", "image_peers", "text_peers", "watched"]

LOOKUP, ASSISTED, MTP, COMPILED = (f"{PEER} {way}" for way in ("look-up", "assisted", "MTP", "compiled"))
LOOKUP_TOKENS = 10  # as in its documentation, and in the drafter `copy`
ONE_AT_A_TIME = "transformers supports one prompt at a time here; pass --batch-size 1"


@dataclass(frozen=True)
class Peers:
    """Decoders of `generate` that can be timed, and the reasons why others cannot."""

    decoders: dict[str, Decode]
    missing: dict[str, str]


def tried(
    decoders: Mapping[str, Callable[..., Decoded]],
    missing: Mapping[str, str],
    batch: Sequence[Example],
    **short: object,
) -> Peers:
    """Try each decoder on a short run; the reason for a failure is transformers' error message."""
    working: dict[str, Decode] = {}
    reasons = dict(missing)
    for name, decode in decoders.items():
        try:
            decode(batch, **short)
            working[name] = decode
        except Exception as error:  # any failure must leave the other rows measurable
            reasons[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return Peers(working, reasons)


def text_peers(
    pipe: AnyPipeline,
    batch: Sequence[Example],
    assistant: nn.Module | None = None,
    compiled: bool = False,
    **settings: Any,
) -> Peers:
    """`generate` for a text model: plain, prompt look-up, assisted by a draft model, and MTP.

    Args:
        pipe: only its model and processor are used.
        batch: the first batch, on which each decoder is tried.
        assistant: a transformers model that drafts; or None.
        compiled: adds plain decoding with a forward method compiled by torch.compile; on a CPU with frozen
            weights, which it packs.
        settings: settings of the calls, at temperature 0.

    Raises:
        InputError: the temperature is above 0, so that tokens cannot be compared.
    """
    require_greedy(settings.pop("temperature", 0.0))
    ways: dict[str, Keywords] = {
        PEER: {},
        LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        ASSISTED: {"assistant_model": assistant},
        MTP: {"use_mtp": True},
        **({COMPILED: {}} if compiled else {}),
    }
    missing = dict.fromkeys((LOOKUP, ASSISTED, MTP), ONE_AT_A_TIME) if len(batch) > 1 else {}
    if assistant is None:
        missing[ASSISTED] = "the model's folder names no draft model"
    if not hasattr(GenerationConfig(), "use_mtp"):
        missing[MTP] = "this version of transformers does not support MTP"
    elif getattr(pipe.model.config.get_text_config(), "num_mtp_layers", None) is None:
        missing[MTP] = "the model has no MTP layers"

    def decode(batch: Sequence[Example], caller: GenerateCaller, **changed: Any) -> Decoded:
        return decode_conversations(caller, batch, **{**settings, **changed})

    found: dict[str, Callable[..., Decoded]] = {
        name: partial(
            decode,
            caller=GenerateCaller(
                pipe, name, way, torch.compile(pipe.model.forward, dynamic=True) if name == COMPILED else None
            ),
        )
        for name, way in ways.items()
        if name not in missing
    }
    return tried(found, missing, batch, max_new_tokens=2)


@dataclass(frozen=True)
class GenerateCaller:
    """transformers' `generate` with options, callable like a text pipeline.

    Attributes:
        pipe: the pipeline with the model and the processor.
        name: name of the peer.
        options: options of `generate`.
        forward: the model's compiled forward method; None for its own.
    """

    pipe: AnyPipeline
    name: str
    options: Mapping[str, Any]
    forward: AnyFunction | None = None

    @property
    def processor(self) -> Processor:
        return self.pipe.processor

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[Any], images: Any = None, **settings: Any) -> SimpleNamespace:
        """Generate text for a batch of prompts, padded on the left."""
        for name in ("apply_chat_template", "seed"):  # implied by the prompts; unused by greedy decoding
            settings.pop(name, None)
        model, stats = self.pipe.model, DecodingStats(accelerator=self.name)
        padding = {"padding": True, "padding_side": "left"} if len(prompt) > 1 else {}
        inputs = encode_prompts(self.pipe, prompt, images, **padding)
        assistant, length = self.options.get("assistant_model"), inputs["input_ids"].shape[1]
        with watched(model, assistant, stats, self.pipe.device, length), frozen(self.pipe, self.forward):
            output = model.generate(**inputs, do_sample=False, num_beams=1, **self.options, **settings)
        ends = model.generation_config.eos_token_id
        ends = torch.tensor(ends if ends is not None else [], dtype=torch.long, device=output.device)
        is_end = torch.isin(output[:, length:], ends)
        kept = is_end.int().cumsum(1) - is_end.int() == 0  # up to the first end token
        tokens = [row[keep].tolist() for row, keep in zip(output[:, length:], kept, strict=True)]
        count(stats, tokens)
        decode = partial(self.pipe.tokenizer.decode, skip_special_tokens=True)
        return SimpleNamespace(text=list(map(decode, tokens)), tokens=tokens, stats=stats)


def image_peers(pipe: Any, batch: Sequence[Example], **settings: Any) -> Peers:
    """`generate` of an image model at temperature 0, if its family has one: LlamaGen and Janus.

    Raises:
        InputError: the temperature is above 0, so that tokens cannot be compared.
    """
    family = family_of(pipe.model.config)
    if family is None or family.generate is None:
        return Peers({}, {PEER: f"{pipe.model.config.model_type} has no `generate` for images"})
    if len(batch) > 1:
        return Peers({}, {PEER: "image prompts are not padded; pass --batch-size 1"})

    asked = load(family.generate)

    def prepared(batch: Sequence[Example]) -> Any:
        call = prepare_images(pipe, batch, seeds=[0] * len(batch), **settings)
        require_greedy(call.sampler.temperature)
        return call

    def decode(batch: Sequence[Example]) -> Decoded:
        call, stats = prepared(batch), DecodingStats(accelerator=PEER)
        part, prompt, inputs = asked(pipe.target, call.requests[0], call.sampler.guidance_scale)
        with torch.inference_mode(), watched(part, None, stats, pipe.device, prompt):
            output = pipe.model.generate(**inputs, do_sample=False)
        tokens = output[:1, -call.layout.length :].tolist()
        count(stats, tokens)
        clock = perf_counter()
        pipe.pixels(call.layout, pipe.latents(call.layout, tokens))
        return Decoded(tokens, [stats], perf_counter() - clock)

    prepared(batch)
    return tried({PEER: decode}, {}, batch)


@contextmanager
def frozen(pipe: AnyPipeline, forward: AnyFunction | None) -> Iterator[None]:
    """Replace a model's forward method by a compiled one, with constant weights on a CPU; None keeps it."""
    if forward is None:
        yield
        return
    vars(pipe.model)["forward"] = forward
    try:
        with torch._inductor.config.patch(freezing=pipe.device.type == "cpu"):
            yield
    finally:
        del vars(pipe.model)["forward"]


@contextmanager
def watched(
    model: nn.Module, assistant: nn.Module | None, stats: DecodingStats, device: torch.device, prompt: int = 1
) -> Iterator[None]:
    """Count and time the forward passes of a model and its assistant by hooks, and the total time.

    The input of the model's first forward pass is the prompt of `prompt` tokens and any candidates after it;
    later inputs are the newest token and candidates. The time of MTP layers is part of the rest.
    """
    started = perf_counter()
    timer = Timer(stats, device)
    drafted = 0

    def begin(module: nn.Module, args: Sequence[torch.Tensor], kwargs: Keywords) -> None:
        nonlocal drafted
        tokens = args[0] if args else kwargs.get("input_ids")
        if module is model and tokens is not None:
            drafted += tokens.shape[1] - (1 if stats.target_forwards else prompt)
        timer.start()

    def end(module: nn.Module, args: object, output: object) -> None:
        if module is not model:
            timer.end("draft")
            stats.draft_passes += 1
            return
        timer.end("target" if stats.target_forwards else "prompt")
        if not stats.target_forwards:
            stats.prefill_seconds = perf_counter() - started
        stats.target_forwards += 1

    handles = []
    for module in (model, assistant):
        if module is not None:
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end))
    try:
        with timer:
            yield
    finally:
        for handle in handles:
            handle.remove()
    stats.seconds = perf_counter() - started
    stats.drafted = [drafted]


def count(stats: DecodingStats, tokens: Sequence[Sequence[int]]) -> None:
    """Count the tokens of a `watched` call; each forward pass after the first is a round of all rows."""
    stats.new_tokens = list(map(len, tokens))
    stats.rounds = [stats.target_forwards - 1] * len(tokens)
    stats.drafted = stats.drafted * len(tokens)
    stats.accepted = [max(0, len(row) - stats.target_forwards) for row in tokens]


def require_greedy(temperature: float) -> None:
    """Raise InputError unless a temperature is greedy, since transformers has its own random numbers."""
    if not Sampler(temperature).greedy:
        rule = "must be 0 with --peers, whose outputs are compared token for token"
        raise InputError("--temperature", temperature, rule)
