"""Joint verification of a run of draft tokens (SJD-SV). Lossy, and labelled so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.acceptance.residuals import residual, sampled_law
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import AcceptanceRule
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.sampling import Scores, draw, require_number
from mmspec.decoding.verdict import Verdict, take


@dataclass(frozen=True)
class Suffix(AcceptanceRule):
    """Judge runs of tokens by the product of their ratios instead of each token by its own.

    SJD-SV (ICML'26; visual-ar-decoding.md section 4.3), of which no code is public: this is our reading of
    its description. A run is a stretch of the draft on which p(x) does not fall. Its tokens are accepted
    together if u < min(1, product of p(x) / q(x)), with one u per run, and, where there are several, if that
    product is at least `confidence`; otherwise the tail is trimmed until what is left passes. What is
    refused is replaced by a draw from norm((p - q)+).

    A token that its own ratio would have refused may pass with those after it, so the output law is not the
    target's. It has no closed form per place and is not measured. Where p(x) falls from token to token, all
    runs are single tokens and the rule is speculative sampling.

    Args:
        confidence: the least product of a run of several tokens, 0 to 1.

    Raises:
        InputError: a value outside its range.
    """

    confidence: float = 0.8

    sound_for = frozenset({DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})
    exactness = "lossy"
    chains_only = True

    def __post_init__(self) -> None:
        require_number("confidence", self.confidence, 0.0, 1.0, "0 to 1")

    def verify(self, draft: Draft, scores: Scores, random: RandomStream, emitted: Tensor) -> Verdict:
        q, p = sampled_law(draft), scores.probabilities()
        steps = torch.arange(draft.max_depth, device=emitted.device)
        u = random.uniform(emitted[:, None] + steps, Purpose.ACCEPT, 1, p.dtype)[..., 0]  # [B, K]
        x = draft.tokens[:, 1:, None]
        p_x, q_x = p[:, :-1].gather(-1, x)[..., 0], q[:, 1:].gather(-1, x)[..., 0]
        drawn = draft.valid[:, 1:] & (q_x > 0)
        accept = self.accepts(p_x.where(drawn, 0.0), q_x.where(drawn, 1.0), u)
        node = accept.long().cumprod(-1).sum(-1)
        p_node = take(p, node)
        after = (node + 1).clamp_max(draft.max_depth)
        judged = torch.nn.functional.pad(drawn, (0, 1)).gather(1, node[:, None])
        final = torch.where(judged, residual(p_node, take(q, after)), p_node)
        return Verdict.at(draft, node, draw(final, random, emitted + node, Purpose.RESIDUAL))

    def accepts(self, p_x: Tensor, q_x: Tensor, u: Tensor) -> Tensor:
        """[B, K] which tokens pass, given probabilities and uniforms [B, K]; also behind a refusal."""
        step = torch.arange(p_x.shape[1], device=p_x.device)
        rises = torch.zeros_like(p_x, dtype=torch.bool)
        rises[:, 1:] = (p_x[:, 1:] >= p_x[:, :-1]) & (p_x[:, :-1] > 0)
        first = step.where(~rises, 0).cummax(-1).values  # [B, K] where the run of a token begins
        same = first[:, :, None] == first[:, None, :]  # [B, K, K]
        upto = same & (step <= step[:, None])
        product = (p_x.log() - q_x.log())[:, None, :].where(upto, 0.0).sum(-1).exp()
        passes = (u.gather(1, first) < product) & (p_x > 0) & (~rises | (product >= self.confidence))
        return (same & (step >= step[:, None]) & passes[:, None, :]).any(-1)  # with all before it in its run
