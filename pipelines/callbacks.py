"""Logits processors and stopping criteria of the caller, with checks of their return values; stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmspec.errors import InputError
from mmspec.open_types import AnyFunction
from mmspec.pipelines.text_stream import BYTE, decode

SPELLED = "abcdef"  # text in front of a token, so that the token keeps its leading space

#: Text of a token: a str, or bytes for tokenizers whose tokens may be parts of a character.
TokenText: TypeAlias = Any


class CheckedCallback:
    """Wrapper of a user's callback that adds the name of the argument to exceptions."""

    def __init__(self, callback: AnyFunction, argument: str) -> None:
        self.callback = callback
        self._argument = argument

    def call(self, *arguments: object) -> object:
        """Call the callback, and return its result."""
        try:
            return self.callback(*arguments)
        except Exception as error:
            error.add_note(f"raised by {self._argument}: {type(self.callback).__name__}")
            raise

    def _refuse(self, result: object, wanted: str) -> InputError:
        rule = f"must return {wanted} (it is a {type(self.callback).__name__})"
        return InputError(self._argument, result, rule)


Checked = TypeVar("Checked", bound=CheckedCallback)


class CheckedProcessor(CheckedCallback, LogitsProcessor):
    """Logits processor whose output must have the shape of its input."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        shape = tuple(scores.shape)
        result = self.call(input_ids, scores)
        if not isinstance(result, Tensor) or tuple(result.shape) != shape or not result.is_floating_point():
            raise self._refuse(result, f"logits of shape {shape}")
        return result


class CheckedCriterion(CheckedCallback, StoppingCriteria):
    """Stopping criterion that must return a bool for all rows, or one for each row."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        result = self.call(input_ids, scores)
        if isinstance(result, bool):
            return torch.tensor([result], device=input_ids.device)
        rows = len(input_ids)
        if not isinstance(result, Tensor) or result.dtype != torch.bool or result.numel() not in (1, rows):
            raise self._refuse(result, "a bool, or a bool tensor with one for each row")
        return result.reshape(-1).to(input_ids.device)


class TokenTexts:
    """Text that each token appends, as transformers' stop strings define it.

    Texts are bytes for tokenizers whose tokens may be parts of a character.

    Raises:
        ValueError: the tokenizer cannot encode arbitrary text; it has a vocabulary of whole words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        made_of = str(getattr(decoder, "__getstate__", str)())  # JSON, where there is a decoder
        self._falls_back = '"ByteFallback"' in made_of
        self.are_bytes = self._falls_back or '"ByteLevel"' in made_of
        ids = tokenizer(SPELLED, add_special_tokens=False)["input_ids"]
        self._before = list(tokenizer.convert_ids_to_tokens(ids))
        if SPELLED not in tokenizer.convert_tokens_to_string(self._before):
            raise ValueError(SPELLED)
        self.size = len(tokenizer)
        self._names = {index: name for name, index in tokenizer.get_vocab().items()}
        self._known: dict[int, TokenText | None] = {}

    def find(self, tokenizer: PreTrainedTokenizerBase, token: int) -> TokenText | None:
        """Return the text of a token, str or bytes; None if there is no such token."""
        if token not in self._known:
            name = self._names.get(token)
            self._known[token] = None if name is None else self._read(tokenizer, name)
        return self._known[token]

    def _read(self, tokenizer: PreTrainedTokenizerBase, name: str) -> TokenText:
        if self._falls_back and BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        if self.are_bytes and not self._falls_back and all(one in BYTE_OF for one in name):
            return bytes(BYTE_OF[one] for one in name)
        text = tokenizer.convert_tokens_to_string([*self._before, name]).partition(SPELLED)[2]
        return text.encode() if self.are_bytes else text


BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # in names of byte-level tokens
TEXTS: WeakKeyDictionary[PreTrainedTokenizerBase, TokenTexts] = WeakKeyDictionary()


def token_texts(tokenizer: PreTrainedTokenizerBase) -> TokenTexts:
    """Return the token texts of a tokenizer, cached between calls."""
    found = TEXTS.get(tokenizer)
    if found is None or found.size != len(tokenizer):
        found = TEXTS[tokenizer] = TokenTexts(tokenizer)
    return found


class StopStringsCriterion(StoppingCriteria):
    """Stop strings: true if the last token completes one.

    Results are those of transformers' StopStringCriteria, which builds a table over the whole vocabulary for
    every new set of strings. This class reads the texts of the last tokens instead and needs no set-up.

    Raises:
        ValueError: the tokenizer cannot encode arbitrary text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, token_texts(tokenizer)
        self._strings: list[TokenText] = [one.encode() if self._texts.are_bytes else one for one in strings]
        self.window = max(map(len, self._strings))  # a token has at least one byte or character

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        found = [self._ends(ids) for ids in input_ids[:, -self.window :].tolist()]
        return torch.tensor(found, device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        last = self._texts.find(self._tokenizer, ids[-1])
        if not last:
            return False
        parts, length = [last], 0
        for token in reversed(ids[:-1]):
            text = self._texts.find(self._tokenizer, token)
            if text is None or length >= self.window:
                break
            parts.append(text)
            length += len(text)
        tail = last[:0].join(reversed(parts))
        return any(tail.find(one, max(0, length - len(one) + 1)) >= 0 for one in self._strings)


class StopTextCriterion(StoppingCriteria):
    """Stop strings for tokenizers of whole words: true if the last token completes one in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        # a word has at least one character, a special token none
        self.window = 2 * max(map(len, strings)) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        found = [self._ends(ids) for ids in input_ids[:, -self.window :].tolist()]
        return torch.tensor(found, device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        before, text = len(decode(self._tokenizer, ids[:-1])), decode(self._tokenizer, ids)
        return any(text.find(item, max(0, before - len(item) + 1)) >= 0 for item in self._strings)


def checked(kind: type[Checked], argument: str, callbacks: object) -> list[Checked]:
    """Wrap the callbacks of a list, so that their results are checked.

    Raises:
        InputError: the argument is not a list of callables.
    """
    if callbacks is None:
        return []
    items: list[Any] = list(callbacks) if isinstance(callbacks, list | tuple) else [None]
    if not all(callable(item) for item in items):
        raise InputError(argument, callbacks, "must be a list of functions (ids, scores), as in transformers")
    return [kind(item, f"{argument}[{index}]") for index, item in enumerate(items)]
