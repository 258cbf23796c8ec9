"""NFIG is VAR with frequency bands and its own settings; its image tokenizer quantises bands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extras.reference.bands import score_bands, train_bands
from mmspec.errors import InputError
from mmspec.families.var.tokenizer import ScaleQuantizer
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import IMAGE_TOKENS, sample_scene
from mmspec.training.data.scenes import image_pixels
from mmspec_extras.families.nfig.modeling import NFIGConfig, NFIGForCausalLM
from mmspec_extras.families.nfig.tokenizer import BandVQModel, band_edges, low_pass, quantise_bands
from reference.image_data import pixel_batch
from tests.families.official_layout import HEADS, VOCABULARY, WIDTH
from tests.families.scale_layout import LABELS, LATENTS
from tests.families.test_scales import folder, pipe  # noqa: F401
from tests.tiny_models import randomise

SIDES = (1, 2, 4, 8, 16)


def wave(down: int, across: int) -> torch.Tensor:
    """A cosine [1, 1, 16, 16] with that many periods in each direction."""
    place = torch.arange(16, dtype=torch.float64)
    return (2 * torch.pi / 16 * (down * place[:, None] + across * place)).cos()[None, None]


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


@pytest.mark.parametrize("periods", [(0, 0), (1, 0), (2, 1), (3, 7), (8, 8)])
def test_bands_hold_the_frequencies_below_their_edges(periods: tuple[int, int]) -> None:
    share = float(np.hypot(*periods) / np.hypot(8, 8))
    for edge in band_edges(SIDES):
        expected = wave(*periods) * (share <= edge)
        torch.testing.assert_close(low_pass(wave(*periods), edge), expected, atol=1e-12, rtol=0)


def test_codes_of_low_bands_do_not_depend_on_high_frequencies() -> None:
    torch.manual_seed(0)
    quantizer, features = ScaleQuantizer(64, 4).double(), torch.randn(2, 4, 16, 16, dtype=torch.float64)
    (one, total), (other, _) = (
        quantise_bands(quantizer, each, SIDES) for each in (features, features + 3 * wave(7, 3))
    )
    below = sum(side**2 for side in SIDES[:-1])
    assert torch.equal(one[:, :below], other[:, :below]) and not torch.equal(one[:, below:], other[:, below:])
    torch.testing.assert_close(quantizer.features(one, SIDES), total)
    assert (features - total).square().mean() < features.square().mean()


def test_a_trained_tokenizer_encodes_images_and_decodes_what_an_nfig_draws(
    start: Path, tmp_path: Path
) -> None:
    losses: list[float] = []
    how: dict[str, Any] = {"steps": 6, "batch_size": 2, "on_step": lambda _, loss: losses.append(loss)}
    own = train_bands(tmp_path / "vq", start=start, **how)
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    shape = {"vocab_size": 64, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_classes": LABELS}
    config = NFIGConfig(num_hidden_layers=1, latent_channels=8, **shape)
    randomise(NFIGForCausalLM(config), 2).save_pretrained(tmp_path)
    nfig: Any = MMSpecPipeline.from_pretrained(tmp_path, vq=own)
    assert isinstance(nfig.vq, BandVQModel) and nfig(class_labels=[1], seed=0).images[0].size == (64, 64)
    pixels, sides = pixel_batch(np.arange(2)).pixels, config.patch_nums
    with torch.no_grad():
        codes = nfig.vq.encode(pixels, sides)
        _, total = quantise_bands(nfig.vq.quantize, nfig.vq.quant_conv(nfig.vq.encoder(pixels)), sides)
        made = nfig.target.decode_output(codes, nfig.target.grid)
        assert codes.shape == (2, 680)
        torch.testing.assert_close(made, nfig.vq.decode(total), atol=1e-4, rtol=1e-4)
        scenes = [sample_scene(20_000 + index, profile=IMAGE_TOKENS) for index in range(4)]
        pixels = image_pixels(scenes, 64)
        due = nfig.vq.decode(
            quantise_bands(nfig.vq.quantize, nfig.vq.quant_conv(nfig.vq.encoder(pixels)), sides)[1]
        )
    assets = Path(__file__).parents[2] / "assets" / "scenes-llamagen"
    scores = score_bands(own, assets, scenes=4, kept=(1, 10))
    errors = {name: error.value for name, (error, _) in scores.items()}
    error = float((due.clamp(-1, 1) - pixels).square().mean())
    assert errors["10 bands, 680 tokens"] == pytest.approx(error, rel=1e-3)
    assert errors["1 bands, 1 tokens"] > 1.05 * error and errors["cells"] < 0.01
