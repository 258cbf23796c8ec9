"""Block verification: a chain is verified jointly. Hierarchical speculative decoding is the same rule.

Token-by-token rejection discards the surplus where p(x) / q(x) is above 1. Block verification spends it on
ratios below 1 at later places.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.kernels.chain import normalise
from mmspec.trees.verification import end_at, place_uniforms, sampled_distribution


class BlockVerification(AcceptanceRule):
    """Accepts the longest prefix of a chain that passes a test of its joint ratio, from the end backwards.

    Sun et al., 2403.10444, algorithm 2. With r_i = p(x_i) / q(x_i), the weight of a prefix is w_0 = 1,
    w_i = min(1, w_{i-1} r_i), and S_i = sum over y of (w_i p(y) - q(y))+ at the place after it. The last
    prefix is accepted with h = w, one before the last with h_i = S_i / (S_i + 1 - w_i), by a uniform of its
    own. The longest accepted one, of length t, is kept and followed by y ~ norm((w_t p - q)+), or by y ~ p if
    it is the whole chain.

    Exact: (1) A drawn prefix is kept, alone or with more, with probability w_i. That holds for a whole chain.
    If it holds at i + 1, more is kept with sum of q min(1, w_i p / q) = w_i - S_i, and else i alone with h_i:
    (w_i - S_i) + (1 - w_i + S_i) h_i = w_i. (2) After a kept prefix, y follows as a candidate with
    q(y) min(1, w_i p(y) / q(y)) = min(q, w_i p), and as a new draw with
    (1 - w_i + S_i) h_i (w_i p - q)+ / S_i = (w_i p - q)+. Together that is w_i p(y), a share p(y) of the kept
    prefixes. The end of a chain may depend on earlier tokens, and on nothing after it.

    No rule accepts more: by (2), any rule that keeps prefixes with a_i and draws one new token obeys
    a_{i+1} q <= a_i p, hence a_i <= w_i. Token by token a_i is the product of min(1, r_j), never more.

    Hierarchical speculative decoding (HSD, 2601.05724, algorithm 2) is this rule: its capped ratio (eq. 16)
    is r_1 ... r_i over the largest of all shorter such products and 1, so that min(1, r*) = w_i. Its
    divergences (17) and (18) are S_i and S_i + 1 - w_i, times the probability of the prefix; their quotient
    (19) is h_i, and y is drawn from (20).

    Rejected tokens after the kept prefix have influenced the decision. Noise is therefore new in every round,
    here and in drafters (`draws_anew`).
    """

    sound_for = frozenset({DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})
    chains_only = True
    judges_whole = True

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        if not draft.max_depth:
            return Path.root(draft, scores.choose(draft, random, emitted)[:, 0])
        p, q, x = scores.p, sampled_distribution(draft).p, draft.tokens[:, 1:, None]
        p_x, q_x = p[:, :-1].gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]
        # a chain ends before a token that was not drawn, and at NaN, which is reported there
        drawn = (draft.valid[:, 1:] & (q_x > 0) & (p_x >= 0)).long().cumprod(-1).bool()
        weight = weigh_prefixes(p_x.where(drawn, 1.0), q_x.where(drawn, 1.0))
        left = (weight[:, :-1, None] * p[:, :-1] - q).clamp_min(0.0)
        length = drawn.sum(-1)
        index = torch.arange(draft.max_depth + 1, device=length.device)
        surplus = pad(left.sum(-1), (0, 1))  # [B, K + 1] S
        refused = surplus + 1 - weight
        # 0 / 0: p and q are equal, and every drawn token is kept
        inner = torch.where(refused > 0, surplus / refused, 1.0)
        passes = torch.where(index == length[:, None], weight, inner)[:, 1:]
        u = place_uniforms(draft, random.at(emitted[:, None]), emitted, 1, p.dtype)[..., 0]
        node = (index[1:] * (drawn & (u <= passes))).amax(-1)
        p_node, left = take(p, node), take(left, node.clamp_max(draft.max_depth - 1))
        final = torch.where((node < length)[:, None], normalise(left, otherwise=p_node), p_node)
        return end_at(draft, node, final, random, emitted)


def weigh_prefixes(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Return the weights w of the prefixes of chains, [B, K + 1]: w_0 = 1, w_i = min(1, w_{i-1} p_i / q_i).

    Unrolled, w_i is the product of the first i ratios over the largest such product up to i, or over 1.

    Args:
        p_x, q_x: [B, K] probabilities of the candidates; q_x above 0.
    """
    total = (p_x.log() - q_x.log()).cumsum(-1)
    return pad((total - total.cummax(-1).values.clamp_min(0.0)).exp(), (1, 0), value=1.0)
