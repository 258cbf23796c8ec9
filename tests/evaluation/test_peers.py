"""transformers' `generate` as a peer of accelerators: equal tokens, counted forward passes, stated gaps."""

from copy import deepcopy

import pytest
import torch

from mmspec.errors import InputError
from mmspec.evaluation.contenders import contender, image_examples, load_images
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.peers import (
    ASSISTED,
    COMPILED,
    LOOKUP,
    MTP,
    image_peers,
    text_peers,
)
from mmspec.evaluation.speed.timing import PEER
from mmspec.pipelines import MMSpecPipeline
from tests.tiny_models import save_family, tiny_images
from tests.tiny_models.llamagen import save_llamagen

QUESTIONS = ("what is there ?", "how many are there and which colour ?")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return MMSpecPipeline.from_pretrained(save_family("llava", tmp_path_factory.mktemp("peer") / "llava"))


@pytest.fixture(scope="module")
def examples():
    images = tiny_images(2)
    talk = Example(QUESTIONS, (images[0],), identifier="talk")
    return load_images([talk, Example(QUESTIONS[1:], (images[1],), identifier="one")])


def test_every_way_gives_our_tokens_over_several_turns(pipe):
    examples = [Example(QUESTIONS, identifier="talk")]  # of images, look-up may copy the tokens, and fail
    peers = text_peers(pipe, examples, deepcopy(pipe.model), max_new_tokens=12, temperature=0.0)
    assert set(peers.decoders) == {PEER, LOOKUP, ASSISTED}
    assert peers.missing == {MTP: "the model has no MTP layers"}
    ours = contender(pipe, "none").decoder(max_new_tokens=12, temperature=0.0)(examples).tokens
    decoded = {name: decode(examples) for name, decode in peers.decoders.items()}
    for one in decoded.values():
        assert one.tokens == ours
        for stats in one.stats:
            assert stats.new_tokens == [12]
            assert 0 < stats.prompt_seconds <= stats.prefill_seconds < stats.seconds
    plain, assisted = (decoded[name].stats[0] for name in (PEER, ASSISTED))
    assert plain.target_forwards == 12 and plain.drafted == [0] and plain.acceptance_length == 1.0
    assert assisted.target_forwards < 12 and assisted.draft_passes > 0 and assisted.draft_seconds > 0
    assert assisted.accepted[0] == 12 - assisted.target_forwards <= assisted.drafted[0]


def test_a_compiled_forward_decodes_our_tokens_and_leaves_the_model(pipe, monkeypatch):
    """Weights are frozen while it runs. Compilation itself is not tested here."""
    frozen = []

    def compiled(forward, dynamic):
        def run(*args, **kwargs):
            frozen.append(torch._inductor.config.freezing)
            return forward(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    examples = [Example(QUESTIONS, identifier="talk")]
    peers = text_peers(pipe, examples, None, compiled=True, max_new_tokens=12)
    before = len(frozen)
    ours = contender(pipe, "none").decoder(max_new_tokens=12, temperature=0.0)(examples).tokens
    assert peers.decoders[COMPILED](examples).tokens == ours
    assert len(frozen) > before and all(frozen)
    assert "forward" not in vars(pipe.model) and not torch._inductor.config.freezing
    assert COMPILED not in text_peers(pipe, examples, None, max_new_tokens=2).decoders


def test_a_batch_is_padded_for_plain_generate_and_the_rest_says_why_it_does_not_run(pipe, examples):
    batch = [Example(QUESTIONS[:1], examples[0].images, identifier="short"), examples[1]]
    peers = text_peers(pipe, batch, None, max_new_tokens=10)
    assert set(peers.decoders) == {PEER}
    assert "one prompt at a time" in peers.missing[LOOKUP]
    assert peers.missing[ASSISTED] == "the model's folder names no draft model"
    ours = contender(pipe, "none").decoder(max_new_tokens=10, temperature=0.0)(batch).tokens
    assert peers.decoders[PEER](batch).tokens == ours


@pytest.mark.parametrize(("condition", "scale"), [("class", 1.0), ("caption", 3.0)])
def test_llamagen_draws_our_images_with_its_own_generate(tmp_path, condition, scale):
    pipe = MMSpecPipeline.from_pretrained(save_llamagen(tmp_path / "model", condition))
    pipe.set_progress_bar_config(disable=True)
    batch = image_examples(pipe, 1)
    settings = {"temperature": 0.0, "guidance_scale": scale}
    peers = image_peers(pipe, batch, **settings)
    assert peers.missing == {}
    decoded = peers.decoders[PEER](batch)
    ours = contender(pipe, "none").decoder(output_type="pt", **settings)(batch)
    assert decoded.tokens == ours.tokens
    assert decoded.stats[0].target_forwards == len(ours.tokens[0]) == ours.stats[0].target_forwards
    assert decoded.pixel_seconds > 0
    with pytest.raises(InputError, match="--peers"):
        image_peers(pipe, batch, temperature=1.0)
    assert "--batch-size 1" in image_peers(pipe, batch * 2, **settings).missing[PEER]
