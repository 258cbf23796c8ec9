"""Special tokens pasted into the text of messages: tokenized as ordinary text, never as special tokens.

A stand-in replaces each of them until the chat template and the processor have seen the text, so that it
neither ends a turn nor counts as an image. The tokenizer then reads the special token, and the ids of its
spelling replace its own id.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase

from mmspec.errors import InputError
from mmspec.open_types import Keywords, Processor

STAND_IN = re.compile("\ufdd0([0-9]{1,5})\ufdd1")  # noncharacters, which Unicode reserves for internal use


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens that text can contain, the longest first."""
    return sorted((token for token in tokenizer.all_special_tokens if len(token) > 2), key=len, reverse=True)


def with_stand_ins(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Replace the special tokens in the text of a message by stand-ins."""
    names = special_texts(tokenizer)
    if not any(name in text for name in names):
        return text
    text = STAND_IN.sub("", text)  # stand-ins in the message itself
    places = {name: f"\ufdd0{index}\ufdd1" for index, name in enumerate(names)}
    return re.sub("|".join(map(re.escape, names)), lambda found: places[found[0]], text)


def reading_stand_ins(processor: Processor, tokenizer: PreTrainedTokenizerBase) -> Processor:
    """Copy a processor (or the tokenizer itself) so that it reads stand-ins as text.

    Raises:
        InputError: the tokenizer has no character offsets of tokens.
    """
    if not tokenizer.is_fast:
        rule = "must not contain the model's special tokens; its tokenizer cannot read them as text"
        raise InputError("prompt", "a message with special tokens", rule)
    reader = SpellingTokenizer(tokenizer)
    if processor is tokenizer:
        return reader
    copied = copy.copy(processor)
    copied.tokenizer = reader
    return copied


class SpellingTokenizer:
    """Tokenizer wrapper for processors that reads each stand-in as the text of its special token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self, text: str | list[str], return_tensors: str | None = None, **how: object
    ) -> BatchEncoding:
        """Tokenize like the wrapped tokenizer, for texts that need no padding."""
        texts = [text] if isinstance(text, str) else text
        rows = [self._read(row, how) for row in texts]
        if isinstance(text, str) and return_tensors is None:
            return BatchEncoding(rows[0])
        # the processor of Idefics3 measures its images with `char_to_token`; no stand-in lies within one
        measured = self._tokenizer(texts, **how).encodings
        return BatchEncoding({key: [row[key] for row in rows] for key in rows[0]}, measured, return_tensors)

    def _read(self, text: str, how: Keywords) -> dict[str, list[int]]:
        names, pasted = special_texts(self._tokenizer), dict[int, str]()
        whole, read = "", 0
        for found in STAND_IN.finditer(text):
            name = names[int(found[1])]
            whole += text[read : found.start()]
            pasted[len(whole)] = name
            whole, read = whole + name, found.end()
        encoded = dict(self._tokenizer(whole + text[read:], **{**how, "return_offsets_mapping": True}))
        known = {self._tokenizer.convert_tokens_to_ids(name): name for name in set(pasted.values())}
        spelled = {token: self._spell(name) for token, name in known.items()}
        offsets, ids = encoded.pop("offset_mapping"), encoded["input_ids"]
        spellings = [
            spelled[token] if token in known and not pasted.keys().isdisjoint(range(*span)) else None
            for token, span in zip(ids, offsets, strict=True)
        ]
        return {key: replaced(values, spellings, key == "input_ids") for key, values in encoded.items()}

    def _spell(self, name: str) -> list[int]:
        """Return the ids of a special token's name as ordinary text."""
        special = {*self._tokenizer.all_special_ids} - {self._tokenizer.unk_token_id}
        for parts in (
            [name],
            [name[0], name[1:]],
            list(name),
        ):  # a word-level model may contain the name itself
            ids = [token for part in parts for token in self._ordinary(part)]
            if not special.intersection(ids):
                return ids
        raise InputError("prompt", name, "must not contain special tokens; this tokenizer cannot spell it")

    def _ordinary(self, text: str) -> Iterable[int]:
        backend = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer is not None:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in backend.model.tokenize(split)]


def replaced(values: list[int], spellings: list[list[int] | None], are_ids: bool) -> list[int]:
    """Replace the ids of special tokens by those of their spellings, and repeat other per-token values."""
    result = []
    for value, spelling in zip(values, spellings, strict=True):
        if spelling is None:
            result.append(value)
        else:
            result += spelling if are_ids else [value] * len(spelling)
    return result
