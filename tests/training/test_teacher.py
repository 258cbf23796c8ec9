"""Forward passes of a target over a batch of sequences equal those over single sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mmspec.families.images import image_target
from mmspec.families.llamagen.modeling import caption_prompt
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.targets.batches import batches
from mmspec.training.data.sequences import TrainingExample
from mmspec.training.losses.base import read
from tests.tiny_models import (
    TEXT_MODELS,
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_image,
    user_message,
)
from tests.tiny_models.llamagen import CAPTION_WIDTH, CODES, tiny_llamagen

TAPS = (0, 1, -1)
LENGTHS = (17, 21, 16, 20)
Inputs = dict[str, Tensor]


def words(seed: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(4, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def followed(prompt: Inputs, whole: int, seed: int) -> Inputs:
    """A prompt with a reply of random words, up to a length."""
    length = whole - prompt["input_ids"].shape[1]
    more = {"input_ids": words(seed, length, 60), "mm_token_type_ids": torch.zeros(1, length).long()}
    return {
        name: torch.cat([value, more[name]], 1) if name in more else value
        for name, value in prompt.items()
        if name != "attention_mask"
    }


def forwards_of(target: CausalTarget, sequences: Sequence[Inputs]) -> int:
    """Read sequences; each has to be read as it is alone. Returns how many forwards it took."""
    count = 0

    def one_more(*_: object) -> None:
        nonlocal count
        count += 1

    examples = [TrainingExample(sequence, 0) for sequence in sequences]
    handle = target.model.get_decoder().register_forward_hook(one_more)
    reading = read(target, examples, TAPS)
    handle.remove()
    assert reading.lengths == [sequence["input_ids"].shape[1] for sequence in sequences]
    for row, (sequence, length) in enumerate(zip(sequences, reading.lengths, strict=True)):
        _, alone = target.prefill([sequence], length, TAPS)
        for tap in TAPS:
            ours, theirs = reading.taps[tap][row], alone.taps[tap][0][0]
            torch.testing.assert_close(ours[:length], theirs, rtol=1e-4, atol=1e-5)
            assert not ours[length:].any()
    return count


def test_texts_of_any_length_are_read_together() -> None:
    for name in TEXT_MODELS.keys() - {"gemma3n"}:
        target = CausalTarget(TEXT_MODELS[name]())
        sequences = [{"input_ids": words(row, length, 64)} for row, length in enumerate(LENGTHS)]
        assert forwards_of(target, sequences) == 1, name


def with_images(family: str, images: Sequence[Sequence[int]]) -> tuple[CausalTarget, list[Inputs]]:
    """Sequences with so many images each, by their numbers: sizes and so tiles and patches differ."""
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    sequences = [
        followed(
            encode(processor, user_message("what is there ?", images=[tiny_image(each) for each in shown])),
            100 + 7 * row,
            row,
        )
        for row, shown in enumerate(images)
    ]
    return VisionLanguageTarget(model), sequences


@pytest.mark.parametrize("family", VISION_LANGUAGE_FAMILIES)
def test_sequences_with_images_are_read_together_and_texts_apart(family: str) -> None:
    assert forwards_of(*with_images(family, [[1], [], [2, 3], []])) == 2


def test_images_after_captions_of_any_length_are_read_together() -> None:
    """Whole images and begun ones."""
    model = tiny_llamagen("caption")
    target = image_target(model)
    assert target is not None
    sequences = []
    for row, (count, tokens) in enumerate([(3, 36), (8, 36), (1, 36), (3, 32)]):
        features = torch.randn(1, count, CAPTION_WIDTH, generator=torch.Generator().manual_seed(row))
        prompt = caption_prompt(model.config, features)
        _, offset = target.positions(prompt)
        ids = torch.cat([prompt["input_ids"], words(row, tokens, CODES)], 1)
        positions = torch.arange(ids.shape[1])[None] + offset
        sequences.append({**prompt, "input_ids": ids, "position_ids": positions})
    assert forwards_of(target, sequences) == 1


def test_what_is_not_known_is_read_alone() -> None:
    """Unknown arguments, images that see what follows them, and images without a place among the tokens."""
    target, sequences = with_images("llava", [[0], [1]])
    rows = [target.arguments(sequence)[0] for sequence in sequences]
    assert batches(target.model, rows) == [[1, 0]], "the longest first"
    types = {"mm_token_type_ids": torch.zeros(1, 1).long()}
    nowhere = [{**row, "input_ids": row["input_ids"].clamp(max=60)} for row in rows]
    unknown = [{**row, "cross_attention_mask": torch.ones(1, 1)} for row in rows]
    for alone in ([{**row, **types} for row in rows], nowhere, unknown):
        assert batches(target.model, alone) == [[1], [0]]
