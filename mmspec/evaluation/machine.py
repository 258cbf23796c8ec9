"""What works on this machine, and why the rest does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec import __version__

__all__ = ["OPTIONAL", "REQUIRED", "examine", "find_assets", "reference_models"]

REQUIRED = (
    "torch",
    "torchvision",
    "transformers",
    "diffusers",
    "accelerate",
    "safetensors",
    "einops",
    "num2words",
    "numpy",
    "pillow",
    "tqdm",
    "typer",
    "rich",
)
OPTIONAL = {
    "triton": ("fast kernels on a GPU; the torch twins are used without it", "pip install triton (Linux)"),
    "decord": ("reading videos", "pip install decord, or av where decord has no wheel"),
    "av": ("reading videos where decord has no wheel", "pip install av"),
    "timm": ("the vision towers of Gemma 3n, PerceptionLM and FastVLM", "pip install timm"),
    "matplotlib": ("plots", 'pip install "mmspec[eval]"'),
    "tensorboard": ("training curves", 'pip install "mmspec[train]"'),
}
REFERENCE_MODELS = {  # name -> what it is, and what makes it
    "scenes-llava": ("vision-language", "mmspec train vlm"),
    "scenes-llava-small": ("draft of scenes-llava", "mmspec train vlm --size small"),
    **{
        f"scenes-llava-{name}": (
            "head that drafts for scenes-llava",
            f"mmspec train drafter --target assets/scenes-llava --method {name}",
        )
        for name in ("eagle", "eagle3", "medusa", "hydra", "vispec", "flash")
    },
    "scenes-llamagen": ("text to image", "mmspec train image"),
    "scenes-llamagen-eagle": ("head that drafts for scenes-llamagen", "mmspec train drafter"),
}


def examine(accelerators: Mapping[str, Any]) -> dict[str, Any]:
    """Look at versions, devices, packages, accelerators and reference models; changes nothing.

    Args:
        accelerators: the table of presets.
    """
    return {
        "mmspec": {"version": __version__, "folder": str(Path(__file__).resolve().parents[1])},
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": [_package(name, "needed", "pip install mmspec") for name in REQUIRED],
        "optional": [_package(name, *what) for name, what in OPTIONAL.items()],
        "devices": _devices(),
        "accelerators": [_accelerator(name, preset) for name, preset in accelerators.items()],
        "reference_models": [_model(name, *about) for name, about in REFERENCE_MODELS.items()],
    }


def find_assets() -> Path | None:
    """The folder of reference models beside the package in a clone, or None in a plain installation."""
    folder = Path(__file__).resolve().parents[2] / "assets"
    return folder if folder.is_dir() else None


def reference_models() -> dict[str, Path]:
    """The reference models that are here, by name."""
    assets = find_assets()
    if assets is None:
        return {}
    return {name: assets / name for name in REFERENCE_MODELS if (assets / name / "config.json").is_file()}


def _package(name: str, purpose: str, remedy: str) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"name": name, "ok": False, "version": None, "for": purpose, "remedy": remedy}
    return {"name": name, "ok": True, "version": version, "for": purpose, "remedy": None}


def _devices() -> list[dict[str, Any]]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [
        {
            "name": "cpu",
            "ok": True,
            "detail": f"{processor_name()}, usable cores: {cores}, torch threads: {torch.get_num_threads()}",
        }
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            detail = (
                f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute {about.major}.{about.minor}"
            )
            devices.append({"name": f"cuda:{index}", "ok": True, "detail": detail})
    else:
        built = torch.version.cuda or torch.version.hip
        detail = "no GPU or no driver found" if built else "this torch was built without GPU support"
        devices.append({"name": "cuda", "ok": False, "detail": detail})
    mps = torch.backends.mps
    if mps.is_available():
        devices.append({"name": "mps", "ok": True, "detail": "Apple GPU"})
    elif platform.system() == "Darwin":
        devices.append({"name": "mps", "ok": False, "detail": "not built in, or macOS is too old"})
    return devices


def processor_name() -> str:
    """The processor's name as its maker gives it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _accelerator(name: str, preset: Any) -> dict[str, Any]:
    try:
        exactness, problem = preset.exactness, None  # asking imports the plug-in
    except Exception as error:  # a plug-in that does not import is a finding, not a crash
        exactness, problem = None, f"{type(error).__name__}: {error}"
    needs = f"--drafter: {preset.needs}" if preset.needs_draft_model else None
    return {
        "name": name,
        "ok": problem is None,
        "exactness": exactness,
        "summary": preset.summary,
        "needs": needs,
        "problem": problem,
    }


def _model(name: str, role: str, recipe: str) -> dict[str, Any]:
    folder = reference_models().get(name)
    if folder is not None:
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        detail = f"{folder}, {size / 1e6:.1f} MB"
        if size < 10_000:  # what a Git LFS pointer weighs
            return {"name": name, "ok": False, "detail": f"{folder}: weights missing (run git lfs pull)"}
        return {"name": name, "ok": True, "detail": f"{role}; {detail}"}
    assets = find_assets()
    where = (
        "no assets/ folder beside the package: install from a clone with pip install -e ."
        if assets is None
        else (f"not in {assets}; train it with {recipe}")
    )
    return {"name": name, "ok": False, "detail": where}
