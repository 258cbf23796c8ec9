"""Scene renderer: textured backgrounds, antialiased shapes and noise; and clips with moving objects.

It is fast because it works on bounding boxes, with textures and stencils that are cached per process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from mmspec.errors import InputError
from mmspec.scenes.world import (
    BACKGROUNDS,
    CANVAS,
    PATTERNS,
    SHAPES,
    Scene,
    SceneObject,
    overlaps,
    sample_scene,
)

__all__ = [
    "Clip",
    "DIRECTIONS",
    "object_masks",
    "render",
    "render_clip",
    "sample_clip",
]

Floats = npt.NDArray[np.floating[Any]]

TILE = 192
TILES_PER_BACKGROUND = 6
NOISE_TILES = 6
NOISE_LEVEL = 6.0
LARGEST_IMAGE = 128

BASE_COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 132, 22),
    "yellow": (246, 220, 40),
    "green": (34, 160, 60),
    "blue": (38, 78, 214),
    "purple": (142, 50, 170),
    "white": (240, 240, 240),
    "black": (26, 26, 30),
}
# Muted, so that objects contrast with every background.
BACKGROUND_COLOURS = {
    "grass": (112, 134, 88),
    "sand": (190, 172, 130),
    "water": (104, 138, 152),
    "stone": (132, 132, 132),
    "wood": (132, 100, 74),
    "brick": (150, 110, 98),
}


def render(scene: Scene, size: int = CANVAS) -> np.ndarray:
    """Render a scene.

    Args:
        scene: the scene; its seed determines texture and noise.
        size: side of the image in pixels; all lengths scale with it.

    Returns:
        uint8 array `[size, size, 3]`.
    """
    if not 16 <= size <= LARGEST_IMAGE:
        raise InputError("size", size, f"must be from 16 to {LARGEST_IMAGE} pixels")
    rng = np.random.default_rng([scene.seed, 0x9A17])
    tile, top, left, noise, noise_top, noise_left = rng.integers(
        (TILES_PER_BACKGROUND, TILE - size, TILE - size, NOISE_TILES, TILE - size, TILE - size)
    )
    tints = rng.uniform(0.92, 1.06, size=len(scene.objects))
    image = _backgrounds()[scene.background][tile, top : top + size, left : left + size].copy()
    for thing, tint in zip(scene.objects, tints, strict=True):
        _paint(image, thing, float(tint), size)
    image += _noise()[noise, noise_top : noise_top + size, noise_left : noise_left + size]
    np.clip(image, 0, 255, out=image)
    return image.astype(np.uint8)


def object_masks(scene: Scene, size: int = CANVAS) -> np.ndarray:
    """Masks of the pixels that each object covers: bool array `[objects, size, size]`."""
    masks = np.zeros((len(scene.objects), size, size), dtype=bool)
    for mask, thing in zip(masks, scene.objects, strict=True):
        alpha, _ = _stencil_of(thing, size)
        canvas, stencil = _windows(thing, alpha.shape[0], size)
        mask[canvas] = alpha[stencil][..., 0] > 0.5
    return masks


def _paint(image: np.ndarray, thing: SceneObject, tint: float, size: int) -> None:
    alpha, accent = _stencil_of(thing, size)
    canvas, stencil = _windows(thing, alpha.shape[0], size)
    base = np.array(BASE_COLOURS[thing.colour], dtype=np.float32) * tint
    second = np.float32(130) if thing.colour == "black" else base * np.float32(0.42)
    paint = base + accent[stencil] * (second - base)
    box = image[canvas]
    box += alpha[stencil] * (paint - box)


def _windows(thing: SceneObject, side: int, size: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Slices of the canvas that a stencil covers, and of the stencil inside the canvas."""
    scale = size / CANVAS
    canvas, stencil = [], []
    for centre in (thing.y, thing.x):
        start = round(centre * scale) - side // 2
        low, high = max(start, 0), min(start + side, size)
        canvas.append(slice(low, max(low, high)))
        stencil.append(slice(low - start, max(low, high) - start))
    return (canvas[0], canvas[1]), (stencil[0], stencil[1])


def _stencil_of(thing: SceneObject, size: int) -> tuple[Floats, Floats]:
    return _stencil(thing.shape, thing.pattern, thing.diameter, thing.rotation, thing.pattern_scale, size)


@lru_cache(maxsize=8192)
def _stencil(
    shape: str, pattern: str, diameter: int, rotation: float, pattern_scale: float, size: int
) -> tuple[Floats, Floats]:
    """Coverage and share of the second colour, both float32 `[side, side, 1]` in [0, 1]."""
    radius = diameter / 2 * size / CANVAS
    half = int(np.ceil(radius * 1.12)) + 1
    v, u = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32)
    cosine, sine = np.cos(rotation), np.sin(rotation)
    u, v = (cosine * u + sine * v).astype(np.float32), (cosine * v - sine * u).astype(np.float32)
    alpha = np.clip(0.5 - _signed_distance(shape, u / radius, v / radius) * radius, 0, 1)
    accent = _pattern(pattern, u * CANVAS / size / pattern_scale, v * CANVAS / size / pattern_scale)
    shade = 0.10 * (v + u) / radius  # lit from the top left
    return alpha[..., None].astype(np.float32), np.clip(accent + shade, -0.2, 1)[..., None].astype(np.float32)


def _signed_distance(shape: str, u: Floats, v: Floats) -> Floats:
    """Distance to the outline in units of the radius, negative inside; `v` points down."""
    across, down = np.abs(u), np.abs(v)
    distance: Floats
    if shape == "circle":
        distance = np.hypot(u, v) - 1
    elif shape == "ring":
        distance = np.abs(np.hypot(u, v) - 0.72) - 0.28
    elif shape == "square":
        distance = np.maximum(across, down) - 0.9
    elif shape == "triangle":
        distance = np.maximum(v - 0.85, 0.889 * across - 0.457 * (v + 1.05))
    elif shape == "cross":
        distance = np.minimum(np.maximum(across - 1, down - 0.34), np.maximum(down - 1, across - 0.34))
    elif shape == "star":
        distance = _star(u, v)
    else:
        raise InputError("shape", shape, f"must be one of {', '.join(SHAPES)}")
    return distance


def _star(u: Floats, v: Floats) -> Floats:
    """Signed distance to a star: the plane is folded into half of a spike, whose edge is straight."""
    sector = 2 * np.pi / 5
    angle = np.abs((np.arctan2(u, -v) + sector / 2) % sector - sector / 2)
    radius = np.hypot(u, v)
    outer, inner = np.array([1.1, 0.0]), 0.47 * np.array([np.cos(sector / 2), np.sin(sector / 2)])
    normal = np.array([inner[1] - outer[1], outer[0] - inner[0]])
    normal /= np.linalg.norm(normal)
    distance: Floats = (radius * np.cos(angle) - outer[0]) * normal[0] + radius * np.sin(angle) * normal[1]
    return distance


def _pattern(pattern: str, u: Floats, v: Floats) -> Floats:
    accent: Floats
    if pattern == "striped":
        accent = np.clip(0.5 + 2.2 * np.sin(2 * np.pi * v / 6.5), 0, 1)
    elif pattern == "dotted":
        accent = np.clip(2.4 - np.hypot((u + 3) % 6 - 3, (v + 3) % 6 - 3), 0, 1)
    elif pattern == "plain":
        accent = np.zeros_like(u)
    else:
        raise InputError("pattern", pattern, f"must be one of {', '.join(PATTERNS)}")
    return accent


@lru_cache(maxsize=1)
def _noise() -> Floats:
    """Camera noise: float32 `[tiles, TILE, TILE, 3]`."""
    rng = np.random.default_rng(0x6021)
    return rng.standard_normal((NOISE_TILES, TILE, TILE, 3), dtype=np.float32) * np.float32(NOISE_LEVEL)


@lru_cache(maxsize=1)
def _backgrounds() -> dict[str, Floats]:
    """Every background as a bank of float32 `[tiles, TILE, TILE, 3]`."""
    banks = {}
    for index, kind in enumerate(BACKGROUNDS):
        rng = np.random.default_rng([0xBAC6, index])
        tiles = [_texture(kind, rng) for _ in range(TILES_PER_BACKGROUND)]
        banks[kind] = np.stack(tiles).astype(np.float32)
    return banks


def _texture(kind: str, rng: np.random.Generator) -> Floats:
    base = np.array(BACKGROUND_COLOURS[kind], dtype=np.float64) * rng.uniform(0.92, 1.08)
    patches = 12 * _smooth_noise(rng, 14, 14)
    v, u = np.mgrid[0:TILE, 0:TILE]
    if kind == "grass":
        relief = 16 * _smooth_noise(rng, 3.0, 0.8)
    elif kind == "sand":
        relief = 9 * _smooth_noise(rng, 0.7, 0.7)
    elif kind == "water":
        relief = 9 * np.sin(v / 2.4 + 2.5 * _smooth_noise(rng, 9, 9)) + 6 * _smooth_noise(rng, 1, 6)
    elif kind == "stone":
        relief = 18 * np.tanh(2 * _smooth_noise(rng, 3.5, 3.5))
    elif kind == "wood":
        relief = 16 * _smooth_noise(rng, 1.2, 22)
    else:
        shifted = u + 8 * (v // 9 % 2)
        relief = 30.0 * ((v % 9 < 1.5) | (shifted % 16 < 1.5)) + 5 * _smooth_noise(rng, 1, 1)
    tone = 6 * _smooth_noise(rng, 10, 10)[..., None] * np.array([1.0, 0.0, -1.0])
    texture: Floats = base + (relief + patches)[..., None] + tone
    return texture


def _smooth_noise(rng: np.random.Generator, down: float, across: float) -> Floats:
    """Gaussian noise of unit variance, blurred by `down` and `across` pixels: `[TILE, TILE]`."""
    frequency = np.fft.fftfreq(TILE)
    blur = np.outer(
        np.exp(-2 * (np.pi * down * frequency) ** 2), np.exp(-2 * (np.pi * across * frequency) ** 2)
    )
    noise = np.fft.ifft2(np.fft.fft2(rng.standard_normal((TILE, TILE))) * blur).real
    unit: Floats = noise / noise.std()
    return unit


DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
TRAVEL = 20  # pixels of the canvas from the first frame to the last
ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Clip:
    """Animated scene: its first frame, the direction of each object, and the number of frames."""

    scene: Scene
    directions: tuple[str, ...]
    frames: int

    def at(self, frame: int) -> tuple[SceneObject, ...]:
        """Objects at their positions in one frame."""
        travelled = TRAVEL * frame / max(self.frames - 1, 1)
        moved = []
        for thing, direction in zip(self.scene.objects, self.directions, strict=True):
            across, down = DIRECTIONS[direction]
            moved.append(replace(thing, x=thing.x + across * travelled, y=thing.y + down * travelled))
        return tuple(moved)


def sample_clip(seed: int, *, frames: int = 8) -> Clip:
    """Sample a scene and animate it; see `animate`."""
    return animate(sample_scene(seed), frames)


def animate(scene: Scene, frames: int) -> Clip:
    """Sample the directions of a scene's objects, deterministic given the scene.

    Objects neither collide nor leave the image; if no such directions are found, nothing moves.
    """
    if not 1 <= frames <= 256:
        raise InputError("frames", frames, "must be from 1 to 256")
    rng = np.random.default_rng([scene.seed, 0xC119])
    for _ in range(ATTEMPTS):
        drawn = rng.choice(list(DIRECTIONS), size=len(scene.objects))
        clip = Clip(scene, tuple(str(direction) for direction in drawn), frames)
        if all(_is_sound(clip.at(frame)) for frame in range(frames)):
            return clip
    return Clip(scene, ("still",) * len(scene.objects), frames)


def render_clip(clip: Clip, size: int = CANVAS) -> np.ndarray:
    """Render every frame on the same background: uint8 array `[frames, size, size, 3]`."""
    images = [render(replace(clip.scene, objects=clip.at(frame)), size) for frame in range(clip.frames)]
    return np.stack(images)


def _is_sound(objects: tuple[SceneObject, ...]) -> bool:
    inside = all(
        thing.diameter / 2 <= centre <= CANVAS - thing.diameter / 2
        for thing in objects
        for centre in (thing.x, thing.y)
    )
    collide = any(overlaps(one, other) for one, other in combinations(objects, 2))
    return inside and not collide
