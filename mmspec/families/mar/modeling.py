"""MAR: a masked autoencoder that conditions the diffusion of each token on known tokens (2406.11838)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from huggingface_hub.dataclasses import strict
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.vectors.denoising_head import DenoisingHead, DenoisingHeadConfig

__all__ = ["SIZES", "MARConfig", "MARForImageGeneration", "Size"]

EPS = 1e-6  # of every LayerNorm
INITIAL_STD = 0.02


class Size(NamedTuple):
    """Layers of the encoder (and of the decoder), attention heads, width; depth and width of the head."""

    layers: int
    heads: int
    width: int
    head_depth: int
    head_width: int


#: The sizes of the paper (2406.11838), by the names of their folders.
SIZES = {
    "mar_base": Size(12, 12, 768, 6, 1024),
    "mar_large": Size(16, 16, 1024, 8, 1280),
    "mar_huge": Size(20, 16, 1280, 12, 1536),
}


@strict
class MARConfig(PreTrainedConfig):
    """Config of a MAR.

    Attributes:
        hidden_size: width D of encoder and decoder.
        encoder_layers, decoder_layers: blocks of each.
        num_attention_heads: attention heads of a block.
        mlp_ratio: inner width of the feed-forward network, as a multiple of D.
        token_size: size d of a token, which is one latent: its channels.
        grid_size: tokens per side of the image, 16 for 256 pixels.
        buffer_size: tokens of the class before those of the image.
        num_classes: number of labels; `num_classes` itself is the null class.
        head_width, head_depth: width and residual blocks of the diffusion head.
        scaling_factor: factor of the latents in training, for a model without an autoencoder beside it.

    Example:
        >>> MARConfig.from_size("mar_large").hidden_size
        1024
    """

    model_type = "mar"

    hidden_size: int = 768
    encoder_layers: int = 12
    decoder_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: float = 4.0
    token_size: int = 16
    grid_size: int = 16
    buffer_size: int = 64
    num_classes: int = 1000
    head_width: int = 1024
    head_depth: int = 6
    scaling_factor: float | None = None

    def validate_architecture(self) -> None:
        """Raise ValueError for impossible sizes; called by `strict`."""
        if self.hidden_size % self.num_attention_heads:
            rule = f"must be a multiple of the {self.num_attention_heads} heads"
            raise ValueError(f"hidden_size {rule}; got {self.hidden_size}")

    @classmethod
    def from_size(cls, size: str) -> MARConfig:
        """Return the config of a published size, by its name in `SIZES`."""
        layers, heads, width, head_depth, head_width = SIZES[size]
        return cls(
            hidden_size=width,
            encoder_layers=layers,
            decoder_layers=layers,
            num_attention_heads=heads,
            head_width=head_width,
            head_depth=head_depth,
        )

    @property
    def condition_type(self) -> str:
        """Kind of condition: "class"; the name is that of LlamaGen's config."""
        return "class"

    @property
    def image_tokens(self) -> int:
        """Tokens N of an image."""
        return self.grid_size**2


class MARForImageGeneration(PreTrainedModel):
    """MAR with the names of its published weights.

    Attention is bidirectional, so that no cache is exact: every new token changes the conditions of all
    others.

    Args:
        config: config of the model.

    Attributes:
        diffloss: the denoising head, of kind "ddpm".
    """

    config_class = MARConfig
    config: MARConfig
    main_input_name = "tokens"
    _input_embed_layer = "class_emb"
    _no_split_modules = ["Block"]

    def __init__(self, config: MARConfig) -> None:
        super().__init__(config)
        width, places = config.hidden_size, config.buffer_size + config.image_tokens
        norm: Any = partial(nn.LayerNorm, eps=EPS)
        block = partial(
            Block,
            dim=width,
            num_heads=config.num_attention_heads,
            mlp_ratio=config.mlp_ratio,
            qkv_bias=True,
            norm_layer=norm,
        )
        self.class_emb = nn.Embedding(config.num_classes, width)
        self.fake_latent = nn.Parameter(torch.zeros(1, width))  # the null class
        self.z_proj = nn.Linear(config.token_size, width)
        self.z_proj_ln = nn.LayerNorm(width, eps=EPS)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, places, width))
        self.encoder_blocks = nn.ModuleList(block() for _ in range(config.encoder_layers))
        self.encoder_norm = nn.LayerNorm(width, eps=EPS)
        self.decoder_embed = nn.Linear(width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, places, width))
        self.decoder_blocks = nn.ModuleList(block() for _ in range(config.decoder_layers))
        self.decoder_norm = nn.LayerNorm(width, eps=EPS)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, config.image_tokens, width))
        self.diffloss = DenoisingHead(
            DenoisingHeadConfig(config.token_size, width, config.head_width, config.head_depth, "ddpm")
        )
        self.post_init()
        self.diffloss.net.initialize()  # its layers are initialised differently

    def _init_weights(self, module: nn.Module) -> None:
        """As published: Xavier for linear layers, and a normal distribution for embeddings."""
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
        elif isinstance(module, MARForImageGeneration):
            for weight in module.parameters(recurse=False):
                nn.init.normal_(weight, std=INITIAL_STD)

    def forward(self, tokens: Tensor, known: Tensor, labels: Tensor) -> Tensor:
        """Return the conditions of all tokens; see `conditions`."""
        return self.conditions(tokens, known, labels)

    def conditions(self, tokens: Tensor, known: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
        """Read the known tokens and return the conditions of all.

        Rows may have different numbers of known tokens; the result of a row does not depend on the others.
        The encoder reads known tokens alone, so that its length depends on their number. Without `count` the
        numbers are read from the device, once per call.

        Args:
            tokens: [B, N, d] tokens; values at unknown places are never read.
            known: [B, N] bool.
            labels: [B] classes; `config.num_classes` for the null class.
            count: number of known tokens, if it is the same in all rows whose result is used.

        Returns:
            [B, N, D] conditions of the head, at known places too.
        """
        counts = known.sum(1)
        fewest, most = torch.stack(counts.aminmax()).tolist() if count is None else (count, count)
        order, is_seen = known_first(known, counts, most)
        hidden = self.encoder_inputs(tokens, order, labels)
        mask = None if fewest == most else self.key_mask(is_seen, hidden.dtype)
        for block in self.encoder_blocks:
            hidden = block(hidden, attn_mask=mask)
        hidden = self.decoder_inputs(self.features(hidden), order, is_seen)
        for block in self.decoder_blocks:
            hidden = block(hidden)
        return self.read_out(hidden)

    def _classes(self, labels: Tensor) -> Tensor:
        """[B, D] embeddings of classes or of the null class."""
        is_null = labels == self.config.num_classes
        embedded = self.class_emb(labels.masked_fill(is_null, 0))
        return torch.where(is_null[:, None], self.fake_latent, embedded)

    def encoder_inputs(self, tokens: Tensor, order: Tensor, labels: Tensor) -> Tensor:
        """[B, buffer + n, D] of the classes and of the tokens at `order` [B, n]."""
        buffer = self.config.buffer_size
        read = self.z_proj(_rows(tokens, order).to(self.z_proj.weight.dtype))
        places = self.encoder_pos_embed_learned
        at = _rows(places[:, buffer:].expand(len(tokens), -1, -1), order)
        before = self._classes(labels)[:, None] + places[:, :buffer]
        hidden: Tensor = self.z_proj_ln(torch.cat([before, read + at], dim=1))
        return hidden

    def key_mask(self, is_seen: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, 1, buffer + n] of the encoder's attention: -inf at tokens that are not seen.

        It is additive, as timm's unfused attention requires.
        """
        is_padding = torch.cat([is_seen.new_zeros(len(is_seen), self.config.buffer_size), ~is_seen], dim=1)
        zeros = torch.zeros_like(is_padding, dtype=dtype)
        return zeros.masked_fill(is_padding, float("-inf"))[:, None, None]

    def features(self, hidden: Tensor) -> Tensor:
        """Decoder inputs of the encoder's tokens, from hidden states after its last block."""
        features: Tensor = self.decoder_embed(self.encoder_norm(hidden))
        return features

    def decoder_inputs(self, features: Tensor, order: Tensor, is_seen: Tensor) -> Tensor:
        """[B, buffer + N, D] of features [B, buffer + n, D], with mask tokens at all other places.

        Features after the buffer are at the places `order` [B, n].
        """
        buffer, count = self.config.buffer_size, self.config.image_tokens
        mask_token = self.mask_token.to(features.dtype)
        image = mask_token.repeat(len(features), count, 1)
        seen = torch.where(is_seen[..., None], features[:, buffer:], mask_token)
        image = image.scatter(1, order[..., None].expand_as(seen), seen)
        return torch.cat([features[:, :buffer], image], dim=1) + self.decoder_pos_embed_learned

    def read_out(self, hidden: Tensor) -> Tensor:
        """[B, N, D] conditions, from hidden states [B, buffer + N, D] after the last block of the decoder."""
        normed: Tensor = self.decoder_norm(hidden)
        return normed[:, self.config.buffer_size :] + self.diffusion_pos_embed_learned

    def unpatchify(self, tokens: Tensor, rows: int | None = None, columns: int | None = None) -> Tensor:
        """Latents [B, d, g, g] of image tokens [B, g * g, d], for the autoencoder after its scaling.

        `rows` and `columns` are ignored: the image is a square of side g.
        """
        return rearrange(tokens, "b (h w) c -> b c h w", h=self.config.grid_size)


def known_first(known: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """[B, most] places of each row, known ones first, and which of them are known."""
    order = (~known).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return order, torch.arange(most, device=known.device) < counts[:, None]


def _rows(values: Tensor, order: Tensor) -> Tensor:
    """[B, n, D] of values [B, N, D] at the places [B, n]."""
    return values.gather(1, order[..., None].expand(-1, -1, values.shape[-1]))
