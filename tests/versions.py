"""Features that the oldest supported transformers lacks, which tests in its CI run skip."""

import transformers
from packaging.version import Version

__all__ = ["IMAGES_REACH_THE_LOOP", "OLDEST", "TAKES_ENCODED_IMAGES"]

OLDEST = Version(transformers.__version__) < Version("5.23")
#: `generate` encodes images before its loop from 5.23 on; until then a padded batch of them is refused.
IMAGES_REACH_THE_LOOP = OLDEST
#: Models take `mm_encoder_outputs`; without it, every prompt with an image runs the encoder.
TAKES_ENCODED_IMAGES = not OLDEST
