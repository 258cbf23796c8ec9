"""Users' hooks in a target: with steering that depends on the call, outputs equal those of `generate`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from transformers import PreTrainedModel

import mmspec
from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import hooks
from tests.tiny_models import HYBRID_TEXT_MODELS, tiny_llama, tiny_llava

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 3, 1, 4]])
Steering = Callable[[Tensor], Tensor]


def direction(width: int) -> Tensor:
    return 2 * torch.randn(width, generator=torch.Generator().manual_seed(3))


def everywhere(hidden: Tensor) -> Tensor:
    return hidden + direction(hidden.shape[-1])


def at_the_end(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :-1], everywhere(hidden[:, -1:])], 1)


def at_the_beginning(hidden: Tensor) -> Tensor:
    return torch.cat([everywhere(hidden[:, :1]), hidden[:, 1:]], 1)


def of_prompts(hidden: Tensor) -> Tensor:
    return everywhere(hidden) if hidden.shape[1] > 1 else hidden


def steer(model: PreTrainedModel, how: Steering) -> Any:
    """Steer what leaves the first layer of a model."""
    layer = model.get_decoder().layers[0]

    @torch.no_grad()  # by which the hook is a function of torch
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (how(output[0]), *output[1:]) if isinstance(output, tuple) else how(output)

    return layer.register_forward_hook(hook)


def say(model: Any) -> list[int]:
    mask = torch.ones_like(IDS)
    found = model.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=24, do_sample=False)
    words: list[int] = found[0].tolist()
    return words


def drafted(model: Any) -> int:
    """Candidates that were drafted in the last call."""
    last = mmspec.summary(model)[0].last
    assert last is not None
    return sum(last.drafted)


@pytest.mark.parametrize(
    ("build", "how"),
    [
        *((tiny_llama, how) for how in (at_the_end, at_the_beginning, of_prompts, everywhere)),
        (HYBRID_TEXT_MODELS["qwen3_5"], at_the_end),
    ],
)
def test_steered_words_are_those_of_generate(
    build: Callable[[], PreTrainedModel], how: Steering, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain decoding replaces drafts that the hook would change; drafts are used before and after it."""
    model, steered = build(), build()
    plain = say(model)
    steer(steered, how)
    wanted = say(steered)
    assert wanted != plain
    mmspec.enable(model, "copy", num_draft_tokens=4)
    assert say(model) == plain and drafted(model)
    handle = steer(model, how)
    with caplog.at_level(logging.WARNING, "mmspec"):
        for _ in range(2):
            assert say(model) == wanted
            assert bool(drafted(model)) == (how is everywhere)
    warnings = [record.message for record in caplog.records if "steer" in record.message]
    assert len(warnings) == (how is not everywhere)
    handle.remove()
    assert say(model) == plain and drafted(model)


def test_a_patched_forward_is_a_hook() -> None:
    model, steered = tiny_llama(), tiny_llama()
    for each in (model, steered):
        layer = each.get_decoder().layers[1].mlp
        own = layer.forward

        @functools.wraps(own)
        def forward(hidden: Tensor, own: Any = own) -> Tensor:
            return at_the_end(own(hidden))

        layer.forward = forward
    mmspec.enable(model, "copy")
    assert say(model) == say(steered) and not drafted(model)


def test_hooks_are_tried_when_they_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of packages that do not depend on the number of tokens are not tried."""
    tried: list[int] = []

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        tried.append(1)
        return score_twice(*args)

    score_twice = hooks.score_twice
    monkeypatch.setattr(hooks, "score_twice", counted)
    model = mmspec.enable(cpu_offload(tiny_llama(), torch.device("cpu")), "copy")
    say(model)
    assert not tried and not hooks.hooks_of_users(model)
    first = steer(model, everywhere)
    say(model), say(model)
    assert len(tried) == 1
    second = model.lm_head.register_forward_pre_hook(lambda module, args: None)
    say(model), say(model)
    assert len(tried) == 2
    first.remove(), second.remove()
    say(model)
    assert len(tried) == 2


def test_a_running_batch_refuses_what_it_would_decode_otherwise() -> None:
    pipe: Any = VisionLanguagePipeline(*tiny_llava(), accelerator="copy", length="fixed")
    with pipe.running_batch(rows=2) as batch:
        batch.enter("what is there ?", max_new_tokens=4)
        steer(pipe.model, at_the_end)
        with pytest.raises(InputError, match="accelerator.*'none'.*hooks.*'copy'"):
            batch.enter("what is there ?", max_new_tokens=4)
        while batch.handles:
            batch.step()
