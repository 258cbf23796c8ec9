"""Distilled Decoding (2412.17153): images in a few forward passes of a student."""

from mmspec.plugins import Method

METHOD = Method(
    "distilled",
    "draws an image in `generation_steps` forward passes of a student that maps noise to tokens",
    "2412.17153",
    drafter="mmspec_extras.methods.distilled.drafter:DistilledDrafter",
)
