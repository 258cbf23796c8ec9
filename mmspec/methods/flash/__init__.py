"""FLASH (2505.12728): compressed images, blocks of tokens in each pass."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "flash",
        "a trained head reads compressed images and drafts a block of tokens in each pass, as a tree",
        "2505.12728",
        head=Head(
            model="mmspec.methods.flash.head:FlashHead",
            drafter="mmspec.methods.flash.drafter:FlashDrafter",
            loss="mmspec.methods.flash.loss:FlashLoss",
            shipped={
                "scenes-llava-flash": (
                    "head that drafts for scenes-llava",
                    "mmspec train drafter --target assets/scenes-llava --method flash",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
)
