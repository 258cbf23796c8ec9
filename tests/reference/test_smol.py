"""scenes-smol with a language model of random weights in place of SmolLM2."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    TokenizersBackend,
)

from mmspec.families.smollm2 import language_model as smollm2
from reference.processors import build_processor
from reference.smol import train_smol
from reference.smol_data import SHARES, make_turn, spoken_batch
from reference.smol_model import IMAGE_TOKEN, SpeechLoss, build_smol, build_smol_processor
from reference.vlm_model import SHAPES_BY_SIZE, build_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", IMAGE_TOKEN)
OPTIONS: dict[str, Any] = {"steps": 24, "batch_size": 2, "rank": 2}
Losses = list[tuple[int, float]]


def language_model() -> tuple[LlamaForCausalLM, TokenizersBackend]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({piece: index for index, piece in enumerate((*SPECIAL, *letters))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    tokenizer = TokenizersBackend(
        tokenizer_object=made, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2]
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    widths = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    # large weights, so that inputs have an effect on the output
    how = {"vocab_size": len(tokenizer), "tie_word_embeddings": True, "initializer_range": 0.3}
    config = LlamaConfig(**how, **widths, **heads, **ids)
    torch.manual_seed(3)
    return LlamaForCausalLM(config), tokenizer


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a tower, a cache, and a tiny language model in place of SmolLM2."""
    folder = tmp_path_factory.mktemp("smol")
    torch.manual_seed(0)
    build_model(SHAPES_BY_SIZE["tiny"], build_processor()).save_pretrained(folder / "llava")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm2, "read_language_model", language_model)
        patch.setattr("reference.smol.CHECK_ROWS", 4)
        patch.setattr("reference.smol.WORDS_SHARE", 0.1)
        patch.setenv("MMSPEC_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def trained(parts: Path) -> tuple[Path, Losses]:
    losses: Losses = []
    out = parts / "tiny-smol"
    tower = parts / "llava"
    train_smol(out, tower_from=tower, **OPTIONS, on_step=lambda step, loss: losses.append((step, loss)))
    return out, losses


def test_both_losses_fall_and_the_folder_holds_no_language_model(trained: tuple[Path, Losses]) -> None:
    folder, losses = trained
    words, speech = ([loss for _, loss in part] for part in (losses[:2], losses[2:]))
    assert words[1] < words[0] and np.mean(speech[-11:]) < np.mean(speech[:11])
    weights = load_file(folder / "model.safetensors")
    language = [name for name in weights if "language_model" in name]
    assert len(language) == 2 * 2 * 2 and all("lora" in name for name in language)
    eight = {name for name, weight in weights.items() if weight.dtype == torch.float8_e4m3fn}
    assert "model.multi_modal_projector.linear_2.weight" in eight
    assert {weights[name].dtype for name in weights.keys() - eight} == {torch.float16}
    assert not [name for name in language if name in eight], "their small numbers would be lost"
    assert not list(folder.glob("tokenizer*")) and json.loads((folder / "training.json").read_text())


def test_what_is_trained_is_what_is_served(trained: tuple[Path, Losses], parts: Path) -> None:
    """The adapters' hooks against merged matrices, and rows of training against the processor's."""
    folder, _ = trained
    whole = smollm2.complete(folder)
    served, processor = (kind.from_pretrained(whole) for kind in (AutoModelForImageTextToText, AutoProcessor))
    language, tokenizer = language_model()
    tower = AutoModelForImageTextToText.from_pretrained(parts / "llava").model.vision_tower
    model = build_smol(language, tokenizer, tower)
    learner = SpeechLoss(model, 2, torch.device("cpu"), torch.float32)
    learner.take_over(folder)
    own = build_smol_processor(tokenizer, model.config)
    for kind in SHARES:
        turn, batch = make_turn(5, kind), spoken_batch(np.array([5]), kind, own.tokenizer, 16)
        content = [{"type": "image"}] * len(turn.images) + [{"type": "text", "text": turn.prompt}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        images = [Image.fromarray(image) for image in turn.images]
        inputs = processor(text=text, images=images, return_tensors="pt")
        prompt = inputs["input_ids"][0]
        assert (
            torch.equal(batch.tokens[0, : len(prompt)], prompt) and not batch.learnt[0, : len(prompt)].any()
        )
        assert processor.decode(batch.tokens[0, len(prompt) :]) == turn.reply
        torch.testing.assert_close(inputs["pixel_values"], batch.pixels)
        logits = served(input_ids=batch.tokens, pixel_values=batch.pixels).logits[:, :-1].transpose(1, 2)
        labels = batch.tokens[:, 1:].masked_fill(~batch.learnt[:, 1:], -100)
        unnamed = replace(batch, mention_at=batch.mention_at[:0], mention_labels=batch.mention_labels[:0])
        wanted = torch.nn.functional.cross_entropy(logits, labels)
        with torch.no_grad():
            torch.testing.assert_close(learner(unnamed)[0], wanted)
            assert len(batch.mention_at) == 0 or learner(batch)[0] > wanted, "mentions are learnt beside it"
