"""Hooks of users in a target, and whether they do to each of several tokens what they do to one alone.

Plain decoding calls a hook with one new token; a forward that scores a draft calls it with many. A hook that
adds a vector to every place does the same in both, one that steers the last place of its call does not:
drafts would be verified by another model than the one that decodes plainly.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from contextlib import closing
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from mmspec.core.draft import DraftKind, Tree
from mmspec.core.verdict import Path
from mmspec.models.replaced import Confined, forward_name
from mmspec.open_types import AnyFunction
from mmspec.targets.model_target import AnyModelTarget

__all__ = ["hooks_of_users", "names_of", "treats_alike"]

logger = logging.getLogger("mmspec")
#: Packages whose hooks and replaced forwards compute the same in every call, whatever the number of tokens.
LIBRARIES = frozenset({
    "accelerate", "bitsandbytes", "deepspeed", "diffusers", "kernels", "liger_kernel", "mmspec", "optimum",
    "peft", "torch", "transformers",
})  # fmt: skip
ROUNDING = 1e-3  # root mean square over the spread of logits, in float32
#: Identities of the hooks that a model was tried with last, and whether they treat all tokens alike.
TRIED: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], bool]] = WeakKeyDictionary()


def hooks_of_users(model: nn.Module) -> dict[int, AnyFunction]:
    """Hooks and replaced forwards of a model's modules that code outside `LIBRARIES` has set, by id."""
    found: dict[int, AnyFunction] = {**of_all._global_forward_hooks, **of_all._global_forward_pre_hooks}
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            found |= {**module._forward_hooks, **module._forward_pre_hooks}
        stands = vars(module).get(forward_name(module))
        if isinstance(stands, Confined):  # another thread is scoring
            stands = stands.stood
        if stands is not None and getattr(stands, "__func__", None) is not type(module).forward:
            found[id(stands)] = stands
    return {key: hook for key, hook in found.items() if not is_of_library(hook)}


def is_of_library(code: object) -> bool:
    """True if a function, and all that it wraps, was written in one of `LIBRARIES`."""
    if isinstance(code, functools.partial):
        written = is_of_library(code.func)
    else:  # `__module__` would be that of the wrapped function
        function = getattr(code, "__func__", code)
        home = getattr(function, "__globals__", {}).get("__name__", type(code).__module__)
        written = home.partition(".")[0] in LIBRARIES
    wrapped = vars(code).get("__wrapped__") if hasattr(code, "__dict__") else None
    return written and (wrapped is None or is_of_library(wrapped))


def names_of(hooks: Mapping[int, AnyFunction]) -> str:
    """The names of hooks, for messages."""
    names = {getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks.values()}
    return ", ".join(sorted(names))


def treats_alike(target: AnyModelTarget, prompt: Mapping[str, Tensor]) -> bool:
    """Whether a target gives several tokens in a forward the logits that it gives them one after another.

    It is tried on a prompt when hooks of users were set or removed, not again while they stay.

    Args:
        target: a causal one.
        prompt: its arguments for a prompt, one row.
    """
    hooks = hooks_of_users(target.model)
    tried, alike = TRIED.get(target.model, ((), True))
    if tuple(hooks) == tried or not hooks:
        return alike or not hooks
    together, apart = score_twice(target, prompt)
    alike = is_close(together, apart)
    TRIED[target.model] = tuple(hooks), alike
    if not alike:
        logger.warning(
            "hooks of %s (%s) do something else to several tokens of a forward than to one alone, so calls "
            "are decoded plainly, a token at a time",
            type(target.model).__name__,
            names_of(hooks),
        )
    return alike


@torch.inference_mode()
def score_twice(target: AnyModelTarget, prompt: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [2, V] of two tokens behind a prompt: scored in one forward, and one after the other."""
    reader = copy.copy(target)
    vars(reader).update(prefix_cache=None, steps=None)
    state, output = reader.prefill([prompt], prompt["input_ids"].shape[1] + 2)
    with closing(state):
        first = Tree.chain(output.logits[:, -1:].argmax(-1), DraftKind.POINT)
        alone = reader.score(state, first).logits
        second = alone.argmax(-1)
        both = Tree.chain(torch.cat([first.tokens, second], 1), DraftKind.POINT)
        together = reader.score(state, both).logits[0]
        going = torch.ones(1, dtype=torch.bool, device=second.device)
        reader.commit(state, first, Path.root(first, second[:, 0]), going)
        after = reader.score(state, Tree.chain(second, DraftKind.POINT)).logits
    return together, torch.cat([alone, after], 1)[0]


def is_close(together: Tensor, apart: Tensor) -> bool:
    """Whether two computations of logits [2, V] differ by no more than rounding, at either token."""
    finite = apart.isfinite()
    if not torch.equal(finite, together.isfinite()):
        return False
    rounding = max(ROUNDING, 8 * torch.finfo(apart.dtype).eps)
    for mine, other, known in zip(together.float(), apart.float(), finite, strict=True):
        difference, spread = (mine - other)[known], other[known].std(correction=0)
        if bool(difference.square().mean().sqrt() > rounding * spread):
            return False
    return True
