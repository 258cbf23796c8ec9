"""Bad requests for images, and bad checkpoints of image models, as data: rows 33 to 56."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mmspec.errors import CheckpointError, InputError, MMSpecError, NumericalError, UnknownArgumentError
from mmspec.pipelines import ImagePipeline
from tests.bad_inputs.checkpoint_rows import damaged, tensors
from tests.bad_inputs.refusals import Bench, Row
from tests.tiny_models import tiny_tokenizer
from tests.tiny_models.llamagen import CODES, STRIDE, save_llamagen, tiny_llamagen, tiny_text_encoder, tiny_vq

NAN, INF = float("nan"), float("inf")
GRID = 2
SIDE, TOKENS = GRID * STRIDE, GRID**2


@dataclass
class DrawingBench(Bench):
    """Pipelines for the rows about images: models of classes and of captions, and the latter's folder."""

    def ask(self) -> list[object]:
        return [self.classes(class_labels=1, seed=1).tokens, self.captions("red", seed=1).tokens]

    @cached_property
    def classes(self) -> Any:
        return quiet(ImagePipeline(tiny_llamagen("class", grid=GRID), None, "none", vq=tiny_vq()))

    @cached_property
    def captions(self) -> Any:
        parts: dict[str, Any] = {"vq": tiny_vq(), "text_encoder": tiny_text_encoder()}
        return quiet(ImagePipeline(tiny_llamagen("caption", grid=GRID), tiny_tokenizer(), "none", **parts))

    @cached_property
    def sound(self) -> Path:
        return save_llamagen(self.base / "drawing", "caption", grid=GRID)


def quiet(pipe: ImagePipeline) -> ImagePipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def label(number: int, argument: str, *expected: str, **call: Any) -> Row:
    return Row(number, f"class {call}"[:60], lambda b: b.classes(**call), argument, tuple(expected))


def text(
    number: int,
    argument: str,
    *expected: str,
    error: type[MMSpecError] = InputError,
    prompt: object = "red",
    **call: Any,
) -> Row:
    title = f"caption {dict(prompt=prompt, **call)}"[:60]
    return Row(number, title, lambda b: b.captions(prompt, **call), argument, tuple(expected), error)


def method(number: int, name: str, argument: str, *expected: str, **options: Any) -> Row:
    def call(bench: DrawingBench) -> object:
        return bench.classes.set_accelerator(name, **options)

    return Row(number, f"{name} {options}", call, argument, tuple(expected))


def replaced_vq(folder: Path) -> None:
    shutil.rmtree(folder / "vq")
    tiny_vq(codes=CODES + 1).save_pretrained(folder / "vq")


def poisoned(bench: DrawingBench) -> object:
    pipe = bench.classes
    table = pipe.model.model.cls_embedding.embedding_table.weight
    before = table.detach().clone()
    try:
        with torch.no_grad():
            table[3] = NAN
        return pipe(class_labels=3, seed=0)
    finally:
        with torch.no_grad():
            table.copy_(before)


VQ = "vq/diffusion_pytorch_model.safetensors"
ENCODER, RAW = "text_encoder/model.safetensors", "vq/raw_codebook.safetensors"
SPARE = {"spare.weight": torch.ones(2)}
GENERATOR = torch.Generator()
UNKNOWN = (("guidance", "guidance_scale"), ("num_images", "num_images_per_prompt"), ("seeds", "seed"))

IMAGES = [
    label(33, "class_labels", "0 to 4"),
    label(33, "class_labels", "combined with prompt", prompt="red", class_labels=1),
    label(33, "prompt", "class_labels", prompt="red"),
    label(33, "class_labels", "0 to 4", class_labels=[]),
    *[label(33, "class_labels[0]", "0 to 4", class_labels=v) for v in (-1, 5, 1.5, "1", True)],
    label(33, "class_labels[1]", "0 to 4", class_labels=[0, 9]),
    text(33, "prompt", "a text", prompt=None),
    text(33, "prompt", "text", prompt=None, class_labels=1),
    text(33, "prompt", "at least one token", prompt=""),
    text(33, "prompt", "at least one text", prompt=[]),
    *[text(33, "prompt", "a string", prompt=v) for v in (5, b"red", {"a": 1})],
    text(33, "prompt[1]", "a string", prompt=["red", None]),
    text(36, "prompt", "NUL", prompt="red\0"),
    text(36, "prompt", "Unicode", prompt="\ud800"),
    label(38, "negative_prompt", "classes", class_labels=1, negative_prompt="red"),
    text(38, "negative_prompt", "1 prompts", negative_prompt=["a", "b"]),
    text(38, "negative_prompt[1]", "a string", prompt=["red", "blue"], negative_prompt=["a", 5]),
    *[text(39, "num_images_per_prompt", "1 to 10,000", num_images_per_prompt=v)
      for v in (0, -1, 1.5, "2", True, 10**6)],
    *[text(39, "batch_size", "1 to 10,000", batch_size=v) for v in (0, -1, 1.5)],
    *[text(40, "temperature", "0 (greedy)", temperature=v) for v in (-1, NAN, INF, "1")],
    *[text(40, "top_k", "a positive integer", top_k=v) for v in (-1, 1.5, "5")],
    *[text(40, "top_p", "above 0 and at most 1", top_p=v) for v in (0, 1.1, NAN)],
    *[text(40, "min_p", "between 0 and 1", min_p=v) for v in (-0.1, 1.1)],
    *[text(41, "guidance_scale", "between 0 and 10000", guidance_scale=v) for v in (-3, NAN, "2", 1e6)],
    text(40, "top_p", "got 1.1", prompt=["red", "blue"], top_p=[0.5, 1.1]),
    text(41, "guidance_scale", "each of the 2 prompts", prompt=["red", "blue"], guidance_scale=[1.0] * 4,
         num_images_per_prompt=2),
    *[text(42, "height", "pixels", height=v) for v in (0, -8, 1.5, "64")],
    text(42, "height, width", f"{SIDE} x {SIDE}", height=SIDE + 1),
    text(42, "height, width", f"{SIDE} x {SIDE}", width=10**9),
    text(42, "output_type", "must be one of latent", output_type="jpg"),
    text(42, "output_type", "did you mean 'latent'?", output_type="latents"),
    text(42, "output_type", "must be one of latent", output_type=5),
    *[method(44, "sjd", "window", window=v) for v in (0, -1, 1.5, "8", TOKENS + 1, 200)],
    *[method(44, name, "delta", window=8, delta=v)
      for name in ("gsd", "lantern") for v in (-0.1, 1.1, NAN, "0.1", True)],
    method(43, "draft_model", "accelerator", "support images", drafter="a"),
    *[text(45, "seed", seed=v) for v in (-1, 2**64, "5", 1.5, True, [1, 2], [])],
    text(45, "seed", "3 (one per", prompt=["red", "blue", "a"], seed=[1, 2], num_images_per_prompt=2),
    text(45, "generator", "torch.Generator", generator=5),
    text(45, "generator", "torch.Generator", generator=[GENERATOR] * 2),
    text(45, "seed", "combined with generator", generator=GENERATOR, seed=1),
    *[text(46, "keyword", f"did you mean '{near}'", error=UnknownArgumentError, **{keyword: 5})
      for keyword, near in UNKNOWN],
    text(48, "callback_on_step_end", "a function", callback_on_step_end=5),
    damaged(49, "cut image tokenizer", lambda f: (f / VQ).write_bytes((f / VQ).read_bytes()[:500]), "vq"),
    damaged(50, "missing key", tensors(lambda w: w.pop("model.norm.weight")), "model",
            "missing keys: model.norm.weight"),
    damaged(50, "surplus key", tensors(lambda w: w.update(SPARE)), "model", "unknown keys: spare.weight"),
    damaged(50, "missing key of the image tokenizer", tensors(lambda w: w.pop("quant_conv.bias"), VQ), "vq",
            "missing keys: quant_conv.bias"),
    damaged(50, "surplus key of the image tokenizer", tensors(lambda w: w.update(SPARE), VQ), "vq",
            "unknown keys: spare.weight"),
    damaged(50, "NaN in the image tokenizer", tensors(lambda w: w["quant_conv.bias"].fill_(NAN), VQ), "vq",
            "NaN", "quant_conv.bias"),
    damaged(50, "missing key of the text encoder",
            tensors(lambda w: w.pop("encoder.final_layer_norm.weight"), ENCODER), "text_encoder",
            "missing keys: encoder.final_layer_norm.weight"),
    damaged(50, "surplus key of its encoder", tensors(lambda w: w.update(SPARE), ENCODER), "text_encoder",
            "unknown keys: spare.weight"),
    damaged(54, "no image tokenizer", lambda f: shutil.rmtree(f / "vq"), "vq", "vq=..."),
    damaged(54, "no text encoder", lambda f: shutil.rmtree(f / "text_encoder"), "text_encoder",
            "text_encoder=..."),
    damaged(54, "no tokenizer of words", lambda f: shutil.rmtree(f / "tokenizer"), "text_encoder",
            "tokenizer"),
    Row(54, "no image tokenizer in memory", lambda b: ImagePipeline(b.classes.model), "vq",
        ("decodes tokens to pixels",), CheckpointError),
    damaged(55, "codebook of another size", replaced_vq, "vq", f"{CODES + 1} entries", str(CODES)),
    damaged(55, "raw codebook of another size", tensors(lambda w: w.update(codebook=torch.ones(7, 4)), RAW),
            "codebook", "7 entries"),
    damaged(55, "raw codebook under another name", tensors(lambda w: w.update(book=w.pop("codebook")), RAW),
            "vq", "raw_codebook"),
    damaged(55, "captions of another width",
            lambda f: tiny_text_encoder(width=32).save_pretrained(f / "text_encoder"), "text_encoder",
            "width 32", "width 16"),
    damaged(55, "text encoder of fewer words",
            lambda f: tiny_text_encoder(words=64).save_pretrained(f / "text_encoder"), "tokenizer",
            "64 tokens"),
    Row(56, "NaN while drawing", poisoned, "", ("row 0, output token 0", "logits"), NumericalError,
        runs=True),
]  # fmt: skip
