"""Sampling from logits: classifier-free guidance, temperature, top-k, top-p, min-p, and the draw.

The order of the steps is that of transformers. Each row of a batch may have its own settings. Settings are
numbers on the host, so that nothing is read back from the device. A CUDA graph stores such numbers; one that
serves rows with other settings gets them as a tensor (`Warping.rows`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .backend import operator, use_triton
from .ordering import largest, sort_stably
from .philox import counter_word, philox_gumbel

NEG_INF = float("-inf")
CACHED_SETTINGS = (
    1024  # limit of cached tensors, of 512 bytes or more: served requests choose settings freely
)
_captured: dict[int, Tensor] = {}
#: Columns of `Warping.rows`.
SCALE, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(5)


class Warping(NamedTuple):
    """Sampling settings: one value for all rows, or one for each of B rows.

    Attributes:
        temperature: 0 takes the likeliest token; such rows get guidance, but no scaling or truncation.
        top_k: keep the k largest logits, including ties with the k-th; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        guidance_scale: s of classifier-free guidance, u + s (c - u); 1 is off.
        rows: [B, 5] float64 numbers of the rows on the device, as of `numbers`. The other fields then only
            say which settings some rows use, and which some rows do not: of top_k, an upper bound.
    """

    temperature: tuple[float, ...] = (1.0,)
    top_k: tuple[int, ...] = (0,)
    top_p: tuple[float, ...] = (1.0,)
    min_p: tuple[float, ...] = (0.0,)
    guidance_scale: tuple[float, ...] = (1.0,)
    rows: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether all rows are greedy."""
        return not any(self.temperature)

    @property
    def is_guided(self) -> bool:
        """Whether any row uses guidance, so that there are unconditional logits."""
        return any(scale != 1.0 for scale in self.guidance_scale)

    @property
    def truncates(self) -> bool:
        """Whether any row excludes tokens."""
        return any(self.top_k) or min(self.top_p) < 1.0 or any(self.min_p)

    @property
    def is_identity(self) -> bool:
        """Whether warping leaves the logits unchanged."""
        kept = self.is_greedy or not (self.truncates or any(t not in (0.0, 1.0) for t in self.temperature))
        return kept and not self.is_guided

    def numbers(self, count: int) -> list[list[float]]:
        """[5][B] scale, temperature, k, 1 - top_p and log min_p of each row; unused ones keep all tokens."""
        settings = [
            self.guidance_scale,
            self.temperature,
            [float(k or math.inf) for k in self.top_k],
            [1.0 - p if p < 1.0 else NEG_INF for p in self.top_p],
            [math.log(p) if p else NEG_INF for p in self.min_p],
        ]
        return [list(values) * (count if len(values) == 1 else 1) for values in settings]

    def guidance(self) -> Warping:
        """Return the settings without temperature and truncation."""
        rows = self.rows
        if rows is not None:
            rows = torch.cat([rows[:, :TEMPERATURE], torch.zeros_like(rows[:, TEMPERATURE:])], 1)
        return Warping((0.0,), guidance_scale=self.guidance_scale, rows=rows)

    def column(self, index: int, like: Tensor) -> Tensor:
        """[B, 1, 1] one of the numbers of the rows, with the dtype of `like`."""
        rows = cast(Tensor, self.rows)
        return rows[:, index].to(like.dtype)[:, None, None]


def warp_logits(logits: Tensor, warping: Warping) -> Tensor:
    """Apply guidance, temperature and truncation to logits; excluded tokens get -inf.

    Args:
        logits: [B, m, V]; [2B, m, V] under guidance: conditional rows, then unconditional ones.
        warping: the sampling settings.

    Returns:
        [B, m, V] in float32 (float64 for float64); the same tensor if the settings change nothing.
    """
    return widen(logits) if warping.is_identity else warped(logits, *warping)


def sample_tokens(
    logits: Tensor,
    warping: Warping,
    key: Tensor | None,
    place: Tensor,
    stream: int | Tensor,
    step: int | Tensor = 0,
    node: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token at each of n nodes of T rows: the argmax of warped logits plus Gumbel noise.

    The noise is that of `philox_gumbel`.

    Args:
        logits: [B, m, V], or [2B, m, V] under guidance: T n = B m vectors, one after another.
        warping: the sampling settings.
        key: [T, 2] Philox keys; None if all rows are greedy.
        place: [T, d] positions that key the noise.
        stream, step: counters of the noise; integers, or tensors that broadcast to [T, d].
        node: [T, n] index of each node's position in its row of `place`; None if node i is at position i.

    Returns:
        [T, n] tokens, the lowest id of ties; and [T, n] False where the token is invalid, because the logits
        are NaN or infinite or exclude every token.
    """
    stream, step = counter_word(stream, place), counter_word(step, place)
    return sampled(logits, key, place, stream, step, node, *warping)


def is_fused(logits: Tensor) -> bool:
    """Return whether a kernel samples from these logits and warps them on the fly."""
    return use_triton(logits.device) and logits.dtype != torch.float64


def _fake_warped(
    logits: Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    guidance_scale: Sequence[float],
    rows: Tensor | None = None,
) -> Tensor:
    copies = 1 + any(scale != 1.0 for scale in guidance_scale)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(len(logits) // copies, *logits.shape[1:], dtype=dtype)


@operator(fake=_fake_warped)
def warped(
    logits: Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    guidance_scale: Sequence[float],
    rows: Tensor | None = None,
) -> Tensor:
    """Like `warp_logits`, but always into a new tensor."""
    warping = _settings(temperature, top_k, top_p, min_p, guidance_scale, rows=rows)
    if is_fused(logits):
        from .sampling_triton import warp_triton

        return warp_triton(logits, warping)
    result = _warp(logits, warping)
    return result.clone() if result is logits else result


def _fake_sampled(logits: Tensor, key: Tensor | None, place: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    node, guidance_scale = rest[2], rest[7]
    copies = 1 + any(scale != 1.0 for scale in guidance_scale)
    rows = len(logits) * logits.shape[1] // copies
    shape = (len(place), rows // max(len(place), 1)) if node is None else node.shape
    return place.new_empty(shape), place.new_empty(shape, dtype=torch.bool)


@operator(fake=_fake_sampled)
def sampled(
    logits: Tensor,
    key: Tensor | None,
    place: Tensor,
    stream: Tensor,
    step: Tensor,
    node: Tensor | None,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    guidance_scale: Sequence[float],
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `sample_tokens`, with tensors for stream and step."""
    warping = _settings(temperature, top_k, top_p, min_p, guidance_scale, rows=rows)
    if is_fused(logits):
        from .sampling_triton import sample_triton

        return sample_triton(logits, key, place, stream, step, node, warping)
    scores = _warp(logits, warping)
    scores = scores.view(*(place if node is None else node).shape, scores.shape[-1])
    if key is None or warping.is_greedy:
        return race(scores, None, node, True)
    noise = philox_gumbel(key, place, stream, scores.shape[-1], step, scores.dtype)
    greedy: bool | Tensor = False
    if 0.0 in warping.temperature:
        is_greedy = greedy_rows(warping, scores)
        greedy = is_greedy.repeat_interleave(len(scores) // len(is_greedy), 0)
    return race(scores, noise, node, greedy)


def race(
    scores: Tensor, noise: Tensor | None, node: Tensor | None, greedy: bool | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the argmax of warped logits plus Gumbel noise.

    Args:
        scores: [T, n, V] warped logits.
        noise: [T, d, V]; None if all rows are greedy.
        node: [T, n] index of each node's noise; None if node i uses index i.
        greedy: rows without noise: a bool for all, or [T, 1, 1].

    Returns:
        See `sample_tokens`.
    """
    is_finite = scores.amax(-1).isfinite()
    if noise is not None and greedy is not True:
        if node is not None:
            noise = noise.gather(1, node[..., None].expand(-1, -1, noise.shape[-1]))
        if isinstance(greedy, Tensor):
            noise = noise.masked_fill(greedy, 0.0)
        scores = scores + noise
    return scores.argmax(-1), is_finite


def _settings(*settings: Any, rows: Tensor | None) -> Warping:
    temperature, top_k, top_p, min_p, guidance_scale = map(tuple, settings)
    return Warping(temperature, top_k, top_p, min_p, guidance_scale, rows)


def of_rows(values: Sequence[object], like: Tensor, of: Callable[[Any], float] = float) -> Any:
    """Return a setting as a number, or as a tensor [B, 1, 1] on the device of `like` if rows differ.

    Args:
        values: one for all rows, or one for each.
        like: a tensor with the device and dtype; each tensor is copied to a device once and cached.
        of: computes the number on the host, for one value and for many alike.
    """
    numbers = tuple(map(of, values))
    return numbers[0] if len(numbers) == 1 else held(_column(numbers, like.device, like.dtype))


def held(settings: Tensor) -> Tensor:
    """Keep a cached tensor forever if a CUDA graph captures it, because the graph stores its address."""
    if settings.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[settings.data_ptr()] = settings
    return settings


@functools.lru_cache(CACHED_SETTINGS)
def _column(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # inference tensors could not be used in autograd
        return torch.tensor(numbers, dtype=dtype, device=device)[:, None, None]


def greedy_rows(warping: Warping, like: Tensor) -> Tensor:
    """[B, 1, 1] which rows are greedy, if some are and others are not."""
    if warping.rows is not None:
        return warping.column(TEMPERATURE, like) == 0.0
    rows: Tensor = of_rows(warping.temperature, like) == 0.0
    return rows


def limits(warping: Warping, like: Tensor) -> float | Tensor:
    """The top_k of all rows, or of each [B, 1, 1]; infinite where all tokens are kept."""
    if warping.rows is not None:
        return warping.column(TOP_K, like)
    found: float | Tensor = of_rows(warping.top_k, like, lambda k: k or math.inf)
    return found


def _warp(logits: Tensor, warping: Warping) -> Tensor:
    """Warp in torch: [B or 2B, m, V] -> [B, m, V]; the same tensor if nothing changes."""
    logits, on_device = widen(logits), warping.rows is not None
    if warping.is_guided:
        scales = warping.column(SCALE, logits) if on_device else of_rows(warping.guidance_scale, logits)
        logits = _guide(logits, scales)
    if warping.is_greedy:
        return logits
    result = logits
    if on_device:
        divisor = warping.column(TEMPERATURE, logits)
        result = _divide(logits, divisor.masked_fill(divisor == 0.0, 1.0))
    elif any(value not in (0.0, 1.0) for value in warping.temperature):
        result = _divide(logits, of_rows(warping.temperature, logits, lambda value: value or 1.0))
    result = _truncate(result, warping)
    if 0.0 in warping.temperature and result is not logits:
        result = torch.where(greedy_rows(warping, logits), logits, result)
    return result


def _truncate(logits: Tensor, warping: Warping) -> Tensor:
    """Exclude tokens by top-k, then top-p, then min-p. logits: [B, m, V], after the temperature."""
    vocabulary, on_device = logits.shape[-1], warping.rows is not None
    counts = [min(k, vocabulary) if on_device else k for k in warping.top_k if k]
    counts = [k for k in counts if on_device or k < vocabulary]
    if counts:
        # `largest` sorts only the places of the counts that it is given
        tops = logits.topk(max(counts), dim=-1).values if on_device else largest(logits, counts)
        threshold = _kth(tops, limits(warping, logits))
        logits = logits.masked_fill(logits < threshold, NEG_INF)
    if min(warping.top_p) < 1.0:
        ordered, order = sort_stably(logits)
        # Ascending, as in transformers: drop the tail whose mass is at most 1 - top_p, never the last.
        tail: float | Tensor
        if on_device:
            tail = warping.column(TOP_P, logits)
        else:
            tail = of_rows(warping.top_p, logits, lambda top_p: 1.0 - top_p if top_p < 1.0 else NEG_INF)
        drop = ordered.softmax(-1).cumsum(-1) <= tail
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), NEG_INF)
    if any(warping.min_p):
        below: float | Tensor
        if on_device:
            below = warping.column(MIN_P, logits)
        else:
            below = of_rows(warping.min_p, logits, lambda min_p: math.log(min_p) if min_p else NEG_INF)
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + below, NEG_INF)
    return logits


def widen(values: Tensor) -> Tensor:
    """Convert to float32, because half precision causes ties; float64 stays."""
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)


def _divide(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide [B, m, V] by a number or by [B, 1, 1], with the same bits."""
    if isinstance(temperature, Tensor) and logits.is_cuda:
        return logits * temperature.reciprocal()  # torch divides by a number in this way on CUDA
    return logits / temperature


def _kth(largest: Tensor, k: float | Tensor) -> Tensor:
    """Return the k-th [B, m, 1] of sorted largest logits [B, m, j]: the last, or one per k [B, 1, 1].

    A k above j gives -inf, which keeps every token.
    """
    if not isinstance(k, Tensor):
        return largest[..., -1:]
    most = largest.shape[-1]
    index = (k.clamp_max(most) - 1).long().expand(*largest.shape[:-1], 1)
    return largest.gather(-1, index).masked_fill(k > most, NEG_INF)


def _guide(logits: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance (Ho & Salimans, 2207.12598): [2B, m, V] -> [B, m, V], u + s (c - u).

    Args:
        logits: [2B, m, V].
        scale: s, a number or [B, 1, 1].
    """
    conditional, unconditional = logits.log_softmax(-1).chunk(2)
    guided = unconditional + scale * (conditional - unconditional)
    guided = guided.masked_fill(conditional == NEG_INF, NEG_INF)  # excluded by a grammar: -inf minus -inf
    if not isinstance(scale, Tensor):
        return guided
    return torch.where(scale == 1.0, logits.chunk(2)[0], guided)  # the unchanged logits: log_softmax rounds
