"""Callbacks of the caller, whose return values are checked before they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from mmspec.errors import InputError
from mmspec.pipelines.text_stream import decode


class CheckedCallback:
    """Calls a user's callback; adds to an exception that it came from there, by the argument's name."""

    def __init__(self, callback: Callable[..., Any], argument: str) -> None:
        self.callback = callback
        self._argument = argument

    def call(self, *arguments: object) -> Any:
        """Call the callback, and return its result."""
        try:
            return self.callback(*arguments)
        except Exception as error:
            error.add_note(f"raised by {self._argument}: {type(self.callback).__name__}")
            raise

    def _refuse(self, result: object, allowed: str) -> InputError:
        return InputError(self._argument, result, f"{type(self.callback).__name__} must return {allowed}")


class CheckedProcessor(CheckedCallback, LogitsProcessor):
    """A logits processor that returns logits of the shape it was given."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        shape = tuple(scores.shape)
        result = self.call(input_ids, scores)
        if not isinstance(result, Tensor) or tuple(result.shape) != shape or not result.is_floating_point():
            raise self._refuse(result, f"logits of shape {shape}")
        return result


class CheckedCriterion(CheckedCallback, StoppingCriteria):
    """A stopping criterion that says yes or no for all rows that it sees, or for each of them."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        result = self.call(input_ids, scores)
        if isinstance(result, bool):
            return torch.tensor([result], device=input_ids.device)
        rows = len(input_ids)
        if not isinstance(result, Tensor) or result.dtype != torch.bool or result.numel() not in (1, rows):
            raise self._refuse(result, "a bool, or a bool tensor with one for each row")
        return result.reshape(-1).to(input_ids.device)


class StopTextCriterion(StoppingCriteria):
    """Stop strings for tokenizers of whole words: true if the last token completes one in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        # a word takes a character at least, special tokens none
        self._window = 2 * max(map(len, strings)) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        found = [self._ends(ids) for ids in input_ids[:, -self._window :].tolist()]
        return torch.tensor(found, device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        before, text = len(decode(self._tokenizer, ids[:-1])), decode(self._tokenizer, ids)
        return any(text.find(item, max(0, before - len(item) + 1)) >= 0 for item in self._strings)


def checked(
    kind: type[CheckedProcessor] | type[CheckedCriterion], argument: str, callbacks: object
) -> list[Any]:
    """Wrap the callbacks of a list, so that they are checked whenever they are called.

    Raises:
        InputError: not a list, or something in it cannot be called.
    """
    if callbacks is None:
        return []
    items: list[Any] = list(callbacks) if isinstance(callbacks, list | tuple) else [None]
    if not all(callable(item) for item in items):
        raise InputError(argument, callbacks, "a list of functions (ids, scores), as in transformers")
    return [kind(item, f"{argument}[{index}]") for index, item in enumerate(items)]
