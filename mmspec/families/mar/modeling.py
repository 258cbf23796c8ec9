"""MAR: a masked autoencoder that conditions a diffusion of every token on the known ones (2406.11838)."""

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
    """Layers of encoder and decoder each, attention heads and width; depth and width of the head."""

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
    """The shape of a MAR.

    Attributes:
        hidden_size: D, of encoder and decoder.
        encoder_layers, decoder_layers: blocks of each.
        num_attention_heads: of a block.
        mlp_ratio: inner width of the feed-forward, as a multiple of D.
        token_size: numbers d of a token; the channels of a latent, which is one token.
        grid_size: tokens per side of the image, 16 for 256 pixels.
        buffer_size: tokens of the class before those of the image.
        num_classes: labels; `num_classes` itself is the null class.
        head_width, head_depth: of the diffusion head.
        scaling_factor: of the latents that it was trained on, where no autoencoder lies beside it.

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
        """Refuse what cannot be built; called by `strict`."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: got {self.hidden_size}; a multiple of the {self.num_attention_heads} heads"
            )

    @classmethod
    def from_size(cls, size: str) -> MARConfig:
        """The config of a published size, by its name in `SIZES`."""
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
        """Kind of condition: "class", under the name that a LlamaGen's config has for it."""
        return "class"

    @property
    def image_tokens(self) -> int:
        """Tokens N of one image."""
        return self.grid_size**2


class MARForImageGeneration(PreTrainedModel):
    """MAR with the names of its published weights.

    Attention is bidirectional, so no cache is exact: what is known may stand anywhere, and every new token
    changes the conditions of all others.

    Args:
        config: its shape.

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
        self.diffloss.net.initialize()  # its layers are not drawn like the others

    def _init_weights(self, module: nn.Module) -> None:
        """As published: Xavier for layers, and normal numbers for whatever is looked up."""
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
        """As `conditions`."""
        return self.conditions(tokens, known, labels)

    def conditions(self, tokens: Tensor, known: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
        """Read the known tokens and give the conditions of all.

        Rows may know different numbers of tokens; each gets what it gets alone. The encoder sees no unknown
        token, so its length depends on the numbers; where the caller does not know them, they are read from
        the device, once a call.

        Args:
            tokens: [B, N, d]; what stands at unknown places is never read.
            known: [B, N] bool.
            labels: [B] classes; `config.num_classes` for the null class.
            count: known tokens of every row that matters, where all know as many.

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
        """[B, 1, 1, buffer + n] what encoder blocks add to attention scores: tokens not seen [B, n] get -inf.

        Additive, because timm's unfused attention reads masks so.
        """
        is_padding = torch.cat([is_seen.new_zeros(len(is_seen), self.config.buffer_size), ~is_seen], dim=1)
        zeros = torch.zeros_like(is_padding, dtype=dtype)
        return zeros.masked_fill(is_padding, float("-inf"))[:, None, None]

    def features(self, hidden: Tensor) -> Tensor:
        """Give the encoder's tokens as the decoder reads them, from hidden states after the last block."""
        features: Tensor = self.decoder_embed(self.encoder_norm(hidden))
        return features

    def decoder_inputs(self, features: Tensor, order: Tensor, is_seen: Tensor) -> Tensor:
        """[B, buffer + N, D] of features [B, buffer + n, D], with mask tokens wherever none is seen.

        Those behind the buffer stand at `order` [B, n].
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

        `rows` and `columns` are g where they are given.
        """
        return rearrange(tokens, "b (h w) c -> b c h w", h=self.config.grid_size)


def known_first(known: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """[B, most] places of each row's known tokens [B, N] and then of others, and which of them are known."""
    order = (~known).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return order, torch.arange(most, device=known.device) < counts[:, None]


def _rows(values: Tensor, order: Tensor) -> Tensor:
    """[B, n, D] of values [B, N, D] at the places [B, n]."""
    return values.gather(1, order[..., None].expand(-1, -1, values.shape[-1]))
