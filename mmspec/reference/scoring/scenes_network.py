"""The reader of scenes as a network of features, for distances between sets of images of scenes."""

from __future__ import annotations

from mmspec.evaluation.quality.feature_network import SCENES, FeatureNetwork, weights_digest
from mmspec.reference.scoring.attributes import AttributeJudge

__all__ = ["scenes_network"]


def scenes_network(judge: AttributeJudge) -> FeatureNetwork:
    """Features and classes of a judge: the mean state of all patches; colour and shape of the first object.

    They are those of `mmspec bench --quality`. The network knows nothing but scenes, and has few features:
    its figures are to be compared with one another, never with those of Inception.
    """
    return FeatureNetwork(
        name=SCENES,
        width=int(judge.reader.config.vision["hidden_size"]),
        identity=weights_digest(judge.reader),
        preprocessing=f"{judge.size} x {judge.size}, bicubic where sizes differ, 2 x - 1",
        features=lambda images: judge.features(images).float().cpu(),
        classify=lambda images: judge.classify(images).float().cpu(),
    )
