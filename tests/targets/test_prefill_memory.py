"""Memory of long prompts: no logits of all tokens, and no mask of all pairs but those of sliding windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmspec.targets import CausalTarget
from tests.tiny_models import TEXT_MODELS, tiny_llama

LENGTH = 700


class Largest(TorchDispatchMode):
    """Keeps the bytes of the largest result of an operator."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.size = max([self.size, *sizes])
        return out


@pytest.mark.parametrize(
    ("model", "most"),
    [(tiny_llama, LENGTH * 512), (TEXT_MODELS["mistral_sliding"], LENGTH * LENGTH)],
    ids=["full", "sliding"],
)
def test_prefill_of_a_long_prompt(model: Any, most: int) -> None:
    """Bytes: of windows one boolean for each pair of tokens; beyond this nothing grows with the square."""
    target = CausalTarget(model())
    read: list[int] = []
    target.model.lm_head.register_forward_hook(lambda module, args, out: read.append(args[0].shape[1]))
    with torch.inference_mode(), Largest() as largest:
        state, _ = target.prefill([{"input_ids": torch.arange(LENGTH)[None] % 50 + 3}], 64)
        state.close()
    assert read == [1]
    assert largest.size <= most
