"""User hooks in a target, and the check whether they act alike on one token and on several.

Plain decoding calls a hook with one new token; a forward pass that scores a draft calls it with many. A hook
that adds a vector at every place acts alike in both. One that steers only the last place does not, and drafts
would be verified by another model than that of plain decoding.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Mapping
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
#: Packages whose hooks and replaced `forward` methods compute the same for any number of tokens.
LIBRARIES = frozenset({
    "accelerate", "bitsandbytes", "deepspeed", "diffusers", "kernels", "liger_kernel", "mmspec", "optimum",
    "peft", "torch", "transformers",
})  # fmt: skip
ROUNDING = 1e-3  # root mean square difference relative to the spread of logits, in float32
#: Identities of the last tested hooks of a model, and whether they treat all tokens alike.
TRIED: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], bool]] = WeakKeyDictionary()


def hooks_of_users(model: nn.Module) -> dict[int, AnyFunction]:
    """Hooks and replaced `forward` methods in a model that code outside `LIBRARIES` has set, by id."""
    found: dict[int, AnyFunction] = {**of_all._global_forward_hooks, **of_all._global_forward_pre_hooks}
    for module in each_module(model):
        if module._forward_hooks or module._forward_pre_hooks:
            found |= {**module._forward_hooks, **module._forward_pre_hooks}
        stands = vars(module).get(forward_name(module))
        if isinstance(stands, Confined):  # another thread is scoring
            stands = stands.stood
        if stands is not None and getattr(stands, "__func__", None) is not type(module).forward:
            found[id(stands)] = stands
    return {key: hook for key, hook in found.items() if not is_of_library(hook)}


def each_module(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module once, faster than `model.modules()`, which also builds their names."""
    met: set[nn.Module | None] = {None}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and module not in met:
            met.add(module)
            left += module._modules.values()
            yield module


def is_of_library(code: object) -> bool:
    """True if a function, and every function that it wraps, belongs to one of `LIBRARIES`."""
    if isinstance(code, functools.partial):
        written = is_of_library(code.func)
    else:  # `__module__` would be that of the wrapped function
        function = getattr(code, "__func__", code)
        home = getattr(function, "__globals__", {}).get("__name__", type(code).__module__)
        written = home.partition(".")[0] in LIBRARIES
    wrapped = vars(code).get("__wrapped__") if hasattr(code, "__dict__") else None
    return written and (wrapped is None or is_of_library(wrapped))


def names_of(hooks: Mapping[int, AnyFunction]) -> str:
    """Names of hooks, for messages."""
    names = {getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks.values()}
    return ", ".join(sorted(names))


def treats_alike(target: AnyModelTarget, prompt: Mapping[str, Tensor]) -> bool:
    """Whether a target gives the same logits for several tokens in one forward pass as one token at a time.

    The test runs on a prompt when user hooks were set or removed, and its result is kept while they stay.

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
            "hooks of %s (%s) act differently on several tokens of a forward pass than on one, so calls are "
            "decoded plainly, one token at a time",
            type(target.model).__name__,
            names_of(hooks),
        )
    return alike


@torch.inference_mode()
def score_twice(target: AnyModelTarget, prompt: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [2, V] of two tokens after a prompt: scored in one forward pass, and one by one."""
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
    """Whether two computations of logits [2, V] differ only by rounding, at both tokens."""
    finite = apart.isfinite()
    if not torch.equal(finite, together.isfinite()):
        return False
    rounding = max(ROUNDING, 8 * torch.finfo(apart.dtype).eps)
    for mine, other, known in zip(together.float(), apart.float(), finite, strict=True):
        difference, spread = (mine - other)[known], other[known].std(correction=0)
        if bool(difference.square().mean().sqrt() > rounding * spread):
            return False
    return True
