"""Continuous speculative decoding of a MAR (CSpD, 2411.11925): a smaller MAR drafts cell by cell."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from mmspec.accelerator import Accelerator
from mmspec.errors import InputError
from mmspec.families.images import continuous_target
from mmspec.families.mar.cells import CellModelDrafter
from mmspec.families.mar.target import MARTarget
from mmspec.vectors.rules import CSpD

__all__ = ["cspd"]


def cspd(
    model: PreTrainedModel | MARTarget | type[MARTarget],
    num_draft_tokens: int = 8,
    prefill: float = 0.05,
    order: str = "random",
    see_drafts: bool = True,
    last_noise: bool = True,
    shared_guidance: bool = False,
    rollback: bool = True,
) -> Accelerator:
    """Continuous speculative decoding of a MAR (CSpD, 2411.11925), exact with the default switches.

    The reference distribution is one cell per forward pass, each given all before it. It is not that of
    `masked`, whose cells of one forward pass are independent.

    The released code is `see_drafts=False, last_noise=False, shared_guidance=True, rollback=False`, with the
    rule `CSpD(temperature=42, variance_factor="released", max_tries=100)`. Options: see `CellModelDrafter`.
    """
    reader: Any = continuous_target(model) if isinstance(model, PreTrainedModel) else model
    if reader is None or not reader.any_order:
        raise InputError(
            "drafter",
            getattr(model, "__name__", type(model).__name__),
            "must be a MAR, for a target that is a MAR",
        )
    switches = see_drafts, last_noise, shared_guidance, rollback
    return Accelerator("cspd", CellModelDrafter(reader, num_draft_tokens, prefill, order, *switches), CSpD())
