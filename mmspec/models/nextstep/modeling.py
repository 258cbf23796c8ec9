"""NextStep-1: a Llama over words and continuous image tokens, with a flow for its image head (2508.10711)."""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import LlamaModel, PreTrainedModel

from mmspec.errors import InputError
from mmspec.models.denoising import DenoisingHead, DenoisingHeadConfig
from mmspec.models.nextstep.configuration import NextStepConfig
from mmspec.transformers_versions import CACHE_NAMES

__all__ = ["NextStepForImageGeneration", "normalize_tokens", "place_embeddings"]

MAX_PERIOD = 10_000


class NextStepForImageGeneration(PreTrainedModel):
    """NextStep-1 with the names of its published weights and the seams of any transformers decoder.

    It gives what its image head is conditioned on; the head's `process` makes distributions of it. Words are
    read alone: the text head is loaded with the rest, and nothing here calls it.

    Args:
        config: its shape.
    """

    config_class = NextStepConfig
    config: NextStepConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlamaDecoderLayer"]
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # where the config says so
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    gen_pos_embed: Tensor

    def __init__(self, config: NextStepConfig) -> None:
        super().__init__(config)
        decoder: Any = LlamaModel(config)
        if config.o_attention_bias != config.attention_bias:
            for layer in decoder.layers:
                projection = layer.self_attn.o_proj
                layer.self_attn.o_proj = nn.Linear(
                    projection.in_features, projection.out_features, bias=bool(config.o_attention_bias)
                )
        # published weights have no prefix: the decoder's parts are registered here, and not the decoder
        self.embed_tokens, self.layers, self.norm = decoder.embed_tokens, decoder.layers, decoder.norm
        self.rotary_emb = decoder.rotary_emb
        self._unregistered = (decoder,)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.gen_pos_grid:
            places = place_embeddings(config.hidden_size, config.gen_pos_grid)
            self.register_buffer("gen_pos_embed", places[None])
        self.image_in_projector = nn.Linear(config.token_size, config.hidden_size)
        condition_size = config.fm_condition_size or config.hidden_size
        self.image_out_projector = nn.Linear(config.hidden_size, condition_size)
        self.image_head = DenoisingHead(
            DenoisingHeadConfig(
                config.token_size, condition_size, config.fm_head_dim, config.fm_head_layers, "flow"
            )
        )
        self.post_init()
        self.image_head.net.initialize()  # its layers are not drawn like the others

    def get_decoder(self) -> Any:
        return self._unregistered[0]

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.embed_tokens = self.get_decoder().embed_tokens = value

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids [B, n] or image tokens [B, n, d] for the first layer, [B, n, D]."""
        reads_image = tokens.is_floating_point()
        embedded: Tensor
        if reads_image:
            embedded = self.image_in_projector(tokens.to(self.image_in_projector.weight.dtype))
        else:
            embedded = self.embed_tokens(tokens)
        return embedded

    def forward(self, tokens: Tensor, output_index: Tensor | None = None, **arguments: Any) -> Tensor:
        """Read tokens and give the conditions of those that follow.

        Args:
            tokens: [B, n] ids, or [B, n, d] image tokens.
            output_index: [B, n] which image token of the output follows each token, from 0; read only with
                `config.use_gen_pos_embed`. Negative where none follows.
            arguments: of the decoder: its cache, `attention_mask`, `position_ids`, ...

        Returns:
            [B, n, D] conditions of the image head.

        Raises:
            InputError: the model adds embeddings of places, and `output_index` is None.
        """
        hidden = self.get_decoder()(inputs_embeds=self.embed(tokens), **arguments).last_hidden_state
        if self.config.use_gen_pos_embed:
            if output_index is None:
                raise InputError("output_index", None, "the places of the output: this model adds them")
            hidden = hidden + self._places(output_index)
        conditions: Tensor = self.image_out_projector(hidden)
        return conditions

    def _places(self, output_index: Tensor) -> Tensor:
        """[B, n, D] embeddings of places of the output; zero for negative ones.

        The table is read in the order of the output, whatever the shape of the image, as published
        (`stepfun-ai/NextStep-1, nextstep/models/pipeline_nextstep.py`). Drafts may point beyond its end.
        """
        table = self.gen_pos_embed[0]
        embedded: Tensor = table[output_index.clamp(0, len(table) - 1)]
        return embedded * (output_index >= 0)[..., None]

    def patchify(self, latents: Tensor) -> Tensor:
        """Image tokens [B, rows * columns, C * p * p] by rows, of latents [B, C, rows * p, columns * p]."""
        size = self.config.latent_patch_size
        return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=size, q=size)

    def unpatchify(self, tokens: Tensor, rows: int | None = None, columns: int | None = None) -> Tensor:
        """Latents [B, C, rows * p, columns * p] of image tokens [B, rows * columns, C * p * p].

        Args:
            tokens: row by row.
            rows, columns: of the image; both None for a square one.

        Raises:
            InputError: there are not rows * columns tokens.
        """
        count, size = tokens.shape[1], self.config.latent_patch_size
        if rows is None and columns is None:
            rows = columns = math.isqrt(count)
        if rows is None or columns is None or rows * columns != count:
            raise InputError("rows, columns", (rows, columns), f"those of an image of {count} tokens")
        return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, w=columns, p=size, q=size)


def normalize_tokens(tokens: Tensor) -> Tensor:
    """Image tokens [..., d] with mean 0 and variance 1 each.

    The published models whose image tokenizer normalises are sampled so (`use_norm` of
    `stepfun-ai/NextStep-1, nextstep/models/pipeline_nextstep.py`), and read what was normalised.
    """
    return layer_norm(tokens, tokens.shape[-1:], eps=1e-6)


def place_embeddings(width: int, side: int) -> Tensor:
    """Sinusoids [side * side, width] of the places of a square, row by row.

    The first half of the width is of the column, the second of the row; of each, sines come first
    (`stepfun-ai/NextStep-1, nextstep/models/modeling_nextstep.py`; the table of MAE, 2111.06377).

    Raises:
        InputError: the width is no multiple of 4.
    """
    if width % 4:
        raise InputError("hidden_size", width, "a multiple of 4: rows and columns have sines and cosines")
    quarter = width // 4
    frequencies = MAX_PERIOD ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    along = torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, width / 2]
    columns = along[None, :, :].expand(side, -1, -1)
    rows = along[:, None, :].expand(-1, side, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).float()
