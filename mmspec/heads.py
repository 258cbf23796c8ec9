"""Table of drafting heads: one record for each, from which all other tables come.

Nothing is imported before it is asked for. Adding a head adds its own files and one record here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["HEADS", "Head"]


@dataclass(frozen=True)
class Head:
    """Record of one kind of drafting head. Parts are named as "module:attribute".

    Attributes:
        model: the head, a `DraftingHead`; its `config_class` is its config.
        drafter: the `Drafter` that runs it.
        loss: the `DrafterLoss` that trains it; None if it comes trained.
        summary: what it does, for tables.
        source: the paper's arXiv id.
        published: reads a folder as the method's authors publish it, for a target; None if they do not.
        of_images: whether it drafts image tokens alone.
        in_checkpoint: whether `published` reads the target's own checkpoint, which then needs no other.
        image_settings: settings of its config where the target draws images and nothing else is asked for.
    """

    model: str
    drafter: str
    loss: str | None
    summary: str
    source: str
    published: str | None = None
    of_images: bool = False
    in_checkpoint: bool = False
    image_settings: Mapping[str, Any] = field(default_factory=dict)

    def load(self, part: str) -> Any:
        """Import the part of that name, one that there is: "model", "drafter", "loss" or "published"."""
        module, attribute = getattr(self, part).split(":")
        return getattr(importlib.import_module(module), attribute)


IMAGE_TREE = {"num_draft_tokens": 60, "depth": 3, "top_k": 40}  # best of nine for scenes-llamagen
HEADS = {
    "eagle": Head(
        "mmspec.models.eagle:EagleHead",
        "mmspec.drafters.eagle:EagleDrafter",
        "mmspec.training.losses.eagle:EagleLoss",
        "a trained head grows a tree from the target's hidden states",
        "2406.16858",
        "mmspec.models.published.eagle:read_eagle",
        image_settings=IMAGE_TREE,
    ),
    "eagle3": Head(
        "mmspec.models.eagle3:Eagle3Head",
        "mmspec.drafters.eagle:Eagle3Drafter",
        "mmspec.training.losses.eagle3:Eagle3Loss",
        "as `eagle`, from hidden states of three depths and over a vocabulary of its own",
        "2503.01840",
        "mmspec.models.published.eagle3:read_eagle3",
        image_settings=IMAGE_TREE,
    ),
    "mtp": Head(
        "mmspec.models.mtp:MtpHead",
        "mmspec.drafters.eagle:MtpDrafter",
        "mmspec.training.losses.eagle3:Eagle3Loss",
        "the layer for multi-token prediction that the target was trained with grows a tree",
        "2412.19437",
        "mmspec.models.published.mtp:read_mtp",
        in_checkpoint=True,
    ),
    "assistant": Head(
        "mmspec.models.assistant:AssistantHead",
        "mmspec.drafters.assistant:AssistantDrafter",
        None,
        "the assistant that is published with a Gemma 4 attends to the target's own keys and values",
        "-",
        "mmspec.models.assistant:read_official",
    ),
    "flash": Head(
        "mmspec.models.flash:FlashHead",
        "mmspec.drafters.flash:FlashDrafter",
        "mmspec.training.losses.flash:FlashLoss",
        "a trained head reads compressed images and drafts a block of tokens in each pass, as a tree",
        "2505.12728",
    ),
    "dflash": Head(
        "mmspec.models.dflash:DFlashHead",
        "mmspec.drafters.dflash:DFlashDrafter",
        "mmspec.training.losses.dflash:DFlashLoss",
        "a trained head denoises a block of tokens in one pass over the target's hidden states",
        "2602.06036",
        "mmspec.models.published.dflash:read_dflash",
    ),
    "dspark": Head(
        "mmspec.models.dflash:DSparkHead",
        "mmspec.drafters.dflash:DSparkDrafter",
        "mmspec.training.losses.dflash:DFlashLoss",
        "as `dflash`, where each token of a block knows the one before it",
        "2607.05147",
        "mmspec.models.published.dflash:read_dspark",
    ),
    "medusa": Head(
        "mmspec.models.medusa:MedusaHead",
        "mmspec.drafters.level_heads:MedusaDrafter",
        "mmspec.training.losses.levels:MedusaLoss",
        "trained heads on one hidden state of the target each draft a token of their own",
        "2401.10774",
        "mmspec.models.published.levels:read_medusa",
    ),
    "hydra": Head(
        "mmspec.models.hydra:HydraHead",
        "mmspec.drafters.level_heads:HydraDrafter",
        "mmspec.training.losses.levels:HydraLoss",
        "as `medusa`, by heads that are told which tokens the heads before them chose",
        "2402.05109",
        "mmspec.models.published.levels:read_hydra",
    ),
    "ppd": Head(
        "mmspec.models.ppd:PromptTokens",
        "mmspec.drafters.ppd:PromptTokensDrafter",
        "mmspec.training.losses.ppd:PromptTokensLoss",
        "trained prompt tokens behind every candidate draft the next ones in the target's own forward",
        "2405.18628",
    ),
    "cjd": Head(
        "mmspec.models.cjd:CorrectorHead",
        "mmspec.drafters.corrected:CorrectedDrafter",
        "mmspec.training.losses.cjd:CorrectorLoss",
        "as `sjd`, where a trained head corrects what the target said of the next places",
        "-",
        of_images=True,
    ),
    "ssd": Head(
        "mmspec.models.ssd:VerticalHead",
        "mmspec.drafters.vertical:VerticalDrafter",
        "mmspec.training.losses.ssd:VerticalLoss",
        "as `sjd`, where a trained head drafts new places from the row above",
        "2606.20543",
        of_images=True,
    ),
}
