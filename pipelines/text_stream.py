"""Text streaming: token ids to text deltas whose concatenation is the decoded text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class TextDeltas:
    """Turns a growing list of token ids into text deltas.

    A delta is held back while the text ends in a half-decoded character, or while a tokenizer still
    rewrites what came before; so the deltas, `finish` included, always join to the final text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = ""

    @property
    def text(self) -> str:
        """Text of all tokens so far."""
        return decode(self._tokenizer, self._tokens)

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the new text that they complete, which may be empty."""
        self._tokens.extend(tokens)
        text = self.text
        if text.endswith(REPLACEMENT) or not text.startswith(self._given):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Return the text that was held back."""
        text = self.text
        return self._advance(text) if text.startswith(self._given) else ""

    def _advance(self, text: str) -> str:
        delta, self._given = text[len(self._given) :], text
        return delta


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode output tokens, without special ones. No clean-up, which would change text already streamed."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
