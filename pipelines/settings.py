"""Settings of text generation: keyword arguments with transformers' names, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedTokenizerBase, StoppingCriteriaList

from mmspec.call_fields import (
    SAMPLING,
    TEXT,
    CutoffFields,
    RandomFields,
    SamplingFields,
    ShapingFields,
    TextFields,
    check_fields,
)
from mmspec.core.canvas import MAX_NEW_TOKENS, Stopping
from mmspec.core.sampling import Sampler, check_rows
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.open_types import Keywords
from mmspec.pipelines.callbacks import CheckedCriterion, StopStringsCriterion, StopTextCriterion, checked
from mmspec.pipelines.generation_fields import distance, resolve
from mmspec.registry import did_you_mean
from mmspec.validation import given_of, is_integer, plain_numbers, require_unicode

DEFAULT_NEW_TOKENS = 256
DEFAULT_TOP_K = 50  # default of transformers with do_sample=True
MAX_STOP_STRINGS = 1_000
OF_CALLS = {
    "images", "videos", "audio", "num_frames", "fps", "apply_chat_template", "generation_config", "streamer",
    "continue_final_message", "chat_template_kwargs", "sanitize_control_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class GenerationSettings(TextFields, SamplingFields, CutoffFields, ShapingFields, RandomFields):
    """Generation settings for text: sampling, length, stopping, logits processors and seeds.

    Pass them as keywords of a call of `VisionLanguagePipeline`. The fields are documented at the base
    classes, in `mmspec.call_fields`. A setting that is None is taken from the model's generation config, then
    from transformers' defaults; as in transformers, `do_sample=True` alone implies top_k = 50.

    A list sets one value for each prompt. Each prompt then has the same output as in a call of its own.
    """

    @classmethod
    def from_keywords(
        cls,
        own: GenerationConfig | None,
        keywords: Mapping[str, object],
        config: GenerationConfig | None = None,
    ) -> GenerationSettings:
        """Read settings from the keywords of a call, then its generation config, then the model's.

        Args:
            own: the generation config of the model.
            keywords: keywords of the call.
            config: `generation_config=` of the call.

        Raises:
            UnknownArgumentError: a keyword does not exist; the message names the nearest one.
            InputError: `config` is not a GenerationConfig, or a field is unsupported or invalid.
        """
        if config is not None and not isinstance(config, GenerationConfig):
            raise InputError("generation_config", config, "must be a transformers GenerationConfig")
        if keywords.get("temperature") is not None and keywords.get("do_sample") is None:
            draws = plain_numbers(keywords["temperature"]) != 0
            keywords = {**keywords, "do_sample": draws}
        given = resolve([field.name for field in fields(cls)], keywords, config, own, OF_CALLS)
        for shorter, longer in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            if distance(longer, keywords, config, own) < distance(shorter, keywords, config, own):
                given.pop(shorter, None)
        settings = cls(**given)
        check_fields(settings, TEXT)
        return settings

    def sampler(self, prompts: int) -> Sampler:
        """Return the sampler for a number of prompts, without logits processors.

        Raises:
            InputError: a value is out of range, or a list does not have one value for each prompt.
        """
        check_rows(self, prompts, "prompts")
        given = given_of(**{name: getattr(self, name) for name in SAMPLING})
        # built for greedy decoding too, so that unused values are checked
        sampled = Sampler(**{"temperature": 1.0, "top_k": DEFAULT_TOP_K, **given})
        return sampled if self.do_sample else replace(sampled, temperature=0.0)

    def stopping(
        self,
        longest_prompt: int,
        positions: int | None,
        tokenizer: PreTrainedTokenizerBase,
        counted: int,
        usual: bool,
    ) -> Stopping:
        """Return the conditions under which rows end.

        Args:
            longest_prompt: number of tokens of the longest prompt, unconditional prompts included.
            positions: maximum number of positions of the model; None if unlimited.
            tokenizer: tokenizer for stop strings.
            counted: number of tokens of the longest prompt, as counted by `max_length`.
            usual: whether `max_new_tokens` is the model's default, which is reduced to the positions left.

        Raises:
            InputError: the prompt and the new tokens exceed the model's positions, or the prompt alone
                exceeds `max_length`.
        """
        room = MAX_NEW_TOKENS if positions is None else positions - longest_prompt
        if room < 1:
            rule = f"must have fewer than {positions} tokens, images included, to fit the model's positions"
            raise InputError("prompt", longest_prompt, rule)
        if self.max_new_tokens is not None:
            new_tokens = min(self.max_new_tokens, room) if usual else self.max_new_tokens
        elif self.max_length is not None:
            new_tokens = min(self._left_by(counted), room)
        else:
            new_tokens = min(DEFAULT_NEW_TOKENS, room)
        others, of_output = self, StoppingCriteriaList()
        if self.stops_in_prompt is False:
            others = replace(self, stop_strings=None)
            of_output = replace(self, max_time=None, stopping_criteria=None)._criteria(tokenizer)
        ends = frozenset(self.end_token_ids())
        criteria = others._criteria(tokenizer)
        stopping = Stopping(new_tokens, ends, criteria, of_output, logprobs=self.logprobs)
        if new_tokens > room:
            has = f"the prompt has {longest_prompt} tokens and the model {positions} positions"
            raise InputError("max_new_tokens", new_tokens, f"must be at most {room}: {has}")
        return stopping

    def _left_by(self, prompt: int) -> int:
        """Return the number of new tokens that `max_length` leaves after a prompt."""
        most = self.max_length
        if not is_integer(most) or most is None or most <= prompt:
            rule = f"must be an integer above {prompt}, the number of tokens of the prompt with its images"
            raise InputError("max_length", most, rule)
        return min(most - prompt, MAX_NEW_TOKENS)

    def end_token_ids(self) -> list[int]:
        """Return the token ids that end a row."""
        ends = self.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]  # type: ignore[list-item]

    def _criteria(self, tokenizer: PreTrainedTokenizerBase) -> StoppingCriteriaList:
        criteria = StoppingCriteriaList()
        if self.max_time is not None:
            criteria.append(MaxTimeCriteria(max_time=float(self.max_time)))
        if self.stop_strings is not None:
            strings = [self.stop_strings] if isinstance(self.stop_strings, str) else self.stop_strings
            if not isinstance(strings, list | tuple):
                raise InputError("stop_strings", strings, "must be a string or a list of strings")
            if not strings or len(strings) > MAX_STOP_STRINGS:
                rule = f"must be 1 to {MAX_STOP_STRINGS:,} strings"
                raise InputError("stop_strings", f"{len(strings)} strings", rule)
            for index, string in enumerate(strings):
                if not isinstance(string, str) or not string:
                    raise InputError(f"stop_strings[{index}]", string, "must be a string that is not empty")
                require_unicode(f"stop_strings[{index}]", string)
            try:
                criteria.append(StopStringsCriterion(tokenizer, list(strings)))
            except ValueError:  # a tokenizer of whole words
                criteria.append(StopTextCriterion(tokenizer, list(strings)))
        criteria.extend(checked(CheckedCriterion, "stopping_criteria", self.stopping_criteria))
        return criteria


def read_keywords(settings: type[RandomFields], keywords: Mapping[str, object], others: set[str]) -> Keywords:
    """Check that the keywords of a call are fields of a dataclass; return those that are not None.

    Raises:
        UnknownArgumentError: a keyword does not exist; the message names the nearest one.
    """
    keywords = plain_numbers(dict(keywords))
    known = {field.name for field in fields(settings)}
    for keyword in keywords:
        if keyword not in known:
            raise UnknownArgumentError("keyword", keyword, did_you_mean(keyword, known | others))
    return given_of(**keywords)


def read_seeds(
    seed: int | Sequence[int] | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    counts: Sequence[int],
) -> int | list[int] | None:
    """Read the seed or seeds of the random streams; None if neither argument is given.

    The caller then draws a seed with `draw_seed`, after all checks. Generators give their initial seeds; the
    length of a list of generators must be one of `counts`.

    Raises:
        InputError: both arguments are given, or `generator` is not a generator or a list of generators.
    """
    if generator is not None:
        if seed is not None:
            raise InputError("seed", seed, "cannot be combined with generator")
        generators = [generator] if isinstance(generator, torch.Generator) else generator
        if (
            not isinstance(generators, list | tuple)
            or not all(isinstance(item, torch.Generator) for item in generators)
            or (generators is generator and len(generators) not in counts)
        ):
            numbers = " or ".join(map(str, counts))
            rule = f"must be a torch.Generator, or a list with one for each of the {numbers} rows"
            raise InputError("generator", generator, rule)
        seeds = [item.initial_seed() % 2**64 for item in generators]
        return seeds[0] if isinstance(generator, torch.Generator) else seeds
    seed = plain_numbers(seed)
    return list(seed) if isinstance(seed, list | tuple) else seed  # type: ignore[return-value]
