"""A window of continuous tokens with shared noise (2510.24211)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "shared_noise",
        "redraws a window of continuous tokens with fixed noise; accepts drafts within `tolerance`",
        "2510.24211",
        drafter="mmspec.methods.shared_noise.drafter:VectorWindowDrafter",
        rule="shared_noise",
        settings={"tolerance": 0.1},
        rules={"shared_noise": "mmspec.vectors.rules:SharedNoise"},
        trials=(
            "shared_noise:tolerance=0",
            "shared_noise:tolerance=0.05",
            "shared_noise",
            "shared_noise:tolerance=0.2",
        ),
    ),
)
