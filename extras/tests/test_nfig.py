"""NFIG is VAR with frequency bands and its own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspec.errors import InputError
from mmspec.pipelines import MMSpecPipeline
from mmspec_extras.families.nfig.modeling import NFIGConfig, NFIGForCausalLM
from tests.families.official_layout import HEADS, VOCABULARY, WIDTH
from tests.families.scale_layout import LABELS, LATENTS
from tests.families.test_scales import folder, pipe  # noqa: F401
from tests.tiny_models import randomise


def test_nfig_is_var_with_bands_and_settings_of_its_own(pipe: Any, tmp_path: Path) -> None:  # noqa: F811
    config = NFIGConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_classes=LABELS,
        latent_channels=LATENTS,
    )
    assert [round(680 * edge) for edge in config.band_edges()] == [1, 5, 14, 30, 55, 91, 155, 255, 424, 680]
    randomise(NFIGForCausalLM(config), 2).save_pretrained(tmp_path)
    pipe.vq.save_pretrained(tmp_path / "vq")
    bands: Any = MMSpecPipeline.from_pretrained(tmp_path)
    settings = bands.sampling({})
    assert (settings["guidance_scale"], settings["top_k"]) == (5.5, 990)
    settings = pipe.sampling({})
    assert (settings["guidance_scale"], settings["top_k"], settings["top_p"]) == (2.5, 900, 0.96)
    output = bands(class_labels=[1], seed=0)
    assert output.stats.target_forwards == 10 and len(output.tokens[0]) == 680
    with pytest.raises(InputError, match="decide places together"):
        bands.set_accelerator("sjd")
