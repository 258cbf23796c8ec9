"""Heads that attend to an encoder's states: against a loop over states, in training and in drafting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.heads.encoder_attention import STEP, EncoderAttention
from mmspec.methods.medusa.drafter import MedusaDrafter
from mmspec.training.data.audio import AudioRows
from mmspec.training.data.sequences import acceptance_length
from mmspec.training.losses.base import Blocks, read
from mmspec.training.recipes import RECIPES
from tests.training.test_audio import data_of

WIDTH, HEADS, PARTS, MERGED = 12, 2, 3, 2


def by_hand(layer: EncoderAttention, states: Tensor, feature: Tensor, embedding: Tensor) -> Tensor:
    """The states [K, d] of the heads at one place, from encoder states [S, d]."""
    merged = torch.stack([part.mean(0) for part in states.split(MERGED)])
    keys, values = layer.key(merged).chunk(PARTS, -1), layer.value(merged).chunk(PARTS, -1)
    query = layer.place_query(layer.place_norm(feature[:WIDTH])).chunk(PARTS)
    place = 0.0
    for part, weight in enumerate(layer.place_weight.softmax(0)):
        share = (keys[part] @ query[part] / math.sqrt(WIDTH / PARTS)).softmax(0)
        place += weight * sum(s * index * MERGED / STEP for index, s in enumerate(share))
    made = []
    for head, state in enumerate(layer.inputs(torch.cat([feature, embedding])).chunk(HEADS)):
        asked, heard = layer.query(layer.norm(state)).chunk(PARTS), []
        for part in range(PARTS):
            scores = []
            for index, key in enumerate(keys[part]):
                away = index * MERGED / STEP - place - layer.distance[head, part]
                width = layer.sharpness[head, part].exp()
                scores.append(key @ asked[part] / math.sqrt(WIDTH / PARTS) - (away * width) ** 2 / 2)
            heard.append(torch.stack(scores).softmax(0) @ values[part])
        state = state + layer.output(torch.cat(heard))
        made.append(layer.final_norm(state + layer.down(gelu(layer.up(layer.inner_norm(state))))))
    return torch.stack(made)


@torch.no_grad()
def test_rows_of_different_lengths_are_those_of_a_loop_over_their_states() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = EncoderAttention(WIDTH, HEADS, PARTS, 16, MERGED).eval()
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    states = [torch.randn(1, length, WIDTH, generator=generator) for length in (9, 4)]
    features = torch.randn(2, 3, 2 * WIDTH, generator=generator)
    embeddings = torch.randn(2, 3, WIDTH, generator=generator)
    found = layer(features, embeddings, *layer.read(states))
    for row in range(2):
        for place in range(3):
            due = by_hand(layer, states[row][0], features[row, place], embeddings[row, place])
            torch.testing.assert_close(found[row, place], due, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def data() -> AudioRows:
    return data_of()


@pytest.fixture(scope="module")
def learner(data: AudioRows) -> Any:
    model = RECIPES["medusa"].build(data.target, merged_states=2, num_heads=3)
    learner = RECIPES["medusa"].learn(model, data.target)
    learner.prepare(model, data, data.target)
    return learner


@torch.no_grad()
def test_drafting_predicts_what_training_does(data: AudioRows, learner: Any) -> None:
    """After each prefix of a transcript, heads give the logits that the loss has at its end."""
    example, head = data.opened(0), learner.eval().head
    taught = read(data.target, [example, data.opened(1)], head.taps)
    blocks = Blocks.of(taught.learnt, 3)
    due = learner.logits(taught, blocks)[blocks.row == 0]
    drafter, ids = MedusaDrafter(head).fit(data.target), example.inputs["input_ids"]
    weight = data.target.model.get_output_embeddings().weight
    before = blocks.before[blocks.row == 0].tolist()
    assert len(before) > 3
    for index, place in enumerate(before):
        prompt = {**example.inputs, "input_ids": ids[:, : place + 1]}
        _, prefill = data.target.prefill([prompt], 40, drafter.taps)
        session: Any = drafter.start([Request(prompt)], prefill, Sampler(), RandomStream.from_seed(0, 1))
        root = data.target.embed(ids[:, place + 1 : place + 2])
        heard = session.keys, session.values, session.present
        found = head.listener(session.features[:, None], root, *heard)[0, 0] @ weight.T
        torch.testing.assert_close(found, due[index], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_dropout_acts_in_training_alone(data: AudioRows, learner: Any) -> None:
    batch = data.batch(0, 0)

    def losses() -> list[float]:
        return [float(learner(batch)[0]) for _ in range(2)]

    learner.train()
    one, other = losses()
    assert one != other
    learner.eval()
    one, other = losses()
    assert one == other


def test_training_raises_acceptance(data: AudioRows, learner: Any) -> None:
    """It begins with the weights of the target's last layer."""
    head, layer = learner.head, data.target.model.get_decoder().layers[-1]
    assert torch.equal(head.listener.query.weight, layer.encoder_attn.q_proj.weight)
    before = acceptance_length(data.target, MedusaDrafter(head.eval()), data.trial())
    learner.train()
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    for step in range(40):
        loss, _ = learner(data.batch(step, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert acceptance_length(data.target, MedusaDrafter(head.eval()), data.trial()) > 1.2 * before
