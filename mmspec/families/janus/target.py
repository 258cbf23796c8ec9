"""Target of Janus and Janus-Pro (2410.13848, 2501.17811); image tokens have their own table and head."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import JanusForConditionalGeneration

from mmspec.core.image_grid import ImageGrid
from mmspec.errors import InputError
from mmspec.models.weights import execution_device
from mmspec.open_types import Processor
from mmspec.targets.image_tokens import AnyVQ
from mmspec.targets.text_vocabulary import IdsPair, TextPromptTarget, plain_ids, special_ids

__all__ = ["JanusTarget"]

BEGIN_OF_IMAGE = "<begin_of_image>"


class JanusTarget(TextPromptTarget):
    """Adapter from `JanusForConditionalGeneration`, with its image tokenizer, to the Target interface.

    Args:
        model: a loaded Janus or Janus-Pro.
        vq: must be None.
        codebook: [K, d]; None for that of the model.
    """

    only_size = "the only size that Janus draws"
    published = {"guidance_scale": 5.0}

    def __init__(
        self, model: JanusForConditionalGeneration, vq: AnyVQ = None, codebook: Tensor | None = None
    ) -> None:
        if vq is not None:
            rule = "must be None: a Janus checkpoint contains its image tokenizer"
            raise InputError("vq", type(vq).__name__, rule)
        own = model.model.vqmodel
        config = own.config
        grid = ImageGrid(config.num_patches, config.num_patches, config.num_embeddings)
        stride = 2 ** (len(config.channel_multiplier) - 1)
        super().__init__(model, grid, stride=stride, vq=own, codebook=codebook)

    def prompt_ids(self, text: str, negative: str | None, grid: ImageGrid, tokenizer: Processor) -> IdsPair:
        """A turn, then begin-of-image; the unconditional prompt has as many padding tokens, unmasked."""
        newer = "<|User|>" in tokenizer.get_vocab()
        user, assistant = ("<|User|>", "<|Assistant|>") if newer else ("User", "Assistant")
        begin, image = special_ids(tokenizer, tokenizer.bos_token, BEGIN_OF_IMAGE)

        def turn(content: str) -> list[int]:
            return [begin, *plain_ids(tokenizer, f"{user}: {content}\n\n{assistant}:"), image]

        ids = turn(text)
        if negative is not None:
            return ids, turn(negative)
        (padding,) = special_ids(tokenizer, tokenizer.pad_token)
        return ids, [token if token in (begin, image) else padding for token in ids]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed words with the language model's table, and codes with the projected table of codes."""
        words = self.model.get_input_embeddings()((tokens - self.vocabulary).clamp(min=0))
        codes = self.model.prepare_embeddings_for_image_generation(tokens.clamp(max=self.vocabulary - 1))
        return torch.where((tokens >= self.vocabulary)[..., None], words, codes)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the generation head."""
        logits: Tensor = self.model.model.generation_head(hidden)
        return logits

    def decode(self, cells: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] into images [B, 3, H, W]."""
        images: Tensor = self.vq.decode(cells.flatten(1).to(execution_device(self.vq)))
        return images
