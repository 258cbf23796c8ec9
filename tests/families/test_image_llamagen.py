"""LlamaGen gives the images of its published loop, with any drafter, batch, guidance and caption length."""

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from mmspec.core.image_grid import ImageGrid
from mmspec.errors import CheckpointError
from mmspec.families.images import image_target
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.families.llamagen.vq import vq_from_official
from mmspec.pipelines.image_prompts import image_requests
from tests.families.converted import convert_and_load
from tests.families.ldm_layout import naive_decode, vq_shapes
from tests.families.official_layout import CAPTIONS, CLASSES, GRID, VOCABULARY, fill
from tests.families.official_layout import transformer_state as official_state
from tests.targets.image_loop import DRAFTERS, accelerator, draw, naive_image
from tests.tiny_models import tiny_tokenizer

CAPTION_SEED = 15  # of 16 tried: at least 7 different tokens in every greedy image
LABELS = (0, 4, 2)
NULL = 5
TEXTS = ["a red circle", "blue", "the small green star on a large square"]  # the last one is cut
SLOTS, WIDTH = CAPTIONS["slots"], CAPTIONS["caption_width"]


def image(model, condition, negative, scale):
    """The greedy image by the model's own forward over all so far; both conditions are inputs of it."""

    def logits(inputs):
        def of_next(output):
            ids = torch.cat([inputs["input_ids"], torch.tensor([output], dtype=torch.long)], 1)
            mask = torch.ones_like(ids)
            mask[:, : inputs.get("pads", 0)] = 0
            others = {name: value for name, value in inputs.items() if name == "caption_features"}
            return model(input_ids=ids, attention_mask=mask, use_cache=False, **others).logits[0, -1]

        return of_next

    other = logits(negative) if scale != 1 else None
    with torch.no_grad():
        return naive_image(ImageGrid(GRID, GRID, VOCABULARY), logits(condition), other, scale)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    state = official_state(seed=9, **CLASSES)
    return LlamaGenTarget(convert_and_load(tmp_path_factory.mktemp("c2i"), state))


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    state = official_state(seed=CAPTION_SEED, **CAPTIONS)
    return LlamaGenTarget(convert_and_load(tmp_path_factory.mktemp("t2i"), state))


@pytest.fixture(scope="module")
def reader():
    """A tokenizer, and a T5 encoder as wide as the tiny model's captions."""
    tokenizer = tiny_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer), d_model=WIDTH, d_kv=4, d_ff=16, num_layers=1, num_heads=2, is_decoder=False
    )
    torch.manual_seed(0)
    encoder = T5EncoderModel(config).eval().requires_grad_(False)
    return {"tokenizer": tokenizer, "text_encoder": encoder}


@pytest.fixture(scope="module", params=[1.0, 3.0])
def class_answers(classes, request):
    """Return a guidance scale, and the naive images with it."""
    prompts = [{"input_ids": torch.tensor([[VOCABULARY + label]])} for label in (*LABELS, NULL)]
    images = [image(classes.model, prompt, prompts[-1], request.param) for prompt in prompts[:-1]]
    assert all(len(set(row)) > 3 for row in images)
    return request.param, images


@pytest.fixture(scope="module")
def caption_answers(captions, reader):
    """Like `class_answers`, for captions, which are padded on the left; both halves have the same mask."""
    ids = torch.full((1, SLOTS), VOCABULARY)
    null = captions.model.model.cls_embedding.uncond_embedding[None]
    images = []
    for text in TEXTS:
        words = reader["tokenizer"](text, truncation=True, max_length=SLOTS, return_tensors="pt").input_ids
        pads = SLOTS - words.shape[1]
        features = torch.zeros(1, SLOTS, WIDTH)
        features[:, pads:] = reader["text_encoder"](words).last_hidden_state
        own = {"input_ids": ids, "caption_features": features, "pads": pads}
        other = {"input_ids": ids, "caption_features": null, "pads": pads}
        images.append(image(captions.model, own, other, 3.0))
    assert all(len(set(row)) > 3 for row in images)
    return 3.0, images


@pytest.mark.parametrize("name", DRAFTERS)
def test_classes(classes, class_answers, name):
    scale, images = class_answers
    requests = image_requests(classes, class_labels=LABELS, guided=scale != 1)
    assert draw(classes, accelerator(name, requests, images, VOCABULARY), requests, scale)[0] == images
    alone = accelerator(name, requests[:1], images[:1], VOCABULARY)
    assert draw(classes, alone, requests[:1], scale)[0] == images[:1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_captions_of_several_lengths(captions, reader, caption_answers, name):
    scale, images = caption_answers
    requests = image_requests(captions, TEXTS, **reader)
    assert [request.inputs["input_ids"].shape[1] for request in requests] == [3, 1, 6]
    if not name.startswith("oracle"):  # needs distinct ids, which captions do not have
        assert draw(captions, accelerator(name, requests, images, VOCABULARY), requests, scale)[0] == images
    for request, expected in zip(requests, images, strict=True):
        made = accelerator(name, [request], [expected], VOCABULARY)
        assert draw(captions, made, [request], scale)[0] == [expected]


@pytest.fixture(scope="module")
def tokenizer_state():
    shapes = vq_shapes((1, 1, 1, 1, 1), codes=VOCABULARY)
    return fill(shapes, seed=3, embeddings=("quantize.",))


def test_codes_become_images(classes, tokenizer_state, tmp_path):
    vq, codebook = vq_from_official(tmp_path, tokenizer_state)
    target = image_target(classes.model, vq, codebook=codebook)
    assert isinstance(target, LlamaGenTarget)
    assert target.image_size == (16 * GRID, 16 * GRID) and torch.equal(target.codebook, codebook)
    assert not torch.equal(codebook, LlamaGenTarget(classes.model, vq).codebook)
    codes = torch.randint(VOCABULARY, (2, GRID**2), generator=torch.Generator().manual_seed(0))
    images = target.decode_tokens(codes)
    assert images.shape == (2, 3, 16 * GRID, 16 * GRID)
    expected = naive_decode(tokenizer_state, codes.reshape(2, GRID, GRID)).clamp(-1, 1)
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-4)


def test_parts_that_do_not_fit_are_refused(classes, tmp_path):
    model = classes.model
    shapes = vq_shapes((1, 1, 1, 1, 1), codes=VOCABULARY + 1)
    vq, codebook = vq_from_official(tmp_path, fill(shapes, seed=3, embeddings=("quantize.",)))
    with pytest.raises(
        CheckpointError,
        match=f"^vq must have {VOCABULARY} code vectors, .*got '{VOCABULARY + 1} code vectors'",
    ):
        image_target(model, vq)
    with pytest.raises(CheckpointError, match=f"must have {VOCABULARY} code vectors"):
        image_target(model, codebook=codebook)
    with pytest.raises(
        CheckpointError, match=f"^codebook must have {VOCABULARY} code vectors, .*got '3 code vectors'"
    ):
        image_target(model, vq, codebook=codebook[:3])
    with pytest.raises(CheckpointError, match="^vq must be an image tokenizer, .*; got None"):
        classes.decode_tokens(torch.zeros(1, GRID**2, dtype=torch.long))
