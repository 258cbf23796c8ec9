"""Memory of long prompts: no logits of all tokens, and no mask of all pairs but those of sliding windows.

Prompts in chunks have masks of a chunk and the tokens that it attends to.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmspec.targets import CausalTarget
from mmspec.targets.prefix import PrefixCache
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


CHUNK, WINDOW = 32, 12


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "after a cached prefix"])
@pytest.mark.parametrize(
    ("model", "keys"),
    [(tiny_llama, LENGTH), (TEXT_MODELS["mistral_sliding"], WINDOW - 1 + CHUNK)],
    ids=["full", "sliding"],
)
def test_masks_of_chunks(model: Any, keys: int, is_known: bool) -> None:
    """Bytes of the largest mask: a number for each token of a chunk and each key that it attends to."""
    target = CausalTarget(model())
    target.prefill_tokens = CHUNK
    prompt = {"input_ids": torch.arange(LENGTH)[None] % 50 + 3}
    if is_known:
        target.prefix_cache = PrefixCache(2**30)
        target.prefill([{"input_ids": prompt["input_ids"][:, : LENGTH // 3]}], 64)[0].close()
    masks: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        masks.append(0 if attn_mask is None else attn_mask.untyped_storage().nbytes())
        return attend(*args, attn_mask=attn_mask, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), Largest() as largest:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        state, _ = target.prefill([prompt], 64)
        state.close()
    assert CHUNK * keys * 4 * 0.9 < max(masks) <= CHUNK * keys * 4
    assert largest.size < LENGTH * LENGTH
