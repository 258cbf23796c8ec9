"""Rotary frequencies that change with the sequence length, computed for each draft token as if it were alone.

Frequencies of type "dynamic" change with every token beyond the length of training, those of type "longrope"
once, there. A forward pass of transformers uses the frequencies of its last token for all tokens; plain
decoding processes one token per forward pass, and keeps earlier keys unchanged. A forward pass over several
tokens, or several rows, therefore gives each token the frequencies of its own position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.models.replaced import Replacement, rebound, replaced_forwards, twin
from mmspec.open_types import AnyFunction

__all__ = ["change_of", "find_changing", "turned"]

LONG_ONCE = "longrope"
GROWING = "dynamic"


def change_of(config: PreTrainedConfig) -> tuple[float, str]:
    """Number of tokens up to which rotary frequencies are constant, infinite if always; and their type."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    changes: list[tuple[float, str]] = [(math.inf, "default")]
    for part in (rope, *rope.values()):  # some have parameters per layer type
        kind = part.get("rope_type", "") if isinstance(part, dict) else ""
        if GROWING in kind:
            changes.append((text.max_position_embeddings, kind))
        elif kind == LONG_ONCE:
            changes.append((part["original_max_position_embeddings"], kind))
    return min(changes)


def find_changing(model: PreTrainedModel) -> list[nn.Module]:
    """Find the rotary embeddings of a decoder whose frequencies change."""
    return [
        module
        for module in model.get_decoder().modules()
        if any(changes(kind) for kind in kinds_of(module)) and hasattr(module, "config")
    ]


def kinds_of(module: nn.Module) -> list[str]:
    """The types of a module's frequencies: one, or one per layer type."""
    kind = getattr(module, "rope_type", None)
    return list(kind.values()) if isinstance(kind, dict) else [kind] if isinstance(kind, str) else []


def changes(kind: str) -> bool:
    """True for frequencies that change with the sequence length."""
    return GROWING in kind or kind == LONG_ONCE


def turned(modules: Sequence[nn.Module], one_by_one: bool = False) -> AbstractContextManager[None]:
    """Replace rotary embeddings in this thread; the modules themselves do not change.

    Args:
        modules: from `find_changing`.
        one_by_one: every token with the frequencies of its own position, as in a scoring forward pass;
            otherwise a whole prompt, as in a model without earlier inputs.
    """
    if not modules:
        return nullcontext()
    turning: AnyFunction = turn_each if one_by_one else lambda turn, _, positions: turn(positions)
    return replaced_forwards(Replacement(module, partial(turned_by, module, turning)) for module in modules)


def turn_each(
    turn: Callable[[Tensor], tuple[Tensor, ...]], stays: tuple[int, bool], positions: Tensor
) -> tuple[Tensor, ...]:
    """Rotate positions [.., B, n], grouped by sequence length.

    Args:
        turn: positions -> cosines and sines [.., B, n, d].
        stays: the length up to which frequencies are constant, and whether they change only once.
        positions: of the nodes.
    """
    most, once = stays
    sizes = positions.flatten(0, -3).amax(0) + 1 if positions.dim() > 2 else positions + 1
    sizes = (sizes > most).long() if once else sizes.clamp(min=most)
    columns, lengths = positions.flatten(-2), sizes.flatten()
    found: list[Tensor] = []
    for length in lengths.unique():
        where = (lengths == length).nonzero()[:, 0]
        parts = turn(columns[..., where].unsqueeze(-2))
        found = found or [part.new_empty(*part.shape[:-3], len(lengths), part.shape[-1]) for part in parts]
        for whole, part in zip(found, parts, strict=True):
            whole[..., where, :] = part.squeeze(-3)
    return tuple(whole.unflatten(-2, sizes.shape) for whole in found)


def turned_by(module: Any, turning: AnyFunction, own: AnyFunction) -> AnyFunction:
    """The replaced `forward` of one module, whose frequencies are reset before each call."""

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> object:
        layer = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not changes(kind):
            return own(x, position_ids, **layer)
        fresh: Any = twin(module)  # a call changes the module's buffers

        def turn(positions: Tensor) -> tuple[Tensor, ...]:
            refresh(fresh, "" if layer_type is None else f"{layer_type}_")
            turned = rebound(own, fresh)(x, positions, **layer)
            return turned if isinstance(turned, tuple) else (turned,)

        rope: Any = module.config.rope_parameters
        rope = rope if layer_type is None else rope[layer_type]
        once = kind == LONG_ONCE
        most = rope["original_max_position_embeddings"] if once else module.original_max_seq_len
        turned = turning(turn, (int(most), once), position_ids)
        return turned if len(turned) > 1 else turned[0]

    return forward


def refresh(module: nn.Module, prefix: str) -> None:
    """Reset a module to its original frequencies."""
    original = getattr(module, f"{prefix}original_inv_freq")
    # a copy, because some versions of transformers write into it
    frequencies = original.to(getattr(module, f"{prefix}inv_freq").device, copy=True)
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
