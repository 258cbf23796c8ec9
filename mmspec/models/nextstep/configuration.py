"""The shape of a NextStep-1 model."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

__all__ = ["NextStepConfig"]


class NextStepConfig(LlamaConfig):
    """The config of NextStep-1: that of a Llama, with its image tokens and the head that predicts them.

    The published models are decoders of Qwen2.5 (biases of queries, keys and values, none of outputs).

    Attributes:
        vae_name_or_path: where the image tokenizer was, when it was published.
        latent_size: latents per side of the images of training.
        latent_patch_size: latents per side p of a token.
        latent_channels: channels C of a latent; a token has C * p * p numbers.
        boi, eoi: ids of the tokens before and after an image.
        image_placeholder_id: id that stands for an image token in text.
        pad_token_id_added: id of the token that the authors added for padding.
        lm_loss_weight, im_loss_weight, fm_head_batch_mul: of training.
        fm_head_dim, fm_head_layers: width and residual blocks of the head.
        use_gen_pos_embed: whether an embedding of its place is added to what predicts a token.
        fm_condition_size: numbers of a condition of the head; None for the hidden size, as published.
        scaling_factor, shift_factor: of the latents of training, where no autoencoder lies beside the model.
        gen_pos_grid: places per side of that table, 0 where there is none; no published config names it.
        o_attention_bias: whether outputs of attention have a bias; None for as `attention_bias`.
    """

    model_type = "nextstep"

    vae_name_or_path: str | None = None
    latent_size: int = 32
    latent_patch_size: int = 2
    latent_channels: int = 16
    boi: int | None = None
    eoi: int | None = None
    image_placeholder_id: int | None = None
    pad_token_id_added: int | None = None
    lm_loss_weight: float = 0.01
    im_loss_weight: float = 1.0
    fm_head_dim: int = 1536
    fm_head_layers: int = 12
    fm_head_batch_mul: int = 4
    fm_condition_size: int | None = None
    scaling_factor: float | None = None
    shift_factor: float | None = None
    use_gen_pos_embed: bool = False
    gen_pos_grid: int = 32
    o_attention_bias: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.o_attention_bias is None:
            self.o_attention_bias = self.attention_bias
        super().__post_init__(**kwargs)

    @property
    def token_size(self) -> int:
        """Numbers d of an image token."""
        return self.latent_channels * self.latent_patch_size**2
