"""The rules of LANTERN and GSD as in their released code, and GSD over clusters of codes."""

from mmspec.plugins import Method

METHOD = Method(
    "released",
    rules={
        "lantern_released": "mmspec_extras.methods.released.lantern:ReleasedLantern",
        "grouped_released": "mmspec_extras.methods.released.grouped:ReleasedGrouped",
        "grouped_codebook": "mmspec_extras.methods.released.grouped:GroupedCodes",
    },
)
