"""The model card of a reference image model: training, attribute accuracy, entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.training.record import read_record
from reference.model_card import HEADER, describe_stages, write_readme

__all__ = ["write_card"]

USE = {
    "caption": """\
```python
from mmspec import MMSpecPipeline

pipe = MMSpecPipeline.from_pretrained("{folder}")
pipe("a red ring left of a small blue square", seed=0).images[0].save("image.png")
```

Prompts are captions of scenes ("a small red plain ring left of a large blue dotted square on grass."), or
part of one: the shape of an object must be said; its size, colour and pattern, the background and which of
two objects is on the left may be left open.
""",
    "class": """\
```python
from mmspec import MMSpecPipeline

pipe = MMSpecPipeline.from_pretrained("{folder}")
pipe(class_labels=[3, 17], seed=0).images[0].save("image.png")
```

There are 48 labels, 6 x colour + shape of the leftmost object; colours are red, orange, yellow, green, blue,
purple, white, black, and shapes circle, square, triangle, star, cross, ring.
""",
}
PARTS = """\
The transformer lies in the folder itself; `vq/` holds the image tokenizer (diffusers `VQModel`, normalised
codes, nearest by angle), `reader/` the network that judged the images{text}.
"""
TEXT_PARTS = ", `text_encoder/` and\n`tokenizer/` a T5 encoder of two layers and its words"
READING = """\
`nats` is the loss on real images; `TV of neighbours` the mean total variation between the conditional
distributions of neighbouring places, and `TV after a redraw` that between two distributions of one place when
the token before it is drawn again: what a Jacobi window has to live with.
"""
LIMITS = """\
It knows nothing but scenes: textured images of 64 x 64 pixels with one or two simple objects, drawn by
`mmspec.scenes`. Other words are passed over.
"""


def write_card(folder: str | Path, scores: dict[str, Any], command: str) -> Path:
    """Write `README.md` from the training records in a folder and the result of `score_image_model`.

    Args:
        folder: a folder that `train_image` wrote.
        scores: what `score_image_model` returned for it.
        command: the command that printed the scores.

    Returns:
        The path of the card.

    Raises:
        CheckpointError: the folder lacks the record of its training.
    """
    folder = Path(folder)
    record, vq, reader = (read_record(part) for part in (folder, folder / "vq", folder / "reader"))
    condition = scores["condition"]
    task = "text-to-image" if condition == "caption" else "unconditional-image-generation"
    return write_readme(
        folder,
        [
            HEADER.format(task=task, tags="llamagen, image-tokens"),
            f"# {folder.name}\n",
            f"A LlamaGen of {record['parameters'] / 1e6:.2f} million parameters that draws *scenes*, given a "
            f"{condition}; a reference model of mmspec. 64 x 64 pixels, 16 x 16 tokens, a codebook of 1024 x "
            "8.\n",
            USE[condition].format(folder=folder.as_posix()),
            PARTS.format(text=TEXT_PARTS if condition == "caption" else ""),
            "## Figures\n",
            f"On {scores['scenes']} held-out scenes (seeds from {scores['seed']}), plain decoding with the "
            f"default sampling, {scores['device']}, {scores['seconds']} s. What was asked for and is there, "
            "by the reader, which has seen real scenes only:\n",
            _table(scores),
            _difficulty(scores),
            READING,
            f"Printed by `{command}`.\n",
            "## Training\n",
            _training("Transformer" + (" and text encoder" if condition == "caption" else ""), record),
            _training("Image tokenizer", vq),
            _training("Reader", reader),
            "Fresh scenes in every batch (seeds from 1,000,000), Muon and AdamW. The code that trained them: "
            "`mmspec/training/{image,vq,reader}.py`.\n",
            "## Limits\n",
            LIMITS + (f"\n{record['limits']}\n" if record.get("limits") else ""),
        ],
    )


def _table(scores: dict[str, Any]) -> str:
    default = f"{scores['default_guidance_scale']:g}"
    rows = {
        f"guidance {scale}{' (default)' if scale == default else ''}": figures
        for scale, figures in scores["guidance"].items()
    }
    if "prompts" in scores:
        rows[f"guidance {default}, prompts that leave things open"] = scores["prompts"]
    rows |= {"real images": scores["real"], "their reconstructions": scores["reconstructed"]}
    names = list(scores["real"]["by_attribute"])
    lines = [f"| | all facts | {' | '.join(names)} | image entirely right |", f"|{'---|' * (len(names) + 3)}"]
    for label, figures in rows.items():
        by_attribute = [_percent(figures["by_attribute"].get(name)) for name in names]
        lines.append(
            f"| {label} | {_percent(figures['share'])} | {' | '.join(by_attribute)} | "
            f"{_percent(figures['exact'])} |"
        )
    return "\n".join(lines) + "\n"


def _difficulty(scores: dict[str, Any]) -> str:
    labels = {
        "nats": "nats a token",
        "entropy_mean": "entropy of the conditionals, mean",
        "entropy_median": "entropy, median",
        "top1": "probability of the likeliest token",
        "neighbour_tv": "TV of neighbours",
        "redraw_tv": "TV after a redraw",
    }
    default = f"{scores['default_guidance_scale']:g}"
    title = f"on {scores['measured']} real held-out images"
    lines = [f"| {title} | guidance 1 | guidance {default} |", "|---|---|---|"]
    lines += [
        f"| {label} | {scores[name]:.3f} | {scores['guided'][name]:.3f} |" for name, label in labels.items()
    ]
    return "\n".join(lines) + "\n"


def _training(part: str, record: dict[str, Any]) -> str:
    stages = describe_stages(record, "held out", "g")
    note = f"\n\n{record['note']}" if record.get("note") else ""
    return (
        f"{part} ({record['parameters'] / 1e6:.2f} M parameters): `{record['command']}`, seed "
        f"{record['seed']}, batches of {record['batch_size']}, on {record['device']}, torch "
        f"{record['torch']}.\n\n{stages}{note}\n"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
