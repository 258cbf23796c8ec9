"""Text streaming: token ids to text deltas whose concatenation is the decoded text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class TextDeltas:
    """Turns a growing list of token ids into text deltas.

    A delta is held back while the text ends in a half-decoded character, or while a tokenizer still
    rewrites what came before; so the deltas, `finish` included, always join to the final text.

    Args:
        tokenizer: of the tokens.
        before: tokens with whose text the deltas go on.
        hidden: tokens that give no text.
        skip_special_tokens: whether special ones give none either.
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
        self._tokens: list[int] = []
        self._given = ""

    @property
    def text(self) -> str:
        """Text of all tokens so far."""
        return decode(self._tokenizer, self._tokens, self._before, self._skips)

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the new text that they complete, which may be empty."""
        self._tokens.extend(token for token in tokens if token not in self._hidden)
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


def decode(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    before: Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> str:
    """Decode output tokens, which go on with the text of those before. No clean-up: it would change that.

    Some tokenizers take the space from a first word, so that tokens alone do not tell their text.
    """
    how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    if before:
        start = str(tokenizer.decode(list(before), **how))
        whole = str(tokenizer.decode([*before, *tokens], **how))
        if whole.startswith(start):
            return whole[len(start) :]
    return str(tokenizer.decode(list(tokens), **how))
