"""Costs of a round: one read of the device, two shapes, and only requested hidden states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmspec.core.canvas import Canvas
from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.kernels import ordering, philox
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.checks import PROMPTS, VOCABULARY, llama, precise
from tests.contracts.running import Recorder, decode
from tests.oracles import tree_of
from tests.tiny_models import TEXT_MODELS, tiny_lm

TAPPED = ("llama", "gemma2", "gemma4", "gpt2")
READS = (
    *("tolist", "item", "cpu", "numpy", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__"),
)
DISPATCHED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}


def compute_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Use torch for computations that use NumPy on a CPU, where both share memory."""
    patch.setattr(philox, "uniforms_on_host", philox._uniforms_in_torch)
    patch.setattr(ordering, "_sort_on_host", ordering._sort_in_torch)
    patch.setattr(ordering, "_largest_on_host", ordering._largest_in_torch)


class DispatchSpy(TorchDispatchMode):
    """Counts operators that make the host wait for the device."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in DISPATCHED:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count reads of tensors by the host; on a CPU `tolist` and its kin bypass the dispatcher."""
    reads: Counter[str] = Counter()

    def counting(name: str, real: Any) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads[name] += 1
            with torch.utils._python_dispatch._disable_current_modes():  # one read is not two
                return real(self, *args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch, DispatchSpy(reads):
        compute_as_on_a_gpu(patch)
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        yield reads


CASES: dict[str, tuple[Drafter, AcceptanceRule | None, Sampler]] = {
    "none": (NoDrafter(), None, Sampler()),
    "none, sampling": (NoDrafter(), None, Sampler(0.8, top_k=10, top_p=0.9, min_p=0.01)),
    "copy": (CopyDrafter(4, min_match=1), None, Sampler()),
    "draft model, sampled": (
        DraftModelDrafter(CausalTarget(tiny_lm(seed=22)), 3, "sampled"),
        SpeculativeSampling(),
        Sampler(0.8),
    ),
    "draft model, rows of their own": (
        DraftModelDrafter(CausalTarget(tiny_lm(seed=22)), 3, "sampled"),
        SpeculativeSampling(),
        Sampler([0.0, 0.8, 1.2], top_k=[0, 5, 9], top_p=[1.0, 0.9, 1.0], min_p=[0.0, 0.0, 0.01]),
    ),
    "jacobi, exact": (JacobiDrafter(4, "exact", front="3x2"), None, Sampler(0.8)),
}


MADE_OF_NUMBERS = {torch: ("tensor", "as_tensor", "from_numpy"), torch.Tensor: ("new_tensor",)}


@contextmanager
def counted_copies() -> Iterator[Counter[str]]:
    """Count tensors that the host makes of its numbers: on a CUDA device each is a copy to it."""
    copies: Counter[str] = Counter()

    def counting(name: str, real: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            copies[name] += 1
            return real(*args, **kwargs)

        return made

    with pytest.MonkeyPatch.context() as patch:
        compute_as_on_a_gpu(patch)
        for owner, names in MADE_OF_NUMBERS.items():
            for name in names:
                patch.setattr(owner, name, counting(name, getattr(owner, name)))
        yield copies


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_the_host_reads_the_device_once_a_round_and_copies_nothing_to_it(name: str) -> None:
    """The text that the host's index finds is an exception."""
    drafter, rule, sampler = CASES[name]
    rounds: list[tuple[Counter[str], Counter[str]]] = []
    with counted_reads() as reads, counted_copies() as copies:

        def watch(canvas: Canvas) -> None:
            rounds.append((+reads, +copies))
            reads.clear()
            copies.clear()

        decode(precise(), PROMPTS, drafter, rule, sampler, max_new_tokens=16, watch=watch)
    assert len(rounds) > 4
    copied = Counter({"tensor": 1} if name == "copy" else {})
    reads_of_first, copied_first = rounds[1]
    assert reads_of_first == Counter({"tolist": 1})
    if not isinstance(drafter, DraftModelDrafter):  # which reads the prompts before its first draft
        assert copied_first == copied
    assert rounds[2:] == [(Counter({"tolist": 1}), copied)] * (len(rounds) - 2)


@pytest.mark.parametrize("name", ["copy", "draft model, sampled", "jacobi, exact"])
def test_forwards_have_few_shapes_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.methods.copy.drafter.can_capture", lambda device: True)
    drafter, rule, sampler = CASES[name]
    target = Recorder(tiny_lm())
    decode(target, PROMPTS, drafter, rule, sampler, max_new_tokens=24)
    sizes = (4, 2, 1) if isinstance(drafter, CopyDrafter) else (drafter.max_nodes - 1,)
    assert set(target.nodes) <= {1, *(1 + size for size in sizes)}
    if isinstance(drafter, DraftModelDrafter):
        small = Recorder(drafter.model.model)
        again = DraftModelDrafter(small, drafter.num_draft_tokens, drafter.sampling)
        decode(target, PROMPTS, again, rule, sampler, max_new_tokens=24)
        assert set(small.nodes) == {1, 2}, "the last two tokens anew, then one by one"


@pytest.mark.parametrize("name", TAPPED)
def test_taps_are_the_models_hidden_states(name: str) -> None:
    """Tap i is hidden_states[i]; -1 is what the head reads, after the norm. At prefill and on every path."""
    target = CausalTarget(TEXT_MODELS[name]())
    layers = target.config.num_hidden_layers
    taps = (*range(layers), -1)

    def reference(tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return target.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states

    prompts = [{"input_ids": torch.tensor([list(prompt)])} for prompt in PROMPTS]
    state, output = target.prefill(prompts, 64, taps)
    for row, prompt in enumerate(PROMPTS):
        for tap in taps:
            gap = (output.taps[tap][row] - reference(prompt)[tap]).abs().max()
            assert output.taps[tap][row].shape[1] == len(prompt) and gap < 1e-4
    tokens = torch.randint(VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(3))
    draft = tree_of(tokens, [0, 0, 0, 1, 3], DraftKind.POINT)
    output = target.score(state, draft)
    state.close()
    for row, prompt in enumerate(PROMPTS):
        for node in range(5):
            path = tokens[row][draft.ancestors[row, node]].tolist()
            for tap in taps:
                gap = (output.taps[tap][row, node] - reference([*prompt, *path])[tap][0, -1]).abs().max()
                assert gap < 1e-4, f"tap {tap}, node {node}"


@pytest.mark.parametrize("tap", [2, -2])
def test_a_tap_that_does_not_exist_is_refused_and_leaves_no_hook(tap: int) -> None:
    prompts = [{"input_ids": torch.tensor([list(PROMPTS[0])])}]
    with pytest.raises(InputError, match="taps"):
        llama().prefill(prompts, 16, (0, tap))
    modules = llama().model.modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
