"""Prefix cache: the prefill reuses the keys and values of the longest prefix shared with an earlier prompt.

Later turns of a conversation thus reuse the prefill of earlier ones, images included. The cache stores the
keys, values and tapped hidden states of each token of a prompt. Keys of the reply are not stored: the reply
is prefilled as part of the next prompt. Recurrent layers have one state for a whole prompt, so that only
prompts that continue it can reuse it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.cache import RowStates
from mmspec.core.recurrent import States
from mmspec.errors import InputError
from mmspec.open_types import Inputs, Keywords
from mmspec.validation import is_integer
from mmspec.visual_tokens.spans import find_images

__all__ = [
    "TOKENS",
    "Prefix",
    "PrefixCache",
    "PromptIdentity",
    "identify",
    "is_causal",
    "media_of",
    "rest_of",
]

TOKENS = ("input_ids", "position_ids", "mm_token_type_ids")  # arguments [.., L], as long as the prompt
MEDIA = frozenset({
    "pixel_values", "pixel_values_images", "pixel_values_videos", "pixel_attention_mask", "image_sizes",
    "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "batch_num_images",
})  # fmt: skip
# The rest is prefilled with a mask, which costs more than plain causal attention: short prefixes do not pay
# off.
LEAST_SHARE = 0.25


@dataclass(frozen=True)
class PromptIdentity:
    """Copies of the inputs that a prompt's keys depend on, in host memory.

    Attributes:
        tokens: [L].
        positions: [.., L].
        media: images and clips by argument name, the first along dim 0 first.
        media_end: index of the first token after all images; 0 without images.
        state: hash of the model's state; see `state_of`.
    """

    tokens: Tensor
    positions: Tensor
    media: dict[str, Tensor]
    media_end: int
    state: int

    def shared_with(self, prompt: PromptIdentity) -> int:
        """Number of leading tokens that `prompt` can reuse from this one: with all of its images, or 0."""
        if self.state != prompt.state or self.positions.shape[:-1] != prompt.positions.shape[:-1]:
            return 0
        for name, own in self.media.items():
            other = prompt.media.get(name, own[:0])
            if own.dtype != other.dtype or not torch.equal(own, other[: len(own)]):
                return 0
        length = min(len(self.tokens), len(prompt.tokens))
        alike = self.tokens[:length] == prompt.tokens[:length]
        alike &= (self.positions[..., :length] == prompt.positions[..., :length]).flatten(0, -2).all(0)
        shared = int(alike.long().cumprod(0).sum())
        return shared if shared >= self.media_end else 0

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.tokens, self.positions, *self.media.values()))


@dataclass(frozen=True)
class Prefix:
    """Cached prefill of a prompt, or of its prefix.

    Attributes:
        prompt: the prompt.
        length: number of tokens n, from the first on.
        states: keys and values of every layer, each [n, heads, head_dim].
        taps: tap -> hidden states [1, n, d].
        recurrent: states of every recurrent layer after the last token.
    """

    prompt: PromptIdentity
    length: int
    states: RowStates
    taps: dict[int, Tensor]
    recurrent: list[States] = field(default_factory=list)

    def shared_with(self, prompt: PromptIdentity) -> int:
        """Number of leading tokens whose prefill `prompt` can reuse."""
        shared = self.prompt.shared_with(prompt)
        if self.recurrent and (shared < self.length or shared == len(prompt.tokens)):
            return 0
        return shared

    def cut(self, length: int) -> Prefix:
        """Prefill of the first `length` tokens."""
        states = {layer: (keys[:length], values[:length]) for layer, (keys, values) in self.states.items()}
        taps = {tap: hidden[:, :length] for tap, hidden in self.taps.items()}
        return Prefix(self.prompt, length, states, taps, self.recurrent)

    def replaces(self, other: Prefix) -> bool:
        """True if this prefill has everything that prompts could reuse from another.

        If the other has fewer images, it fits prompts that this one does not.
        """
        is_beginning = other.prompt.shared_with(self.prompt) == other.length
        if other.recurrent and other.length < self.length:
            return False
        has_its_images = other.prompt.media_end == self.prompt.media_end
        return is_beginning and has_its_images and other.taps.keys() <= self.taps.keys()

    def nbytes(self) -> int:
        states = [tensor for pair in self.states.values() for tensor in pair]
        states += [state for layer in self.recurrent for state in layer.values()]
        return sum(tensor.nbytes for tensor in (*states, *self.taps.values())) + self.prompt.nbytes()


class PrefixCache:
    """Prefix cache of one model: the prefills of recent prompts, within a memory limit. Copies are empty.

    Args:
        max_bytes: limit for keys, values, hidden states and images; the least recently used are dropped
            first.

    Raises:
        InputError: the limit is not a positive integer.
    """

    def __init__(self, max_bytes: int) -> None:
        if not is_integer(max_bytes) or max_bytes < 1:
            raise InputError("max_bytes", max_bytes, "must be a positive number of bytes")
        self.max_bytes = max_bytes
        self.entries: list[Prefix] = []  # least recently used first

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[int]]:
        return type(self), (self.max_bytes,)

    def find(self, prompt: PromptIdentity, taps: Sequence[int]) -> Prefix | None:
        """Find the longest cached prefix of a prompt, shorter than the prompt; None if none pays off.

        Args:
            prompt: the prompt to prefill.
            taps: layers whose hidden states are needed for all of its tokens.
        """
        fitting = [entry for entry in self.entries if set(taps) <= set(entry.taps)]
        if not fitting:
            return None
        lengths = [entry.shared_with(prompt) for entry in fitting]
        longest = max(lengths)
        best = fitting[lengths.index(longest)]
        length = min(
            longest, len(prompt.tokens) - 1
        )  # the last token is processed: its logits are not cached
        if length < max(best.prompt.media_end, 1, LEAST_SHARE * len(prompt.tokens)):
            return None
        self.entries = [entry for entry in self.entries if entry is not best] + [best]
        return best.cut(length)

    def keep(
        self,
        prompt: PromptIdentity,
        states: RowStates,
        taps: Mapping[int, Tensor],
        recurrent: Sequence[States] = (),
    ) -> None:
        """Store a prefill, unless it exceeds the limit alone; drop the entries that it replaces.

        Args:
            prompt: the prompt.
            states: of all of its tokens; copied.
            taps: hidden states [1, L, d].
            recurrent: of every recurrent layer, after the last token; not copied.
        """
        copies = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in states.items()}
        new = Prefix(prompt, len(prompt.tokens), copies, dict(taps), list(recurrent))
        if new.nbytes() > self.max_bytes:
            return
        self.entries = [entry for entry in self.entries if not new.replaces(entry)] + [new]
        while self.nbytes() > self.max_bytes:
            self.entries.pop(0)

    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(entry.nbytes() for entry in self.entries)


def identify(model: PreTrainedModel, inputs: Inputs, state: int) -> PromptIdentity | None:
    """Identify a prompt by everything that its keys depend on; None if it cannot be prefilled in two parts.

    This is the case if images attend to later tokens (which Gemma 3 and PaliGemma mark by `token_type_ids`,
    Gemma 4 by token types without M-RoPE), if images have no placeholder tokens (cross-attention), if a
    placeholder has no image, or if an argument is unknown.

    Args:
        model: the target's.
        inputs: its arguments, batch size 1, including `position_ids` [.., L].
        state: hash of the model's state; see `state_of`.
    """
    if not is_causal(model, inputs):
        return None
    media, spans = media_of(inputs), find_images(model.config, inputs)
    if bool(media) != bool(spans):
        return None
    return PromptIdentity(
        own_copy(inputs["input_ids"][0]),
        own_copy(inputs["position_ids"]),
        {name: own_copy(value) for name, value in media.items()},
        max((span.stop for span in spans), default=0),
        state,
    )


def media_of(inputs: Mapping[str, object]) -> Keywords:
    """The arguments that are not per token: images, clips and their sizes."""
    return {name: value for name, value in inputs.items() if name not in TOKENS}


def is_causal(model: PreTrainedModel, inputs: Mapping[str, object]) -> bool:
    """True if a prompt's arguments are known, and none marks an image that attends to later tokens."""
    media = media_of(inputs)
    known = media.keys() <= MEDIA and all(isinstance(value, Tensor) for value in media.values())
    typed = "mm_token_type_ids" in inputs and not hasattr(getattr(model, "model", None), "get_rope_index")
    return known and not typed


def rest_of(inputs: Inputs, known: Prefix) -> dict[str, Tensor]:
    """Arguments for the rest of a prompt: tokens, positions and images after a cached prefix."""
    media = known.prompt.media
    rest = {
        name: value[..., known.length :] if name in TOKENS else value[len(media.get(name, ())) :]
        for name, value in inputs.items()
    }
    return {name: value for name, value in rest.items() if len(value)}


def own_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory; callers may modify theirs later."""
    return tensor.detach().to("cpu", copy=True)
