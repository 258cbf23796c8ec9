"""Couplings of the tokens of a Jacobi window with those of the round before.

Maximal (MC-SJD, 2510.24211), by shared Gumbel noise (GS, 2510.24211), or none (SJD, 2410.01699).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.acceptance.residuals import sampled_distribution
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.kernels import redraw
from mmspec.kernels.redraw import invert

__all__ = ["KIND_OF_COUPLING", "LastDraft", "draw_coupled", "ranked_candidates"]

KIND_OF_COUPLING = {
    "fresh": DraftKind.IID,
    "maximal": DraftKind.IID,
    "gumbel": DraftKind.IID,
    "exact": DraftKind.COUPLED,
}


class LastDraft(NamedTuple):
    """The last draft, as places are drawn anew with it.

    Attributes:
        tokens: [B, n].
        valid: [B, n] False where one means nothing.
        q: [B, n, V] what they were drawn from; None where new tokens are drawn independently of them.
    """

    tokens: Tensor
    valid: Tensor
    q: Tensor | None

    @staticmethod
    def of(draft: Draft, coupling: str) -> LastDraft:
        """Take what a coupling asks of a draft; one by shared noise asks nothing."""
        q = sampled_distribution(draft).p if coupling == "maximal" else None
        return LastDraft(draft.tokens, draft.valid, q)


def draw_coupled(coupling: str, p: Tensor, last: LastDraft, stood: Tensor, noise: Tensor) -> Tensor:
    """Draw a token from each p [B, W, V], coupled with the place's old one.

    Args:
        coupling: as of `WindowDrafter`.
        p: new distributions.
        last: the draft that holds the old tokens.
        stood: [B, W] the node that held the place's old token; 0 where it had none.
        noise: [B, W, 3] uniforms, new in every round; or [B, W, V] Gumbel noise that stays.

    Returns:
        [B, W].
    """
    if coupling in ("gumbel", "exact"):
        return (p.log() + noise).argmax(-1)
    if last.q is None:
        return invert(p, noise[..., 1:])
    return redraw(p, last.q, last.tokens, last.valid, stood, noise)


def ranked_candidates(first: Tensor, p: Tensor, noise: Tensor, branch: int) -> tuple[Tensor, Tensor]:
    """Draw further candidates without replacement: [B, n, branch] all, and whether each could be drawn.

    By the Gumbel top-k trick (Kool et al., 1903.06059), the first candidate taken out.

    Args:
        first: [B, n] drawn from p [B, n, V].
        p: distributions.
        noise: [B, 1, V] Gumbel noise.
        branch: number of candidates, the first included.
    """
    left = p.scatter(-1, first[..., None], 0.0)
    further = (left.log() + noise).topk(branch - 1, dim=-1).indices
    could = torch.cat([torch.ones_like(first)[..., None] > 0, left.gather(-1, further) > 0], -1)
    return torch.cat([first[..., None], further], -1), could
