"""Reader of Medusa's heads as their authors publish them: `medusa_lm_head.pt`.

The files do not name the target; width and vocabulary are checked when the heads are fitted to one. Sizes are
read from the tensors: the config of medusa-vicuna-7b-v1.3 states two heads, and its file holds five.
"""

from __future__ import annotations

import re

from mmspec.heads.published import Found, Layout, level_sizes
from mmspec.methods.medusa.head import MedusaConfig

__all__ = ["read_medusa"]


def medusa_config(found: Found) -> MedusaConfig:
    """The config of Medusa's heads."""
    layers = [int(match[1]) for name in found.tensors if (match := re.match(r"blocks\.\d+\.(\d+)\.", name))]
    return MedusaConfig(**level_sizes(found), num_layers=1 + max(layers, default=-1))


read_medusa = Layout(
    what="a file of Medusa's heads",
    config=medusa_config,
    # head i is a sequence: residual blocks 0 ... n - 1, then its output matrix at n
    names=(
        (r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.\3"),
        (r"(?:medusa_head\.)?(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
    ),
    files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    has_config=False,
    ignored="",
)
