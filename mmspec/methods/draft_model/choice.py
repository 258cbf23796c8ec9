"""Choice of the drafter for a draft model: of tokens, of a masked model's paths, or of continuous tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from mmspec.accelerator import Accelerator, pair
from mmspec.core.distributions import Continuous
from mmspec.errors import InputError
from mmspec.families.images import continuous_target
from mmspec.families.mar.cells import CellModelDrafter
from mmspec.families.mar.target import MARTarget
from mmspec.methods.draft_model.drafter import LENGTH, DraftModelDrafter
from mmspec.methods.draft_model.masked import MaskedModelDrafter
from mmspec.methods.draft_model.vectors import VectorModelDrafter
from mmspec.open_types import Keywords
from mmspec.targets import CausalTarget, adapt
from mmspec.trees.rejection import SpeculativeSampling
from mmspec.vectors.rules import Reflection, SharedNoise

__all__ = ["draft_model"]


def draft_model(
    model: PreTrainedModel | CausalTarget | MARTarget | type[CausalTarget | MARTarget],
    num_draft_tokens: int | None = None,
    sampling: str | None = None,
    tree: str | int | Sequence[int] | None = None,
    keep: float | None = None,
    mass: float | None = None,
) -> Accelerator:
    """Draft with a smaller model of the same tokenizer (2211.17192), or of the same continuous tokens.

    Args:
        model: the draft model; a masked language model drafts as in DiffuSpec (`MaskedModelDrafter`). The
            class of its target checks the options before it is loaded.
        num_draft_tokens: length of a draft, 1 to 512; 5, or at most 30 with a masked draft model if None.
        tree: see `DraftModelDrafter`. For text only.
        keep, mass: see `DraftModelDrafter`.
        sampling: see `DraftModelDrafter`; "coupled" for text, "sampled" for continuous tokens if None.

    Coupled text is verified by `sample_and_match`. Vectors (`VectorModelDrafter`) are verified by
    `reflection` if sampled. A MAR's drafts are sampled, and verified by `speculative_sampling` as whole
    chains; the reference distribution is one cell per forward pass, as in `cspd`.
    """
    reader: Any = model
    if isinstance(model, PreTrainedModel):
        reader = continuous_target(model) or adapt(model)
    of_text: Keywords = {"tree": tree, "keep": keep, "mass": mass}
    if reader.fills_masks:
        rule = "must be None: a masked draft model drafts one chain, which it searches for"
        refuse({"sampling": sampling, **of_text}, rule)
        return pair("draft_model", MaskedModelDrafter(reader, num_draft_tokens))
    if not issubclass(reader.distribution, Continuous):
        drafter = DraftModelDrafter(reader, num_draft_tokens, sampling or "coupled", **of_text)
        return pair("draft_model", drafter)
    refuse(of_text, "must be None: a draft model of continuous tokens drafts a chain from the whole prompt")
    length = LENGTH if num_draft_tokens is None else num_draft_tokens
    if reader.any_order:
        cells = CellModelDrafter(reader, length)
        return Accelerator("draft_model", cells, SpeculativeSampling())
    vectors = VectorModelDrafter(reader, length, sampling or "sampled")
    verified = SharedNoise() if sampling == "coupled" else Reflection()
    return Accelerator("draft_model", vectors, verified)


def refuse(options: Keywords, rule: str) -> None:
    """Raise InputError for the first option that is not None."""
    for name, value in options.items():
        if value is not None:
            raise InputError(name, value, rule)
