"""VAR: decoding equals plain loops of the published algorithm, scale by scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.errors import CheckpointError, InputError
from mmspec.families.llamagen.conversion import convert_checkpoint
from mmspec.pipelines import MMSpecPipeline
from tests.families.ldm_layout import naive_latents, naive_pixels
from tests.families.official_layout import VOCABULARY, WIDTH, Changes, changed
from tests.families.parallel_layout import doubled
from tests.families.scale_layout import (
    LATENTS,
    SIDES,
    naive_features,
    naive_var,
    vae_state,
    var_state,
)
from tests.families.test_parallel_images import Noise

PLACES = sum(side**2 for side in SIDES)
CFG = 1.5
#: Ten scales and four; the third and the eighth are equally near to two scales, except for rounding.
PUBLISHED_CONVOLUTIONS = [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
VAE = vae_state()
CLASSES, SEEDS = [0, 3], [11, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of official files, the image tokenizer inside."""
    folder = tmp_path_factory.mktemp("var")
    for name, tensors, out in (("var_d2.pth", var_state(), "out"), ("vae.pth", VAE, "out/vq")):
        torch.save(tensors, folder / name)
        convert_checkpoint(folder / name, folder / out)
    return folder / "out"


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    """In double precision."""
    pipe: Any = MMSpecPipeline.from_pretrained(folder, dtype=torch.float64)
    pipe.vq.double()
    return pipe


def chooser(seed: int, top_k: int = 0, top_p: float = 1.0) -> Callable[[int, Tensor], int]:
    """Tokens by the noise of their places, truncated as the published sampler does."""
    noise = Noise(seed)

    def choose(place: int, logits: Tensor) -> int:
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
        ascending, order = logits.sort()
        removed = ascending.softmax(0).cumsum(0) <= 1 - top_p
        removed[-1] = False
        return noise.choose(place, logits.masked_fill(removed.scatter(0, order, removed), -math.inf))

    return choose


def test_a_truncated_image_is_a_plain_loop_over_scales(pipe: Any) -> None:
    settings: dict[str, Any] = {"top_k": 12, "top_p": 0.8}
    drawn = pipe(class_labels=CLASSES, seed=SEEDS, guidance_scale=1 + CFG, output_type="latent", **settings)
    assert drawn.stats.target_forwards == len(SIDES) and drawn.stats.exactness == "exact"
    for row, (label, seed) in enumerate(zip(CLASSES, SEEDS, strict=True)):
        expected = naive_var(var_state(), VAE, SIDES, label, CFG, chooser(seed, **settings))
        assert drawn.tokens[row] == expected


def test_no_scale_sees_a_later_one(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in one forward pass over all scales, nor through keys of later places."""
    model, generator = pipe.model, torch.Generator().manual_seed(0)
    read = torch.randn(1, PLACES, LATENTS, dtype=torch.float64, generator=generator)
    label, begin = torch.tensor([1]), sum(side**2 for side in SIDES[:-1])
    plain = model(inputs_embeds=read, class_labels=label).logits
    read[:, begin:] += 1
    other = model(inputs_embeds=read, class_labels=label).logits
    assert torch.equal(plain[:, :begin], other[:, :begin])
    assert (plain[:, begin:] != other[:, begin:]).any(-1).all()

    asked: dict[str, Any] = {"class_labels": CLASSES, "seed": SEEDS, "output_type": "latent"}
    expected, score = pipe(**asked).tokens, pipe.target.score

    def spoilt(state: Any, draft: Any) -> Any:
        output, end = score(state, draft), int(draft.starts.max()) + 1
        for layer in state.cache.ragged:
            layer.keys[:, end:PLACES] = layer.values[:, end:PLACES] = 1e6
        return output

    monkeypatch.setattr(pipe.target, "score", spoilt)
    assert pipe(**asked).tokens == expected


def test_codes_come_to_the_vectors_that_were_quantised(pipe: Any) -> None:
    quantizer = pipe.vq.quantize
    features = torch.randn(2, LATENTS, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    codes, found = quantizer.encode(features, SIDES)
    assert codes.shape == (2, PLACES)
    torch.testing.assert_close(quantizer.features(codes, SIDES), found)
    for row in range(2):
        torch.testing.assert_close(found[row : row + 1], naive_features(VAE, SIDES, codes[row].tolist()))
    order = [list(quantizer.smoothing).index(quantizer.convolution_of(scale, 10)) for scale in range(10)]
    assert order == PUBLISHED_CONVOLUTIONS


def test_pixels_are_those_of_the_published_decoder(pipe: Any) -> None:
    codes = torch.randint(VOCABULARY, (2, PLACES), generator=torch.Generator().manual_seed(5))
    apart = doubled(VAE)
    for name in [name for name in apart if ".qkv." in name]:
        parts = apart.pop(name).chunk(3)
        apart |= {name.replace("qkv", part): each for part, each in zip("qkv", parts, strict=True)}
    features = torch.cat([naive_features(VAE, SIDES, row) for row in codes.tolist()])
    expected = naive_pixels(apart, features)
    torch.testing.assert_close(pipe.target.decode_tokens(codes), expected.clamp(-1, 1))
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    found = pipe.vq.encode(pixels, SIDES)
    assert torch.equal(found, pipe.vq.quantize.encode(naive_latents(apart, pixels), SIDES)[0])
    with pytest.raises(InputError, match=f"{PLACES}"):
        pipe.target.decode_tokens(codes[:, 1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lvl_1L": None}, "lvl_1L"),
        ({"pos_1LC": torch.zeros(1, PLACES + 1, WIDTH)}, "pos_1LC"),
        ({"blocks.1.attn.q_bias": None}, "blocks.1.attn.q_bias"),
        ({"blocks.1.ada_gss": torch.zeros(1, 1, 6, WIDTH)}, "ada_gss"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, changes: Changes, message: str) -> None:
    torch.save(changed(var_state(), changes), tmp_path / "var.pth")
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "var.pth", tmp_path / "out")
