"""Fields of a chat that only a tokenizer can read: words that are not written, tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.errors import InputError
from mmspec.pipelines.text_stream import TextDeltas

__all__ = ["TextRules"]


@dataclass(frozen=True)
class TextRules:
    """Rules of the text of one answer.

    Attributes:
        bad_words: what may not be written, as the tokens that it is alone and after a space.
        stop_token_ids: ids that end the answer, besides those that end the model's.
        ignore_eos: whether those of the model do not.
        shows_stops: whether the text has the token that ended it.
        skip_special_tokens: whether the text is without special tokens.
    """

    bad_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    shows_stops: bool = False
    skip_special_tokens: bool = True

    def settings(self, pipe: Any) -> dict[str, Any]:
        """Settings of a pipeline that keep the rules.

        Raises:
            InputError: a token that the model does not have, or a word that is none.
        """
        size = pipe.model.config.get_text_config(decoder=True).vocab_size
        for index, token in enumerate(self.stop_token_ids):
            if token >= size:
                raise InputError(f"stop_token_ids[{index}]", token, f"below {size}, the model's tokens")
        banned = [ids for index in range(len(self.bad_words)) for ids in self._spellings(pipe, index)]
        settings: dict[str, Any] = {"bad_words_ids": banned} if banned else {}
        if banned or self.stop_token_ids or self.ignore_eos:
            # transformers lets a banned token pass where it is also one that ends the row
            settings["eos_token_id"] = [end for end in self._ends(pipe) if [end] not in banned]
        return settings

    def deltas(self, pipe: Any, before: Sequence[int]) -> TextDeltas:
        """Make the decoder of the answer's tokens into text.

        Args:
            pipe: the pipeline.
            before: last tokens of the prompt, where the answer goes on with their text.
        """
        hidden = [] if self.shows_stops else self._ends(pipe)
        return TextDeltas(pipe.tokenizer, before, hidden, self.skip_special_tokens)

    def _ends(self, pipe: Any) -> list[int]:
        own = pipe.model.generation_config.eos_token_id
        own = [] if own is None or self.ignore_eos else own
        return [*(own if isinstance(own, list) else [own]), *self.stop_token_ids]

    def _spellings(self, pipe: Any, index: int) -> list[list[int]]:
        """Token ids of a word alone and after a space, as vLLM bans them; none if it cannot be written."""
        tokenizer, word = pipe.tokenizer, self.bad_words[index].lstrip()
        if not word:
            raise InputError(f"bad_words[{index}]", self.bad_words[index], "a word")
        found = []
        for text in (word, f" {word}"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids and tokenizer.unk_token_id not in ids and ids not in found:
                found.append(ids)
        return found
