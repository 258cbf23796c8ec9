"""The model card of a reference model of continuous tokens: training, attribute accuracy, distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.models.official_files import read_config
from mmspec.training.record import read_record
from reference.model_card import HEADER, describe_stages, write_readme

__all__ = ["write_card"]

ABOUT = {
    "caption": (
        "A NextStep (2508.10711) of {size:.2f} million parameters that draws *scenes*, given a caption",
        'pipe("a red ring left of a small blue square", seed=0).images[0].save("image.png")',
    ),
    "class": (
        "A MAR (any order, 2406.11838) of {size:.2f} million parameters that draws *scenes* of one object, "
        "given a class: 6 x colour + shape (red, orange, yellow, green, blue, purple, white, black; circle, "
        "square, triangle, star, cross, ring)",
        'pipe(class_labels=[3, 17], seed=0).images[0].save("image.png")',
    ),
}
USE = """\
```python
from mmspec import MMSpecPipeline

pipe = MMSpecPipeline.from_pretrained("{folder}")
{call}
```

The model lies in the folder itself; `vae/` holds its autoencoder (diffusers `AutoencoderKL`, 16 x 16 latents
of 8 channels). The network that judged the images is that of assets/scenes-llamagen.
"""
LIMITS = """\
It knows nothing but scenes: textured images of 64 x 64 pixels with one or two simple objects, drawn by
`mmspec.scenes`.
"""


def write_card(folder: str | Path, scores: dict[str, Any], command: str) -> Path:
    """Write `README.md` from the training records in a folder and the result of `score_latent_model`.

    Args:
        folder: a folder that `train_latent_model` wrote.
        scores: what `score_latent_model` returned for it.
        command: the command that printed the scores.

    Returns:
        The path of the card.

    Raises:
        CheckpointError: the folder lacks the record of its training.
    """
    folder = Path(folder)
    record, vae = read_record(folder), read_record(folder / "vae")
    about, call = ABOUT[scores["condition"]]
    task = "text-to-image" if scores["condition"] == "caption" else "unconditional-image-generation"
    return write_readme(
        folder,
        [
            HEADER.format(task=task, tags=f"{read_config(folder)['model_type']}, continuous-tokens"),
            f"# {folder.name}\n",
            about.format(size=record["parameters"] / 1e6) + "; a reference model of mmspec.\n",
            USE.format(folder=folder.as_posix(), call=call),
            "## Figures\n",
            f"On {scores['scenes']} held-out scenes (seeds from {scores['seed']}), plain decoding with the "
            f"model's settings, {scores['device']}, {scores['seconds']} s. What was asked for and is there, "
            "by the reader, which has seen real scenes only, and the kernel distance (KID, unbiased) of its "
            "features to real images:\n",
            _table(scores),
            f"Printed by `{command}`.\n",
            "## Training\n",
            _training("Model", record),
            _training("Autoencoder", vae),
            "## Limits\n",
            LIMITS + (f"\n{record['limits']}\n" if record.get("limits") else ""),
        ],
    )


def _table(scores: dict[str, Any]) -> str:
    names = list(scores["real"]["by_attribute"])
    lines = [
        f"| | all facts | {' | '.join(names)} | image entirely right | kernel distance |",
        f"|{'---|' * (len(names) + 4)}",
    ]
    rows = {f"guidance {scale}": one for scale, one in scores["guidance"].items()}
    for label, one in {**rows, "real images": scores["real"]}.items():
        shares = [one["share"], *map(one["by_attribute"].get, names), one["exact"]]
        distance = f"{one['kernel_distance']:.3g} +- {one['margin']:.2g}" if "margin" in one else ""
        shown = " | ".join("" if share is None else f"{100 * share:.1f} %" for share in shares)
        lines.append(f"| {label} | {shown} | {distance} |")
    return "\n".join(lines) + "\n"


def _training(part: str, record: dict[str, Any]) -> str:
    note = f"\n\n{record['note']}" if record.get("note") else ""
    return (
        f"{part} ({record['parameters'] / 1e6:.2f} M parameters): `{record['command']}`, seed "
        f"{record['seed']}, batches of {record['batch_size']}, on {record['device']}, torch "
        f"{record['torch']}.\n\n{describe_stages(record, 'held out', 'g')}{note}\n"
    )
