"""Registry of drafters, which propose candidate tokens."""

from mmspec.decoding.interfaces import Drafter
from mmspec.heads import HEADS
from mmspec.registry import Registry

__all__ = ["DRAFTERS", "Drafter"]

DRAFTERS: Registry[type[Drafter]] = Registry(
    "drafter",
    {
        "none": "mmspec.drafters.none:NoDrafter",
        "copy": "mmspec.drafters.copy:CopyDrafter",
        "draft_model": "mmspec.drafters.draft_model:DraftModelDrafter",
        "masked_model": "mmspec.drafters.masked_model:MaskedModelDrafter",
        "any_subset": "mmspec.drafters.any_subset:AnySubsetDrafter",
        "cell_model": "mmspec.drafters.cell_order:CellModelDrafter",
        "jacobi": "mmspec.drafters.jacobi:JacobiDrafter",
        "staircase": "mmspec.drafters.staircase:StaircaseDrafter",
        "vector_model": "mmspec.drafters.vectors:VectorModelDrafter",
        "vector_window": "mmspec.drafters.vectors:VectorWindowDrafter",
        "cell_order": "mmspec.drafters.cell_order:CellOrderDrafter",
        "early_exit": "mmspec.drafters.early_exit:EarlyExitDrafter",
        "self_speculation": "mmspec.drafters.self_speculation:SelfSpeculationDrafter",
        "states": "mmspec.drafters.states:StatesDrafter",
        **{name: head.drafter for name, head in HEADS.items()},
    },
)
