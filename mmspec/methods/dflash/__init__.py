"""DFlash (2602.06036) and DSpark (2607.05147): a head that denoises a block of tokens in one pass."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "dflash",
        "a trained head denoises a block of tokens in one pass over the target's hidden states",
        "2602.06036",
        head=Head(
            model="mmspec.methods.dflash.head:DFlashHead",
            drafter="mmspec.methods.dflash.drafter:DFlashDrafter",
            loss="mmspec.methods.dflash.loss:DFlashLoss",
            published="mmspec.methods.dflash.published:read_dflash",
            shipped={
                "scenes-hybrid-dflash": (
                    "head that drafts for scenes-hybrid",
                    "mmspec train drafter --target assets/scenes-hybrid --method dflash:block=8",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
    Method(
        "dspark",
        "as `dflash`, where each token of a block knows the one before it",
        "2607.05147",
        head=Head(
            model="mmspec.methods.dflash.head:DSparkHead",
            drafter="mmspec.methods.dflash.drafter:DSparkDrafter",
            loss="mmspec.methods.dflash.loss:DFlashLoss",
            published="mmspec.methods.dflash.published:read_dspark",
            shipped={
                "scenes-hybrid-dspark": (
                    "head that drafts for scenes-hybrid",
                    "mmspec train drafter --target assets/scenes-hybrid --method dspark:block=8",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
)
