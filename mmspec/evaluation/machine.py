"""Report on this machine: versions, devices, optional packages and accelerators."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec import __version__
from mmspec.accelerators import promise_of
from mmspec.open_types import Json

if TYPE_CHECKING:
    import torch

    from mmspec.plugins import Method

__all__ = ["OPTIONAL", "REQUIRED", "environment", "examine"]

REQUIRED = (
    *("torch", "torchvision", "transformers", "diffusers", "accelerate", "safetensors", "timm", "einops"),
    *("num2words", "numpy", "packaging", "pillow", "psutil", "tqdm", "typer", "rich"),
)
OPTIONAL = {
    "triton": ("fast kernels on a GPU; the torch twins are used without it", "pip install triton (Linux)"),
    "decord": ("reading videos", "pip install decord, or av where decord has no wheel"),
    "av": ("reading videos where decord has no wheel", "pip install av"),
    "matplotlib": ("plots", 'pip install "mmspec[eval]"'),
    "nvidia-ml-py": ("energy of a GPU", 'pip install "mmspec[eval]"'),
    "pycocoevalcap": ("CIDEr of texts", 'pip install "mmspec[eval]"'),
    "rouge-score": ("ROUGE of texts", 'pip install "mmspec[eval]"'),
    "sacrebleu": ("BLEU of texts", 'pip install "mmspec[eval]"'),
    "torch-fidelity": ("the features of Inception", 'pip install "mmspec[eval]"'),
    "ray": ("--ray: many workers", 'pip install "mmspec[ray]"'),
    "gradio": ("mmspec demo", 'pip install "mmspec[demo]"'),
    "fastapi": ("mmspec serve", 'pip install "mmspec[serve]"'),
    "prometheus-client": ("mmspec serve", 'pip install "mmspec[serve]"'),
    "uvicorn": ("mmspec serve", 'pip install "mmspec[serve]"'),
    "tensorboard": ("training curves", 'pip install "mmspec[train]"'),
}


def examine(accelerators: Mapping[str, Any]) -> Json:
    """List versions, devices, packages, kernels and the given methods."""
    return {
        "mmspec": {"version": __version__, "folder": str(Path(__file__).resolve().parents[1])},
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": [_noted(_package(name, "needed", "pip install mmspec")) for name in REQUIRED],
        "optional": [_package(name, *what) for name, what in OPTIONAL.items()],
        "devices": _devices(),
        "kernels": _kernels(),
        "accelerators": [_accelerator(name, method) for name, method in accelerators.items()],
    }


def environment(device: torch.device, dtype: torch.dtype) -> Json:
    """Device, number format and versions that figures were measured with."""
    import torch
    import transformers

    on_gpu = device.type == "cuda"
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "threads": torch.get_num_threads(),
        "mmspec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _package(name: str, purpose: str, remedy: str) -> Json:
    version: str | None
    try:
        version, remedy_needed = importlib.metadata.version(name), None
    except importlib.metadata.PackageNotFoundError:
        version, remedy_needed = None, remedy
    return {
        "name": name,
        "ok": version is not None,
        "version": version,
        "for": purpose,
        "remedy": remedy_needed,
    }


def _noted(package: Json) -> Json:
    """Add to transformers what is known of its version."""
    if package["name"] != "transformers" or not package["ok"]:
        return package
    from mmspec.transformers_versions import describe

    return package | {"note": describe(package["version"])}


def _devices() -> list[Json]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"{processor_name()}, usable cores: {cores}, torch threads: {torch.get_num_threads()}"
    devices = [{"name": "cpu", "ok": True, "detail": detail}]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            memory, compute = f"{about.total_memory / 2**30:.0f} GiB", f"compute {about.major}.{about.minor}"
            detail = f"{about.name}, {memory}, {compute}"
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


def _kernels() -> list[Json]:
    """The ops of `mmspec.kernels`, and what they run as on the device at hand."""
    import torch

    from mmspec import kernels
    from mmspec.kernels.backend import explain_backend

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        backend, reason = explain_backend(device)
    except ValueError as error:  # an unknown MMSPEC_BACKEND is a finding, not a crash
        backend, reason = "none", str(error)
    return [
        {
            "name": name,
            "ok": backend == "triton",
            "device": str(device),
            "backend": backend,
            "reason": reason,
            "summary": (getattr(kernels, name).__doc__ or "").strip().partition("\n")[0],
        }
        for name in kernels.OPS
    ]


def processor_name() -> str:
    """Name of the processor as its maker gives it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _accelerator(name: str, method: Method) -> Json:
    try:
        exactness, problem = promise_of(method)[0], None  # asking imports the plug-in
    except Exception as error:  # a plug-in that does not import is a finding, not a crash
        exactness, problem = None, f"{type(error).__name__}: {error}"
    return {
        "name": name,
        "ok": problem is None,
        "exactness": exactness,
        "summary": method.summary,
        "needs": f"--drafter: {method.needs}" if method.needs else None,
        "problem": problem,
    }
