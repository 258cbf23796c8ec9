"""The configs of DFlash and DSpark heads."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3Config

from mmspec.models.eagle3.configuration import three_taps
from mmspec.models.feature_head import HIDDEN
from mmspec.models.published_layer import FULL, SLIDING, PublishedLayerConfig

__all__ = ["MARKOV_HEADS", "MAX_SLOTS", "DFlashConfig", "DSparkConfig"]

MAX_SLOTS = 64
MARKOV_HEADS = ("vanilla", "gated", "rnn", "domino")


@strict
class DFlashConfig(PublishedLayerConfig):
    """Config of a head that denoises a block of tokens in one pass, with layers of Qwen3.

    Positions have one axis: a row's is the index of its token.

    Attributes:
        taps: hidden states of the target that are read: k for what enters layer k, -1 for the final one.
        num_layers: of the head.
        block: slots of a pass: the newest token, which is known, and noise.
        anchor_predicts: whether the slot of the newest token predicts what follows it, so that a pass gives
            as many tokens as it has slots; otherwise one less, and each slot of noise predicts itself.
        mask_token: the target's token whose embedding is the noise; None for an embedding of the head's own.
        draft_vocabulary: tokens that the head's own output matrix knows; 0 if it uses the target's.
        markov: what the token before says about each slot (DSpark): "", "vanilla", "gated" or "rnn"; or what
            all tokens of the block before it say: "domino".
        markov_rank: width of that.
        memory: width of what a Domino head remembers of those tokens.
        plain_slots: predictions of a block, the first ones, that a Domino head leaves as they are.
        confidence: whether a slot is judged by how likely it is to be accepted.
        confidence_with_markov: whether that knows the token before, by its embedding in the Markov head.
        layer_types: "full_attention", or "sliding_attention" with the window, of each layer; empty if all are
            alike: with the window where there is one.
        causal: whether the slots of a block see those before them alone, in each layer; empty if in none.
        sinks: whether a part of the attention of each head goes nowhere, as in gpt-oss.
        num_draft_tokens, top_k: the tree where nothing else is asked for; `top_k=1` is a chain, as published.
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
    confidence: bool = False
    confidence_with_markov: bool = True
    layer_types: list[str] = field(default_factory=list)
    causal: list[bool] = field(default_factory=list)
    sinks: bool = False
    num_draft_tokens: int = MAX_SLOTS
    top_k: int = 1

    @property
    def depth(self) -> int:
        """Tokens that a pass predicts: depth of the tree that is grown where nothing else is asked for."""
        return self.block - (not self.anchor_predicts)

    @property
    def layers(self) -> list[tuple[str, bool]]:
        """Type of each layer, and whether its slots see those before them alone."""
        every = FULL if self.sliding_window is None else SLIDING
        types = self.layer_types or [every] * self.num_layers
        return [*zip(types, self.causal or [False] * self.num_layers, strict=True)]

    def validate_layers(self) -> None:
        """Refuse what is not said of every layer; called by `strict`."""
        types, window = self.layer_types, self.sliding_window
        known = {FULL} if window is None else {FULL, SLIDING}
        if types and (len(types) != self.num_layers or not {*types} <= known):
            allowed = f"{' or '.join(sorted(known))} for each of {self.num_layers} layers"
            raise ValueError(f"layer_types: got {types} with sliding_window {window}; {allowed}")
        if self.causal and len(self.causal) != self.num_layers:
            raise ValueError(f"causal: got {self.causal}; one for each of {self.num_layers} layers")
        noise = self.mask_token
        if noise is not None and self.vocabulary and not 0 <= noise < self.vocabulary:
            raise ValueError(
                f"mask_token: got {noise}; from 0 to {self.vocabulary - 1}, tokens of the target"
            )
        if self.mlp_bias:
            raise ValueError("mlp_bias: got True; False, as these layers have none")

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if self.depth < 1 or self.block > MAX_SLOTS:
            raise ValueError(f"block: got {self.block}; 2 to {MAX_SLOTS} slots in a pass")
        if self.num_layers < 1:
            raise ValueError(f"num_layers: got {self.num_layers}; 1 or more")
        if self.markov and self.markov not in MARKOV_HEADS:
            raise ValueError(f"markov: got {self.markov!r}; one of {', '.join(MARKOV_HEADS)}, or ''")
        if self.markov == "domino" and (self.confidence or self.memory < 1 or self.plain_slots < 0):
            raise ValueError(
                "markov: got 'domino'; it has no confidence, a memory of 1 or more, plain_slots from 0"
            )
        if self.markov and self.markov_rank < 1:
            raise ValueError(f"markov_rank: got {self.markov_rank}; 1 or more")
        deepest = self.target_layers - 1 if self.target_layers else max(self.taps, default=0)
        if not self.taps or any(not HIDDEN <= tap <= deepest for tap in self.taps):
            raise ValueError(f"taps: got {self.taps}; from -1 to {deepest}")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of layers like the target's, and three taps."""
        sizes = super().sizes_for(text, vocabulary) | {"taps": three_taps(int(text.num_hidden_layers))}
        return sizes | {"markov_rank": min(256, int(text.hidden_size))}

    def layers_config(self) -> Qwen3Config:
        """The config of the layers."""
        windows = {
            "layer_types": [kind for kind, _ in self.layers],
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
        }
        settings = self.layer_settings() | windows | {"sinks": self.sinks}
        return Qwen3Config(vocab_size=1, num_hidden_layers=self.num_layers, **settings)


@strict
class DSparkConfig(DFlashConfig):
    """Config of a DSpark head: every slot predicts, and tokens are taken from left to right."""

    model_type = "mmspec_dspark"

    block: int = 7
    anchor_predicts: bool = True
    markov: str = "vanilla"
    confidence: bool = True
