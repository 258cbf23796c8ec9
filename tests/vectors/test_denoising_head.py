"""Denoising heads: published keys, tables in closed form, the fast path, chains of known distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmspec.vectors.denoising_head import (
    DDPMSchedule,
    DenoisingHead,
    DenoisingHeadConfig,
    DenoisingNet,
    DenoisingProcess,
    FlowSchedule,
)
from tests.vectors.denoising_layout import net_shapes, randomize

TOKEN, CONDITION, WIDTH, DEPTH = 3, 5, 16, 2
SCHEDULES = {"ddpm": DDPMSchedule(7), "noisy": DDPMSchedule(7, last_step_noise=True), "flow": FlowSchedule(5)}
CPU, DOUBLE = torch.device("cpu"), torch.float64


def head(kind: str, dtype: torch.dtype = DOUBLE, seed: int = 0) -> DenoisingHead:
    kind = "ddpm" if kind == "noisy" else kind
    made = DenoisingHead(DenoisingHeadConfig(TOKEN, CONDITION, WIDTH, DEPTH, kind))
    return randomize(made, seed).to(dtype)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = DOUBLE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=DOUBLE).to(dtype)


def test_weights_have_the_published_names_and_start_closed():
    outputs = 2 * TOKEN
    net = DenoisingNet(TOKEN, CONDITION, WIDTH, DEPTH, outputs)
    own = {name: tuple(weight.shape) for name, weight in net.state_dict().items()}
    assert own == net_shapes(TOKEN, CONDITION, WIDTH, DEPTH, outputs)
    closed = {name for name, weight in net.named_parameters() if not weight.any()}
    assert {name for name in own if "adaLN" in name or name.startswith("final_layer.")} <= closed
    assert not net(random(2, TOKEN).float(), torch.ones(2), random(2, CONDITION).float()).any()


def test_the_network_is_what_the_formulas_say():
    net = head("flow").net
    weights = net.state_dict()

    def dense(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def norm(x: Tensor) -> Tensor:
        return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-6)

    x, condition, time = random(TOKEN), random(CONDITION, seed=2), 0.7
    angles = [time * 10_000 ** (-k / 128) for k in range(128)]
    waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=DOUBLE)
    y = dense("time_embed.mlp.2", silu(dense("time_embed.mlp.0", waves))) + dense("cond_embed", condition)
    hidden = dense("input_proj", x)
    for block in (f"res_blocks.{index}." for index in range(DEPTH)):
        shift, scale, gate = dense(block + "adaLN_modulation.1", silu(y)).split(WIDTH)
        inner = norm(hidden) * weights[block + "in_ln.weight"] + weights[block + "in_ln.bias"]
        inner = dense(block + "mlp.0", inner * (1 + scale) + shift)
        hidden = hidden + gate * dense(block + "mlp.2", silu(inner))
    shift, scale = dense("final_layer.adaLN_modulation.1", silu(y)).split(WIDTH)
    expected = dense("final_layer.linear", norm(hidden) * (1 + scale) + shift)
    output = net(x[None], torch.tensor([time], dtype=DOUBLE), condition[None])[0]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def respaced(steps: int) -> tuple[list[int], list[float], list[float]]:
    """Indices, alpha bar and alpha bar of the step before, the least noisy first, in python's numbers."""

    def curve(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    product, products = 1.0, []
    for index in range(1000):
        product *= 1 - min(1 - curve((index + 1) / 1000) / curve(index / 1000), 0.999)
        products.append(product)
    indices = [round(index * 999 / (steps - 1)) for index in range(steps)]
    kept = [products[index] for index in indices]
    return indices, kept, [1.0, *kept[:-1]]


@pytest.mark.parametrize("steps", [5, 64])
def test_ddpm_tables_are_those_of_the_closed_forms(steps):
    indices, kept, before = respaced(steps)
    schedule = DDPMSchedule(steps, last_step_noise=True).to(CPU, DOUBLE)
    assert schedule.times.tolist() == indices[::-1]
    x, noise = 0.3, -0.8
    posteriors = [(1 - a / b) * (1 - b) / (1 - a) for a, b in zip(kept, before, strict=True)]
    posteriors[0] = posteriors[1]
    for value in (-1.0, 0.0, 1.0):
        output = torch.tensor([[noise, value]], dtype=DOUBLE)
        for index, (a, b) in enumerate(zip(kept, before, strict=True)):
            beta = 1 - a / b
            token = x / math.sqrt(a) - math.sqrt(1 / a - 1) * noise
            expected = (token * beta * math.sqrt(b) + x * (1 - b) * math.sqrt(1 - beta)) / (1 - a)
            share = (value + 1) / 2
            variance = math.exp(share * math.log(beta) + (1 - share) * math.log(posteriors[index]))
            mean, std = schedule.transition(torch.tensor([[x]], dtype=DOUBLE), steps - 1 - index, output)
            assert float(mean) == pytest.approx(expected, rel=1e-9, abs=1e-9)
            assert float(std) == pytest.approx(math.sqrt(variance), rel=1e-9)


def test_the_flow_takes_the_steps_of_the_published_sampler():
    steps, shift, last = 6, 3.0, 0.04
    schedule = FlowSchedule(steps, shift, last).to(CPU, DOUBLE)
    plain = [(1 - last) * index / (steps - 1) for index in range(steps)]
    times = [time / (shift - (shift - 1) * time) for time in plain]
    assert schedule.times.tolist() == pytest.approx(times)
    x, velocity = 0.4, -1.3
    state, output = (torch.tensor([[number]], dtype=DOUBLE) for number in (x, velocity))
    for step, (time, following) in enumerate(zip(times, times[1:], strict=False)):
        score = (time * velocity - x) / ((1 - time) ** 2 + time * (1 - time))
        drift = velocity + (1 - time) * score
        mean, std = schedule.transition(state, step, output)
        assert float(mean) == pytest.approx(x + drift * (following - time))
        assert float(std) == pytest.approx(math.sqrt(2 * (1 - time)) * math.sqrt(following - time))
    mean, std = schedule.transition(state, steps - 1, output)
    assert (float(mean), float(std)) == (pytest.approx(x + last * velocity), 0)


def process_of(kind: str, rows: int = 4, dtype: torch.dtype = DOUBLE, **settings: Any) -> DenoisingProcess:
    arguments: dict[str, Any] = {"unconditional": random(rows, CONDITION, seed=3, dtype=dtype), "scale": 2.5}
    arguments |= {"temperature": 0.8, "schedule": SCHEDULES[kind]} | settings
    return head(kind, dtype).process(random(rows, CONDITION, seed=2, dtype=dtype), **arguments)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_guidance_and_temperature_are_those_of_the_formulas(kind):
    process, net = process_of(kind), head(kind).net
    x, steps = random(4, TOKEN, seed=7), process.steps
    schedule = SCHEDULES[kind].to(CPU, DOUBLE)
    for step in (0, 2, steps - 1):
        times = schedule.times[step].expand(4)
        conditional = net(x, times, random(4, CONDITION, seed=2))
        unconditional = net(x, times, random(4, CONDITION, seed=3))
        guided = conditional.clone()
        u, c = unconditional[:, :TOKEN], conditional[:, :TOKEN]
        guided[:, :TOKEN] = u + 2.5 * (c - u)
        mean, std = schedule.transition(x, step, guided)
        own_mean, own_std = process.transition(x, step)
        torch.testing.assert_close(own_mean, mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(own_std, 0.8 * std, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["noisy", "flow"])
def test_a_whole_path_gives_the_transitions_of_its_steps(kind):
    process = process_of(kind)
    states = random(4, process.steps, TOKEN, seed=8)
    means, stds = process.transitions(states)
    assert means.shape == stds.shape == states.shape
    for step in range(process.steps):
        mean, std = process.transition(states[:, step], step)
        torch.testing.assert_close(means[:, step], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(stds[:, step], std, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_sample_is_the_chain_of_its_transitions(kind):
    process = process_of(kind)
    noises = random(4, process.steps + 1, TOKEN, seed=9)
    x = noises[:, 0]
    for step in range(process.steps):
        mean, std = process.transition(x, step)
        assert bool((std > 0).all()) == (step < process.steps - 1 or kind == "noisy")
        x = mean + std * noises[:, 1 + step]
    assert torch.equal(process.run(noises)[:, -1], x)


class Spy(TorchDispatchMode):
    """Collects the operations that move numbers between host and device, or depend on them."""

    BANNED = ("_local_scalar_dense", "nonzero", "lift", "masked_select", "unique", "is_pinned")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        moves = "_to_copy" in name and (kwargs or {}).get("device") is not None
        if moves or any(banned in name for banned in self.BANNED):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_passes_between_host_and_device_inside_a_chain():
    process = process_of("ddpm", dtype=torch.bfloat16)
    noises = random(4, process.steps + 1, TOKEN, dtype=torch.float32)
    states = random(4, process.steps, TOKEN, dtype=torch.float32)
    rows = torch.tensor([0, 2])
    process.run(noises)[:, -1]  # tables of a schedule are made when they are first needed, and kept
    with Spy() as spy:
        process.run(noises)[:, -1]
        process.transitions(states)
        process.select(rows)
    assert spy.found == []
    mean, std = process.transition(states[:, 0], 0)
    assert mean.dtype == std.dtype == process.run(noises)[:, -1].dtype == torch.float32, (
        "of a network in half"
    )
