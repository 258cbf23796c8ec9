"""EMR-Merging: what is elected, masked and rescaled, and heads restored by the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmspec.errors import InputError
from mmspec_extras.cli import app
from mmspec_extras.head_store import merge_heads, restore_head


def numbers(seed: int, size: tuple[int, ...] = (5, 7)) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_one_head_is_restored_in_its_own_precision() -> None:
    base, head = {"a": numbers(1).to(torch.float8_e4m3fn)}, {"a": numbers(2).half()}
    restored = restore_head(merge_heads(base, {"one": head}), "one")["a"]
    torch.testing.assert_close(restored, head["a"], atol=4e-3, rtol=0)


def test_the_elected_vector_masks_and_factors_are_those_of_the_paper() -> None:
    """Computed weight by weight, in plain Python."""
    base = {"a": numbers(0)}
    heads = {task: {"a": base["a"] + numbers(seed)} for task, seed in (("x", 1), ("y", 2), ("z", 3))}
    store = merge_heads(base, heads)
    moves = {task: (head["a"] - base["a"]).flatten().tolist() for task, head in heads.items()}
    elected = []
    for each in zip(*moves.values(), strict=True):
        sign = 1 if sum(each) > 0 else -1
        elected.append(sign * max((abs(move) for move in each if move * sign > 0), default=0.0))
    for task, own in moves.items():
        mask = [move * vector > 0 for move, vector in zip(own, elected, strict=True)]
        assert 0 < sum(mask) < len(mask)
        kept = sum(abs(vector) for vector, taken in zip(elected, mask, strict=True) if taken)
        factor = sum(map(abs, own)) / kept
        expected = torch.tensor([factor * v * m for v, m in zip(elected, mask, strict=True)]).view(5, 7)
        torch.testing.assert_close(restore_head(store, task)["a"] - base["a"], expected, atol=5e-3, rtol=5e-3)
    assert store["mask/x/a"].nbytes == 5  # 35 bits


def test_commands_write_a_store_and_give_a_head_back(tmp_path: Path) -> None:
    for folder, seed in (("base", 1), ("first", 2), ("second", 3)):
        (tmp_path / folder).mkdir()
        save_file({"a": numbers(seed), "b.c": numbers(seed, (3,))}, tmp_path / folder / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    base, store, out = (str(tmp_path / name) for name in ("base", "store.safetensors", "taken"))
    heads = [str(tmp_path / name) for name in ("first", "second")]
    made = CliRunner().invoke(app, ["merge-heads", *heads, "--base", base, "--out", store])
    assert made.exit_code == 0, made.output
    taken = CliRunner().invoke(app, ["take-head", store, "second", "--base", base, "--out", out])
    assert taken.exit_code == 0, taken.output
    read = load_file(Path(out) / "model.safetensors")
    expected = restore_head(load_file(store), "second")
    assert all(torch.equal(read[name], expected[name]) for name in ("a", "b.c"))
    assert (Path(out) / "config.json").read_text() == "{}"


def test_other_tensors_and_tasks_are_refused() -> None:
    base = {"a": numbers(1)}
    with pytest.raises(InputError, match="heads.*in the same shapes"):
        merge_heads(base, {"x": {"a": numbers(1, (2, 2))}})
    with pytest.raises(InputError, match="task must be one of x"):
        restore_head(merge_heads(base, {"x": base}), "y")
