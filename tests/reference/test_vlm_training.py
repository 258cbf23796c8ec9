"""Training of a model of 90,000 parameters, with the code that trains the shipped models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmspec.errors import InputError
from mmspec.scenes import CANVAS, HELD_OUT_SEEDS, training_seeds
from reference.cards import write_card
from reference.processors import build_hybrid_processor, build_processor
from reference.vlm import train_vlm
from reference.vlm_data import QUESTIONS_PER_SCENE, conversation_batch, patch_batch
from reference.vlm_model import SHAPES_BY_SIZE, ConversationLoss, build_model, exact_answers, tower_of
from reference.vlm_scores import score_vlm

OPTIONS: dict[str, Any] = {"size": "tiny", "steps": 40, "batch_size": 4, "tower_share": 0.25}
Losses = list[tuple[int, float]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Losses]:
    losses: Losses = []
    folder = tmp_path_factory.mktemp("vlm") / "tiny"
    train_vlm(folder, **OPTIONS, on_step=lambda step, loss: losses.append((step, loss)))
    return folder, losses


def test_training_lowers_both_losses(trained: tuple[Path, Losses]) -> None:
    tower, conversations = trained[1][:10], trained[1][10:]
    assert [step for step, _ in tower] == list(range(1, 11))
    assert tower[-1][1] < tower[0][1] - 0.05
    assert conversations[-1][1] < conversations[0][1] - 0.2


def test_a_trained_folder_loads_as_any_other_and_scores_and_card_come_from_it_alone(
    trained: tuple[Path, Losses],
) -> None:
    folder, _ = trained
    model, processor = (kind.from_pretrained(folder) for kind in (AutoModelForImageTextToText, AutoProcessor))
    assert type(model).__name__ == "LlavaForConditionalGeneration" and model.dtype == torch.float32
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    assert model.config.text_config.max_position_embeddings >= 1024
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    scores = score_vlm(folder, scenes=3, descriptions=False)
    assert scores["captions"] == 0, "a model trained for seconds cannot caption"
    assert 0 <= scores["answers"] <= 1 and scores["questions"] == 12
    record = json.loads((folder / "training.json").read_text())
    assert record["stages"][1]["steps"] == 30
    own, limits = "# Tiny\n\nA model.\n\n", "## Limits\n\nIt knows nothing.\n"
    (folder / "README.md").write_text(f"{own}## Figures\n\nold\n\n## Training\n\nold\n\n{limits}")
    for share in ("0.1 %", "0.0 %"):
        card = write_card(folder, "3 scenes", ("", "right"), [("captions", share)], "evaluate").read_text()
    assert card.startswith(own) and card.endswith(limits) and "old" not in card and "| 0.1 % |" not in card
    assert "| captions | 0.0 % |" in card and record["command"] in card


@pytest.mark.parametrize("size", ["tiny", "tiny-hybrid"])
def test_the_loss_is_that_of_the_plain_forward_pass(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference.vlm_model.MENTION_WEIGHT", 0.0)
    processor: Any = build_hybrid_processor() if size == "tiny-hybrid" else build_processor()
    model = build_model(SHAPES_BY_SIZE[size], processor).eval()
    visual = tower_of(model, CANVAS).visual_tokens
    batch = conversation_batch(np.arange(3), processor.tokenizer, visual, with_description=True)
    loss, right = ConversationLoss(model)(batch)
    inputs = {"pixel_values": batch.pixels}
    if size == "tiny-hybrid":  # as the processor cuts images into patches
        whole = dict(do_resize=False, do_rescale=False, do_normalize=False, return_tensors="pt")
        inputs = processor.image_processor(list(batch.pixels), **whole)
        inputs["mm_token_type_ids"] = (batch.tokens == processor.image_token_id).long()
    logits = model(input_ids=batch.tokens, **inputs).logits[:, :-1]
    weights = batch.weights[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:], reduction="none")
    # Both sum some thousand fp32 terms in another order.
    torch.testing.assert_close(loss, (losses * weights).sum() / weights.sum(), rtol=1e-5, atol=1e-5)
    assert len(exact_answers(batch, right)) == len(batch.kinds) == 3 * (2 + QUESTIONS_PER_SCENE)
    assert exact_answers(batch, torch.ones_like(right)).all()


def test_batches_depend_on_their_seeds_alone_and_never_hold_held_out_scenes(tmp_path: Path) -> None:
    seeds = training_seeds(0, 1, 5, 0, 16)
    assert (seeds >= HELD_OUT_SEEDS.stop).all()
    assert not np.array_equal(seeds, training_seeds(0, 1, 5, 1, 16)), "two processes see other scenes"
    one, other = patch_batch(seeds, 12), patch_batch(training_seeds(0, 1, 5, 0, 16), 12)
    assert torch.equal(one.pixels, other.pixels) and torch.equal(one.labels, other.labels)
    assert one.labels.shape == (16, 64, 6)
    with pytest.raises(InputError, match="held-out"):
        score_vlm(tmp_path, scenes=10, seed=HELD_OUT_SEEDS.stop - 5)
