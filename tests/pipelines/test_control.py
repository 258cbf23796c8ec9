"""ControlAR: controlled images equal those of a plain loop, with every exact accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import T5Config, T5EncoderModel

from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.families.llamagen.conversion import convert_checkpoint
from mmspec.pipelines import ImagePipeline, MMSpecPipeline
from tests.families.control_layout import controlar_state, naive_control, naive_controlled
from tests.families.naive_llamagen import caption_prefix, class_prefix
from tests.families.official_layout import CAPTIONS, CLASSES, HEADS, IMAGE_SIZE
from tests.tiny_models import tiny_tokenizer
from tests.tiny_models.llamagen import STRIDE, tiny_vq

SIDE = 4 * STRIDE
LABELS, SEEDS, SCALE, STRENGTH = [3, 0], [5, 8], 2.0, 0.6
STATE = controlar_state(**CLASSES)
NOISE = np.random.default_rng(0)
IMAGES = [Image.fromarray(NOISE.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in LABELS]
CALL: dict[str, Any] = {
    "class_labels": LABELS,
    "seed": SEEDS,
    "guidance_scale": SCALE,
    "output_type": "latent",
}
Choose = Callable[[int, Tensor], int]


def converted(folder: Path, state: dict[str, Tensor], name: str, **settings: Any) -> Path:
    torch.save({"model": state}, folder / name)
    out = folder / "out"
    convert_checkpoint(folder / name, out, image_size=IMAGE_SIZE, num_heads=HEADS, **settings)
    tiny_vq().save_pretrained(out / "vq")
    return out


def load(folder: Path, **parts: Any) -> Any:
    pipe = MMSpecPipeline.from_pretrained(folder, accelerator="none", dtype=torch.float64, **parts)
    assert isinstance(pipe, ImagePipeline)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(converted(tmp_path_factory.mktemp("control"), STATE, "canny_MR.pt"))


@pytest.fixture(scope="module")
def plain(pipe: Any) -> list[list[int]]:
    return drawn(pipe)


def drawn(pipe: Any, accelerator: str = "none", options: dict[str, Any] | None = None, **call: Any) -> Any:
    pipe.set_accelerator(accelerator, **(options or {}))
    given = {**CALL, "temperature": 1.0, "top_k": 0, "control_image": IMAGES, "control_strength": STRENGTH}
    return pipe(**{**given, **call}).tokens


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1


def sampled(seed: int) -> Choose:
    random = RandomStream.from_seed([seed], 1)

    def choose(cell: int, logits: Tensor) -> int:
        noise = random.at(0).gumbel(torch.tensor([[cell]]), Purpose.TARGET, len(logits), torch.float64)
        return int((logits + noise[0, 0]).argmax())

    return choose


def greedy(_: int, logits: Tensor) -> int:
    return int(logits.argmax())


def test_images_are_those_of_a_plain_loop(pipe: Any, plain: list[list[int]], tmp_path: Path) -> None:
    likeliest = drawn(pipe, temperature=0.0)
    for row, (label, image) in enumerate(zip(LABELS, IMAGES, strict=True)):
        control = STRENGTH * naive_control(STATE, tmp_path, pixels(image), "nearest")
        prefixes = [class_prefix(STATE, one) for one in (label, CLASSES["classes"])]
        for found, choose in ((plain[row], sampled(SEEDS[row])), (likeliest[row], greedy)):
            assert found == naive_controlled(STATE, prefixes, control, SCALE, choose)
        for shift in (0, 2):  # the control of the token itself, and of the cell after the next
            assert likeliest[row] != naive_controlled(STATE, prefixes, control, SCALE, greedy, shift)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sjd", {"coupling": "exact", "window": 5}),
        ("sjd", {"coupling": "exact", "window": 8, "front": (3, 2)}),
        ("copy", {"min_match": 1}),
        ("zipar", {"zipar_window": 4}),  # as wide as the image: plain decoding
    ],
)
def test_exact_accelerators_draw_the_same_images(
    pipe: Any, plain: list[list[int]], name: str, options: dict[str, Any]
) -> None:
    assert drawn(pipe, name, options) == plain
    alone = {"class_labels": LABELS[1], "seed": SEEDS[1], "control_image": IMAGES[1]}
    assert drawn(pipe, name, options, **alone) == plain[1:]


def test_no_strength_is_no_control(pipe: Any, plain: list[list[int]], tmp_path: Path) -> None:
    parts = ("adapter", "condition_")
    bare = {name: tensor for name, tensor in STATE.items() if not name.startswith(parts)}
    other = load(converted(tmp_path, bare, "c2i.pt"))
    without = drawn(other, control_image=None, control_strength=None)
    assert drawn(pipe, control_strength=0) == drawn(pipe, control_image=None, control_strength=0) == without
    assert all(a != b for a, b in zip(without, plain, strict=True))
    with pytest.raises(InputError, match="^control_image must be None; .*no control image"):
        drawn(other, control_strength=None)
    with pytest.raises(InputError, match="^control_strength must be None; .*no control image"):
        drawn(other, control_image=None)


def test_captions_of_any_length_are_controlled_where_their_image_is(tmp_path: Path) -> None:
    """Guidance uses the null caption without control; unused slots of a caption have no effect."""
    state, slots = controlar_state(seed=2, **CAPTIONS), CAPTIONS["slots"]
    tokenizer, width = tiny_tokenizer(), CAPTIONS["caption_width"]
    config = T5Config(vocab_size=len(tokenizer), d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    torch.manual_seed(0)
    encoder = T5EncoderModel(config).eval().requires_grad_(False)
    folder = converted(tmp_path, state, "tiny.pt", control_resize="bicubic")
    encoder.save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "tokenizer")
    pipe = load(folder)
    words = encoder.double()(tokenizer("a red circle", return_tensors="pt").input_ids).last_hidden_state[0]
    assert len(words) < slots
    features = torch.cat([torch.zeros(slots - len(words), width), words])
    prefixes = [caption_prefix(state, one) for one in (features, state["cls_embedding.uncond_embedding"])]
    control = naive_control(state, tmp_path, pixels(IMAGES[0]), "bicubic")
    due = naive_controlled(state, prefixes, control, SCALE, greedy, padded=slots - len(words))
    given = {"class_labels": None, "prompt": "a red circle", "seed": 0, "control_image": IMAGES[0]}
    for name, options in (("none", {}), ("sjd", {"coupling": "exact", "window": 5})):
        assert drawn(pipe, name, options, **given, temperature=0.0, control_strength=None) == [due]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"control_image": None}, "an image, 16 pixels high and 16 wide; or pass control_strength=0"),
        ({"control_image": Image.new("RGB", (16, 12))}, "16 pixels high and 16 wide, .*got '12"),
        ({"control_image": [IMAGES[0]] * 3}, "3 images"),
        ({"control_image": "no-such-file.png"}, "control_image .*no-such-file"),
        ({"control_strength": -1.0}, "control_strength"),
        ({"control_strength": float("nan")}, "control_strength"),
        ({"control_strenght": 1.0}, "control_strength"),
    ],
)
def test_what_cannot_control_is_refused(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(pipe.target, "prefill", None)
    with pytest.raises(InputError, match=message):
        drawn(pipe, **call)
