"""Text streaming: converts token ids to text deltas whose concatenation is the decoded text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
#: A byte token. An invalid byte turns the whole run of byte tokens into replacement characters.
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
WINDOW = 32  # number of tokens that are decoded again before earlier ones are dropped


class TextDeltas:
    """Incremental detokenizer: converts a growing list of token ids into text deltas.

    Each delta decodes a window of the last tokens, so that a long text takes linear time. A delta is withheld
    while the text ends in an incomplete character or a run of byte tokens, or while the tokenizer changes
    earlier text. The deltas, including that of `finish`, join to the final text.

    Args:
        tokenizer: tokenizer of the tokens.
        before: tokens whose text the deltas continue.
        hidden: tokens without text.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        before: Sequence[int] = (),
        hidden: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._before = tokenizer, before
        self._hidden, self._skips = frozenset(hidden), skip_special_tokens
        self._window: list[int] = []
        self._given = ""  # text of the window that has been returned
        self._settled = 0  # number of tokens in the window at the last delta
        self._due = 0  # number of tokens in the window at which it is decoded again

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that they complete, which may be empty."""
        self._window.extend(token for token in tokens if token not in self._hidden)
        size = len(self._window)
        if size < self._due:
            return ""
        text = self._decode(self._window, self._before)
        delta = "" if text == self._given or self._is_open(text) else self._advance(text)
        if delta:
            if size > WINDOW:
                self._shift(text)
            self._settled = len(self._window)
        # a long window that cannot be shifted (noise) is decoded less often, in proportion to its length
        self._due = len(self._window) + 1 + len(self._window) // (2 * WINDOW)
        return delta

    def finish(self) -> str:
        """Return the withheld text."""
        text = self._decode(self._window, self._before)
        return self._advance(text) if text.startswith(self._given) else ""

    def _is_open(self, text: str) -> bool:
        """Whether later tokens may change the end of the text."""
        if text.endswith(REPLACEMENT) or not text.startswith(self._given):
            return True
        for token in reversed(self._window):
            if BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
                return True
            if self._decode([token]):  # a special token may occur within a run of bytes
                return False
        return False

    def _advance(self, text: str) -> str:
        delta, self._given = text[len(self._given) :], text
        return delta

    def _shift(self, text: str) -> None:
        """Drop the tokens up to the last delta if the remaining tokens have the same text without them."""
        rest = self._window[self._settled :]
        alone = self._decode(rest)
        if alone and text.endswith(alone):
            self._before, self._window, self._given = (), rest, alone

    def _decode(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        return decode(self._tokenizer, tokens, before, self._skips)


def decode(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    before: Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> str:
    """Decode output tokens that continue the text of the tokens `before`, without clean-up of spaces.

    Some tokenizers drop the space in front of the first word, so that the tokens alone decode differently.
    """
    how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    if before:
        start = str(tokenizer.decode(list(before), **how))
        whole = str(tokenizer.decode([*before, *tokens], **how))
        if whole.startswith(start):
            return whole[len(start) :]
    return str(tokenizer.decode(list(tokens), **how))
