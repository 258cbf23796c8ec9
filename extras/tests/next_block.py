"""A tiny NBP with the weights of a PAR, which has the same parts."""

from __future__ import annotations

from typing import Any

from mmspec_extras.families.nbp.modeling import NBPConfig, NBPForCausalLM


def next_block_model(par: Any, frames: int = 1) -> NBPForCausalLM:
    """Return a model of clips with a PAR's weights; a block has as many tokens as the PAR has regions."""
    shape = par.config.to_dict()
    block_size = shape.pop("regions")
    for name in ("model_type", "architectures"):
        shape.pop(name)
    model = NBPForCausalLM(NBPConfig(frames=frames, block_size=block_size, **shape))
    model.load_state_dict(par.state_dict())
    return model.to(par.dtype).eval()
