"""FLASH (2505.12728): a head over compressed images that drafts blocks of tokens."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "flash",
        "drafts blocks of tokens as a tree with a trained head that reads compressed images",
        "2505.12728",
        drafter="mmspec.methods.flash.drafter:FlashDrafter",
        head=Head(
            model="mmspec.methods.flash.head:FlashHead",
            loss="mmspec.methods.flash.loss:FlashLoss",
            shipped={
                "scenes-llava-flash": (
                    "head for scenes-llava",
                    "mmspec train drafter --target assets/scenes-llava --method flash",
                ),
            },
        ),
        needs="a head that was trained for the target",
    ),
)
