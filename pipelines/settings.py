"""Settings of text generation: keyword arguments in transformers' words, checked."""

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
DEFAULT_TOP_K = 50  # what transformers' do_sample=True implies
MAX_STOP_STRINGS = 1_000
OF_CALLS = {
    "images", "videos", "num_frames", "fps", "apply_chat_template", "generation_config", "streamer",
    "continue_final_message", "chat_template_kwargs", "sanitize_control_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class GenerationSettings(TextFields, SamplingFields, CutoffFields, ShapingFields, RandomFields):
    """Settings of text generation: the fields of `mmspec.call_fields` that its bases hold.

    None takes the model's generation config, then transformers' default; `do_sample` alone implies top_k = 50
    as there. In a list of settings each prompt gives what it gives alone.
    """

    @classmethod
    def from_keywords(
        cls,
        own: GenerationConfig | None,
        keywords: Mapping[str, object],
        config: GenerationConfig | None = None,
    ) -> GenerationSettings:
        """Read settings from a call's keywords, completed by its generation config and then the model's.

        Raises:
            UnknownArgumentError: a keyword that does not exist; the message holds the nearest one.
            InputError: the config is something else or sets what is not served, or `do_sample` is no bool.
        """
        if config is not None and not isinstance(config, GenerationConfig):
            raise InputError("generation_config", config, "a transformers GenerationConfig")
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
        """Sampler of the distribution that is promised, but for its processors.

        Raises:
            InputError: a value outside its range, or a list of another length than the prompts.
        """
        check_rows(self, prompts, "prompts")
        given = given_of(**{name: getattr(self, name) for name in SAMPLING})
        # made for greedy decoding too: a value that is not used may not be wrong either
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
        """Conditions under which rows end.

        Args:
            longest_prompt: tokens of the longest prompt, unconditional ones included.
            positions: of the model.
            tokenizer: of stop strings.
            counted: tokens of the longest prompt as max_length counts them.
            usual: whether max_new_tokens is the model's own, which nobody asks for: as many as there is room.

        Raises:
            InputError: the prompt and the new tokens together exceed the model's positions, or the prompt
                alone max_length.
        """
        room = MAX_NEW_TOKENS if positions is None else positions - longest_prompt
        if room < 1:
            allowed = f"at most {positions} tokens, images included: the model has no more positions"
            raise InputError("prompt", longest_prompt, allowed)
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
        stopping = Stopping(new_tokens, ends, others._criteria(tokenizer), of_output)
        if new_tokens > room:
            has = f"the prompt has {longest_prompt} tokens and the model {positions} positions"
            raise InputError("max_new_tokens", new_tokens, f"at most {room}: {has}")
        return stopping

    def _left_by(self, prompt: int) -> int:
        """New tokens that max_length leaves to a prompt."""
        most = self.max_length
        if not is_integer(most) or most is None or most <= prompt:
            allowed = f"an integer above {prompt}, the tokens of the prompt with its images"
            raise InputError("max_length", most, allowed)
        return min(most - prompt, MAX_NEW_TOKENS)

    def end_token_ids(self) -> list[int]:
        """Ids that end a row."""
        ends = self.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]  # type: ignore[list-item]

    def _criteria(self, tokenizer: PreTrainedTokenizerBase) -> StoppingCriteriaList:
        criteria = StoppingCriteriaList()
        if self.max_time is not None:
            criteria.append(MaxTimeCriteria(max_time=float(self.max_time)))
        if self.stop_strings is not None:
            strings = [self.stop_strings] if isinstance(self.stop_strings, str) else self.stop_strings
            if not isinstance(strings, list | tuple):
                raise InputError("stop_strings", strings, "a string or a list of strings")
            if not strings or len(strings) > MAX_STOP_STRINGS:
                allowed = f"1 to {MAX_STOP_STRINGS:,} strings"
                raise InputError("stop_strings", f"{len(strings)} strings", allowed)
            for index, string in enumerate(strings):
                if not isinstance(string, str) or not string:
                    raise InputError(f"stop_strings[{index}]", string, "a string of at least one character")
                require_unicode(f"stop_strings[{index}]", string)
            try:
                criteria.append(StopStringsCriterion(tokenizer, list(strings)))
            except ValueError:  # a tokenizer of whole words
                criteria.append(StopTextCriterion(tokenizer, list(strings)))
        criteria.extend(checked(CheckedCriterion, "stopping_criteria", self.stopping_criteria))
        return criteria


def read_keywords(settings: type[RandomFields], keywords: Mapping[str, object], others: set[str]) -> Keywords:
    """Check that a call's keywords name fields of a dataclass; return those that are not None.

    Raises:
        UnknownArgumentError: a keyword that does not exist; the message holds the nearest one.
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
    """Read the seed(s) of random streams; None if neither argument is given.

    One is to be drawn then by `draw_seed`, when nothing can be refused any more.

    Generators give their initial seeds; a list of them has one of the lengths `counts`.

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
            allowed = f"a torch.Generator, or one for each of the {numbers} rows"
            raise InputError("generator", generator, allowed)
        seeds = [item.initial_seed() % 2**64 for item in generators]
        return seeds[0] if isinstance(generator, torch.Generator) else seeds
    seed = plain_numbers(seed)
    return list(seed) if isinstance(seed, list | tuple) else seed  # type: ignore[return-value]
