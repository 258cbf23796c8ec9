"""Outputs of single compressors, compared with a closed form or a slow implementation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from mmspec.compressors import build_compressor, pooling
from mmspec.compressors.pruning import most_diverse
from mmspec.compressors.queries import compress_latent
from mmspec.visual_tokens.tokens import VisualTokens, raster

WIDTH = 6


def image(boxes: Tensor, seed: int = 0) -> VisualTokens:
    features = torch.randn(1, len(boxes), WIDTH, generator=torch.Generator().manual_seed(seed))
    return VisualTokens(features, torch.ones(1, len(boxes), dtype=torch.bool), boxes[None])


def test_latent_is_the_closed_form() -> None:
    given = image(raster(3, 3))
    queries = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    features = given.features[0]
    normed = features / features.pow(2).mean(-1, keepdim=True).sqrt()
    expected = torch.stack(
        [
            sum(w * f for w, f in zip((normed @ q / WIDTH**0.5).softmax(0), features, strict=True))
            for q in queries
        ]
    )
    torch.testing.assert_close(
        compress_latent(queries, given.features, given.mask)[0], expected, rtol=1e-4, atol=1e-5
    )


def test_pooling_is_average_pooling_where_the_grids_divide() -> None:
    given = image(torch.cat([raster(4, 6), raster(1, 2)]))
    given.mask[0, 24:] = False
    due = avg_pool2d(given.features[0, :24].T.view(WIDTH, 4, 6), 2).flatten(1).T
    torch.testing.assert_close(pooling.pool(given, 2, 3).features[0], due)


def test_attention_keeps_what_the_question_points_at_in_reading_order() -> None:
    given = image(raster(3, 3))
    wanted = [2, 5, 7]
    given.features[0, wanted] = given.features[0, wanted].abs() + 3
    kept = build_compressor("attention_pruning", WIDTH, tokens=3)(given, torch.ones(1, WIDTH))
    assert torch.equal(kept.features[0], given.features[0, wanted])
    assert torch.equal(kept.boxes[0], given.boxes[0, wanted])


def test_similarity_adds_the_farthest_token_each_time() -> None:
    given = image(raster(4, 5))
    unit = given.features[0] / given.features[0].norm(dim=-1, keepdim=True)
    chosen = [int((unit @ unit.sum(0)).argmin())]
    while len(chosen) < 6:
        nearest = (unit @ unit[chosen].T).amax(-1)
        chosen.append(min(set(range(20)) - set(chosen), key=lambda token: float(nearest[token])))
    assert most_diverse(given, 6)[0][0].tolist() == sorted(chosen)


def test_the_gate_sends_each_image_through_the_branch_of_its_question() -> None:
    torch.manual_seed(0)
    branches = {"pooling": {"tokens": 4}, "latent": {"tokens": 2}, "none": {}}
    gate = build_compressor("gate", WIDTH, branches=branches).eval()
    one = image(raster(4, 4))
    many = VisualTokens(*(part.expand(64, *part.shape[1:]) for part in (one.features, one.mask, one.boxes)))
    questions = torch.randn(64, WIDTH)
    made = gate(many, questions)
    picked = gate.score(torch.nn.functional.rms_norm(questions, (WIDTH,))).argmax(-1)  # type: ignore[operator]
    assert picked.unique().numel() > 1
    for row, branch in enumerate(picked.tolist()):
        alone = list(gate.branches.values())[branch](one, questions[row : row + 1])  # type: ignore[union-attr]
        count = alone.features.shape[1]
        assert made.mask[row].sum() == count
        assert torch.equal(made.features[row, :count], alone.features[0])
