"""NextStep-1: a Llama over text and continuous image tokens, with a flow-matching head (2508.10711)."""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedModel, PreTrainedTokenizerBase

from mmspec.errors import CheckpointError, InputError
from mmspec.transformers_versions import CACHE_NAMES
from mmspec.vectors.denoising_head import DenoisingHead, DenoisingHeadConfig

MAX_PERIOD = 10_000

IMAGE_AREA, BEGIN_OF_IMAGE = "<|image_area|>", "<|begin_of_image|>"
#: Tokens added to the tokenizer (`stepfun-ai/NextStep-1, nextstep/models/tokenization_nextstep.py`).
SPECIAL_TOKENS = (
    IMAGE_AREA,
    BEGIN_OF_IMAGE,
    "<|end_of_image|>",
    "<|image_placeholder|>",
    "<|begin_of_prompt_refinement|>",
    "<|end_of_prompt_refinement|>",
    "<|begin_of_thinking|>",
    "<|end_of_thinking|>",
)


class NextStepConfig(LlamaConfig):
    """Config of NextStep-1: Llama's, with image tokens and the head that predicts them.

    The published models have the decoder of Qwen2.5 (biases of queries, keys and values, but not of outputs).

    Attributes:
        latent_size: latents per side of the training images.
        latent_patch_size: latents per side p of a token.
        latent_channels: channels C of a latent; a token has C * p * p numbers.
        boi, eoi: ids of the tokens before and after an image.
        image_placeholder_id: id that stands for an image token in text.
        fm_head_dim, fm_head_layers: width and residual blocks of the head.
        use_gen_pos_embed: whether an embedding of a token's place is added to the hidden state before it.
        fm_condition_size: size of the head's condition; None for the hidden size, as published.
        scaling_factor, shift_factor: normalisation of the latents in training, for a model without an
            autoencoder beside it.
        gen_pos_grid: places per side of the table of embeddings, 0 for no table; not in published configs.
        o_attention_bias: whether outputs of attention have a bias; None for the value of `attention_bias`.
    """

    model_type = "nextstep"

    latent_size: int = 32
    latent_patch_size: int = 2
    latent_channels: int = 16
    boi: int | None = None
    eoi: int | None = None
    image_placeholder_id: int | None = None
    fm_head_dim: int = 1536
    fm_head_layers: int = 12
    fm_condition_size: int | None = None
    scaling_factor: float | None = None
    shift_factor: float | None = None
    use_gen_pos_embed: bool = False
    gen_pos_grid: int = 32
    o_attention_bias: bool | None = None

    def __post_init__(self, **kwargs: object) -> None:
        if self.o_attention_bias is None:
            self.o_attention_bias = self.attention_bias
        super().__post_init__(**kwargs)

    @property
    def token_size(self) -> int:
        """Size d of an image token."""
        return self.latent_channels * self.latent_patch_size**2


class NextStepForImageGeneration(PreTrainedModel):
    """NextStep-1 with the names of its published weights and the interface of any transformers decoder.

    It returns the conditions of its image head, whose `process` makes distributions of them. Text is only
    read: the text head is loaded with the other weights, but not used.

    Args:
        config: config of the model.
    """

    config_class = NextStepConfig
    config: NextStepConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlamaDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\."]  # tables that old versions of transformers saved
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # if the config ties them
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    gen_pos_embed: Tensor
    _unregistered: tuple[nn.Module]

    def __init__(self, config: NextStepConfig) -> None:
        super().__init__(config)
        decoder: Any = LlamaModel(config)
        if config.o_attention_bias != config.attention_bias:
            for layer in decoder.layers:
                projection = layer.self_attn.o_proj
                layer.self_attn.o_proj = nn.Linear(
                    projection.in_features, projection.out_features, bias=bool(config.o_attention_bias)
                )
        # published weights have no prefix, so that the decoder's parts are registered, not the decoder
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
        self.image_head.net.initialize()  # its layers are initialised differently

    def get_decoder(self) -> nn.Module:
        return self._unregistered[0]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = self.get_decoder().embed_tokens = value

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids [B, n] or image tokens [B, n, d] for the first layer, [B, n, D]."""
        reads_image = tokens.is_floating_point()
        embedded: Tensor
        if reads_image:
            embedded = self.image_in_projector(tokens.to(self.image_in_projector.weight.dtype))
        else:
            embedded = self.embed_tokens(tokens)
        return embedded

    def forward(self, tokens: Tensor, output_index: Tensor | None = None, **arguments: object) -> Tensor:
        """Read tokens and return the conditions of those that follow.

        Args:
            tokens: [B, n] ids, or [B, n, d] image tokens.
            output_index: [B, n] index in the output of the image token after each token, from 0; negative if
                none follows. Used only with `config.use_gen_pos_embed`.
            arguments: arguments of the decoder: its cache, `attention_mask`, `position_ids`, ...

        Returns:
            [B, n, D] conditions of the image head.

        Raises:
            InputError: the model adds embeddings of places, and `output_index` is None.
        """
        hidden = self.get_decoder()(inputs_embeds=self.embed(tokens), **arguments).last_hidden_state
        if self.config.use_gen_pos_embed:
            if output_index is None:
                rule = "must be passed: this model adds embeddings of the output's places"
                raise InputError("output_index", None, rule)
            hidden = hidden + self._places(output_index)
        conditions: Tensor = self.image_out_projector(hidden)
        return conditions

    def _places(self, output_index: Tensor) -> Tensor:
        """[B, n, D] embeddings of places of the output; zero for negative ones.

        The table is indexed by the output index for any shape of the image, as published
        (`stepfun-ai/NextStep-1, nextstep/models/pipeline_nextstep.py`). Drafts may reach beyond its end.
        """
        table = self.gen_pos_embed[0]
        embedded: Tensor = table[output_index.clamp(0, len(table) - 1)]
        return embedded * (output_index >= 0)[..., None]

    def unpatchify(self, tokens: Tensor, rows: int | None = None, columns: int | None = None) -> Tensor:
        """Latents [B, C, rows * p, columns * p] of image tokens; by default of a square image."""
        count, size = tokens.shape[1], self.config.latent_patch_size
        if rows is None and columns is None:
            rows = columns = math.isqrt(count)
        if rows is None or columns is None or rows * columns != count:
            raise InputError("rows, columns", (rows, columns), f"must be those of an image of {count} tokens")
        return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, w=columns, p=size, q=size)


def place_embeddings(width: int, side: int) -> Tensor:
    """Return sinusoidal embeddings [side * side, width] of the places of a square, row by row.

    The first half of the width encodes the column and the second the row, each with sines before cosines
    (`stepfun-ai/NextStep-1, nextstep/models/modeling_nextstep.py`; the table of MAE, 2111.06377).
    """
    if width % 4:
        rule = "must be a multiple of 4: rows and columns have sines and cosines"
        raise InputError("hidden_size", width, rule)
    quarter = width // 4
    frequencies = MAX_PERIOD ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    along = torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, width / 2]
    columns = along[None, :, :].expand(side, -1, -1)
    rows = along[:, None, :].expand(-1, side, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).float()


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, config: NextStepConfig, caption: str, rows: int, columns: int
) -> Tensor:
    """Make the prompt of an image: the caption, the size as text, and the begin token.

    Guidance uses a second prompt with a negative caption, which may be empty
    (`stepfun-ai/NextStep-1, nextstep/models/pipeline_nextstep.py`).

    Args:
        tokenizer: tokenizer of the checkpoint.
        config: config of the model.
        caption: text; may be empty.
        rows, columns: image tokens per column and per row.

    Returns:
        [1, L] token ids.

    Raises:
        InputError: the image has no tokens.
        CheckpointError: the tokenizer lacks the tokens around images.
    """
    if min(rows, columns) < 1:
        raise InputError("rows, columns", (rows, columns), "must be at least 1")
    known = tokenizer.get_vocab()
    begin = config.boi if config.boi is not None else known.get(BEGIN_OF_IMAGE)
    if IMAGE_AREA not in known or begin is None:
        raise CheckpointError("tokenizer", type(tokenizer).__name__, f"must have the token {IMAGE_AREA}")
    words = tokenizer(caption).input_ids
    area = tokenizer(f"{IMAGE_AREA}{rows}*{columns}", add_special_tokens=False).input_ids
    return torch.tensor([[*words, *area, begin]], device="cpu")
