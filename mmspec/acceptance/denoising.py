"""Rules for values that a denoising head draws: exact ones by its transitions, and one with a tolerance.

`speculative_sampling` judges whole chains at once and takes any head whose every step has noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.acceptance.last_transition import LastTransition
from mmspec.acceptance.residuals import last_purpose, sampled_distribution
from mmspec.decoding.denoising import Denoising
from mmspec.decoding.draft import CANDIDATES, Draft, DraftKind
from mmspec.decoding.indexing import take
from mmspec.decoding.interfaces import AcceptanceRule
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.verdict import Verdict
from mmspec.errors import InputError
from mmspec.validation import require_number

__all__ = ["LastStep", "Reflection", "SharedNoise"]


class Reflection(AcceptanceRule):
    """Follow the draft's chain step by step, and go on with the target's own from the first step refused.

    Reflection coupling of two normal transitions with one covariance (De Bortoli et al., 2501.05370): with
    z the noise of the draft's step, D the distance of the means and e = D / |D|, the state of the draft is
    kept with probability exp(-|z + D|^2 / 2 + |z|^2 / 2), and its mirror image taken otherwise. Exact, and
    every place is decided in the round that judges it. A step without noise is kept if both means are equal.
    """

    sound_for = frozenset({DraftKind.IID})
    chains_only = True
    judges = "vectors"

    def verify(self, draft: Draft, scores: Denoising, random: RandomStream, emitted: Tensor) -> Verdict:
        q = sampled_distribution(draft)
        depths = torch.arange(draft.max_depth, device=emitted.device)
        steps = scores.process.steps
        u = random.uniform(emitted[:, None] + depths, Purpose.ACCEPT, steps, scores.dtype)  # [B, K, S]
        kept, mirrored = reflect(scores[:-1], q[1:], u)
        drawn = draft.valid[:, 1:]
        node = (drawn & kept.all(-1)).long().cumprod(-1).sum(-1)
        judged = torch.nn.functional.pad(drawn, (0, 1)).gather(1, node[:, None])
        here = scores.at(node)
        noise, known = here.noise(random, emitted + node, last_purpose(draft)), None
        if draft.max_depth:
            at = node.clamp_max(draft.max_depth - 1)
            chain, agrees = take(q.drawn[:, 1:], at), take(kept, at)
            first = agrees.long().cumprod(-1).sum(-1)[:, None]  # [B, 1] the step that was refused
            state = torch.arange(steps + 1, device=node.device)
            chain = torch.where((state == first + 1)[:, :, None], pad_first(take(mirrored, at)), chain)
            known = chain, (state <= first + 1) & judged
        return Verdict.at(draft, node, here.value_of(here.process.run(noise, known)))


def reflect(p: Denoising, q: Denoising, u: Tensor) -> tuple[Tensor, Tensor]:
    """Judge each step of the chains that candidates end, given that those before it were kept.

    Args:
        p: [T, k] of the target.
        q: of the draft, with its chains.
        u: [T, k, S].

    Returns:
        [T, k, S] whether the state after the step is kept, and [T, k, S, d] what takes its place if not.

    Raises:
        InputError: the head predicts deviations, which would differ between target and draft.
    """
    if q.drawn is None:
        raise TypeError("candidates of a denoising head are judged by the chains that drew them")
    if not p.process.has_fixed_noise:
        allowed = "one whose noise is the same for target and draft (a flow); others take whole chains"
        raise InputError("schedule", "deviations that the network predicts", allowed)
    chains = q.drawn.flatten(0, 1)
    (mean, std), (other, _) = p.process.transitions(chains[:, :-1]), q.process.transitions(chains[:, :-1])
    moves = std > 0
    scale = std.where(moves, 1.0)
    z, distance = (chains[:, 1:] - other) / scale, (other - mean) / scale
    z, distance = z.where(moves, 0.0), distance.where(moves, 0.0)
    log_ratio = (z.square() - (z + distance).square()).sum(-1) / 2
    same = ((mean == other) | moves).all(-1)
    kept = same & (u.flatten(0, 1).log() <= log_ratio)
    length = distance.square().sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    mirrored = mean + std * (z - 2 * (z * distance).sum(-1, keepdim=True) / length * distance)
    return kept.view(u.shape), mirrored.view(*u.shape, -1)


def pad_first(states: Tensor) -> Tensor:
    """[B, S, d] states after each step -> [B, S + 1, d], with room for the one before the first."""
    return torch.cat([torch.zeros_like(states[:, :1]), states], 1)


class LastStep(LastTransition):
    """Judge the last transition alone, behind chains of target and draft with the same noise.

    The target's own chain, run with the noise of the draft, is a sample of the target up to the last state
    but one, whatever the coupling; the last states are then coupled as two normal distributions (2411.11925,
    with the variance factor left out and no temperature of its own: both bias it). Exact. With many steps
    the last deviation is small against the distance of the means, and hardly any candidate is accepted.
    """


@dataclass(frozen=True)
class SharedNoise(AcceptanceRule):
    """Draw the target's own value at every node; go on along candidates that are within a tolerance of it.

    What is emitted is always the target's own, drawn with the noise of plain decoding. Only what it was
    conditioned on may differ from what was emitted, by the tolerance. At 0 this is plain decoding, up to the
    rounding of forwards with more nodes.

    Args:
        tolerance: largest root mean square, over the d dimensions, of candidate minus value.

    Raises:
        InputError: a negative tolerance.
    """

    tolerance: float = 0.0

    sound_for = CANDIDATES
    exactness = "lossy"
    bound = "a vector is the target's own draw, given a context off by at most the tolerance"
    chains_only = True
    judges = "vectors"

    def __post_init__(self) -> None:
        require_number("tolerance", self.tolerance, 0.0, 1e4, "0 or more; 0 is plain decoding")

    @property
    def promise(self) -> str:
        return "approximate" if self.tolerance else "exact"

    def verify(self, draft: Draft, scores: Denoising, random: RandomStream, emitted: Tensor) -> Verdict:
        values = scores.choose(draft, random, emitted)
        gap = (draft.tokens[:, 1:] - values[:, :-1]).square().mean(-1).sqrt()
        near = draft.valid[:, 1:] & (gap <= self.tolerance)
        node = near.long().cumprod(-1).sum(-1)
        drift = gap if self.tolerance else None
        return replace(Verdict.at(draft, node, take(values, node)), values=values, drift=drift)
