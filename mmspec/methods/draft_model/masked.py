"""Drafts of a masked language model for a target that predicts the next token (DiffuSpec, 2510.02358).

One forward pass over the text so far and a row of masks gives a distribution for each of the next places,
which are independent. A search finds a path through their likeliest tokens that an n-gram model of the text
so far also rates high, and a controller sets the number of masks of the next draft.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import AnyTarget, DraftSession, Request
from mmspec.core.session import ModelDrafter, PromptBatch
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.targets.attention import mask_dtype
from mmspec.targets.prefix import TOKENS
from mmspec.validation import check_draft_tokens
from mmspec.visual_tokens.spans import find_images

__all__ = ["MaskedModelDrafter", "NgramModel", "search_path"]

BACKOFF = 0.4  # weight of a shorter context (stupid backoff, Brants et al., 2007)
EMA = 0.5  # weight of the newest length
LEAST = 20  # fewest masks of a draft
STEP = 10  # masks that are added where a whole draft was accepted


class NgramModel:
    """Trigram model of a growing text, with backoff to bigrams and single words.

    Attributes:
        words: of the text so far.
    """

    def __init__(self) -> None:
        self.words: list[int] = []
        self.counts: Counter[tuple[int, ...]] = Counter()

    def extend(self, words: Sequence[int]) -> None:
        """Add words at the end."""
        for word in words:
            self.words.append(word)
            for order in (1, 2, 3):
                if order <= len(self.words):
                    self.counts[tuple(self.words[-order:])] += 1

    def log_score(self, before: Sequence[int], word: int) -> float:
        """Log score of a word after others; scores are not normalised, and so no probabilities."""
        penalty = 0.0
        for order in (2, 1):
            context = tuple(before[-order:])
            if len(context) == order and (seen := self.counts[(*context, word)]):
                return penalty + math.log(seen / self.counts[context])
            penalty += math.log(BACKOFF)
        return penalty + math.log((self.counts[(word,)] + 1) / (len(self.words) + 1000))


def search_path(
    log_p: Tensor,
    ngrams: NgramModel,
    ends: frozenset[int],
    *,
    mass: float = 0.8,
    most: int = 15,
    beam: int = 3,
    weight: float = 0.5,
) -> list[int]:
    """Search a path through distributions of consecutive places (DiffuSpec's causal-consistency search).

    Args:
        log_p: [k, V] log-probabilities of the places.
        ngrams: of the text before.
        ends: tokens that end an output; the path ends with the first place whose likeliest token is one.
        mass, most: the candidates of a place are its likeliest tokens with this total mass, at most `most`.
        beam: number of paths that are kept.
        weight: of the distributions; the n-grams have 1 - weight.

    Returns:
        The best path, of at most k tokens.
    """
    values, tokens = log_p.topk(min(most, log_p.shape[-1]), dim=-1)
    inside = (values.exp().cumsum(-1) - values.exp() < mass).tolist()
    paths: list[tuple[float, list[int]]] = [(0.0, [])]
    for kept, logs, words in zip(inside, values.tolist(), tokens.tolist(), strict=True):
        longer = []
        for score, path in paths:
            before = [*ngrams.words[-2:], *path]
            for keep, log, word in zip(kept, logs, words, strict=True):
                if keep:
                    step = weight * log + (1 - weight) * ngrams.log_score(before, word)
                    longer.append((score + step, [*path, word]))
        paths = sorted(longer, key=lambda each: -each[0])[:beam]
        if words[0] in ends:
            break
    return paths[0][1]


@dataclass
class LengthControl:
    """Length of the next draft of a row, from those of earlier drafts (DiffuSpec's controller).

    Attributes:
        least, most, step: bounds of the length, and its increase where a whole draft was accepted.
        drafted, accepted: moving averages.
    """

    least: int
    most: int
    step: int
    drafted: float
    accepted: float = 0.0

    @property
    def length(self) -> int:
        """Number of masks of the next draft."""
        more = self.step if self.accepted >= self.drafted else 0
        return int(min(max(self.drafted + more, self.least), self.most))

    def observe(self, drafted: int, accepted: int) -> None:
        """Record the length of a draft, and how many of its tokens were accepted."""
        self.drafted += EMA * (drafted - self.drafted)
        self.accepted += EMA * (accepted - self.accepted)


class MaskedModelSession(DraftSession):
    """Drafts of a batch, on the host.

    Attributes:
        ngrams, lengths: of each row.
        drafted: number of tokens of each row's last draft.
        prompts: [L, d] embeddings of each row's prompt, images included.
    """

    def __init__(self, drafter: MaskedModelDrafter, batch: PromptBatch) -> None:
        self.drafter = drafter
        most = drafter.num_draft_tokens
        self.ngrams = [NgramModel() for _ in batch.requests]
        self.lengths = [LengthControl(min(LEAST, most), most, STEP, float(most)) for _ in batch.requests]
        self.known = [0] * len(batch.requests)
        self.prompts = [drafter.model.embed_prompt(request.inputs) for request in batch.requests]

    def propose(self, canvas: Canvas) -> Draft:
        paths: list[list[int]] = []
        for row, (ids, reason) in enumerate(zip(canvas.ids, canvas.finish_reasons, strict=True)):
            self._learn(row, canvas)
            self.ngrams[row].extend(ids[len(self.ngrams[row].words) :])
            paths.append([] if reason is not None else self._path(row, ids, canvas))
        self.drafted, self.known = [len(path) for path in paths], list(canvas.output_lengths)
        longest = max(1, *self.drafted)
        padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=canvas.device)
        place = torch.arange(longest + 1, device=canvas.device)
        valid = place <= torch.tensor(self.drafted, device=canvas.device)[:, None]
        return Tree.chain(torch.cat([canvas.root[:, None], padded], 1), DraftKind.POINT, valid=valid)

    def _learn(self, row: int, canvas: Canvas) -> None:
        """Record the acceptance of the last draft."""
        if self.known[row]:
            accepted = canvas.output_lengths[row] - self.known[row] - 1
            self.lengths[row].observe(self.drafted[row], max(0, accepted))

    def _path(self, row: int, ids: list[int], canvas: Canvas) -> list[int]:
        """Draft a path after the text of a row."""
        stopping = canvas.stopping[row]
        left = stopping.max_new_tokens - canvas.output_lengths[row] - 1
        count = min(self.lengths[row].length, left)
        if count < 1:
            return []
        self.passes += 1
        prompt = self.prompts[row]
        log_p = self.drafter.predict(prompt, ids[len(prompt) :], count).log_softmax(-1)
        return search_path(log_p, self.ngrams[row], stopping.end_token_ids)


class MaskedModelDrafter(ModelDrafter):
    """Drafts a path with one forward pass of a masked language model of the same tokenizer (DiffuSpec).

    2510.02358. The path is searched for, not drawn, so that `sample_and_match` verifies it, at any
    temperature. Whether the model can read images is known at the first prompt with one.

    Args:
        model: the masked model behind the Target interface.
        num_draft_tokens: most masks of a draft; 30 if None.

    Raises:
        InputError: a value is out of range.
    """

    kind = DraftKind.POINT
    session = MaskedModelSession
    model: MaskedTarget
    vocabulary: int  # tokens that the target has too

    def __init__(self, model: MaskedTarget, num_draft_tokens: int | None = None) -> None:
        self.model = model
        self.num_draft_tokens = check_draft_tokens(30 if num_draft_tokens is None else num_draft_tokens)
        self.max_nodes = self.num_draft_tokens + 1

    def fit(self, target: AnyTarget) -> MaskedModelDrafter:
        fitted = copy.copy(self)
        fitted.vocabulary = min(target.vocabulary, self.model.vocabulary)
        return fitted

    def admit(self, requests: Sequence[Request], sampler: object, stopping: object) -> None:
        config = self.model.config
        for request in requests:
            more = sorted(set(request.inputs) - {*TOKENS, "attention_mask"})
            if more and not find_images(config, request.inputs):
                rule = f"cannot be used: the draft model, a {config.model_type}, reads text alone"
                raise InputError("images", more, rule)

    @torch.inference_mode()
    def predict(self, prompt: Tensor, ids: Sequence[int], count: int) -> Tensor:
        """Return the logits [count, V] of masked places after a text.

        Args:
            prompt: [L, d] embeddings.
            ids: of the output so far.
            count: of the places.
        """
        target = self.model
        tokens = torch.tensor([*ids, *[target.mask_token_id] * count], device=target.device)
        embedded = torch.cat([prompt, target.embed(tokens)])[None]
        known = len(prompt) + len(ids)
        place = torch.arange(embedded.shape[1], device=target.device)
        block = place if target.block_length is None else place // target.block_length
        sees = torch.ones(len(place), len(place), dtype=torch.bool, device=target.device)
        if target.block_length is not None:
            sees = (block[:, None] >= block) | (place[:, None] >= known)
        mask = sees[None, None]
        if (dtype := mask_dtype(target.model)) is not None:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        output = target.model(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=place[None],
            use_cache=False,
            logits_to_keep=count + 1,
        )
        first = int(target.predicts == "own")  # else the last known place predicts the next one
        logits: Tensor = output.logits[0, first : first + count].float()
        logits[:, target.mask_token_id] = float("-inf")
        return logits[:, : self.vocabulary]
