"""Reports on this machine (versions, devices, packages, accelerators) and on a model from its config."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from mmspec import __version__
from mmspec.accelerators import promise_of
from mmspec.core.cache import check_layer_types
from mmspec.errors import CheckpointError, UnsupportedModelError, how_to_install
from mmspec.evaluation.recommendation import config_of, recommend
from mmspec.open_types import Json
from mmspec.plugins import Method, family_of, load
from mmspec.targets.admission import check_model
from mmspec.targets.memory import cached_bytes, measure_states
from mmspec.transformers_versions import describe

__all__ = ["OPTIONAL", "REQUIRED", "environment", "examine", "examine_model"]

REQUIRED = (
    *("torch", "torchvision", "transformers", "diffusers", "accelerate", "safetensors", "timm", "einops"),
    *("av", "num2words", "numpy", "packaging", "pillow", "psutil", "tqdm", "typer", "rich"),
)
#: Optional packages: what each is for, and the extra that installs it; triton comes with torch on Linux.
OPTIONAL: dict[str, tuple[str, str | None]] = {
    "triton": ("fast kernels on a GPU; without it torch implementations run", None),
    "jiwer": ("word error rates", "eval"),
    "matplotlib": ("plots", "eval"),
    "nvidia-ml-py": ("energy of a GPU", "eval"),
    "pycocoevalcap": ("CIDEr of texts", "eval"),
    "rouge-score": ("ROUGE of texts", "eval"),
    "sacrebleu": ("BLEU of texts", "eval"),
    "torch-fidelity": ("features of the Inception network", "eval"),
    "ray": ("option --ray, many workers", "ray"),
    "gradio": ("mmspec demo", "demo"),
    "llguidance": ("structured output", "grammar"),
    "fastapi": ("mmspec serve", "serve"),
    "fastapi-offline": ("mmspec serve", "serve"),
    "jinja2": ("mmspec serve", "serve"),
    "prometheus-client": ("mmspec serve", "serve"),
    "python-multipart": ("mmspec serve", "serve"),
    "uvicorn": ("mmspec serve", "serve"),
    "tensorboard": ("training curves", "train"),
}


def examine(accelerators: Mapping[str, Method]) -> Json:
    """Report versions, devices, packages, kernels and the given methods."""
    return {
        "mmspec": {"version": __version__, "folder": str(Path(__file__).resolve().parents[1])},
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": [_package(name, "needed") for name in REQUIRED],
        "optional": [_package(name, *what) for name, what in OPTIONAL.items()],
        "devices": _devices(),
        "kernels": _kernels(),
        "accelerators": [_accelerator(name, method) for name, method in accelerators.items()],
    }


def environment(device: torch.device, dtype: torch.dtype) -> Json:
    """Device, dtype and versions, for records of measurements."""
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


def _package(name: str, purpose: str, extra: str | None = None) -> Json:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        remedy = how_to_install(extra)
        return {"name": name, "ok": False, "version": None, "for": purpose, "remedy": remedy}
    found: Json = {"name": name, "ok": True, "version": version, "for": purpose, "remedy": None}
    return found | ({"note": describe(version)} if name == "transformers" else {})


def _devices() -> list[Json]:
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
        devices.append(
            {"name": "mps", "ok": False, "detail": "this torch was built without MPS, or macOS is too old"}
        )
    return devices


def _kernels() -> list[Json]:
    """The ops of `mmspec.kernels`, with their backend on this device."""
    from mmspec import kernels
    from mmspec.kernels.backend import explain_backend

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        backend, reason = explain_backend(device)
    except ValueError as error:  # an unknown MMSPEC_BACKEND is reported
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
    """Model name of the processor, from /proc/cpuinfo if possible."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _accelerator(name: str, method: Method) -> Json:
    try:
        exactness, problem = promise_of(method)[0], None  # imports the plug-in
    except Exception as error:  # a plug-in that cannot be imported is reported
        exactness, problem = None, f"{type(error).__name__}: {error}"
    return {
        "name": name,
        "ok": problem is None,
        "exactness": exactness,
        "summary": method.summary,
        "needs": f"--drafter: {method.needs}" if method.needs else None,
        "problem": problem,
    }


def examine_model(source: str) -> Json:
    """Examine the model of a folder, hub id or GGUF file from its config, on the meta device.

    Returns:
        `ok`, and `problem` if it is false. Otherwise `recommended` (fields of `Recommendation`), layers by
        kind, bytes per token, row and draft token, and the recurrent mixers with how they compute a draft. A
        model that generates in any order (MAR) has no cache, and layers and bytes are empty or 0.

    Raises:
        CheckpointError: the model does not exist, or transformers does not support it.
    """
    config = config_of(source)
    found = {"name": type(config).__name__, "ok": True, "problem": None, "recommended": None}
    try:
        model = skeleton(config)
        found["name"] = type(model).__name__
        found["recommended"] = asdict(recommend(source, config))
        family = family_of(config)
        if family is not None and load(family.target).any_order:
            sizes = dict.fromkeys(("token_bytes", "row_bytes", "node_bytes"), 0)
            return found | {"layers": {}, "mixers": []} | sizes
        check_model(model)
    except UnsupportedModelError as error:
        return found | {"ok": False, "problem": str(error), "recommended": None}
    states = measure_states(model)
    mixers = Counter((one.mixer, one.is_closed, one.row, one.node) for one in states)
    return found | {
        "layers": dict(Counter(check_layer_types(config.get_text_config(decoder=True)))),
        "token_bytes": cached_bytes(config, model.dtype),
        "row_bytes": sum(one.row for one in states),
        "node_bytes": sum(one.node for one in states),
        "mixers": [
            {"name": name, "count": count, "closed_form": is_closed, "row_bytes": row, "node_bytes": node}
            for (name, is_closed, row, node), count in mixers.items()
        ],
    }


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a config on the meta device, in the dtype of the config."""
    usual = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")  # a GGUF file does not contain it
    (name, *_) = getattr(config, "architectures", None) or [usual]
    model_class: Any = None
    family = family_of(config)
    if family is not None and (family.draws or family.own_code):  # published with other class names
        kinds: Any = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
        model_class = next(kind[type(config)] for kind in kinds if type(config) in kind)
    model_class = model_class or getattr(transformers, name, None)
    if model_class is None:
        rule = "must be a text model, a vision-language model or an image generator"
        raise CheckpointError("model", name or type(config).__name__, rule)
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, dtype=config.dtype or torch.float32)
    model.eval()
    return model
