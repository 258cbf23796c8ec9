"""Common parts of the tiny vision-language families: the sizes of their models, and their weights."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from .processors import VOCABULARY_SIZE, WORDS
from .weights import randomise

__all__ = ["CLIP", "TEXT", "TILE", "Family", "finish"]

Family = tuple[PreTrainedModel, ProcessorMixin]

FIRST_WORD = 4  # <pad>, <s>, </s> and <unk> come first
TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CLIP: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=28,
    patch_size=14,
    projection_dim=32,
)
TILE: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
)


def finish(model: PreTrainedModel, processor: ProcessorMixin, seed: int) -> Family:
    """Draw the weights; only words may be the arg-max."""
    silent = [i for i in range(VOCABULARY_SIZE) if not FIRST_WORD <= i < FIRST_WORD + len(WORDS)]
    return randomise(model, seed, silent_ids=silent), processor
