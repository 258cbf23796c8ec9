"""Heat map of committed cells per forward pass."""

import base64
import io

import numpy as np
from PIL import Image

from mmspec.core.image_grid import ImageGrid
from mmspec.demo.drawing import CommitMap, heat_map


def test_every_cell_has_the_number_that_its_forward_committed() -> None:
    commits = CommitMap(ImageGrid(2, 3, 8))
    assert (commits.counts == 0).all()
    for decided in ([1], [1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1, 1, 0]):  # in any order; shorter ones too
        commits.add(decided)
    assert commits.counts.tolist() == [[1, 2, 2], [2, 2, 0]]


def test_syntax_between_the_rows_is_no_cell() -> None:
    commits = CommitMap(ImageGrid(2, 2, 8, row_end=8, ending=(9,)))
    commits.add([1, 1, 1])
    commits.add([1] * 9)
    assert commits.counts.tolist() == [[2, 2], [2, 2]]


def test_the_map_is_an_image_of_a_pixel_a_cell_with_its_scale() -> None:
    html = heat_map(np.array([[1, 2, 0], [2, 3, 3]]))
    data = base64.b64decode(html.split("base64,")[1].split('"')[0])
    assert Image.open(io.BytesIO(data)).size == (3, 2)
    assert "aspect-ratio: 3 / 2" in html and "<span>3</span>" in html
    assert "<span>8</span>" in heat_map(np.array([[1]]), most=8)
