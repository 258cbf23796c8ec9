"""Settings of text generation: keyword arguments in transformers' words, checked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mmspec.decoding.canvas import MAX_NEW_TOKENS, Stopping
from mmspec.decoding.row_settings import check_rows
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.pipelines.callbacks import CheckedCriterion, CheckedProcessor, StopTextCriterion, checked
from mmspec.registry import did_you_mean
from mmspec.validation import given_of, is_integer, require_number

DEFAULT_NEW_TOKENS = 256
DEFAULT_TOP_K = 50  # what transformers' do_sample=True implies
MAX_STOP_STRINGS = 1_000
OF_CALLS = {
    "images",
    "videos",
    "num_frames",
    "fps",
    "apply_chat_template",
    "generation_config",
    "streamer",
} | {
    "continue_final_message",
    "chat_template_kwargs",
}


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of text generation. None takes the model's generation config, then transformers' default.

    Temperature, top_k, top_p, min_p and guidance_scale are one value, or a list with one for each prompt,
    which then gives what it gives alone.

    Args:
        max_new_tokens: most tokens to emit; by default 256, or what the model's positions leave room for.
        min_new_tokens: no end token before that many.
        do_sample: draw from the distribution instead of taking the likeliest token.
        temperature: above 0; giving one turns `do_sample` on, 0 turns it off. In a list, 0 is for
            that prompt alone.
        top_k, top_p, min_p: truncation, in that order; `do_sample` alone implies top_k = 50, as in
            transformers; 0 keeps every token.
        repetition_penalty, no_repeat_ngram_size, bad_words_ids: as in transformers, exact along drafts.
        logits_processor: transformers processors, called on each node's own path; they must keep no state.
        stop_strings: end a row when its text ends in one of them.
        stopping_criteria: transformers criteria, asked after every token.
        max_time: seconds, counted from the call.
        eos_token_id: id or ids that end a row.
        seed: integer, or one per prompt; row i of an integer seed has its own stream. None draws one.
        generator: torch generator(s), diffusers' way; their initial seeds are taken.
        guidance_scale: classifier-free guidance against `negative_prompt`; 1 is off.
        negative_prompt: the unconditional prompt(s) of guidance.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | Sequence[float] | None = None
    top_k: int | Sequence[int] | None = None
    top_p: float | Sequence[float] | None = None
    min_p: float | Sequence[float] | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    logits_processor: LogitsProcessorList | None = None
    stop_strings: str | Sequence[str] | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    max_time: float | None = None
    eos_token_id: int | Sequence[int] | None = None
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    guidance_scale: float | Sequence[float] | None = None
    negative_prompt: str | Sequence[str] | None = None

    @classmethod
    def from_keywords(cls, config: GenerationConfig, keywords: dict[str, object]) -> GenerationSettings:
        """Read settings from a call's keywords, completed by a generation config.

        Raises:
            UnknownArgumentError: a keyword that does not exist; the message holds the nearest one.
            InputError: the config is something else, or `do_sample` is not a bool.
        """
        if not isinstance(config, GenerationConfig):
            raise InputError("generation_config", config, "a transformers GenerationConfig")
        given = read_keywords(cls, keywords, OF_CALLS)
        if "temperature" in given and "do_sample" not in given:
            given["do_sample"] = given["temperature"] != 0
        usual = given_of(**{field.name: getattr(config, field.name, None) for field in fields(cls)})
        given = {**usual, **given}
        if not isinstance(given.get("do_sample", False), bool):
            raise InputError("do_sample", given["do_sample"], "True or False")
        return cls(**given)

    def sampler(self, prompts: int) -> Sampler:
        """Sampler of the distribution that is promised, but for its processors.

        Raises:
            InputError: a value outside its range, or a list of another length than the prompts.
        """
        check_rows(self, prompts, "prompts")
        sampled = Sampler(  # made for greedy decoding too: a value that is not used may not be wrong either
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=DEFAULT_TOP_K if self.top_k is None else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            guidance_scale=1.0 if self.guidance_scale is None else self.guidance_scale,
        )
        return sampled if self.do_sample else replace(sampled, temperature=0.0)

    def processors(self, prompt_lengths: Sequence[int], device: torch.device) -> list[LogitsProcessorList]:
        """Processors of each row, or none at all."""
        processors = [self._processors(length, device) for length in prompt_lengths]
        return processors if any(processors) else []

    def stopping(
        self, longest_prompt: int, positions: int | None, tokenizer: PreTrainedTokenizerBase
    ) -> Stopping:
        """Conditions under which rows end.

        Raises:
            InputError: the prompt and the new tokens together exceed the model's positions.
        """
        room = MAX_NEW_TOKENS if positions is None else positions - longest_prompt
        if room < 1:
            raise InputError(
                "prompt",
                longest_prompt,
                f"at most {positions} tokens, images included: the model has no more positions",
            )
        new_tokens = min(DEFAULT_NEW_TOKENS, room) if self.max_new_tokens is None else self.max_new_tokens
        stopping = Stopping(new_tokens, frozenset(self.end_token_ids()), self._criteria(tokenizer))
        if new_tokens > room:
            raise InputError(
                "max_new_tokens",
                new_tokens,
                f"at most {room}: the prompt has {longest_prompt} tokens and the model {positions} positions",
            )
        return stopping

    def seeds(self, rows: int) -> int | list[int]:
        """Seed(s) of the random streams.

        Raises:
            InputError: both ways at once, or a value that is neither one nor one per row.
        """
        return read_seeds(self.seed, self.generator, (rows,))

    def end_token_ids(self) -> list[int]:
        """Ids that end a row."""
        given = [] if self.eos_token_id is None else self.eos_token_id
        ids: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if not are_token_ids(ids):
            raise InputError("eos_token_id", self.eos_token_id, "a token id, or a list of token ids")
        return ids

    def _processors(self, prompt_length: int, device: torch.device) -> LogitsProcessorList:
        processors = LogitsProcessorList()
        if self.repetition_penalty is not None and self.repetition_penalty != 1.0:
            require_number(
                "repetition_penalty", self.repetition_penalty, 0.0, 1e4, "above 0", open_below=True
            )
            processors.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.no_repeat_ngram_size:
            if not is_integer(self.no_repeat_ngram_size) or self.no_repeat_ngram_size < 1:
                raise InputError("no_repeat_ngram_size", self.no_repeat_ngram_size, "a positive integer")
            processors.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        end = self.end_token_ids()
        if self.bad_words_ids is not None:
            words = self.bad_words_ids
            if not isinstance(words, list | tuple) or not words or not all(map(are_token_ids, words)):
                raise InputError("bad_words_ids", words, "lists of token ids, one for each word")
            if not all(words):
                raise InputError("bad_words_ids", words, "lists of token ids with at least one id each")
            processors.append(NoBadWordsLogitsProcessor(self.bad_words_ids, end or None))
        if self.min_new_tokens:
            if not is_integer(self.min_new_tokens) or self.min_new_tokens < 0:
                raise InputError("min_new_tokens", self.min_new_tokens, "an integer of at least 0")
            if end:
                processors.append(
                    MinNewTokensLengthLogitsProcessor(
                        prompt_length, self.min_new_tokens, end, device=str(device)
                    )
                )
        processors.extend(checked(CheckedProcessor, "logits_processor", self.logits_processor))
        return processors

    def _criteria(self, tokenizer: PreTrainedTokenizerBase) -> StoppingCriteriaList:
        criteria = StoppingCriteriaList()
        if self.max_time is not None:
            require_number("max_time", self.max_time, 0.0, 1e9, "seconds above 0", open_below=True)
            criteria.append(MaxTimeCriteria(max_time=float(self.max_time)))
        if self.stop_strings is not None:
            strings = [self.stop_strings] if isinstance(self.stop_strings, str) else self.stop_strings
            if not isinstance(strings, list | tuple):
                raise InputError("stop_strings", strings, "a string or a list of strings")
            if not strings or len(strings) > MAX_STOP_STRINGS:
                raise InputError(
                    "stop_strings", f"{len(strings)} strings", f"1 to {MAX_STOP_STRINGS:,} strings"
                )
            for index, string in enumerate(strings):
                if not isinstance(string, str) or not string:
                    raise InputError(f"stop_strings[{index}]", string, "a string of at least one character")
            try:
                criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings)))
            except ValueError:  # transformers spells "abcdef" to learn the tokens' texts; not all can
                criteria.append(StopTextCriterion(tokenizer, list(strings)))
        criteria.extend(checked(CheckedCriterion, "stopping_criteria", self.stopping_criteria))
        return criteria


def read_keywords(settings: type[Any], keywords: Mapping[str, Any], others: set[str]) -> dict[str, Any]:
    """Those of a call's keywords that are given.

    Args:
        settings: a dataclass, whose fields they name.
        keywords: of the call.
        others: what the call takes besides.

    Raises:
        UnknownArgumentError: a keyword that does not exist; the message holds the nearest one.
    """
    known = {field.name for field in fields(settings)}
    for keyword in keywords:
        if keyword not in known:
            raise UnknownArgumentError("keyword", keyword, did_you_mean(keyword, known | others))
    return given_of(**keywords)


def read_seeds(
    seed: int | Sequence[int] | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    counts: Sequence[int],
) -> int | list[int]:
    """Read the seed(s) of random streams: drawn anew if neither argument is given.

    Args:
        seed: one for all rows, or a list.
        generator: the same as torch generators, whose initial seeds are taken.
        counts: lengths that a list of generators may have.

    Raises:
        InputError: both arguments, or something else than generators.
    """
    if generator is not None:
        if seed is not None:
            raise InputError("seed", seed, "either seed or generator, not both")
        generators = [generator] if isinstance(generator, torch.Generator) else generator
        if (
            not isinstance(generators, list | tuple)
            or not all(isinstance(item, torch.Generator) for item in generators)
            or (generators is generator and len(generators) not in counts)
        ):
            numbers = " or ".join(map(str, counts))
            raise InputError(
                "generator", generator, f"a torch.Generator, or one for each of the {numbers} rows"
            )
        seeds = [item.initial_seed() % 2**64 for item in generators]
        return seeds[0] if isinstance(generator, torch.Generator) else seeds
    if seed is None:
        return secrets.randbits(63)  # not torch's global generator: a call leaves no trace there
    return list(seed) if isinstance(seed, list | tuple) else seed  # type: ignore[return-value]


def are_token_ids(value: object) -> bool:
    """True for a list of integers of at least 0."""
    return isinstance(value, list | tuple) and all(is_integer(item) and item >= 0 for item in value)
