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
PENALTY = Range(-2.0, 2.0, "must be between -2 and 2")
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
        temperature: sampling temperature, 0 to 10000; 0 is greedy decoding, as are values below 0.0001; 1 if
            None.
        top_k: keep the k most likely tokens; 0 keeps all. Applied before `top_p` and `min_p`; 50 for text,
            all for images if None.
        top_p: keep the most likely tokens with this total probability, above 0 to 1; 1 if None.
        min_p: keep tokens with at least this share of the largest probability, 0 to 1; 0 if None.
        guidance_scale: scale s of classifier-free guidance, u + s (c - u), 0 to 10000. 1 disables guidance;
            without guidance for any row of a batch, each forward pass has half as many rows; 1 if None.
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
            stream; a random seed if None.
        generator: a torch generator or a list of them, as in diffusers; their initial seeds are used; from
            `seed` if None.
    """

    seed: int | Sequence[int] | None = call_field()
    generator: torch.Generator | Sequence[torch.Generator] | None = call_field()


@dataclass(frozen=True)
class ShapingFields:
    """Settings of logits processors. They act as in `generate`, at every token of a draft.

    All but the presence and frequency penalties are those of transformers.

    `min_length` counts the prompt of the row, `min_new_tokens` does not. If both are set, the call takes
    precedence over `generation_config=`, and that over the model's own config; in the same place
    `min_new_tokens` takes precedence.

    Args:
        min_new_tokens: least number of new tokens; 0 if None.
        min_length: least length including the prompt; 0 if None.
        repetition_penalty: factor above 0 by which positive logits of tokens that occurred before are
            divided, and negative ones multiplied; 1 if None.
        encoder_repetition_penalty: factor above 0 that makes tokens of the prompt more likely if above 1, and
            less likely if below; 1 if None.
        presence_penalty: number from -2 to 2 by which the logits of tokens in the output are reduced, as in
            OpenAI's API; tokens of the prompt do not count; 0 if None.
        frequency_penalty: the same, once for each time that the token occurs in the output; 0 if None.
        no_repeat_ngram_size: size of n-grams that occur only once; off if None.
        encoder_no_repeat_ngram_size: size of n-grams of the prompt that do not occur in the output; off if
            None.
        bad_words_ids: lists of token ids that do not occur in the output.
        sequence_bias: biases of sequences of token ids, as in transformers.
        suppress_tokens: token ids that are not generated.
        begin_suppress_tokens: token ids that are not generated at the beginning of the output.
        forced_bos_token_id: token id at the beginning of the output.
        forced_eos_token_id: token id or ids at the end of an output that reaches its maximum length.
        exponential_decay_length_penalty: (start, factor): after `start` new tokens the end token becomes more
            likely, exponentially.
        remove_invalid_values: whether NaN and infinite logits are replaced; False if None.
        watermarking_config: config of a watermark, as in transformers.
    """

    min_new_tokens: int | None = call_field(COUNT, neutral=0, in_chats="min_tokens")
    min_length: int | None = call_field(COUNT, neutral=0)
    repetition_penalty: float | None = call_field(ABOVE_ZERO, neutral=1.0)
    encoder_repetition_penalty: float | None = call_field(ABOVE_ZERO, neutral=1.0)
    presence_penalty: float | None = call_field(PENALTY, neutral=0.0)
    frequency_penalty: float | None = call_field(PENALTY, neutral=0.0)
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
    """Truncation by transformers' logits processors, applied after top_k, top_p and min_p.

    Args:
        top_h: keep the most likely tokens up to this share of the distribution's entropy, 0 to 1; off if
            None.
        typical_p: keep the tokens of typical information with this total probability, 0 to 1; 1 if None.
        epsilon_cutoff: keep tokens of at least this probability, 0 to 1; 0 if None.
        eta_cutoff: keep tokens of probability min(e, sqrt(e) exp(-H)) or more, with this value e, 0 to 1, and
            the entropy H; 0 if None.
    """

    top_h: float | None = call_field(SHARE)
    typical_p: float | None = call_field(SHARE, neutral=1.0)
    epsilon_cutoff: float | None = call_field(SHARE, neutral=0.0)
    eta_cutoff: float | None = call_field(SHARE, neutral=0.0)


@dataclass(frozen=True)
class TextFields:
    """Length, stopping, logits processors and guidance of a call that generates text.

    Args:
        max_new_tokens: maximum number of new tokens. The default and a value of the model's config are
            reduced to the positions that the model has left; a value of the call may not exceed them; 256 if
            None.
        max_length: maximum length including the longest prompt, as in transformers. If both are set, the
            call takes precedence over `generation_config=`, and that over the model's own config; in the
            same place `max_new_tokens` takes precedence.
        do_sample: sample instead of decoding greedily. A temperature above 0 in the call enables it, 0
            disables it; False if None.
        logits_processor: transformers logits processors, called as `generate` calls them. A processor that
            may keep state or depend on the batch disables drafting. Exempt are transformers' processors that
            depend on the tokens of the row alone, and processors with `depends_on_path_alone = True`.
        prefix_allowed_tokens_fn: function (row, ids) -> allowed token ids, as in transformers. It disables
            drafting as `logits_processor` does.
        stop_strings: a row ends when its text ends with one of these strings.
        stops_in_prompt: whether a stop string may begin in the prompt, as in transformers. With False, only
            stop strings that lie entirely in the output count; True if None.
        stopping_criteria: transformers stopping criteria, evaluated after every token. With several prompts,
            they disable drafting as `logits_processor` does.
        max_time: time limit in seconds, above 0, counted from the call.
        eos_token_id: token id or ids that end a row.
        logprobs: number of most likely tokens to return with each output token and its log-probability, 0 or
            more. These are of the model's own distribution, before logits processors, temperature and
            truncation; with guidance, after it. Neither if None.
        negative_prompt: the unconditional prompt(s) of guidance. For LLaDA the default is the prompt with all
            tokens masked, as in LLaDA's code; an empty prompt if None.
        response_format: format of the output: a pydantic model, or a dictionary such as {"type":
            "json_object"}; see `docs/how-to/structured-output.md`. A list sets one format for each prompt;
            free text if None.
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
    logprobs: int | None = call_field(COUNT, in_chats="top_logprobs")
    negative_prompt: str | Sequence[str] | None = call_field()
    response_format: object = call_field()


@dataclass(frozen=True)
class ImageFields:
    """Settings of a call that generates images.

    Args:
        num_images_per_prompt: number of images for each prompt, 1 to 10000.
        batch_size: number of images decoded together, 1 to 10000. It does not affect the images.
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
        guidance_scale: scale of classifier-free guidance, 0 to 10000; 1 disables guidance; 1 if None.
        temperature: factor of the noise of every denoising step, above 0. The initial noise is not scaled; 1
            if None.
        num_inference_steps: denoising steps for each token, 2 or more; 20 for flows, 100 for diffusions if
            None.
        shift: time shift of a flow, above 1 for more steps at early times; 1 if None.
        clip_sample_range: largest absolute value of a diffusion head's predicted token; not clipped if None.
        last_step_noise: add noise in the last step as well, which the published samplers leave out. Exact
            speculation needs it: without it a token has no density.
        normalize_tokens: normalise each token as it is drawn; from the image tokenizer's config if None.
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
#: Fields with one meaning in all requests of the server. The response format of images is their encoding, and
#: `logprobs` of chats is a flag.
SAME_IN_REQUESTS = [name for name in CALL_FIELDS if name not in ("logprobs", "response_format")]
#: Values that leave the probability of every token unchanged.
NO_TRUNCATION = {name: SAMPLING[name].neutral for name in ("top_k", "top_p", "min_p")}
#: Names in server requests of the pipeline arguments that have another name there.
CHAT_NAMES = {"images": "messages", "prompt": "messages"} | {
    name: one.in_chats for name, one in CALL_FIELDS.items() if one.in_chats is not None
}
