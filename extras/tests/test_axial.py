"""Axial transformers: images drawn with kept keys equal one pass over all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.errors import InputError
from mmspec.families.images import image_target
from mmspec_extras.families.axial.modeling import AxialConfig, AxialForCausalLM
from mmspec_extras.families.axial.target import AxialTarget
from tests.families.test_parallel_images import images
from tests.tiny_models import randomise

SIDE, LABELS, SCALE = 4, (0, 3, 1), 2.5
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "grid_size": SIDE,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "outer_layers": 2,
    "num_classes": 4,
}


@pytest.fixture(scope="module")
def target() -> AxialTarget:
    model = randomise(AxialForCausalLM(AxialConfig(**SHAPE)), 5).double().eval()
    made = image_target(model)
    assert isinstance(made, AxialTarget)
    return made


@torch.inference_mode()
def whole_pass(target: AxialTarget, image: list[int], label: int) -> Tensor:
    """[N, V] guided logits of an image of a label, in one pass over all rows."""
    asked = torch.tensor([[SHAPE["vocab_size"] + each] for each in (label, SHAPE["num_classes"])])
    tokens = torch.tensor([image]).expand(2, -1)
    with_label, without = target.model.image_logits(target.model.begin(asked), tokens)
    return without + SCALE * (with_label - without)


@pytest.mark.parametrize(("name", "options"), [("none", {}), ("sjd", {"window": 6, "coupling": "exact"})])
def test_drawn_images_are_those_of_one_pass_over_all_rows(
    target: AxialTarget, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily, in a batch, with windows that cross rows; the outer stack reads each row once."""
    read, own = list[int](), target.model.summarise

    def noted(begin: Tensor, above: Tensor, before: Any, first: int) -> Any:
        read.extend(range(first, first + above.shape[1]))
        return own(begin, above, before, first)

    monkeypatch.setattr(target.model, "summarise", noted)
    drawn, stats = images(target, name, temperature=0.0, **options)
    monkeypatch.undo()
    for image, label in zip(drawn, LABELS, strict=True):
        assert whole_pass(target, image, label).argmax(-1).tolist() == image
    assert len({tuple(image) for image in drawn}) == 3
    if name == "none":
        assert sorted(read) == sorted([*range(SIDE)] * 2 * len(LABELS))
    else:
        assert stats.target_forwards < SIDE**2
    sampled, _ = images(target, name, **options)
    assert sampled == images(target, "none")[0]


def test_an_image_does_not_depend_on_its_batch(target: AxialTarget) -> None:
    together, _ = images(target)
    assert images(target, rows=(2, 0))[0] == [together[2], together[0]]


def test_a_token_changes_later_predictions_alone(target: AxialTarget) -> None:
    image = torch.randint(32, (SIDE**2,), generator=torch.Generator().manual_seed(0)).tolist()
    before = whole_pass(target, image, 1)
    for cell in range(SIDE**2):
        changed = [*image[:cell], (image[cell] + 1) % 32, *image[cell + 1 :]]
        differs = (whole_pass(target, changed, 1) != before).any(-1).tolist()
        assert differs == [place > cell for place in range(SIDE**2)]


def test_trees_are_refused(target: AxialTarget) -> None:
    with pytest.raises(InputError, match="chain"):
        images(target, "sjd", window=4, front="2")
