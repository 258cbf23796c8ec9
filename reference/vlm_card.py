"""The model card of a reference vision-language model: training and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.training.record import read_record
from reference.model_card import HEADER, describe_stages, write_readme

__all__ = ["write_card"]

USE = """\
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
#: transformers replaces the tokenizer of such a folder by its family's own, and keeps the vocabulary alone.
OWN = {
    "more": ", PreTrainedTokenizerFast",
    "own": 'processor.tokenizer = PreTrainedTokenizerFast.from_pretrained("{folder}")  # not Qwen\'s\n',
}
LIMITS = """\
It knows nothing but scenes: textured images of one to three simple objects, drawn by
`mmspec.scenes`, and the few hundred words that they are spoken of in. It was trained with one
image per conversation. Images of the real world get confident nonsense.
"""
LABELS = {
    "captions": "short captions right to the word",
    "descriptions": "long descriptions right to the word",
}


def write_card(folder: str | Path, scores: dict[str, Any], command: str) -> Path:
    """Write `README.md` from the training record in a folder and the result of `score_vlm`.

    Args:
        folder: a folder that `train_vlm` wrote.
        scores: what `score_vlm` returned for it.
        command: the command that printed the scores.

    Returns:
        The path of the card.
    """
    folder = Path(folder)
    record = read_record(folder)
    is_hybrid = "hybrid" in record["size"]
    return write_readme(
        folder,
        [
            HEADER.format(task="image-text-to-text", tags="qwen3_5" if is_hybrid else "llava"),
            f"# {folder.name}\n",
            _introduction(record),
            USE.format(folder=folder.as_posix(), **(OWN if is_hybrid else {"more": "", "own": ""})).replace(
                "{folder}", folder.as_posix()
            ),
            "## Figures\n",
            f"On {scores['scenes']} held-out scenes (seeds from {scores['seed']}) and {scores['questions']} "
            f"questions about them, greedy decoding, {scores['device']}, {scores['seconds']} s:\n",
            _table(scores),
            f"Printed by `{command}`.\n",
            "## Training\n",
            _training(record),
            "## Limits\n",
            LIMITS,
        ],
    )


def _introduction(record: dict[str, Any]) -> str:
    role = "a draft model for scenes-llava" if record["size"] == "small" else "a reference model"
    kind, visual = "A LLaVA", "64 visual tokens"
    if "hybrid" in record["size"]:
        kind = "A Qwen3.5 (three layers of four keep a recurrent state)"
        visual = "16 visual tokens at three-axis positions"
    return (
        f"{kind} of {record['parameters'] / 1e6:.2f} million parameters that describes *scenes* and answers "
        f"questions about them; {role} of mmspec. 96 x 96 pixels, {visual}, one token per word.\n"
    )


def _table(scores: dict[str, Any]) -> str:
    rows = [(label, scores[key]) for key, label in LABELS.items() if key in scores]
    rows.insert(1, ("answers right", scores["answers"]))
    rows += [(f"answers about {kind}", share) for kind, share in scores["answers_by_kind"].items()]
    rows += [(f"{name} of an object, in captions", share) for name, share in scores["attributes"].items()]
    rows += [
        ("number of objects, in captions", scores["count"]),
        ("background, in captions", scores["background"]),
    ]
    body = "\n".join(f"| {label} | {100 * share:.1f} % |" for label, share in rows)
    return f"| | share |\n|---|---|\n{body}\n"


def _training(record: dict[str, Any]) -> str:
    stages = describe_stages(record, "of 64 held-out scenes", ".3f")
    note = f"{record['note']}\n\n" if record.get("note") else ""
    return (
        f"`{record['command']}`, seed {record['seed']}, on {record['device']}, torch {record['torch']}, "
        f"fresh scenes in every batch (seeds from 1,000,000), Muon and AdamW.\n\n{stages}\n\n{note}"
        "The code that trained it: `reference/vlm.py`.\n"
    )
