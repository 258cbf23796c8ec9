"""The fields of a call of a pipeline: type, default, range, and the names and words for them elsewhere.

Settings of pipelines are made of the groups below. Samplers and processors check values by them, requests of
the server take ranges and names from them, and options of commands their help. To add a field, add it to the
group of those who read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer, is_list, require_number

if TYPE_CHECKING:
    import torch
    from transformers import LogitsProcessorList, StoppingCriteriaList

#: Raises InputError for a value, under the name of its field, that is not allowed.
Check = Callable[[str, object], None]
OUTPUT_TYPES = ("pil", "pt", "np", "latent")
MAX_IMAGES = 10_000
IMAGES_AT_ONCE = 16


@dataclass(frozen=True)
class CallField:
    """Facts about a field of a call, beside its type and its default.

    Attributes:
        check: of its value; None leaves that to who reads the field.
        neutral: the value that asks for nothing, besides None.
        help: of the command line.
        in_chats: the name in requests to the server, where it is another.
    """

    check: Check | None = None
    neutral: object = None
    help: str = ""
    in_chats: str | None = None


@dataclass(frozen=True)
class Range:
    """Check of a number: from `low` to `high`, which `allowed` says in words."""

    low: float
    high: float
    allowed: str
    open_below: bool = False
    whole: bool = False

    def __call__(self, name: str, value: object) -> None:
        if self.whole and not is_integer(value):
            raise InputError(name, value, self.allowed)
        require_number(name, value, self.low, self.high, self.allowed, open_below=self.open_below)


def passing(test: Callable[[object], object], allowed: str) -> Check:
    """Check by a test of the value; `allowed` says in errors what passes."""

    def check(name: str, value: object) -> None:
        if not test(value):
            raise InputError(name, value, allowed)

    return check


def output_type(name: str, value: object) -> None:
    """Raise InputError for what is no form of images."""
    if not isinstance(value, str) or value not in OUTPUT_TYPES:
        raise InputError(name, value, did_you_mean(value, OUTPUT_TYPES))


def are_token_ids(value: object) -> bool:
    """True for a list of integers of at least 0."""
    return is_list(value) and all(is_integer(item) and item >= 0 for item in value)


FLAG = passing(lambda value: isinstance(value, bool), "True or False")
INTEGERS = passing(lambda value: is_list(value) and all(map(is_integer, value)), "a list of token ids")
TOKEN_IDS = passing(
    lambda value: are_token_ids(value if is_list(value) else [value]), "a token id, or a list of token ids"
)
WORDS = passing(
    lambda value: is_list(value) and value and all(one and are_token_ids(one) for one in value),
    "lists of token ids, one for each word, with at least one id each",
)
SHARE = Range(0.0, 1.0, "0 to 1")
ABOVE_ZERO = Range(0.0, 1e4, "above 0", open_below=True)
POSITIVE = Range(1, math.inf, "a positive integer", whole=True)
COUNT = Range(0, math.inf, "an integer of at least 0", whole=True)
GUIDANCE = Range(0.0, 1e4, "0 to 10000; 1 is off")
STEPS = Range(2, math.inf, "an integer of at least 2", whole=True)
TOP_K = Range(0, math.inf, "a positive integer, or None or 0 to keep every token", whole=True)
OF_IMAGES = Range(1, MAX_IMAGES, f"an integer from 1 to {MAX_IMAGES:,}", whole=True)


def call_field(check: Check | None = None, *, default: object = None, **known: Any) -> Any:
    """A field of a group; what is `known` of it are attributes of `CallField`."""
    return field(default=default, metadata={"field": CallField(check, **known)})


def known_fields(group: Any) -> dict[str, CallField]:
    """Return the facts about the fields of a group, by name."""
    return {one.name: one.metadata["field"] for one in fields(group)}


def check_fields(settings: object, known: Mapping[str, CallField]) -> None:
    """Raise InputError for one of those fields whose value is not allowed; None is."""
    for name, one in known.items():
        value = getattr(settings, name)
        if one.check is not None and value is not None:
            one.check(name, value)


@dataclass(frozen=True)
class SamplingFields:
    """Settings of sampling. Each is one value, or a list with one for each prompt.

    Args:
        temperature: 0 takes the likeliest token; below 0.0001 it counts as 0.
        top_k, top_p, min_p: truncation, in that order.
        guidance_scale: classifier-free guidance, u + s (c - u); 1 is off, and halves the work of rows that
            are decoded together if it is off for all of them.
    """

    temperature: float | Sequence[float] | None = call_field(
        Range(0.0, 1e4, "0 (greedy) to 10000"), help="0 takes the likeliest token."
    )
    top_k: int | Sequence[int] | None = call_field(TOP_K, neutral=0, help="0 keeps every token.")
    top_p: float | Sequence[float] | None = call_field(
        Range(0.0, 1.0, "above 0, at most 1", open_below=True), neutral=1.0, help="1 keeps every token."
    )
    min_p: float | Sequence[float] | None = call_field(SHARE, neutral=0.0)
    guidance_scale: float | Sequence[float] | None = call_field(GUIDANCE, help="Guidance scale; 1 is off.")


@dataclass(frozen=True)
class RandomFields:
    """Sources of random numbers; with neither field, torch's global generator draws a seed.

    Args:
        seed: integer, or one for each row; row i of an integer seed has its own stream.
        generator: torch generator(s), diffusers' way; their initial seeds are taken.
    """

    seed: int | Sequence[int] | None = call_field()
    generator: torch.Generator | Sequence[torch.Generator] | None = call_field()


@dataclass(frozen=True)
class ShapingFields:
    """Settings of transformers' processors, which act as there, exact along drafts.

    Of `min_length`, which counts the row's own prompt, and `min_new_tokens` that counts which is set nearer
    to the call, at the same place the latter.
    """

    min_new_tokens: int | None = call_field(COUNT, neutral=0, in_chats="min_tokens")
    min_length: int | None = call_field(COUNT, neutral=0)
    repetition_penalty: float | None = call_field(ABOVE_ZERO, neutral=1.0)
    encoder_repetition_penalty: float | None = call_field(ABOVE_ZERO, neutral=1.0)
    no_repeat_ngram_size: int | None = call_field(POSITIVE, neutral=0)
    encoder_no_repeat_ngram_size: int | None = call_field(POSITIVE, neutral=0)
    bad_words_ids: list[list[int]] | None = call_field(WORDS, in_chats="bad_words")
    sequence_bias: object = call_field()
    suppress_tokens: list[int] | None = call_field(INTEGERS)
    begin_suppress_tokens: list[int] | None = call_field(INTEGERS)
    forced_bos_token_id: int | None = call_field(TOKEN_IDS)
    forced_eos_token_id: int | Sequence[int] | None = call_field(TOKEN_IDS)
    exponential_decay_length_penalty: tuple[int, float] | None = call_field()
    remove_invalid_values: bool | None = call_field(FLAG, neutral=False)
    watermarking_config: object = call_field()


@dataclass(frozen=True)
class CutoffFields:
    """Truncation of draws by transformers' processors, behind top_k, top_p and min_p."""

    top_h: float | None = call_field(SHARE)
    typical_p: float | None = call_field(SHARE, neutral=1.0)
    epsilon_cutoff: float | None = call_field(SHARE, neutral=0.0)
    eta_cutoff: float | None = call_field(SHARE, neutral=0.0)


@dataclass(frozen=True)
class TextFields:
    """Further settings of a call for text.

    Args:
        max_new_tokens: most tokens to emit; by default 256, or what the model's positions leave room for. A
            number of the model's own config is cut to that room, and one of the call may not exceed it.
        max_length: the same with the longest prompt counted, as in transformers; of the two counts what is
            set nearer to the call, at the same place max_new_tokens.
        do_sample: draw from the distribution instead of taking the likeliest token. A temperature above 0
            turns it on, 0 turns it off.
        logits_processor: transformers processors, called as `generate` calls them. Those that may keep a
            state or know the batch turn drafts off: all but transformers' own of the path, and those that
            declare `depends_on_path_alone = True`.
        prefix_allowed_tokens_fn: (row, ids) -> allowed ids, as in transformers; likewise.
        stop_strings: end a row when its text ends in one of them.
        stops_in_prompt: whether a stop string may begin in the prompt, as in transformers; False for
            those that are in the output whole.
        stopping_criteria: transformers criteria, asked after every token; of several prompts likewise.
        max_time: seconds, counted from the call.
        eos_token_id: id or ids that end a row.
        negative_prompt: the unconditional prompt(s) of guidance; None is an empty one, or, for LLaDA, the
            prompt with all tokens masked, as in its code.
    """

    max_new_tokens: int | None = call_field(in_chats="max_tokens")
    max_length: int | None = call_field()
    do_sample: bool | None = call_field(FLAG)
    logits_processor: LogitsProcessorList | None = call_field()
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = call_field()
    stop_strings: str | Sequence[str] | None = call_field(in_chats="stop")
    stops_in_prompt: bool | None = call_field(FLAG)
    stopping_criteria: StoppingCriteriaList | None = call_field()
    max_time: float | None = call_field(Range(0.0, 1e9, "seconds above 0", open_below=True))
    eos_token_id: int | Sequence[int] | None = call_field(TOKEN_IDS, in_chats="stop_token_ids")
    negative_prompt: str | Sequence[str] | None = call_field()


@dataclass(frozen=True)
class ImageFields:
    """Settings of a call for images, beside its prompts.

    Args:
        num_images_per_prompt: images of each prompt.
        batch_size: images decoded together; the images do not depend on it.
        output_type: "pil", "pt", "np", or "latent" for the tokens alone.
        guidance_schedule: "constant"; "rising" from 1 with the share of the image that is decided, which LPD
            and MAR call linear, of models that decide many cells in a forward; or "falling" to 1, which
            NextStep-1 calls linear, of continuous tokens.
    """

    num_images_per_prompt: int = call_field(OF_IMAGES, default=1, help="Images of each prompt.")
    batch_size: int = call_field(OF_IMAGES, default=IMAGES_AT_ONCE, help="Images decoded together.")
    output_type: str = call_field(output_type, default="pil")
    guidance_schedule: str = call_field(default="constant")


@dataclass(frozen=True)
class ContinuousFields:
    """Settings of continuous tokens. The first two are one value, or a list with one for each prompt.

    Args:
        guidance_scale: as of `SamplingFields`.
        temperature: factor of the noise of every step of the head, above 0; the first noise is not scaled.
        num_inference_steps: steps of the head for every token; 20 for flows, 100 for diffusions.
        shift: of the times of a flow; above 1 for more steps at early times.
        clip_sample_range: largest number of a token that a diffusion head predicts; None does not clip.
        last_step_noise: whether the last step has noise like the others, which the published samplers leave
            out; without it a token has no density, which exact speculation needs.
        normalize_tokens: whether each token is normalised as it is drawn; None is what the image tokenizer
            asks for.
    """

    guidance_scale: float | Sequence[float] | None = call_field(GUIDANCE)
    temperature: float | Sequence[float] | None = call_field(ABOVE_ZERO)
    num_inference_steps: int | None = call_field(STEPS, help="Steps of a denoising head.")
    shift: float | None = call_field()
    clip_sample_range: float | None = call_field()
    last_step_noise: bool = call_field(
        FLAG, default=False, help="Noise in the last step of a head too: exact speculation needs it."
    )
    normalize_tokens: bool | None = call_field()


SAMPLING = known_fields(SamplingFields)
SHAPING = known_fields(ShapingFields)
CUTOFFS = known_fields(CutoffFields)
TEXT = known_fields(TextFields)
IMAGES = known_fields(ImageFields)
CONTINUOUS = known_fields(ContinuousFields)
#: All but those that say where random numbers come from; of two of a name that of `SamplingFields`.
CALL_FIELDS = CONTINUOUS | IMAGES | TEXT | CUTOFFS | SHAPING | SAMPLING
#: Values with which every token keeps its probability.
NO_TRUNCATION = {name: SAMPLING[name].neutral for name in ("top_k", "top_p", "min_p")}
#: Names in chats of the arguments of a pipeline that have others there.
CHAT_NAMES = {"images": "messages", "prompt": "messages"} | {
    name: one.in_chats for name, one in CALL_FIELDS.items() if one.in_chats is not None
}
