"""Warping: from logits to the distribution that is promised, once per forward.

The order is that of transformers: guidance, then processors that look at the path, then
temperature, top-k, top-p, min-p. Target and drafter share this code, so p and q cannot disagree
about it. Rows of a batch may have settings of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from mmspec.decoding.denoising import Denoising, DenoisingSource, with_steps
from mmspec.decoding.distribution import Gaussian, Scores
from mmspec.decoding.draft import Draft
from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer, is_list, require_number

NEG_INF = float("-inf")
GUIDANCE_SCHEDULES = ("constant", "rising", "falling")
# They remember the last token that they were called with, and drafts are not called in the order of tokens.
STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
#: Settings that rows of a batch may have each their own of, and what None stands for there.
ROW_SETTINGS = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "guidance_scale": None}


@dataclass(frozen=True)
class RowSettings:
    """Settings of which each row of a batch may have its own: the temperature, and what subclasses add."""

    temperature: float | Sequence[float] = 0.0
    _copies: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def greedy(self) -> bool:
        """True if all rows are."""
        return self.temperature == 0.0

    def numbers(self, name: str, like: Tensor, of: Callable[[Any], float] = float) -> Any:
        """Compute numbers of a setting: one, or [B, 1, 1] of them beside `like`, where rows differ.

        Args:
            name: of the setting.
            like: a tensor of the device and dtype; values go to a device once.
            of: computes the number, on the host as where there is one.
        """
        setting = getattr(self, name)
        if not isinstance(setting, tuple):
            return of(setting)
        key = tuple(map(of, setting)), like.device, like.dtype
        if key not in self._copies:
            self._copies[key] = torch.tensor(key[0], dtype=like.dtype, device=like.device)[:, None, None]
        return self._copies[key]


@dataclass(frozen=True)
class Sampler(RowSettings):
    """Sampling settings: how logits become a distribution. The defaults are greedy decoding.

    The first five are one value for all rows, or a sequence with one for each of the B rows; where all of
    these are equal, they are kept as one.

    Args:
        temperature: 0 is greedy decoding.
        top_k: keep the k likeliest tokens; None or 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        guidance_scale: s of classifier-free guidance, u + s (c - u); 1 is off.
        processors: one list of transformers logits processors per row, or none at all; each sees the
            token ids on the node's own path.

    Raises:
        InputError: a value outside its range, or a processor that looks at more than the path.
    """

    top_k: int | Sequence[int | None] | None = None
    top_p: float | Sequence[float | None] | None = None
    min_p: float | Sequence[float | None] | None = None
    guidance_scale: float | Sequence[float] = 1.0
    processors: Sequence[LogitsProcessorList] = ()

    def __post_init__(self) -> None:
        for name in ROW_SETTINGS:
            object.__setattr__(self, name, read_setting(name, getattr(self, name), check_setting))
        for processor in (item for row in self.processors for item in row):
            if isinstance(processor, STATEFUL_PROCESSORS):
                allowed = "processors of a token's own path; this one keeps a state from call to call"
                raise InputError("logits_processor", type(processor).__name__, allowed)

    @property
    def is_guided(self) -> bool:
        """True if any row is, so that the unconditional prompts are read as well."""
        return self.guidance_scale != 1.0

    def support(self, vocabulary: int) -> int:
        """Most tokens of V that temperature and top-k leave to a row, ties not counted."""
        return 1 if self.greedy else max(k or vocabulary for k in values_of(self.top_k))

    def of_rows(self, rows: slice) -> Self:
        """Settings of a part of the batch."""
        names = (*ROW_SETTINGS, "processors")
        part: dict[str, Any] = {n: values[rows] for n in names if is_list(values := getattr(self, n))}
        return replace(self, **part)

    def __call__(
        self, logits: Tensor, draft: Draft, history: Sequence[Sequence[int]], first: Tensor | None = None
    ) -> Scores:
        """Warp a target's logits.

        Args:
            logits: [B, n, V], or [2B, n, V] under guidance: conditional rows, then unconditional ones.
            draft: the scored nodes; they give processors their paths.
            history: B lists of committed token ids, prompt and root included.
            first: [T] output index that depth 1 competes for, for samplers whose settings depend on it.
        """
        logits = self.guided(logits)
        if self.processors:
            logits = self.processed(logits, draft, history)
        return self.scores(logits, draft.valid.shape)

    def guided(self, logits: Tensor) -> Tensor:
        """Apply guidance to logits as the model gave them, [B or 2B, n, V] -> [B, n, V]."""
        logits = widen(logits)
        return guide(logits, self.numbers("guidance_scale", logits))

    def processed(self, logits: Tensor, draft: Draft, history: Sequence[Sequence[int]]) -> Tensor:
        """Apply processors to every node with the token ids of that node's own path.

        Penalties and grammars depend on the path, so each node is one call with one row; this costs
        one more read of the draft by the host, and only requests that ask for it pay.
        """
        tokens, ancestors = draft.tokens.tolist(), draft.ancestors.tolist()
        processed = torch.empty_like(logits)
        for row, committed in enumerate(history):
            for node, reached in enumerate(ancestors[row]):
                path = [tokens[row][j] for j in range(1, node + 1) if reached[j]]
                ids: Any = torch.tensor([[*committed, *path]], device=logits.device)
                processed[row, node] = self.processors[row](ids, logits[row, node][None].clone())[0]
        return processed

    def scores(self, logits: Tensor, shape: Sequence[int] | None = None) -> Scores:
        """Make distributions of guided logits [B, m, V].

        Args:
            logits: of B rows.
            shape: T and n, where the m nodes of a row stand in T / B lanes of n; B and m if None.
        """
        shape = logits.shape[:2] if shape is None else shape
        warped = self.warp(logits).view(*shape, logits.shape[-1])
        if self.greedy or 0.0 not in values_of(self.temperature):
            return Scores(warped, self.greedy)
        is_greedy: Tensor = self.numbers("temperature", logits) == 0.0
        return Scores(warped, is_greedy.repeat_interleave(shape[0] // len(logits), 0))

    def warp(self, logits: Tensor) -> Tensor:
        """Apply temperature and truncation to guided logits [B, n, V]; greedy rows stay as they are."""
        if self.greedy:
            return logits
        temperature = self.numbers("temperature", logits, lambda value: value or 1.0)
        warped = self.truncate(divide(logits, temperature))
        if 0.0 in values_of(self.temperature):
            warped = torch.where(self.numbers("temperature", logits) == 0.0, logits, warped)
        return warped

    def truncate(self, logits: Tensor) -> Tensor:
        """Exclude tokens by top-k, then top-p, then min-p. logits: [B, n, V], already at temperature."""
        vocabulary = logits.shape[-1]
        counts = [k for k in values_of(self.top_k) if k and k < vocabulary]
        if counts:
            largest = logits.topk(max(counts), dim=-1).values
            threshold = kth(largest, self.numbers("top_k", logits, lambda k: k or math.inf))
            logits = logits.masked_fill(logits < threshold, NEG_INF)
        if any(top_p is not None and top_p < 1.0 for top_p in values_of(self.top_p)):
            ordered, order = logits.sort(dim=-1, descending=False)
            # Ascending, as in transformers: drop the tail whose mass is at most 1 - top_p, never the last.
            tail = self.numbers("top_p", logits, lambda top_p: 1.0 - top_p if top_p < 1.0 else NEG_INF)
            drop = ordered.softmax(-1).cumsum(-1) <= tail
            drop[..., -1] = False
            logits = logits.masked_fill(drop.scatter(-1, order, drop), NEG_INF)
        if any(values_of(self.min_p)):
            below = self.numbers("min_p", logits, lambda min_p: math.log(min_p) if min_p else NEG_INF)
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + below, NEG_INF)
        return logits


@dataclass(frozen=True)
class GaussianSampler(RowSettings):
    """Sampling settings of continuous tokens with a Gaussian head.

    Args:
        temperature: factor of the standard deviations, or one for each of the B rows; 0 is the mean.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float | Sequence[float] = 1.0
    is_guided: ClassVar[bool] = False
    processors: ClassVar[tuple[LogitsProcessorList, ...]] = ()

    def __post_init__(self) -> None:
        check = partial(require_number, low=0.0, high=1e4, allowed="0 (the mean) to 10000")
        object.__setattr__(self, "temperature", read_setting("temperature", self.temperature, check))

    def of_model(self, model: Any) -> Self:
        """The same settings for another model: a Gaussian head is part of what the model says."""
        return self

    def __call__(
        self, parameters: Tensor, draft: Draft, history: Sequence[Sequence[int]], first: Tensor | None = None
    ) -> Gaussian:
        """Make distributions of a head's parameters [B, n, 2 d]: mean and log standard deviation."""
        mean, log_std = widen(parameters).chunk(2, -1)
        return Gaussian(mean, log_std.exp() * self.numbers("temperature", mean))


@dataclass(frozen=True, kw_only=True)
class DenoisingSampler(RowSettings):
    """Sampling settings of continuous tokens with a denoising head.

    Temperature and guidance are one value for all rows, or a sequence with one for each of the B rows.

    Args:
        source: the head.
        schedule: of its steps.
        temperature: factor of the deviations of its steps, above 0; the first noise is not scaled.
        guidance_scale: s of u + s (c - u) at every step; 1 is off.
        guidance_schedule: "constant"; "rising" from 1 to s with the share of the image that is decided (MAR,
            2406.11838); or "falling" from s to 1 (NextStep-1, 2508.10711). Both are linear.
        normalize: whether tokens are normalised as they are drawn, each by itself.
        length: tokens of the image, for schedules of the guidance.

    Raises:
        InputError: a value outside its range.
    """

    source: DenoisingSource
    schedule: Any
    temperature: float | Sequence[float] = 1.0
    guidance_scale: float | Sequence[float] = 1.0
    guidance_schedule: str = "constant"
    normalize: bool = False
    length: int = 0
    processors: ClassVar[tuple[LogitsProcessorList, ...]] = ()

    def __post_init__(self) -> None:
        noisy = partial(require_number, low=0.0, high=1e4, allowed="above 0", open_below=True)
        object.__setattr__(self, "temperature", read_setting("temperature", self.temperature, noisy))
        scale = read_setting("guidance_scale", self.guidance_scale, check_setting)
        object.__setattr__(self, "guidance_scale", scale)
        if self.guidance_schedule not in GUIDANCE_SCHEDULES:
            known = did_you_mean(self.guidance_schedule, GUIDANCE_SCHEDULES)
            raise InputError("guidance_schedule", self.guidance_schedule, known)

    @property
    def is_guided(self) -> bool:
        """True if any row is, so that the unconditional prompts are read as well."""
        return self.guidance_scale != 1.0

    def of_rows(self, rows: slice) -> Self:
        """Settings of a part of the batch."""
        names = ("temperature", "guidance_scale")
        part: dict[str, Any] = {n: values[rows] for n in names if is_list(values := getattr(self, n))}
        return replace(self, **part)

    def of_model(self, model: Any) -> Self:
        """The same settings for another model behind the Target interface, with its own head."""
        return replace(self, source=model.denoiser)

    def __call__(
        self, conditions: Tensor, draft: Draft, history: Sequence[Sequence[int]], first: Tensor | None = None
    ) -> Denoising:
        """Make distributions of a model's conditions.

        Args:
            conditions: [B, n, D], or [2B, n, D] under guidance: conditional rows, then unconditional ones.
            draft: the scored nodes, of T chains.
            history: not used.
            first: [T] output index that depth 1 competes for.
        """
        nodes = conditions.view(1 + self.is_guided, *draft.valid.shape, conditions.shape[-1])
        schedule, progress = self.schedule, draft.progress
        if progress is not None and progress.annealing is not None:
            steps = progress.annealing.steps(schedule.steps, progress.iteration, progress.iterations)
            schedule = with_steps(schedule, steps)
        scale, temperature = (
            self._of_nodes("guidance_scale", nodes[0]),
            self._of_nodes("temperature", nodes[0]),
        )
        if self.is_guided and self.guidance_schedule != "constant":
            scale = 1 + (scale - 1) * self._share(draft, first, nodes[0])
            scale = scale.expand(*nodes.shape[1:3], 1) if isinstance(scale, Tensor) else scale
        unconditional = nodes[1] if self.is_guided else None
        return Denoising(
            self.source, schedule, nodes[0], unconditional, scale, temperature, normalize=self.normalize
        )

    def _of_nodes(self, name: str, nodes: Tensor) -> Any:
        """The number of a setting, or [T, n, 1] where rows differ; nodes: [T, n, D]."""
        numbers = self.numbers(name, nodes)
        if not isinstance(numbers, Tensor):
            return numbers
        lanes = len(nodes) // max(1, len(numbers))
        return numbers.repeat_interleave(lanes, 0).expand(*nodes.shape[:2], 1)

    def _share(self, draft: Draft, first: Tensor | None, nodes: Tensor) -> Any:
        """Share of the full scale at every node, [T, n, 1] or a number: of what is decided, or is not yet."""
        before: Any
        if draft.progress is not None:
            before, after = draft.progress.before, draft.progress.after
            last = self.length - 1
            after = after.clamp_max(last) if isinstance(after, Tensor) else min(after, last)
        elif first is None:
            raise TypeError("a guidance schedule depends on the places that are predicted")
        else:
            before = (first[:, None] + draft.depth).to(nodes.dtype)[..., None]
            after = (before + 1).clamp_max(self.length - 1)
        return after / self.length if self.guidance_schedule == "rising" else 1 - before / self.length


def check_setting(name: str, value: Any) -> None:
    """Raise InputError for a value outside the range of its setting."""
    if name == "temperature":
        require_number(name, value, 0.0, 1e4, "0 (greedy) to 10000")
        if 0.0 < value < 1e-4:
            raise InputError(name, value, "0 (greedy), or at least 0.0001")
    elif name == "guidance_scale":
        require_number(name, value, 0.0, 1e4, "0 to 10000; 1 is off")
    elif name == "top_k" and value is not None and (not is_integer(value) or value < 0):
        raise InputError(name, value, "a positive integer, or None or 0 to keep every token")
    elif name == "top_p" and value is not None:
        require_number(name, value, 0.0, 1.0, "above 0, at most 1", open_below=True)
    elif name == "min_p" and value is not None:
        require_number(name, value, 0.0, 1.0, "0 to 1")


def read_setting(name: str, given: Any, check: Callable[[str, Any], None]) -> Any:
    """Check a value, or one for each row: a tuple without None, or one value where all are equal."""
    values = list(given) if is_list(given) else [given]
    if not values:
        raise InputError(name, given, "one value, or one for each row")
    if len(values) > 1:
        values = [ROW_SETTINGS[name] if value is None else value for value in values]
    for value in values:
        check(name, value)
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def check_rows(settings: object, count: int, rows: str = "rows") -> None:
    """Raise InputError for a setting that is a list of another length than the batch, or that holds None."""
    for name in ROW_SETTINGS:
        values = getattr(settings, name, None)
        if is_list(values) and (len(values) != count or None in values):
            raise InputError(name, values, f"one value, or a list with one for each of the {count} {rows}")


def values_of(setting: Any) -> tuple[Any, ...]:
    """The one value of a checked setting, or those of the rows."""
    return setting if isinstance(setting, tuple) else (setting,)


def widen(values: Tensor) -> Tensor:
    """Convert to float32 whatever the model's dtype is, or ties decide; float64 stays."""
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)


def divide(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide [B, n, V] by one number or [B, 1, 1], with the same bits."""
    if isinstance(temperature, Tensor) and logits.is_cuda:
        return logits * temperature.reciprocal()  # as torch divides by one number there
    return logits / temperature


def kth(largest: Tensor, k: float | Tensor) -> Tensor:
    """[B, n, 1] the k-th of the largest logits [B, n, m], in order: the last, or one for each k [B, 1, 1].

    A k above m keeps every token: -inf.
    """
    if not isinstance(k, Tensor):
        return largest[..., -1:]
    most = largest.shape[-1]
    index = (k.clamp_max(most) - 1).long().expand(*largest.shape[:-1], 1)
    return largest.gather(-1, index).masked_fill(k > most, NEG_INF)


def guide(logits: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance (Ho & Salimans, 2207.12598): [2B, n, V] -> [B, n, V], u + s (c - u).

    Args:
        logits: [2B, n, V]; [B, n, V] where the scale is 1 for all rows.
        scale: s, or [B, 1, 1].
    """
    if not isinstance(scale, Tensor) and scale == 1.0:
        return logits
    conditional, unconditional = logits.log_softmax(-1).chunk(2)
    guided = unconditional + scale * (conditional - unconditional)
    guided = guided.masked_fill(conditional == NEG_INF, NEG_INF)  # excluded by a grammar: -inf minus -inf
    if not isinstance(scale, Tensor):
        return guided
    return torch.where(scale == 1.0, logits.chunk(2)[0], guided)  # as the model gave them: log_softmax rounds
