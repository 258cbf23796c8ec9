"""Drafters: who proposes."""

from mmspec.decoding.interfaces import Drafter
from mmspec.registry import Registry

__all__ = ["DRAFTERS", "Drafter"]

DRAFTERS: Registry[type[Drafter]] = Registry(
    "drafter",
    {
        "none": "mmspec.drafters.none:NoDrafter",
        "copy": "mmspec.drafters.copy:CopyDrafter",
        "draft_model": "mmspec.drafters.draft_model:DraftModelDrafter",
        "jacobi": "mmspec.drafters.jacobi:JacobiDrafter",
        "eagle": "mmspec.drafters.eagle:EagleDrafter",
        "eagle3": "mmspec.drafters.eagle:Eagle3Drafter",
        "flash": "mmspec.drafters.flash:FlashDrafter",
        "medusa": "mmspec.drafters.medusa:MedusaDrafter",
        "hydra": "mmspec.drafters.hydra:HydraDrafter",
    },
)
