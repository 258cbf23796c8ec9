"""Target adapters for models with text prompts and image-token outputs: Janus, Emu3, Chameleon and others.

Only the image tokens' rows of the head are computed, so that the softmax is over K tokens and not over all
words. The families' own `forward` may also mask image tokens (Chameleon's does); calling the decoder directly
avoids that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mmspec.core.cache import RaggedCache
from mmspec.core.image_grid import ImageGrid
from mmspec.errors import CheckpointError, InputError
from mmspec.open_types import Inputs, Processor
from mmspec.targets.image_tokens import AnyVQ, Asked, ImageTokenTarget, PromptPair, TextEncoder

__all__ = [
    "IdsPair",
    "TextPromptTarget",
    "TextVocabularyTarget",
    "code_ids",
    "plain_ids",
    "special_ids",
    "token_ids",
]

#: A tokenizer's ids of a prompt, and of the unconditional one.
IdsPair = tuple[list[int], list[int]]


class TextPromptTarget(ImageTokenTarget):
    """Image-token target that calls the decoder directly: embed, layers, head."""

    @abstractmethod
    def prompt_ids(self, text: str, negative: str | None, grid: ImageGrid, tokenizer: Processor) -> IdsPair:
        """The tokenizer's ids of a prompt, and of the unconditional one; see `encode_prompt`."""

    def encode_prompt(
        self,
        asked: Asked,
        negative: str | None,
        grid: ImageGrid,
        tokenizer: Processor,
        text_encoder: TextEncoder = None,
    ) -> PromptPair:
        """Encode a prompt, and the unconditional one; ids are offset by the target's own vocabulary."""
        pair = self.prompt_ids(str(asked), negative, grid, tokenizer)
        own, other = (torch.tensor([ids], device="cpu") + self.vocabulary for ids in pair)
        return {"input_ids": own}, {"input_ids": other}

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Embed compact tokens [B, n] or ids of a prompt: inputs [B, n, d] of the first layer."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [B, n, K + S] of final hidden states [B, n, d], without the grammar."""

    def forward(self, inputs: Inputs, cache: RaggedCache, keep: int = 0, whole: bool = False) -> Tensor:
        """Logits [B, n or 1, K + S], without the grammar."""
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        output = self.model.get_decoder()(
            inputs_embeds=self.embed(inputs["input_ids"]), **others, **self.told(cache)
        )
        return self.head(output.last_hidden_state[:, -keep:])


class TextVocabularyTarget(TextPromptTarget):
    """Target whose image tokens are part of the text vocabulary.

    Args:
        model: with `lm_head`.
        grid: the default image.
        codes: the K model ids of the codebook's entries.
        syntax_ids: the S model ids of the syntax tokens, in the order of the compact ones.
        stride, vq, codebook: see `ImageTokenTarget`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        grid: ImageGrid,
        codes: Sequence[int],
        syntax_ids: Sequence[int],
        stride: int,
        vq: AnyVQ,
        codebook: Tensor | None,
    ) -> None:
        super().__init__(model, grid, len(syntax_ids), stride, vq, codebook)
        self.model_ids = torch.tensor([*codes, *syntax_ids], device=self.device)
        # consecutive ids are a view of the head; others are gathered in each forward pass
        is_run = list(codes) == list(range(codes[0], codes[0] + len(codes)))
        self.head_rows = slice(codes[0], codes[-1] + 1) if is_run else self.model_ids[: len(codes)]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of the model's own ids."""
        own = self.model_ids[tokens.clamp(max=self.vocabulary - 1)]
        is_text = tokens >= self.vocabulary
        embedded: Tensor = self.model.get_input_embeddings()(
            torch.where(is_text, tokens - self.vocabulary, own)
        )
        return embedded

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the codes; syntax tokens are forced, so that their logits are 0."""
        output = self.model.get_output_embeddings()
        if type(output) is nn.Linear and not output.weight.is_meta:
            logits = linear(hidden.to(output.weight.device), output.weight[self.head_rows])
        else:  # quantised, with an adapter, or offloaded
            logits = output(hidden)[..., self.head_rows]
        return pad(logits, (0, self.syntax))


def code_ids(of_code: Mapping[int, int]) -> list[int]:
    """Model ids in the order of the codes, from a table code -> model id.

    Raises:
        CheckpointError: the codes are not 0 to K - 1.
    """
    if not of_code or sorted(of_code) != list(range(len(of_code))):
        rule = "must have one token for each code from 0 on"
        raise CheckpointError("vocabulary_map", f"{len(of_code)} image tokens", rule)
    return [of_code[code] for code in range(len(of_code))]


def token_ids(model: PreTrainedModel, names: Sequence[str]) -> list[int]:
    """Model ids of tokens by name.

    Raises:
        CheckpointError: the config's `vocabulary_map` lacks one.
    """
    table: Mapping[str, int] = model.config.vocabulary_map
    missing = [name for name in names if name not in table]
    if missing:
        raise CheckpointError("vocabulary_map", f"no {', '.join(missing)}", "must have the syntax tokens")
    return [table[name] for name in names]


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text, without special tokens around them."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def special_ids(tokenizer: PreTrainedTokenizerBase, *tokens: str | None) -> list[int]:
    """Find the ids of special tokens.

    Raises:
        InputError: the tokenizer lacks one, because it belongs to another model.
    """
    vocabulary: Mapping[Any, int] = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            rule = f"must be that of the model, which has a token {token!r}"
            raise InputError("tokenizer", type(tokenizer).__name__, rule)
    return [vocabulary[token] for token in tokens]
