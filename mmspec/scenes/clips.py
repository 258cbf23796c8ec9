"""Short moving clips: a scene whose objects glide in straight lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from mmspec.errors import InputError
from mmspec.scenes.language import name
from mmspec.scenes.render import render
from mmspec.scenes.world import CANVAS, Scene, SceneObject, overlaps, sample_scene

__all__ = ["DIRECTIONS", "Clip", "clip_caption", "render_clip", "sample_clip"]

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
TRAVEL = 20  # pixels of the canvas from the first frame to the last
ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Clip:
    """A scene in its first frame, the direction in which each object moves, and the number of frames."""

    scene: Scene
    directions: tuple[str, ...]
    frames: int

    def at(self, frame: int) -> tuple[SceneObject, ...]:
        """Objects at their places in one frame."""
        travelled = TRAVEL * frame / max(self.frames - 1, 1)
        moved = []
        for thing, direction in zip(self.scene.objects, self.directions, strict=True):
            across, down = DIRECTIONS[direction]
            moved.append(replace(thing, x=thing.x + across * travelled, y=thing.y + down * travelled))
        return tuple(moved)


def sample_clip(seed: int, *, frames: int = 8) -> Clip:
    """Sample a clip in which nothing collides or leaves the image; equal arguments give equal clips."""
    if not 1 <= frames <= 256:
        raise InputError("frames", frames, "1 to 256 frames")
    scene = sample_scene(seed)
    rng = np.random.default_rng([seed, 0xC119])
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


def clip_caption(clip: Clip) -> str:
    """One sentence that says who moves where, from left to right in the first frame."""
    clauses = [
        f"the {name(thing)} " + ("stays still" if direction == "still" else f"moves {direction}")
        for thing, direction in zip(clip.scene.objects, clip.directions, strict=True)
    ]
    joined = clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]
    return f"{joined} on {clip.scene.background}."


def _is_sound(objects: tuple[SceneObject, ...]) -> bool:
    inside = all(
        thing.diameter / 2 <= centre <= CANVAS - thing.diameter / 2
        for thing in objects
        for centre in (thing.x, thing.y)
    )
    collide = any(overlaps(one, other) for one, other in combinations(objects, 2))
    return inside and not collide
