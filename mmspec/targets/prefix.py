"""Prefix cache: later turns of a conversation reuse the prefill of earlier ones, images included.

Kept are keys, values and tapped hidden states of each token of a prompt. A new prompt that begins alike takes
over what the two share. Keys of the reply are not kept: it is read again in one pass, as part of the next
prompt. Recurrent layers keep one state for a whole prompt, so that only prompts that go on from its end can
take it over.
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

TOKENS = ("input_ids", "position_ids", "mm_token_type_ids")  # [.., L]: as long as the prompt
MEDIA = frozenset({
    "pixel_values", "pixel_values_images", "pixel_values_videos", "pixel_attention_mask", "image_sizes",
    "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "batch_num_images",
})  # fmt: skip
# The rest is read under a mask, which costs more than plain causal attention; a shorter prefix does not pay.
LEAST_SHARE = 0.25


@dataclass(frozen=True)
class PromptIdentity:
    """Inputs that a prompt's keys depend on, in host memory, in tensors that nobody else writes into.

    Attributes:
        tokens: [L].
        positions: [.., L].
        media: images and clips by the name of the model's argument, the first along dim 0 first.
        media_end: index of the first token behind all images; 0 if there are none.
        state: of the model, as `state_of` hashes it.
    """

    tokens: Tensor
    positions: Tensor
    media: dict[str, Tensor]
    media_end: int
    state: int

    def shared_with(self, prompt: PromptIdentity) -> int:
        """Number of leading tokens that `prompt` can take over from this one: all of its images, or 0."""
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
    """Prefill of a prompt, or of its beginning.

    Attributes:
        prompt: what was read.
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
        """Number of leading tokens whose prefill `prompt` can take over."""
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
        """True if this prefill has all that prompts could take over from another.

        With fewer images the other fits prompts that this one does not.
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
    """Prefills of the prompts that one model has read last, within a limit of memory. Copies are empty.

    Args:
        max_bytes: of keys, values, hidden states and images; what was used longest ago goes first.

    Raises:
        InputError: the limit is no positive integer.
    """

    def __init__(self, max_bytes: int) -> None:
        if not is_integer(max_bytes) or max_bytes < 1:
            raise InputError("max_bytes", max_bytes, "a positive number of bytes")
        self.max_bytes = max_bytes
        self.entries: list[Prefix] = []  # the one used longest ago first

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[int]]:
        return type(self), (self.max_bytes,)

    def find(self, prompt: PromptIdentity, taps: Sequence[int]) -> Prefix | None:
        """Find the longest known beginning of a prompt, shorter than the prompt itself; None if none pays.

        Args:
            prompt: about to be read.
            taps: hidden states that are needed of all of its tokens.
        """
        fitting = [entry for entry in self.entries if set(taps) <= set(entry.taps)]
        if not fitting:
            return None
        lengths = [entry.shared_with(prompt) for entry in fitting]
        longest = max(lengths)
        best = fitting[lengths.index(longest)]
        length = min(longest, len(prompt.tokens) - 1)  # the last token is read: its logits are not kept
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
        """Remember a prompt that was just read, unless it is above the limit alone; forget what it replaces.

        Args:
            prompt: what was read.
            states: of all of its tokens; copied.
            taps: hidden states [1, L, d].
            recurrent: of every recurrent layer, after the last token; nobody else writes into them.
        """
        copies = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in states.items()}
        new = Prefix(prompt, len(prompt.tokens), copies, dict(taps), list(recurrent))
        if new.nbytes() > self.max_bytes:
            return
        self.entries = [entry for entry in self.entries if not new.replaces(entry)] + [new]
        while self.nbytes() > self.max_bytes:
            self.entries.pop(0)

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(entry.nbytes() for entry in self.entries)


def identify(model: PreTrainedModel, inputs: Inputs, state: int) -> PromptIdentity | None:
    """Identify a prompt by all that its keys depend on; None if it cannot be read in two parts.

    That is so if images attend to what follows them (Gemma 3 and PaliGemma say so by `token_type_ids`,
    Gemma 4 by token types without M-RoPE), if they stand at no token of the prompt (cross-attention), if a
    placeholder stands for no image, or if an argument is not known here.

    Args:
        model: the target's.
        inputs: its arguments, batch size 1, `position_ids` [.., L] among them.
        state: of the model, as `state_of` hashes it.
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
    """The arguments that are not as long as the prompt: images, clips and their sizes."""
    return {name: value for name, value in inputs.items() if name not in TOKENS}


def is_causal(model: PreTrainedModel, inputs: Mapping[str, object]) -> bool:
    """True if a prompt's arguments are known, and none marks an image that attends to what follows it."""
    media = media_of(inputs)
    known = media.keys() <= MEDIA and all(isinstance(value, Tensor) for value in media.values())
    typed = "mm_token_type_ids" in inputs and not hasattr(getattr(model, "model", None), "get_rope_index")
    return known and not typed


def rest_of(inputs: Inputs, known: Prefix) -> dict[str, Tensor]:
    """Arguments for the rest of a prompt: tokens, positions and images behind a known beginning."""
    media = known.prompt.media
    rest = {
        name: value[..., known.length :] if name in TOKENS else value[len(media.get(name, ())) :]
        for name, value in inputs.items()
    }
    return {name: value for name, value in rest.items() if len(value)}


def own_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory; callers may write into their own later."""
    return tensor.detach().to("cpu", copy=True)
