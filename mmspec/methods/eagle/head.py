"""The EAGLE head, called as any transformers decoder: with a Cache, a 4-D mask and position_ids.

It uses the frozen output matrix of its target, and its embedding unless the config sets `own_embedding`.
"""

from __future__ import annotations

from dataclasses import field, replace

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import pad

from mmspec.compressors import build_compressor
from mmspec.core.indexing import take
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.heads.layers import TargetLayerConfig, single_layer
from mmspec.heads.model import FeatureHead, Prompts
from mmspec.open_types import Keywords
from mmspec.visual_tokens.splice import PromptRows, compress_images, splice

__all__ = ["EagleConfig", "EagleHead"]

VISUAL = ("fused", "embedded")


@strict
class EagleConfig(TargetLayerConfig):
    """Config of an EAGLE head, which has one decoder layer of its target's own family.

    Attributes:
        bias: whether the fusion of embedding and hidden state has one.
        input_norm: whether the layer begins with a norm, as SpecVLM's (2509.11815) and those trained by
            mmspec; EAGLE's own heads have none.
        visual: content of the row of a visual token: "fused", as for text, from its embedding and the hidden
            state before it (EAGLE); or "embedded", its embedding alone (MSD, 2505.14260).
        compressor, compressor_options: compression of each image before that; see `mmspec.compressors`.
            With "fused", "gate" is SpecVLM (2509.11815); with "embedded", "vispec" is ViSpec (2509.15235);
            "none" hides images from the head (HiViS, 2509.23928).
        own_embedding: whether it embeds tokens with a matrix of its own, and all slots of a prompt as token
            0, as LANTERN's drafters for LlamaGen do (2410.03355).
        one_axis: whether positions count tokens, although the target's positions have several axes in images
            (ViSpec's release for Qwen2.5-VL).
        num_draft_tokens, depth, top_k: the default dynamic tree. Deep trees suit text; wide ones suit images,
            whose distributions are flat.
    """

    model_type = "mmspec_eagle"

    bias: bool = True
    input_norm: bool = True
    visual: str = "fused"
    compressor: str = "identity"
    compressor_options: Keywords = field(default_factory=dict)
    own_embedding: bool = False
    one_axis: bool = False
    depth: int = 5

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that cannot be built; called by `strict`."""
        if self.visual not in VISUAL:
            raise ValueError(f"visual must be one of {', '.join(VISUAL)}; got {self.visual!r}")


class EagleHead(FeatureHead):
    """Predicts the hidden state of a token from the token and the hidden state before it.

    Row t of its input holds the embedding of token t and the target's final hidden state at t - 1; its
    output imitates the target's at t. No norm follows the layer, because the imitated states are normed
    already. The layer begins with a norm unless the config removes it, as in EAGLE's release.

    Raises:
        InputError: there is no such compressor, or its summary is not one of embeddings.
        UnsupportedModelError: the layers have no norm that could be removed.
    """

    config: EagleConfig
    config_class = EagleConfig
    base_model_prefix = "eagle"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        visual = width if config.visual == "embedded" else 2 * width
        self.compressor = build_compressor(config.compressor, visual, **config.compressor_options)
        self.img_fc: nn.Linear | None = None
        if self.compressor.summarises:
            if visual > width:
                rule = f"must be 'embedded': the compressor {config.compressor} summarises embeddings"
                raise InputError("visual", config.visual, rule)
            self.img_fc = nn.Linear(2 * width, width, bias=config.bias)
        self.embed_tokens = nn.Embedding(config.vocabulary, width) if config.own_embedding else None
        self.decoder = single_layer(config.layer_config())
        if not config.input_norm:
            first = self.decoder.get_submodule("layers.0")
            if not hasattr(first, "input_layernorm"):
                kind = type(self.decoder).__name__
                raise UnsupportedModelError(
                    f"The layers of {kind} do not begin with a norm; use input_norm=True."
                )
            first.input_layernorm = nn.Identity()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.img_fc:
            nn.init.eye_(module.weight)  # [I, 0]: the initial head ignores summaries of images
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif all(module is not part for part in self.compressor.modules()):  # it has its own initialisation
            super()._init_weights(module)

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """Make rows as every head does; `summary` may also be [B, n, d], of another image for each row."""
        if self.img_fc is not None:
            extra = torch.zeros_like(features) if summary is None else summary  # zeros: no image
            extra = extra if extra.dim() == features.dim() else extra[:, None].expand_as(features)
            features = self.img_fc(torch.cat([features, extra], dim=-1))
        fused: Tensor = self.fc(torch.cat([embeddings, features], dim=-1))
        return fused

    def read_prompts(self, prompts: Prompts) -> PromptRows:
        """Make the rows of whole prompts, without that of the first token.

        The compressor reads the content of visual rows: embedding and hidden state side by side [2d], or the
        embedding alone [d]. A question is a row of text in the same space.
        """
        embeddings = prompts.embeddings
        if self.embed_tokens is not None:
            embeddings = self.embed_tokens.weight[0].expand_as(embeddings)
        joined = torch.cat([embeddings, pad(prompts.features[:, :-1], (0, 0, 1, 0))], dim=-1)
        asked, visual = take(joined, prompts.questions), joined
        embedded = self.config.visual == "embedded"
        if embedded:
            asked, visual = self.fuse(*asked.chunk(2, -1)), embeddings
        compressed = compress_images(self.compressor, visual, prompts.spans, asked)
        wide = pad(compressed.features, (0, joined.shape[-1] - visual.shape[-1]))
        spliced = splice(joined, prompts.lengths, prompts.spans, replace(compressed, features=wide))
        summaries = newest = None
        if compressed.summary is not None:
            summaries = pad(compressed.summary, (0, 0, 1, 0))[spliced.image + 1]  # zeros before all images
            ends = zip(summaries, spliced.lengths, strict=True)
            newest = torch.stack([row[length - 1] for row, length in ends])
        own, before = spliced.rows.chunk(2, -1)
        rows = self.fuse(own, before, summaries)
        if embedded:
            rows = rows.where(spliced.source[..., None] >= 0, own)
        left = [length - 1 for length in spliced.lengths]
        return PromptRows(rows[:, 1:], left, spliced.source[:, 1:], spliced.slot[:, 1:], newest)
