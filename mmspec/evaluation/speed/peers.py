"""transformers' own `generate` as contenders, on the prompts and in the run of a benchmark.

Greedy, with transformers' own defaults for everything else, so that its tokens can be compared with ours.
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
LOOKUP_TOKENS = 10  # what its documentation uses; the drafter `copy` has as many
ONE_AT_A_TIME = "transformers decodes one prompt at a time in this way: --batch-size 1"


@dataclass(frozen=True)
class Peers:
    """Ways of `generate` that can be timed, as functions that decode a batch, and why others cannot."""

    decoders: dict[str, Decode]
    missing: dict[str, str]


def tried(
    decoders: Mapping[str, Callable[..., Decoded]],
    missing: Mapping[str, str],
    batch: Sequence[Example],
    **short: object,
) -> Peers:
    """Decode a batch in each way, at little cost; of what fails, the reason is transformers' own words."""
    working: dict[str, Decode] = {}
    reasons = dict(missing)
    for name, decode in decoders.items():
        try:
            decode(batch, **short)
            working[name] = decode
        except Exception as error:  # whatever it is, the other rows can be measured
            reasons[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return Peers(working, reasons)


def text_peers(
    pipe: AnyPipeline,
    batch: Sequence[Example],
    assistant: nn.Module | None = None,
    compiled: bool = False,
    **settings: Any,
) -> Peers:
    """Ways of `generate` for a text model: plain, prompt look-up, assisted by a draft model, and MTP.

    Args:
        pipe: its model and processor are used, and none of its code.
        batch: the first one, on which each way is tried.
        assistant: a transformers model that drafts; None if there is none.
        compiled: whether plain decoding with a forward compiled by torch.compile is one of them too, on a CPU
            with frozen weights, which it packs.
        settings: of the calls; at temperature 0.

    Raises:
        InputError: a temperature, with which tokens cannot be compared.
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
        missing[MTP] = "this version of transformers has none"
    elif getattr(pipe.model.config.get_text_config(), "num_mtp_layers", None) is None:
        missing[MTP] = "the model has no layers that predict several tokens"

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
    """transformers' `generate` with options, as `decode_conversations` calls a text pipeline.

    Attributes:
        pipe: whose model and processor are used.
        name: of the peer.
        options: of `generate`.
        forward: the model's, compiled; None for its own.
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
        for name in ("apply_chat_template", "seed"):  # prompts show the one; greedy tokens need no other
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
        kept = is_end.int().cumsum(1) - is_end.int() == 0  # up to the first end token; the rest is padding
        tokens = [row[keep].tolist() for row, keep in zip(output[:, length:], kept, strict=True)]
        count(stats, tokens)
        decode = partial(self.pipe.tokenizer.decode, skip_special_tokens=True)
        return SimpleNamespace(text=list(map(decode, tokens)), tokens=tokens, stats=stats)


def image_peers(pipe: Any, batch: Sequence[Example], **settings: Any) -> Peers:
    """`generate` of an image model at temperature 0, where its family has one: LlamaGen and Janus.

    Raises:
        InputError: a temperature, with which tokens cannot be compared.
    """
    family = family_of(pipe.model.config)
    if family is None or family.generate is None:
        return Peers({}, {PEER: f"{pipe.model.config.model_type} has no `generate` that draws"})
    if len(batch) > 1:
        return Peers({}, {PEER: "prompts of images are not padded here: --batch-size 1"})

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
    """Let a model run by a compiled forward, whose weights are constants on a CPU; by its own where None."""
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
    """Count and time the forwards of a model and of its assistant, by hooks, and the time of all.

    The first forward of the model reads the prompt, of `prompt` tokens, and maybe candidates behind it; later
    ones the newest token and candidates. What MTP layers take is in the rest.
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
    """Count the tokens of a call that was `watched`; its forwards beyond the first are rounds of all rows."""
    stats.new_tokens = list(map(len, tokens))
    stats.rounds = [stats.target_forwards - 1] * len(tokens)
    stats.drafted = stats.drafted * len(tokens)
    stats.accepted = [max(0, len(row) - stats.target_forwards) for row in tokens]


def require_greedy(temperature: float) -> None:
    """Raise InputError unless a temperature is greedy: transformers draws with numbers of its own."""
    if not Sampler(temperature).greedy:
        allowed = "0 with --peers: its outputs are compared with ours token for token"
        raise InputError("--temperature", temperature, allowed)
