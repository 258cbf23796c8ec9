"""Table of the trigrams of a corpus: the likely successors of two tokens, and of one.

The table of ADED (2407.12021), interpolated with that of bigrams. It helps most if the corpus resembles the
target's output; the target's own replies to similar questions are the best corpus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.atomic_file import atomic_file
from mmspec.errors import InputError

MOST = 200_000  # default size of a table, in n-grams: 3 MB
SUCCESSORS = 12  # most successors of a context, as in ADED
Index = TypeVar("Index", int, Tensor)
NONE = -1  # in place of the first token of a bigram


def key_of(first: Index, second: Index) -> Index:
    """Return the number by which a context of two tokens is sorted and found."""
    return ((first + 1) << 32) + second


class Trigrams:
    """Successors of contexts of two tokens and of one, with their shares.

    Args:
        ngrams: [N, 3] tokens; the first is -1 for a bigram.
        shares: [N] of the last token among the successors of the first two, above 0, at most 1 in sum.
    """

    def __init__(self, ngrams: Tensor, shares: Tensor) -> None:
        contexts = key_of(*ngrams[:, :2].long().unbind(-1)).numpy()
        order = contexts.argsort(kind="stable")
        self.ngrams, self.shares = ngrams[order], shares[order]
        self._contexts = contexts[order]

    @classmethod
    def count(cls, texts: Iterable[Sequence[int]], most: int = MOST) -> Trigrams:
        """Count the n-grams of texts; keep the most frequent, with at most 12 successors of a context.

        A share is count / (1 + the context's count), so that rare contexts leave more to other evidence.
        """
        counts: Counter[tuple[int, int, int]] = Counter()
        for text in texts:
            counts.update((NONE, *pair) for pair in zip(text, text[1:], strict=False))
            counts.update(zip(text, text[1:], text[2:], strict=False))
        totals, kept = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for (first, second, _), count in counts.items():
            totals[first, second] += count
        rows: list[tuple[tuple[int, int, int], float]] = []
        for ngram, count in counts.most_common():
            context = ngram[:2]
            if kept[context] < SUCCESSORS and len(rows) < most:
                kept[context] += 1
                rows.append((ngram, count / (1 + totals[context])))
        ngrams = torch.tensor([ngram for ngram, _ in rows], dtype=torch.int32, device="cpu").view(-1, 3)
        shares = torch.tensor([share for _, share in rows], dtype=torch.float32, device="cpu")
        return cls(ngrams, shares)

    def save(self, path: Path) -> None:
        """Write the table as a safetensors file; errors: see `atomic_file`."""
        with atomic_file(path) as temporary:
            save_file({"ngrams": self.ngrams, "shares": self.shares}, temporary)

    @classmethod
    def load(cls, path: str | Path) -> Trigrams:
        """Read a table from a file that `save` wrote.

        Raises:
            InputError: there is no such file, or it is not such a table.
        """
        try:
            content = load_file(path)
            ngrams, shares = content["ngrams"], content["shares"]
        except (OSError, SafetensorError, KeyError) as error:
            rule = f"must be a file of trigrams ({type(error).__name__}: {error})"
            raise InputError("corpus", str(path), rule) from error
        fits = ngrams.dtype == torch.int32 and ngrams.shape == (len(shares), 3) and shares.dim() == 1
        if (
            not fits
            or not ((shares > 0) & (shares <= 1)).all()
            or (ngrams < torch.tensor([NONE, 0, 0], device=ngrams.device)).any()
        ):
            rule = "must hold ngrams [N, 3] of int32, and shares [N] above 0 and at most 1"
            raise InputError("corpus", str(path), rule)
        return cls(ngrams, shares)

    @property
    def vocabulary(self) -> int:
        """Least size of a vocabulary that has all tokens of the table."""
        return int(self.ngrams.max()) + 1 if len(self.ngrams) else 0

    def __call__(self, context: Sequence[int]) -> dict[int, float]:
        """Return the probabilities of successors: trigram shares, and bigram shares for the rest.

        Args:
            context: the text so far, of which the last two tokens are used.
        """
        found = self._shares(*context[-2:]) if len(context) > 1 else {}
        rest = max(0.0, 1 - sum(found.values()))
        for token, share in self._shares(NONE, context[-1]).items():
            found[token] = found.get(token, 0.0) + rest * share
        return found

    def _shares(self, first: int, second: int) -> dict[int, float]:
        key = key_of(first, second)
        start, end = np.searchsorted(self._contexts, (key, key + 1)).tolist()
        of_context = self.ngrams[start:end, 2].tolist(), self.shares[start:end].tolist()
        return dict(zip(*of_context, strict=True))
