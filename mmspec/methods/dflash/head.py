"""The heads of DFlash and DSpark: layers of Qwen3 with keys and values of two kinds of rows.

Rows of the context are made from the target's hidden states and are the same for every layer. Rows of the
block are the newest token and noise, which every layer denoises. A block sees the context and all of itself;
in some layers of some heads there is a sliding window, or the block is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from math import gcd

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from mmspec.heads.configuration import check_taps, three_taps
from mmspec.heads.layers import FULL, SLIDING, PartialRotary, PublishedLayerConfig
from mmspec.heads.model import DraftingHead
from mmspec.methods.dflash.corrections import (
    CandidateSelector,
    ConfidenceHead,
    DominoHead,
    Lattice,
    LatticeCorrelator,
    MarkovHead,
)
from mmspec.methods.dflash.layers import BlockLayer, GroupedConvolution, near
from mmspec.open_types import Keywords

MAX_SLOTS = 64
MARKOV_HEADS = ("vanilla", "gated", "rnn", "domino")


@strict
class DFlashConfig(PublishedLayerConfig):
    """Config of a head that denoises a block of tokens in one forward pass, with layers of Qwen3.

    The position of a row is the index of its token, or its position in the target if that has several axes
    and `mrope_section` is set.

    Attributes:
        taps: hidden states of the target that are read: k for the input of layer k, -1 for the final one.
        num_layers: of the head.
        block: slots of a forward pass: the newest token, which is known, and noise.
        anchor_predicts: whether the slot of the newest token predicts the token after it, so that there are
            as many predictions as slots; otherwise there is one less, and each slot of noise predicts itself.
        mask_token: the target's token whose embedding is the noise; None for an embedding of the head's own.
        draft_vocabulary: tokens of the head's own output matrix; 0 if it uses the target's.
        markov: correction of each slot by the token before (DSpark): "", "vanilla", "gated" or "rnn"; or by
            all earlier tokens of the block: "domino".
        markov_rank: width of the correction.
        memory: width of the recurrent state of a Domino head.
        plain_slots: number of first predictions of a block that a Domino head does not correct.
        conv_taps: number of slots, its own included, that the convolution around each part of a layer reads
            (DFlash 2); 0 without convolutions.
        conv_group: channels that share the part of a kernel that depends on the slot.
        candidates: number of a slot's likeliest tokens among which the next two parts choose.
        selector_rank: width of the choice by the token before (DFlash 2); 0 without it.
        lattice_layers: of the small transformer over the candidates of all slots (LiLiCorr); 0 without it.
        lattice_width, lattice_heads, lattice_ratio: its width, its attention heads, and its feed-forward's
            width as a multiple.
        lattice_factors, lattice_scale, lattice_eps: width of the vectors whose cosines score transitions,
            the factor of these, and the least norm of a vector.
        logit_scale, logit_cap: factor of the logits, and their bound by a tanh behind it, 0 for none.
        embedding_scale: factor of the target's embeddings in a block.
        confidence: whether the head predicts the acceptance of each slot.
        confidence_with_markov: whether this reads the token before, by its embedding in the Markov head.
        layer_types: "full_attention", or "sliding_attention" with the window, of each layer; if empty, all
            layers have the window if there is one.
        causal: whether slots see only earlier slots of their block, for each layer; empty for no layer.
        sinks: whether each attention head has a logit without a value, as in gpt-oss.
        num_draft_tokens, top_k: the default tree; `top_k=1` is a chain, as published.
    """

    model_type = "mmspec_dflash"

    taps: list[int] = field(default_factory=lambda: [2, 16, 29])
    num_layers: int = 1
    block: int = 16
    anchor_predicts: bool = False
    mask_token: int | None = None
    draft_vocabulary: int = 0
    markov: str = ""
    markov_rank: int = 256
    memory: int = 1024
    plain_slots: int = 0
    conv_taps: int = 0
    conv_group: int = 16
    candidates: int = 16
    selector_rank: int = 0
    lattice_layers: int = 0
    lattice_width: int = 512
    lattice_heads: int = 8
    lattice_ratio: float = 2.0
    lattice_factors: int = 128
    lattice_scale: float = 8.0
    lattice_eps: float = 1e-4
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    confidence: bool = False
    confidence_with_markov: bool = True
    layer_types: list[str] = field(default_factory=list)
    causal: list[bool] = field(default_factory=list)
    sinks: bool = False
    num_draft_tokens: int = MAX_SLOTS
    top_k: int = 1

    @property
    def depth(self) -> int:
        """Tokens that a forward pass predicts, which is the depth of the default tree."""
        return self.block - (not self.anchor_predicts)

    @property
    def reads_targets_matrix(self) -> bool:
        return not self.draft_vocabulary

    @property
    def draft_size(self) -> int:
        return self.draft_vocabulary or self.frequent_tokens

    @property
    def layers(self) -> list[tuple[str, bool]]:
        """Type of each layer, and whether its slots see earlier slots alone."""
        every = FULL if self.sliding_window is None else SLIDING
        types = self.layer_types or [every] * self.num_layers
        return [*zip(types, self.causal or [False] * self.num_layers, strict=True)]

    def validate_layers(self) -> None:
        """Raise ValueError unless lists have an entry for every layer; called by `strict`."""
        types, window = self.layer_types, self.sliding_window
        known = {FULL} if window is None else {FULL, SLIDING}
        if types and (len(types) != self.num_layers or not {*types} <= known):
            rule = f"{' or '.join(sorted(known))} for each of {self.num_layers} layers"
            raise ValueError(f"layer_types must be {rule}; got {types} with sliding_window {window}")
        if self.causal and len(self.causal) != self.num_layers:
            raise ValueError(
                f"causal must have one entry for each of {self.num_layers} layers; got {self.causal}"
            )
        noise = self.mask_token
        if noise is not None and self.vocabulary and not 0 <= noise < self.vocabulary:
            raise ValueError(f"mask_token must be a token from 0 to {self.vocabulary - 1}; got {noise}")
        if self.mlp_bias:
            raise ValueError("mlp_bias must be False, as these layers have none; got True")

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that cannot be built; called by `strict`."""
        if self.depth < 1 or self.block > MAX_SLOTS:
            raise ValueError(f"block must have 2 to {MAX_SLOTS} slots; got {self.block}")
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be at least 1; got {self.num_layers}")
        if self.markov and self.markov not in MARKOV_HEADS:
            raise ValueError(f"markov must be '' or one of {', '.join(MARKOV_HEADS)}; got {self.markov!r}")
        if self.markov == "domino" and (self.confidence or self.memory < 1 or self.plain_slots < 0):
            raise ValueError(
                "markov='domino' must have confidence=False, a memory of at least 1 and plain_slots from 0"
            )
        if self.markov and self.markov_rank < 1:
            raise ValueError(f"markov_rank must be at least 1; got {self.markov_rank}")
        check_taps(self.taps, self.target_layers)

    def validate_candidates(self) -> None:
        """Raise ValueError for convolutions or choices that cannot be built; called by `strict`."""
        if not 0 <= self.conv_taps <= self.block:
            raise ValueError(f"conv_taps must be from 0 to {self.block}, the block; got {self.conv_taps}")
        if self.conv_taps and (self.conv_group < 1 or self.hidden_size % self.conv_group):
            raise ValueError(f"conv_group must divide the width {self.hidden_size}; got {self.conv_group}")
        if self.candidates < 1 or min(self.selector_rank, self.lattice_layers) < 0:
            sizes = self.candidates, self.selector_rank, self.lattice_layers
            raise ValueError(
                f"candidates must be at least 1, selector_rank and lattice_layers at least 0; got {sizes}"
            )
        if bool(self.markov) + bool(self.selector_rank) + bool(self.lattice_layers) > 1:
            raise ValueError("markov, selector_rank and lattice_layers exclude each other; got several")
        if self.lattice_layers and (self.anchor_predicts or self.lattice_width % self.lattice_heads):
            rule = "a lattice_width that lattice_heads divide, and anchor_predicts=False"
            raise ValueError(f"lattice_layers must have {rule}; got {self.lattice_width}")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        sizes = super().sizes_for(text, vocabulary) | {"taps": three_taps(int(text.num_hidden_layers))}
        width = int(text.hidden_size)
        shares = {"conv_group": gcd(width, 16), "lattice_width": min(512, width)}
        return sizes | shares | {"markov_rank": min(256, width), "lattice_heads": gcd(width, 8)}

    def layers_config(self) -> Qwen3Config:
        """Return the config of the layers."""
        windows = {
            "layer_types": [kind for kind, _ in self.layers],
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
        }
        convolution = {"conv_taps": self.conv_taps, "conv_group": self.conv_group, "block": self.block}
        settings = self.layer_settings() | windows | convolution | {"sinks": self.sinks}
        return Qwen3Config(vocab_size=1, num_hidden_layers=self.num_layers, **settings)


@strict
class DSparkConfig(DFlashConfig):
    """Config of a DSpark head: every slot predicts, and tokens are taken from left to right."""

    model_type = "mmspec_dspark"

    block: int = 7
    anchor_predicts: bool = True
    markov: str = "vanilla"
    confidence: bool = True


class DFlashHead(DraftingHead):
    """Predicts the tokens after the newest one, each from its own slot, in one pass (DFlash, 2602.06036).

    It uses the embedding of its target, and its output matrix unless `draft_vocabulary` is set.
    """

    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "dflash"
    _supports_sdpa = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, config.layers_config()
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(layers, index) for index in range(config.num_layers))
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        rotary = Qwen3RotaryEmbedding if config.rotary_dim == config.head_dim else PartialRotary
        self.rotary_emb = config.multimodal_rotary() or rotary(layers)
        self.layers_config = layers
        self.mask_embedding = nn.Parameter(torch.empty(width)) if config.mask_token is None else None
        own = config.draft_vocabulary
        self.lm_head = nn.Linear(width, own, bias=False) if own else None
        words = config.draft_size or config.vocabulary
        self.markov_head: MarkovHead | DominoHead | None = None
        if config.markov == "domino":
            self.markov_head = DominoHead(width, config.memory, config.markov_rank, words)
        elif config.markov:
            self.markov_head = MarkovHead(config, words)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.lilicorr = LatticeCorrelator(config) if config.lattice_layers else None
        reads = width + (config.markov_rank if config.markov and config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(reads) if config.confidence else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.mask_embedding is not None:
            nn.init.normal_(self.mask_embedding, std=self.config.initializer_range)
        if isinstance(module, GroupedConvolution):  # at first each slot passes unchanged
            module.base_kernel.data.zero_()[:, 0] = 1
            nn.init.zeros_(module.kernel_projection.weight)
        if isinstance(module, CandidateSelector):  # at first no token prefers any other
            nn.init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            nn.init.zeros_(module.successor_codebook)

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states at the taps, each [..., d] -> rows of the context [..., d]."""
        rows: Tensor = self.hidden_norm(self.fc(torch.cat([*states], dim=-1)))
        return rows

    def slots(self, newest: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of blocks [..., n, d], the input of the first layer.

        Args:
            newest: [...] the first tokens of the blocks.
            embed: the target's embedding.
        """
        known = embed(newest)[..., None, :]
        if self.mask_embedding is not None:
            noise = self.mask_embedding.to(known)
        else:
            noise = embed(torch.full_like(newest.flatten()[:1, None], self.config.mask_token or 0))[0, 0]
        rows = torch.cat([known, noise.expand(*known.shape[:-2], self.config.block - 1, -1)], -2)
        return rows * self.config.embedding_scale

    def near(self, asking: Tensor, keys: Tensor) -> list[Tensor]:
        """Masks of each layer, [..., n, m]: whether slots at indices [..., n] see rows at [..., m]."""
        window = self.config.sliding_window
        rules = [(window if kind == SLIDING else None, causal) for kind, causal in self.config.layers]
        made = {rule: near(asking, keys, *rule) for rule in {*rules}}
        return [made[rule] for rule in rules]

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        positions: Tensor,
        mask: Tensor | Sequence[Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Denoise blocks, and keep the rows of the context.

        Args:
            block: [B, n, d] from `slots`; n may be 0, to read a context alone.
            context: [B, c, d] from `join`, the new rows.
            positions: [B or 1, c + n] of all of them, or [3, B or 1, c + n].
            mask: see `BlockAttention`, or one for each layer; None without earlier rows, for the config's
                windows alone.
            cache: of earlier rows.

        Returns:
            [B, n, d] normed states of the slots.
        """
        turns = self.rotary_emb(context, positions)
        plain = not any(self.config.causal) and self.config.sliding_window is None
        if mask is None and not plain:
            index = torch.arange(positions.shape[-1], device=block.device)[None]
            mask = [seen[:, None] for seen in self.near(index[:, context.shape[1] :], index)]
        masks = [mask] * len(self.layers) if mask is None or isinstance(mask, Tensor) else mask
        for layer, seen in zip(self.layers, masks, strict=True):
            block = layer(block, context, turns, seen, cache)
        states: Tensor = self.norm(block)
        return states

    def logits(self, hidden: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., V or V'] of the slots' states [..., d], without the correction by tokens before."""
        logits: Tensor = read_out(hidden) if self.lm_head is None else self.lm_head(hidden)
        logits, bound = logits * self.config.logit_scale, self.config.logit_cap
        return (logits / bound).tanh() * bound if bound else logits

    @property
    def has_candidates(self) -> bool:
        """Whether it chooses among the likeliest tokens of each slot."""
        return self.candidate_selector is not None or self.lilicorr is not None

    def lattice(
        self,
        hidden: Tensor,
        logits: Tensor,
        anchor: Tensor,
        embed: Callable[[Tensor], Tensor],
        ranked: Tensor | None = None,
    ) -> Lattice:
        """The candidates of slots with states [R, D, d] and logits [R, D, V'].

        Args:
            hidden, logits: of the slots.
            anchor: [R, d] the rows of the context that predicted the newest tokens.
            embed: the target's embedding.
            ranked: [R, D, V'] logits whose best are the candidates, `logits` if None.
        """
        ranked = logits if ranked is None else ranked
        index = ranked.topk(min(self.config.candidates, logits.shape[-1]), -1).indices
        best = logits.gather(-1, index)
        tokens = index if self.draft_tokens is None else self.draft_tokens[index]
        if self.lilicorr is None:
            return Lattice(index, tokens, best)
        log_p = best.float() - logits.float().logsumexp(-1, keepdim=True)
        embeddings = embed(tokens.flatten(1)).unflatten(1, tokens.shape[1:]).to(hidden.dtype)
        return Lattice(index, tokens, best, *self.lilicorr(embeddings, log_p, hidden, anchor))

    def scores(self, lattice: Lattice, level: int, before: Tensor, hidden: Tensor) -> Tensor:
        """Scores [R, w, k] of a level's candidates after tokens [R, w], for slots with states [R, w, d]."""
        if self.candidate_selector is None:
            return lattice.transitions(level, before)
        scores: Tensor = self.candidate_selector(lattice, level, before, hidden)
        return scores

    def told(
        self,
        level: int,
        before: Tensor,
        hidden: Tensor,
        state: Tensor | None,
        embed: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the bias of slots' logits by the tokens [...] before them, for states [..., d] of the slots.

        `level` is that of the slots in their blocks, 0 for the first that predicts; `state` is that of the
        level before. Returns [..., V'], and the state for the next level, None if there is none.
        """
        if isinstance(self.markov_head, DominoHead):
            bias, after = self.markov_head(embed(before), hidden, state)
            return (bias if level >= self.config.plain_slots else torch.zeros_like(bias)), after
        if self.markov_head is None:
            return hidden.new_zeros(()), None
        corrected: tuple[Tensor, Tensor | None] = self.markov_head(before, hidden, state)
        return corrected

    def confidences(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits [...] of the acceptance of slots with states [..., d] after tokens [...]."""
        if self.confidence_head is None:
            return torch.full_like(hidden[..., 0], torch.inf)
        if isinstance(self.markov_head, MarkovHead) and self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(before)], -1)
        logits: Tensor = self.confidence_head(hidden)
        return logits


class DSparkHead(DFlashHead):
    """Predicts as DFlash does, with each token depending on the one before it (DSpark, 2607.05147)."""

    config: DSparkConfig
    config_class = DSparkConfig
    base_model_prefix = "dspark"
