"""A random ControlAR in the key layout of its official files (2410.02705), and its plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from tests.families.naive_llamagen import caption_prefix
from tests.families.official_layout import GRID, VOCABULARY, WIDTH, fill, transformer_shapes
from tests.families.parallel_layout import llama, rms

CELLS, LAYERS = GRID * GRID, 6
PATCH, VISION, PLACES = 14, 64, 3  # positions of DINOv2: 3 x 3 patches, of which those of 4 x 4 are made
DINO = {"hidden_size": VISION, "num_hidden_layers": 1, "num_attention_heads": 1, "mlp_ratio": 2}
State = dict[str, Tensor]


def controlar_state(seed: int = 0, **condition: int) -> State:
    """Return all keys of an official file, including unused ones."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, VISION),
        "embeddings.mask_token": (1, VISION),
        "embeddings.position_embeddings": (1, PLACES**2 + 1, VISION),
        "embeddings.patch_embeddings.projection.weight": (VISION, 3, PATCH, PATCH),
        "embeddings.patch_embeddings.projection.bias": (VISION,),
    }
    layer = "encoder.layer.0."
    parts = {f"attention.attention.{part}": (VISION, VISION) for part in ("query", "key", "value")}
    parts["attention.output.dense"] = VISION, VISION
    parts |= {"mlp.fc1": (2 * VISION, VISION), "mlp.fc2": (VISION, 2 * VISION)}
    for name, shape in parts.items():
        shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    for name in (layer + "norm1", layer + "norm2", "layernorm"):
        shapes |= {f"{name}.weight": (VISION,), f"{name}.bias": (VISION,)}
    shapes |= {f"{layer}layer_scale{index}.lambda1": (VISION,) for index in (1, 2)}
    shapes = {f"adapter.model.{name}": shape for name, shape in shapes.items()}
    shapes |= {"adapter_mlp.fc1.weight": (WIDTH, VISION), "adapter_mlp.fc2.weight": (WIDTH, WIDTH)}
    for name in ("condition_mlp.cap_proj", *(f"condition_layers.{index}" for index in range(3))):
        shapes |= {f"{name}.fc1.weight": (WIDTH, WIDTH), f"{name}.fc2.weight": (WIDTH, WIDTH)}
    shapes["condition_embeddings.weight"] = VOCABULARY, WIDTH
    shapes["condition_mlp.uncond_embedding"] = CELLS, WIDTH
    shapes |= transformer_shapes(layers=LAYERS, **condition)
    state = fill(shapes, seed, embeddings=("tok_embeddings", "cls_embedding.e"))
    for index in range(3):  # strong enough to be seen in every image
        state[f"condition_layers.{index}.fc2.weight"] *= 12
    return state


def naive_control(state: State, folder: Path, pixels: Tensor, mode: str) -> Tensor:
    """[3, N, D] of an image [3, H, W] in [-1, 1]; transformers loads DINOv2 from its own folder."""
    prefix = "adapter.model."
    own = {name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    Dinov2Config(**DINO, image_size=PATCH * PLACES).save_pretrained(folder)
    dino = Dinov2Model.from_pretrained(folder, dtype=torch.float64).eval()
    corners = None if mode == "nearest" else True
    resized = F.interpolate(pixels[None], (GRID * PATCH,) * 2, mode=mode, align_corners=corners)
    with torch.no_grad():
        rows = dino(resized.double()).last_hidden_state[0, 1:]

    def layers(name: str, rows: Tensor) -> Tensor:
        weights = {f"cls_embedding.cap_proj.fc{i}.weight": state[f"{name}.fc{i}.weight"] for i in (1, 2)}
        return caption_prefix(weights, rows)

    cells = layers("condition_mlp.cap_proj", layers("adapter_mlp", rows))
    return torch.stack([layers(f"condition_layers.{index}", cells) for index in range(3)])


def naive_controlled(
    state: State,
    prefixes: Sequence[Tensor],
    control: Tensor,
    scale: float,
    choose: Callable[[int, Tensor], int],
    shift: int = 1,
    padded: int = 0,
) -> list[int]:
    """An image by guidance from the second prefix, which has no control; a `shift` of 1 is right."""
    state = {name: tensor.double() for name, tensor in state.items()}
    layers = [
        {name: part for name, part in state.items() if name.startswith(f"layers.{index}.")}
        for index in range(LAYERS)
    ]
    tokens: list[int] = []
    for cell in range(CELLS):
        logits = []
        for prefix, added in zip(prefixes, (control, torch.zeros_like(control)), strict=True):
            slots = len(prefix)
            rows = torch.cat([prefix, state["tok_embeddings.weight"][tokens]])
            sees = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
            sees[:, :padded] = False
            sees |= torch.eye(len(rows), dtype=torch.bool)
            for index, layer in enumerate(layers):
                if index in (0, LAYERS // 3, 2 * LAYERS // 3):
                    for place in range(len(rows)):
                        if 0 <= (of := place - slots + shift) < CELLS:
                            rows[place] += added[index // (LAYERS // 3), of]
                rows = llama(layer, rows, [*[None] * slots, *range(cell)], sees)[0]
            logits.append(state["output.weight"] @ rms(rows[-1:], state["norm.weight"])[0])
        tokens.append(choose(cell, logits[1] + scale * (logits[0] - logits[1])))
    return tokens
