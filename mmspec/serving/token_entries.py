"""Tokens of an answer with their log-probabilities, in step with the text that is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from mmspec.core.logprobs import TokenLogprob
from mmspec.pipelines.callbacks import token_texts
from mmspec.pipelines.text_stream import REPLACEMENT, TextDeltas, decode

__all__ = ["EntryQueue", "Piece", "TokenEntry", "TokenPieces"]

LEAST = -9999.0  # stands for log-probabilities below it, as in OpenAI's API; JSON has no infinity


class TokenEntry(NamedTuple):
    """A token with its log-probability and the most likely tokens at its place.

    Attributes:
        data: the bytes that the token appends to the text, which may be a part of a character.
        logprob: its log-probability, at least -9999.
        top: the most likely tokens, the most likely first.
    """

    data: bytes
    logprob: float
    top: Sequence[TokenEntry] = ()

    @property
    def text(self) -> str:
        """The bytes as text; those of an incomplete character are escaped, as in OpenAI's API."""
        return self.data.decode("utf-8", "backslashreplace")


class Piece(NamedTuple):
    """A piece of text, with the entries of its tokens if they are asked for."""

    text: str
    entries: Sequence[TokenEntry] = ()


class TokenPieces:
    """Incremental detokenizer that returns text in pieces with the entries of their tokens.

    Tokens without text in the answer, such as an end token, have no entry. The bytes of all entries therefore
    join to the text, in which bytes that form no character are U+FFFD.

    Args:
        tokenizer, before, hidden, skip_special_tokens: see `TextDeltas`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        before: Sequence[int] = (),
        hidden: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._deltas = TextDeltas(tokenizer, before, hidden, skip_special_tokens)
        self._tokenizer, self._before = tokenizer, before
        self._silent = {*hidden, *(tokenizer.all_special_ids if skip_special_tokens else ())}
        self._known: dict[int, bytes] = {}
        self._waiting: list[TokenEntry] = []  # of tokens whose text is not complete
        self._has_begun = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Piece]:
        """Add tokens, with all their log-probabilities or none; return the pieces that they complete."""
        if not logprobs:
            return self._pieces(self._deltas.add(tokens))
        pieces = []
        for token, found in zip(tokens, logprobs, strict=True):
            if token not in self._silent:
                self._waiting.append(self._entry(found))
                self._has_begun = True
            pieces += self._pieces(self._deltas.add([token]))
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest of the text, and the entries of tokens that have added nothing to it."""
        pieces = self._pieces(self._deltas.finish())
        return [*pieces, Piece("", self._waiting)] if self._waiting else pieces

    def _pieces(self, text: str) -> list[Piece]:
        """Return the pieces of a new text, one for each token where a token ends with a character."""
        if not text:
            return []
        entries, self._waiting = self._waiting, []
        if b"".join(entry.data for entry in entries) != text.encode():
            return [Piece(text, as_written(entries, text))]
        pieces, begun = [], list[TokenEntry]()
        for entry in entries:
            begun.append(entry)
            try:
                whole = b"".join(one.data for one in begun).decode()
            except UnicodeDecodeError:
                continue
            pieces.append(Piece(whole, begun))
            begun = []
        return pieces

    def _entry(self, found: TokenLogprob) -> TokenEntry:
        top = [TokenEntry(self._bytes(token), max(logprob, LEAST)) for token, logprob in found.top]
        return TokenEntry(self._bytes(found.token), max(found.logprob, LEAST), top)

    def _bytes(self, token: int) -> bytes:
        """Return the bytes that a token appends here; many tokenizers drop a space in front of the first."""
        if not self._has_begun:
            text = decode(self._tokenizer, [token], self._before, skip_special_tokens=False)
            if REPLACEMENT not in text:
                return text.encode()
        if token not in self._known:
            self._known[token] = bytes_of(self._tokenizer, token)
        return self._known[token]


def as_written(entries: Sequence[TokenEntry], text: str) -> Sequence[TokenEntry]:
    """Return the entries of a text with bytes that form no character.

    Tokenizers with byte fallback write U+FFFD for every byte of a run that is invalid anywhere, also where a
    part of the run is a character. The tokens of such a part get the bytes of U+FFFD.
    """
    if b"".join(entry.data for entry in entries).decode("utf-8", "replace") == text:
        return entries
    written, begun = [], list[TokenEntry]()
    for entry in entries:
        begun.append(entry)
        try:
            whole = b"".join(one.data for one in begun).decode()
        except UnicodeDecodeError:
            whole = REPLACEMENT
        if text.startswith(whole) and whole != REPLACEMENT:
            text = text.removeprefix(whole)
            written += begun
            begun = []
        while begun and text.startswith(REPLACEMENT):
            text = text.removeprefix(REPLACEMENT)
            written.append(begun.pop(0)._replace(data=REPLACEMENT.encode()))
    return [*written, *begun]


def bytes_of(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes that a token appends to a text."""
    try:
        found = token_texts(tokenizer).find(tokenizer, token)
    except ValueError:  # the vocabulary consists of whole words
        found = None
    if found is None:
        found = decode(tokenizer, [token], [token], skip_special_tokens=False)
    return found.encode() if isinstance(found, str) else bytes(found)


class EntryQueue:
    """Entries that wait until the text of their token is sent, which a stop string may withhold or cut."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._added = self._sent = 0  # characters

    def add(self, piece: Piece) -> None:
        """Add a piece of text that may be withheld."""
        self._pieces.append((self._added, piece))
        self._added += len(piece.text)

    def take(self, text: str, is_last: bool) -> list[tuple[int, TokenEntry]]:
        """Return the entries of the tokens that are sent as a whole with this text, each with its place.

        Args:
            text: the next text that is sent.
            is_last: whether no further text is sent; the last token may then be cut.
        """
        self._sent += len(text)
        found = []
        while self._pieces:
            place, piece = self._pieces[0]
            if place + len(piece.text) > self._sent and not (is_last and place < self._sent):
                break
            found += [(place, entry) for entry in piece.entries]
            self._pieces.popleft()
        return found
