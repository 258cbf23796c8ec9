"""From logits to a distribution and to tokens drawn from it: guidance, temperature, truncation, noise.

The order is that of transformers. Rows of a batch may have settings of their own; they are known to the host,
so that nothing is read back from the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend import operator, use_triton
from .ordering import largest, sort_stably
from .philox import counter_word, philox_gumbel

NEG_INF = float("-inf")
CACHED_SETTINGS = 1024  # tensors that are kept, of 512 bytes or more: served requests choose settings freely
_captured: dict[int, Tensor] = {}


class Warping(NamedTuple):
    """Settings that make a distribution of logits: one value for all rows, or one for each of B rows.

    Attributes:
        temperature: 0 takes the likeliest token; such rows are guided, and neither scaled nor truncated.
        top_k: keep the k largest logits, and all that equal the k-th; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        guidance_scale: s of classifier-free guidance, u + s (c - u); 1 is off.
    """

    temperature: tuple[float, ...] = (1.0,)
    top_k: tuple[int, ...] = (0,)
    top_p: tuple[float, ...] = (1.0,)
    min_p: tuple[float, ...] = (0.0,)
    guidance_scale: tuple[float, ...] = (1.0,)

    @property
    def is_greedy(self) -> bool:
        """True if all rows are."""
        return not any(self.temperature)

    @property
    def is_guided(self) -> bool:
        """True if any row is, so that there are unconditional logits."""
        return any(scale != 1.0 for scale in self.guidance_scale)

    @property
    def truncates(self) -> bool:
        """True if tokens of any row are excluded."""
        return any(self.top_k) or min(self.top_p) < 1.0 or any(self.min_p)

    @property
    def is_identity(self) -> bool:
        """True if logits are their own warped ones."""
        kept = self.is_greedy or not (self.truncates or any(t not in (0.0, 1.0) for t in self.temperature))
        return kept and not self.is_guided


def warp_logits(logits: Tensor, warping: Warping) -> Tensor:
    """Warp logits: those of the promised distribution, -inf where a token is excluded.

    Args:
        logits: [B, m, V]; [2B, m, V] under guidance: conditional rows, then unconditional ones.
        warping: the settings of all rows, or of each of the B.

    Returns:
        [B, m, V] in float32 (float64 for float64); the logits themselves where there is nothing to do.
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
    """Draw a token at each of n nodes in T lanes: the arg-max of warped logits and Gumbel noise.

    The noise is that of `philox_gumbel`.

    Args:
        logits: [B, m, V], or [2B, m, V] under guidance: T n = B m rows, one after another.
        warping: how they are warped.
        key: [T, 2] Philox keys; None where all rows take their likeliest token.
        place: [T, d] positions that key the noise.
        stream, step: of the noise; integers, or tensors that broadcast to [T, d].
        node: [T, n] index of each node's position in its row of `place`; None if node i is at position i.

    Returns:
        [T, n] tokens, the lowest id of equals; and [T, n] False where the logits are NaN or infinite, or
        exclude every token, so that the token means nothing.
    """
    stream, step = counter_word(stream, place), counter_word(step, place)
    return sampled(logits, key, place, stream, step, node, *warping)


def is_fused(logits: Tensor) -> bool:
    """Return whether sampling from these logits is a kernel that warps them on the way."""
    return use_triton(logits.device) and logits.dtype != torch.float64


def _fake_warped(
    logits: Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    guidance_scale: Sequence[float],
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
) -> Tensor:
    """As `warp_logits`, in a new tensor."""
    warping = _settings(temperature, top_k, top_p, min_p, guidance_scale)
    if is_fused(logits):
        from .sampling_triton import warp_triton

        return warp_triton(logits, warping)
    result = _warp(logits, warping)
    return result.clone() if result is logits else result


def _fake_sampled(logits: Tensor, key: Tensor | None, place: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    node, guidance_scale = rest[2], rest[-1]
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
) -> tuple[Tensor, Tensor]:
    """As `sample_tokens`, with a tensor for the stream and for the step."""
    warping = _settings(temperature, top_k, top_p, min_p, guidance_scale)
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
        rows: Tensor = of_rows(warping.temperature, scores) == 0.0
        greedy = rows.repeat_interleave(len(scores) // len(rows), 0)
    return race(scores, noise, node, greedy)


def race(
    scores: Tensor, noise: Tensor | None, node: Tensor | None, greedy: bool | Tensor
) -> tuple[Tensor, Tensor]:
    """Take the arg-max of warped logits and Gumbel noise.

    Args:
        scores: [T, n, V] warped logits.
        noise: [T, d, V]; None where all rows are greedy.
        node: [T, n] index of each node's noise; None if node i has the i-th.
        greedy: which rows take no noise: all or none, or [T, 1, 1].

    Returns:
        As `sample_tokens`.
    """
    is_finite = scores.amax(-1).isfinite()
    if noise is not None and greedy is not True:
        if node is not None:
            noise = noise.gather(1, node[..., None].expand(-1, -1, noise.shape[-1]))
        if isinstance(greedy, Tensor):
            noise = noise.masked_fill(greedy, 0.0)
        scores = scores + noise
    return scores.argmax(-1), is_finite


def _settings(*settings: Any) -> Warping:
    return Warping(*map(tuple, settings))


def of_rows(values: Sequence[object], like: Tensor, of: Callable[[Any], float] = float) -> Any:
    """Compute the number of a setting: one, or [B, 1, 1] of them beside `like` where rows differ.

    Args:
        values: one for all rows, or one for each.
        like: a tensor of the device and dtype; values go to a device once.
        of: computes the number, on the host as where there is one.
    """
    numbers = tuple(map(of, values))
    return numbers[0] if len(numbers) == 1 else held(_column(numbers, like.device, like.dtype))


def held(settings: Tensor) -> Tensor:
    """Keep a cached tensor for good if it is read while a CUDA graph is captured, which holds its address."""
    if settings.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[settings.data_ptr()] = settings
    return settings


@functools.lru_cache(CACHED_SETTINGS)
def _column(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # or no graph of gradients could use it
        return torch.tensor(numbers, dtype=dtype, device=device)[:, None, None]


def _warp(logits: Tensor, warping: Warping) -> Tensor:
    """Warp in torch: [B or 2B, m, V] -> [B, m, V], the same tensor where there is nothing to do."""
    logits = widen(logits)
    if warping.is_guided:
        logits = _guide(logits, of_rows(warping.guidance_scale, logits))
    if warping.is_greedy:
        return logits
    result = logits
    if any(value not in (0.0, 1.0) for value in warping.temperature):
        result = _divide(logits, of_rows(warping.temperature, logits, lambda value: value or 1.0))
    result = _truncate(result, warping)
    if 0.0 in warping.temperature and result is not logits:
        result = torch.where(of_rows(warping.temperature, logits) == 0.0, logits, result)
    return result


def _truncate(logits: Tensor, warping: Warping) -> Tensor:
    """Exclude tokens by top-k, then top-p, then min-p. logits: [B, m, V], already at temperature."""
    vocabulary = logits.shape[-1]
    counts = [k for k in warping.top_k if k and k < vocabulary]
    if counts:
        threshold = _kth(largest(logits, counts), of_rows(warping.top_k, logits, lambda k: k or math.inf))
        logits = logits.masked_fill(logits < threshold, NEG_INF)
    if min(warping.top_p) < 1.0:
        ordered, order = sort_stably(logits)
        # Ascending, as in transformers: drop the tail whose mass is at most 1 - top_p, never the last.
        tail = of_rows(warping.top_p, logits, lambda top_p: 1.0 - top_p if top_p < 1.0 else NEG_INF)
        drop = ordered.softmax(-1).cumsum(-1) <= tail
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), NEG_INF)
    if any(warping.min_p):
        below = of_rows(warping.min_p, logits, lambda min_p: math.log(min_p) if min_p else NEG_INF)
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + below, NEG_INF)
    return logits


def widen(values: Tensor) -> Tensor:
    """Convert to float32 whatever the model's dtype is, or ties decide; float64 stays."""
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)


def _divide(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide [B, m, V] by one number or [B, 1, 1], with the same bits."""
    if isinstance(temperature, Tensor) and logits.is_cuda:
        return logits * temperature.reciprocal()  # as torch divides by one number there
    return logits / temperature


def _kth(largest: Tensor, k: float | Tensor) -> Tensor:
    """[B, m, 1] the k-th of the largest logits [B, m, j], in order: the last, or one for each k [B, 1, 1].

    A k above j keeps every token: -inf.
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
        scale: s, or [B, 1, 1].
    """
    conditional, unconditional = logits.log_softmax(-1).chunk(2)
    guided = unconditional + scale * (conditional - unconditional)
    guided = guided.masked_fill(conditional == NEG_INF, NEG_INF)  # excluded by a grammar: -inf minus -inf
    if not isinstance(scale, Tensor):
        return guided
    return torch.where(scale == 1.0, logits.chunk(2)[0], guided)  # as the model gave them: log_softmax rounds
