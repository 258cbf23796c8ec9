"""The q of a sampled draft, and the noise of the last token that a rule draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft
from mmspec.decoding.random_stream import Purpose


def last_purpose(draft: Draft) -> Tensor:
    """[B] purpose of the noise that draws the last token: plain decoding's own where nothing was proposed."""
    proposed = (draft.valid & (draft.parents == 0))[:, 1:].any(-1)
    return torch.where(proposed, Purpose.RESIDUAL, Purpose.TARGET)


def sampled_distribution(draft: Draft) -> Any:
    """Return the draft's q, a distribution of the kind that the target's are.

    Raises:
        TypeError: it has none; accelerators are checked for that when they are built.
    """
    if draft.q is None:
        raise TypeError(
            f"a {draft.kind.value} draft has no q; rejection rules need the distribution it was drawn from"
        )
    return draft.q
