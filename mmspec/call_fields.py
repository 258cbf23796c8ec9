"""Settings of pipeline calls: type, default, allowed range, help text and name in server requests.

The settings classes of the pipelines inherit from the groups below. Samplers and logits processors check
values with them, the server reads ranges and names from them, and the command line its help texts. To add a
setting, add it to the group of the component that reads it.
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

#: Raises InputError, under the name of the field, for a value that is not allowed.
Check = Callable[[str, object], None]
OUTPUT_TYPES = ("pil", "pt", "np", "latent")
MAX_IMAGES = 10_000
IMAGES_AT_ONCE = 16


@dataclass(frozen=True)
class CallField:
    """Metadata of one setting, in addition to its type and default.

    Attributes:
        check: check of the value; None if the code that reads the field checks it.
        neutral: the value, other than None, that has no effect.
        help: help text of the command-line option.
        in_chats: name in server requests, if it differs.
    """

    check: Check | None = None
    neutral: object = None
    help: str = ""
    in_chats: str | None = None


@dataclass(frozen=True)
class Range:
    """Check that a number lies in [low, high]; `rule` states this in errors, beginning with a verb."""

    low: float
    high: float
    rule: str
    open_below: bool = False
    whole: bool = False

    def __call__(self, name: str, value: object) -> None:
        if self.whole and not is_integer(value):
            raise InputError(name, value, self.rule)
        require_number(name, value, self.low, self.high, self.rule, open_below=self.open_below)


def passing(test: Callable[[object], object], rule: str) -> Check:
    """Make a check from a predicate; `rule` states it in error messages, beginning with a verb."""

    def check(name: str, value: object) -> None:
        if not test(value):
            raise InputError(name, value, rule)

    return check


def output_type(name: str, value: object) -> None:
    """Raise InputError unless the value is an output type of images."""
    if not isinstance(value, str) or value not in OUTPUT_TYPES:
        raise InputError(name, value, did_you_mean(value, OUTPUT_TYPES))


def are_token_ids(value: object) -> bool:
    """Whether a value is a list of integers of at least 0."""
    return is_list(value) and all(is_integer(item) and item >= 0 for item in value)


FLAG = passing(lambda value: isinstance(value, bool), "must be True or False")
INTEGERS = passing(
    lambda value: is_list(value) and all(map(is_integer, value)), "must be a list of token ids"
)
TOKEN_IDS = passing(
    lambda value: are_token_ids(value if is_list(value) else [value]),
    "must be a token id or a list of token ids",
)
WORDS = passing(
    lambda value: is_list(value) and value and all(one and are_token_ids(one) for one in value),
    "must be a list of words, each a list of at least one token id",
)
SHARE = Range(0.0, 1.0, "must be between 0 and 1")
ABOVE_ZERO = Range(0.0, 1e4, "must be above 0 and at most 10000", open_below=True)
POSITIVE = Range(1, math.inf, "must be a positive integer", whole=True)
COUNT = Range(0, math.inf, "must be an integer of at least 0", whole=True)
GUIDANCE = Range(0.0, 1e4, "must be between 0 and 10000; 1 disables guidance")
STEPS = Range(2, math.inf, "must be an integer of at least 2", whole=True)
TOP_K = Range(0, math.inf, "must be a positive integer, or None or 0 to keep every token", whole=True)
OF_IMAGES = Range(1, MAX_IMAGES, f"must be an integer from 1 to {MAX_IMAGES:,}", whole=True)


def call_field(check: Check | None = None, *, default: object = None, **known: Any) -> Any:
    """Declare a field of a group; the keywords are attributes of `CallField`."""
    return field(default=default, metadata={"field": CallField(check, **known)})


def known_fields(group: Any) -> dict[str, CallField]:
    """Return the `CallField` of each field of a group, by name."""
    return {one.name: one.metadata["field"] for one in fields(group)}


def check_fields(settings: object, known: Mapping[str, CallField]) -> None:
    """Raise InputError for the first field whose value is not allowed; None is allowed."""
    for name, one in known.items():
        value = getattr(settings, name)
        if one.check is not None and value is not None:
            one.check(name, value)


@dataclass(frozen=True)
class SamplingFields:
    """Sampling settings. Each is one value, or a list with one value for each prompt.

    Args:
        temperature: 0 is greedy decoding. Values below 0.0001 count as 0.
        top_k, top_p, min_p: truncation of the distribution, applied in this order.
        guidance_scale: scale s of classifier-free guidance, u + s (c - u). 1 disables guidance; without
            guidance for any row of a batch, each forward pass has half as many rows.
    """

    temperature: float | Sequence[float] | None = call_field(
        Range(0.0, 1e4, "must be between 0 (greedy) and 10000"), help="Sampling temperature; 0 is greedy."
    )
    top_k: int | Sequence[int] | None = call_field(
        TOP_K, neutral=0, help="Sample from the k most likely tokens; 0 keeps every token."
    )
    top_p: float | Sequence[float] | None = call_field(
        Range(0.0, 1.0, "must be above 0 and at most 1", open_below=True),
        neutral=1.0,
        help="Sample from the most likely tokens with this total probability; 1 keeps every token.",
    )
    min_p: float | Sequence[float] | None = call_field(SHARE, neutral=0.0)
    guidance_scale: float | Sequence[float] | None = call_field(
        GUIDANCE, help="Guidance scale; 1 disables guidance."
    )


@dataclass(frozen=True)
class RandomFields:
    """Random seeds. Without either field, torch's global generator draws a seed.

    Args:
        seed: an integer, or a list with one for each row. With one integer, each row has its own random
            stream.
        generator: a torch generator or a list of them, as in diffusers; their initial seeds are used.
    """

    seed: int | Sequence[int] | None = call_field()
    generator: torch.Generator | Sequence[torch.Generator] | None = call_field()


@dataclass(frozen=True)
class ShapingFields:
    """Settings of transformers' logits processors. They act as in `generate`, at every token of a draft.

    `min_length` counts the prompt of the row, `min_new_tokens` does not. If both are set, the call takes
    precedence over `generation_config=`, and that over the model's own config; in the same place
    `min_new_tokens` takes precedence.
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
    """Truncation by transformers' logits processors, applied after top_k, top_p and min_p."""

    top_h: float | None = call_field(SHARE)
    typical_p: float | None = call_field(SHARE, neutral=1.0)
    epsilon_cutoff: float | None = call_field(SHARE, neutral=0.0)
    eta_cutoff: float | None = call_field(SHARE, neutral=0.0)


@dataclass(frozen=True)
class TextFields:
    """Length, stopping, logits processors and guidance of a call that generates text.

    Args:
        max_new_tokens: maximum number of new tokens. The default is 256, or fewer if the model has fewer
            positions left. A value of the model's own config is reduced to the positions left; a value of
            the call may not exceed them.
        max_length: maximum length including the longest prompt, as in transformers. If both are set, the
            call takes precedence over `generation_config=`, and that over the model's own config; in the
            same place `max_new_tokens` takes precedence.
        do_sample: sample instead of decoding greedily. A temperature above 0 enables it, 0 disables it.
        logits_processor: transformers logits processors, called as `generate` calls them. A processor that
            may keep state or depend on the batch disables drafting. Exempt are transformers' processors that
            depend on the tokens of the row alone, and processors with `depends_on_path_alone = True`.
        prefix_allowed_tokens_fn: function (row, ids) -> allowed token ids, as in transformers. It disables
            drafting under the same condition.
        stop_strings: a row ends when its text ends with one of these strings.
        stops_in_prompt: whether a stop string may begin in the prompt, as in transformers. With False, only
            stop strings that lie entirely in the output count.
        stopping_criteria: transformers stopping criteria, evaluated after every token. With several prompts,
            they disable drafting under the same condition.
        max_time: time limit in seconds, counted from the call.
        eos_token_id: token id or ids that end a row.
        negative_prompt: the unconditional prompt(s) of guidance. None is an empty prompt; for LLaDA it is
            the prompt with all tokens masked, as in LLaDA's code.
    """

    max_new_tokens: int | None = call_field(in_chats="max_tokens")
    max_length: int | None = call_field()
    do_sample: bool | None = call_field(FLAG)
    logits_processor: LogitsProcessorList | None = call_field()
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = call_field()
    stop_strings: str | Sequence[str] | None = call_field(in_chats="stop")
    stops_in_prompt: bool | None = call_field(FLAG)
    stopping_criteria: StoppingCriteriaList | None = call_field()
    max_time: float | None = call_field(
        Range(0.0, 1e9, "must be a number of seconds above 0", open_below=True)
    )
    eos_token_id: int | Sequence[int] | None = call_field(TOKEN_IDS, in_chats="stop_token_ids")
    negative_prompt: str | Sequence[str] | None = call_field()


@dataclass(frozen=True)
class ImageFields:
    """Settings of a call that generates images.

    Args:
        num_images_per_prompt: number of images for each prompt.
        batch_size: number of images decoded together. It does not affect the images.
        output_type: "pil", "pt", "np", or "latent" for the tokens without decoding to pixels.
        guidance_schedule: "constant"; "rising", for models that decide many cells per forward pass, from 1
            to the scale with the decided share of the image ("linear" in LPD and MAR); or "falling", for
            continuous tokens, from the scale to 1 ("linear" in NextStep-1).
    """

    num_images_per_prompt: int = call_field(OF_IMAGES, default=1, help="Number of images per prompt.")
    batch_size: int = call_field(OF_IMAGES, default=IMAGES_AT_ONCE, help="Number of images decoded together.")
    output_type: str = call_field(output_type, default="pil")
    guidance_schedule: str = call_field(default="constant")


@dataclass(frozen=True)
class ContinuousFields:
    """Settings of continuous tokens. The first two are one value, or a list with one value for each prompt.

    Args:
        guidance_scale: as in `SamplingFields`.
        temperature: factor of the noise of every denoising step, above 0. The initial noise is not scaled.
        num_inference_steps: denoising steps for each token; by default 20 for flows, 100 for diffusions.
        shift: time shift of a flow; above 1 for more steps at early times.
        clip_sample_range: largest absolute value of a diffusion head's predicted token; None does not clip.
        last_step_noise: add noise in the last step as well, which the published samplers leave out. Exact
            speculation needs it: without it a token has no density.
        normalize_tokens: normalise each token as it is drawn; None follows the image tokenizer's config.
    """

    guidance_scale: float | Sequence[float] | None = call_field(GUIDANCE)
    temperature: float | Sequence[float] | None = call_field(ABOVE_ZERO)
    num_inference_steps: int | None = call_field(STEPS, help="Denoising steps of each token.")
    shift: float | None = call_field()
    clip_sample_range: float | None = call_field()
    last_step_noise: bool = call_field(
        FLAG, default=False, help="Add noise in the last denoising step too; exact speculation needs it."
    )
    normalize_tokens: bool | None = call_field()


SAMPLING = known_fields(SamplingFields)
SHAPING = known_fields(ShapingFields)
CUTOFFS = known_fields(CutoffFields)
TEXT = known_fields(TextFields)
IMAGES = known_fields(ImageFields)
CONTINUOUS = known_fields(ContinuousFields)
#: All fields except those of `RandomFields`; `SamplingFields` takes precedence for names that occur twice.
CALL_FIELDS = CONTINUOUS | IMAGES | TEXT | CUTOFFS | SHAPING | SAMPLING
#: Values that leave the probability of every token unchanged.
NO_TRUNCATION = {name: SAMPLING[name].neutral for name in ("top_k", "top_p", "min_p")}
#: Names in server requests of the pipeline arguments that have another name there.
CHAT_NAMES = {"images": "messages", "prompt": "messages"} | {
    name: one.in_chats for name, one in CALL_FIELDS.items() if one.in_chats is not None
}
