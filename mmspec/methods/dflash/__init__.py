"""DFlash (2602.06036) and DSpark (2607.05147): heads that denoise a block of tokens in one forward pass."""

from mmspec.plugins import Head, Method, Variant

METHODS = (
    Method(
        "dflash",
        "denoises a block of tokens in one forward pass of a trained head",
        "2602.06036",
        drafter="mmspec.methods.dflash.drafter:DFlashDrafter",
        head=Head(
            model="mmspec.methods.dflash.head:DFlashHead",
            loss="mmspec.methods.dflash.loss:DFlashLoss",
            published="mmspec.methods.dflash.published:read_dflash",
            exports={"specforge": "mmspec.methods.dflash.export:write_head"},
            variants={
                "dflash2": Variant({"conv_taps": 2, "selector_rank": 256}),
                "lilicorr": Variant({"lattice_layers": 2}),
            },
            shipped={
                "scenes-hybrid-dflash": (
                    "head for scenes-hybrid",
                    "mmspec train drafter --target assets/scenes-hybrid --method dflash:block=8",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
    Method(
        "dspark",
        "denoises blocks as `dflash` does; each token of a block depends on the one before it",
        "2607.05147",
        drafter="mmspec.methods.dflash.drafter:DFlashDrafter",
        head=Head(
            model="mmspec.methods.dflash.head:DSparkHead",
            loss="mmspec.methods.dflash.loss:DFlashLoss",
            published="mmspec.methods.dflash.published:read_dspark",
            exports={"specforge": "mmspec.methods.dflash.export:write_head"},
            shipped={
                "scenes-hybrid-dspark": (
                    "head for scenes-hybrid",
                    "mmspec train drafter --target assets/scenes-hybrid --method dspark:block=8",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
)
