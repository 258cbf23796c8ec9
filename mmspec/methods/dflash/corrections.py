"""Corrections of the slots of a block by each other: each slot's logits depend on the tokens chosen before.

| part | it changes | source |
|---|---|---|
| `MarkovHead`, `DominoHead` | the logits of all tokens | DSpark (2607.05147), Domino of SpecForge |
| `CandidateSelector` | the logits of a slot's likeliest tokens | DFlash 2 (z-lab/dflash) |
| `LatticeCorrelator` | replaces those logits | LiLiCorr (2608.20530, NVIDIA/Model-Optimizer) |

The tensors have the published names. The last two parts choose among the k likeliest tokens of each slot, its
candidates; tokens that are no candidates are not drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mmspec.core.indexing import pick

if TYPE_CHECKING:
    from mmspec.methods.dflash.head import DFlashConfig

__all__ = ["CandidateSelector", "ConfidenceHead", "DominoHead", "Lattice", "LatticeCorrelator", "MarkovHead"]

FEATURES = 5  # of a candidate: log-probability, probability, gap to the best, rank, whether it is the best


@dataclass(frozen=True)
class Lattice:
    """The candidates of the D slots of R blocks.

    Attributes:
        index: [R, D, k] of the candidates among the logits, the likeliest first.
        tokens: [R, D, k] of the target.
        logits: [R, D, k].
        start: [R, k] scores of the first slot's candidates by `LatticeCorrelator`; None without one.
        pairs: [R, D - 1, k, k] scores of each candidate after each of the slot before; None without one.
    """

    index: Tensor
    tokens: Tensor
    logits: Tensor
    start: Tensor | None = None
    pairs: Tensor | None = None

    def transitions(self, level: int, before: Tensor) -> Tensor:
        """Scores [R, w, k] of a level's candidates after tokens [R, w], candidates of the level before."""
        if self.start is None or self.pairs is None or not level:
            start = self.logits[:, 0] if self.start is None else self.start
            return start[:, None].expand(-1, before.shape[1], -1)
        same = self.tokens[:, level - 1, None] == before[..., None]  # [R, w, k]
        return pick(self.pairs[:, level - 1], same.int().argmax(-1))

    def spread(self, level: int, scores: Tensor, size: int) -> Tensor:
        """Logits [B, w, V'] of a level with these scores [B, w, k] of its candidates, -inf for other tokens.

        The first B of the R rows have these candidates.
        """
        index = self.index[: len(scores), level, None].expand_as(scores)
        return scores.new_full((*scores.shape[:2], size), -torch.inf).scatter(-1, index, scores)


class DominoHead(nn.Module):
    """Correction of a slot's logits by all earlier tokens of its block, and by the slot's own state.

    A gated recurrent unit reads their embeddings in the target, s = GRU(e(x_1), ..., e(x_i)); the correction
    of slot i + 1 is W2 silu(W1 [hidden, s]).
    """

    def __init__(self, width: int, memory: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.prefix_gru = nn.GRUCell(width, memory, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + memory, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocabulary, bias=False)
        )

    def forward(self, embeddings: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Correct slots [..., d] after tokens [..., d]; return [..., V], and the state after these tokens."""
        before = None if state is None else state.flatten(0, -2)
        after = self.prefix_gru(embeddings.flatten(0, -2).to(hidden.dtype), before)
        after = after.unflatten(0, embeddings.shape[:-1])
        return self.embed_proj(torch.cat([hidden, after], -1)), after


class MarkovHead(nn.Module):
    """Bias of the token before on the logits of a slot (DSpark, 2607.05147).

    "vanilla" is W2 W1[token]; "gated" gates the middle by the slot's state; "rnn" also reads a recurrent
    state of all earlier tokens of the block.
    """

    def __init__(self, config: DFlashConfig, vocabulary: int) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.kind, self.rank = config.markov, rank
        self.markov_w1 = nn.Embedding(config.vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias [..., V'] of tokens [...] on the slots [..., d] after them, and the state of the next."""
        inner = self.markov_w1(tokens)
        if self.kind == "gated":
            inner = torch.sigmoid(self.gate_proj(torch.cat([hidden, inner], -1))) * inner
        elif self.kind == "rnn":
            state = torch.zeros_like(inner) if state is None else state
            joint = self.joint_proj(torch.cat([state, inner, hidden], -1))
            gate, candidate, out = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state, inner = gate * state + (1 - gate) * candidate.tanh(), out.tanh()
        bias: Tensor = self.markov_w2(inner)
        return bias, state


class ConfidenceHead(nn.Module):
    """Probability that a slot's token is accepted, from the slot's state and the token before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> [...] logits."""
        logits: Tensor = self.proj(features)[..., 0]
        return logits


class CandidateSelector(nn.Module):
    """Adds <A[x] * H s, B[y]> to the logit of candidate y after x, in a slot with state s (DFlash 2)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = config.vocabulary, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.empty(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, lattice: Lattice, level: int, before: Tensor, hidden: Tensor) -> Tensor:
        """Scores [R, w, k] of a level's candidates after tokens [R, w], for slots with states [R, w, d]."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        after = self.successor_codebook[lattice.tokens[:, level]]  # [R, k, rank]
        scores: Tensor = lattice.logits[:, level, None] + context @ after.transpose(-1, -2)
        return scores


class LatticeLayer(nn.Module):
    """A layer of a transformer over all candidates of a block, which see each other."""

    def __init__(self, width: int, heads: int, ratio: float, eps: float) -> None:
        super().__init__()
        inner = int(width * ratio)
        self.attn_norm = Qwen3RMSNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp_norm = Qwen3RMSNorm(width, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        """[R, D k, width] -> the same; bias [heads, D k, D k] of the attention."""
        normed = self.attn_norm(rows)
        mask = bias.repeat(len(rows), 1, 1)
        rows = rows + self.attn(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        out: Tensor = rows + self.mlp(self.mlp_norm(rows))
        return out


class LatticeCorrelator(nn.Module):
    """Scores each candidate after each of the slot before, from all candidates of a block (LiLiCorr).

    The score is a scaled cosine of two vectors: one that leaves the earlier candidate, or the accepted text,
    and one that enters the later candidate.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, outer, eps = config.lattice_width, config.hidden_size, config.rms_norm_eps
        self.scale, self.least_norm = config.lattice_scale, config.lattice_eps
        self.token_proj = nn.Identity() if outer == width else nn.Linear(outer, width)
        self.pass_hidden_proj = nn.Linear(outer, width)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.block - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.lattice_heads, 2 * config.block - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.lattice_heads))
        self.context_proj = nn.Linear(outer, width)
        shape = width, config.lattice_heads, config.lattice_ratio, eps
        self.layers = nn.ModuleList(LatticeLayer(*shape) for _ in range(config.lattice_layers))
        self.output_norm = Qwen3RMSNorm(width, eps=eps)
        self.anchor_norm = Qwen3RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(width, config.lattice_factors) for _ in range(3)
        )

    def forward(
        self, embeddings: Tensor, log_p: Tensor, hidden: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores of the first slot's candidates [R, k], and of all transitions [R, D - 1, k, k].

        Args:
            embeddings: [R, D, k, d] of the candidates in the target.
            log_p: [R, D, k] their log-probabilities, the likeliest first.
            hidden: [R, D, d] states of the slots.
            anchor: [R, d] the row of the context that predicted the newest token.
        """
        slots, ranks = log_p.shape[1:]
        said = log_p.float()
        rank = torch.arange(ranks, device=said.device, dtype=said.dtype).expand_as(said)
        gap, best = said - said.amax(-1, keepdim=True), (rank == 0).to(said)
        features = torch.stack([said, said.exp(), gap, rank / max(ranks - 1, 1), best], -1)
        rows = self.token_proj(embeddings) + self.pass_hidden_proj(hidden)[:, :, None]
        rows = rows + self.feature_mlp(features.to(rows.dtype))
        rows = rows + self.slot_embedding[:, 0, :slots] + self.rank_embedding[:, 0, :, :ranks]
        slot = torch.arange(slots, device=said.device).repeat_interleave(ranks)
        distance = slot[:, None] - slot
        middle = self.relative_slot_bias.shape[1] // 2
        bias = self.relative_slot_bias[:, distance + middle]
        bias = bias + (distance == 0) * self.same_slot_bias[:, None, None]
        rows = rows.flatten(1, 2)
        for layer in self.layers:
            rows = layer(rows, bias.to(rows.dtype))
        rows = self.output_norm(rows).unflatten(1, (slots, ranks))
        text = self.anchor_norm(self.context_proj(anchor))
        beside = text[:, None, None].expand_as(rows)
        factors = nn.functional.silu(self.factor_input_proj(torch.cat([rows, beside, rows * beside], -1)))
        leaving, entering, first = (
            normalize(project(each), dim=-1, eps=self.least_norm)
            for project, each in (
                (self.out_head, factors),
                (self.in_head, factors),
                (self.anchor_out_head, text),
            )
        )
        start = (entering[:, 0] @ first[..., None])[..., 0]
        pairs = leaving[:, :-1] @ entering[:, 1:].transpose(-1, -2)
        return start.float() * self.scale, pairs.float() * self.scale
