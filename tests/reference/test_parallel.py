"""Training of the model with queries: training matches decoding, and a tiny run can be resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmspec.core.image_grid import ImageGrid
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.families.lpd.modeling import LPDForCausalLM
from mmspec.families.parallel_images.orders import DecodingOrder
from mmspec.pipelines import MMSpecPipeline
from reference.image_data import ImageBatch, image_batch
from reference.image_model import (
    SHAPES_BY_SIZE,
    build_caption_tokenizer,
)
from reference.parallel import (
    QueryLoss,
    begin_with,
    mirrored,
    sample_groups,
    train_parallel,
)

TINY = SHAPES_BY_SIZE["tiny"]
GRID = ImageGrid(TINY.grid, TINY.grid, TINY.entries)


def batch_of(seeds: range) -> ImageBatch:
    batch = image_batch(np.array(seeds), build_caption_tokenizer(), dropped=0.0)
    tokens = torch.randint(TINY.entries, (len(seeds), GRID.cells), generator=torch.Generator().manual_seed(1))
    return replace(batch, tokens=tokens)


@pytest.fixture(scope="module")
def learner(start: Path) -> QueryLoss:
    from transformers import T5EncoderModel

    torch.manual_seed(1)
    model = begin_with(start, 2)
    with torch.no_grad():
        model.model.position_embedding.weight.normal_()
        model.model.embed_tokens.weight.mul_(50)
        model.lm_head.weight.mul_(20)
    return QueryLoss(model.eval(), T5EncoderModel.from_pretrained(start / "text_encoder").eval())


@pytest.mark.parametrize("seed", range(12))
def test_groups_are_of_all_cells(seed: int) -> None:
    order, sizes = sample_groups(GRID, 3, np.random.default_rng(seed))
    assert (order.sort(1).values == torch.arange(GRID.cells)).all()
    assert sum(sizes) == GRID.cells and min(sizes) >= 1
    square = ImageGrid(3, 3, 1)
    turned = {tuple(mirrored(np.arange(9), square, which)) for which in range(8)}
    assert len(turned) == 8


def test_what_is_learnt_is_what_decodes(learner: QueryLoss, start: Path) -> None:
    pipe = MMSpecPipeline.from_pretrained(start, accelerator="none")
    words = "a red ring left of a small blue cross"
    pipe = type(pipe)(learner.transformer, pipe.processor, "none", vq=pipe.vq, text_encoder=pipe.text_encoder)
    drawn = pipe(words, seed=5, guidance_scale=1.0, output_type="latent")
    tokens = torch.tensor(drawn.tokens)
    ids = pipe.tokenizer([words], return_tensors="pt", padding="max_length", truncation=True)
    batch = replace(
        batch_of(range(1)), tokens=tokens, words=ids["input_ids"], word_mask=ids["attention_mask"]
    )
    random = RandomStream.from_seed([5], 1)
    order = DecodingOrder()
    with torch.no_grad():
        logits, _ = learner.read(batch, order.draw(GRID, random), order.counts(GRID))
    cells: Tensor = order.draw(GRID, random)
    noise = random.gumbel(cells, Purpose.TARGET, TINY.entries, torch.float32)
    assert drawn.stats.target_forwards == 20
    assert ((logits + noise).argmax(-1) == tokens.gather(1, cells)).all()


def test_a_tiny_training_learns_goes_on_and_is_loaded(start: Path, tmp_path: Path) -> None:
    out, losses = tmp_path / "parallel", list[float]()
    plan = {"start": start, "layers": 1, "batch_size": 2}
    train_parallel(out, steps=2, on_step=lambda _, loss: losses.append(loss), **plan)
    train_parallel(out, steps=3, resume=True, on_step=lambda _, loss: losses.append(loss), **plan)
    assert len(losses) == 3 and all(np.isfinite(losses))
    record = json.loads((out / "training.json").read_text())
    assert record["command"].startswith("python -m reference train parallel")
    stored = load_file(out / "model.safetensors")
    matrices = {weight.dtype for name, weight in stored.items() if ".layers." in name and weight.dim() == 2}
    assert matrices == {torch.float8_e4m3fn}
    pipe = MMSpecPipeline.from_pretrained(out)
    assert isinstance(pipe.model, LPDForCausalLM) and pipe.model.dtype == torch.float32
    images = pipe("a red ring", seed=0)
    assert images.stats.target_forwards == 20 and images.images[0].size == (64, 64)
