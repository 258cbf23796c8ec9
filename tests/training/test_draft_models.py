"""Distillation of draft models: divergences, sources of replies, and trained models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmspec import MMSpecPipeline
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError, MMSpecError
from mmspec.heads.frequent_output import restrict_output
from mmspec.methods.draft_model import distillation
from mmspec.methods.draft_model.distillation import DIVERGENCES, Distillation, DraftModelLoss, compare
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget, adapt
from mmspec.training.data.conversation_file import read_conversations
from mmspec.training.data.conversations import ConversationReader, ConversationRows
from mmspec.training.data.sequences import Trial, acceptance_length, decode
from mmspec.training.draft_model import shortened, spare_token, train_draft_model
from mmspec.training.losses.base import token_counts
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import (
    tiny_gpt2,
    tiny_llama,
)

TEMPLATE = """
    {%- for message in messages %}{{ message['role'] + ':' + message['content'] + '<|end|>' }}{% endfor %}
    {%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
ROWS = [{"prompt": f"tell {row} é", "response": f"the {row} of the {row}"} for row in range(12)]
TURNS = [("user", "a"), ("assistant", "the re"), ("user", "b"), ("assistant", "there")]
TWO_TURNS = {"messages": [{"role": role, "content": text} for role, text in TURNS]}


def save(model: Any, folder: Path) -> Path:
    """A folder of a model with the byte-level tokenizer and a template for strings alone."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model.config.max_position_embeddings = 256
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(vocab=len(byte_level_tokenizer()), layers=4)
    return save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.training.data.conversations.TRIAL_TOKENS", 12)


def data_of(folder: Path, rows: list[Any] = ROWS, seed: int = 0) -> ConversationRows:
    pipe = MMSpecPipeline.from_pretrained(folder, accelerator="none")
    reader = ConversationReader(CausalTarget(pipe.model), pipe.processor)
    return ConversationRows(reader, read_conversations(rows, with_images=False), 3, seed)


def direct(name: str, p: Tensor, q: Tensor, label: int = 0, beta: float = 0.5) -> Tensor:
    """The divergences of two vectors as the paper writes them."""
    mixed = beta * p + (1 - beta) * q
    kl = {
        "forward_kl": (p * (p / q).log()).sum(),
        "reverse_kl": (q * (q / p).log()).sum(),
        "jsd": beta * (p * (p / mixed).log()).sum() + (1 - beta) * (q * (q / mixed).log()).sum(),
        "tvd": (p - q).abs().sum() / 2,
        "hard_labels": -q[label].log(),
    }
    return kl[name]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_are_those_of_the_paper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradient, in parts of two rows; 0 for equal models; tokens of only one model are excluded."""
    monkeypatch.setattr(distillation, "PIECE", 2 * 9)
    noise = torch.Generator().manual_seed(0)
    target = torch.randn(5, 9, generator=noise)
    draft = torch.randn(5, 12, generator=noise, requires_grad=True)
    formula = Distillation(name, beta=0.3).formula
    values, accepted = compare(target, draft, formula)
    p, q = target.softmax(-1), draft[:, :9].softmax(-1)
    due = torch.stack([direct(name, *row, beta=0.3) for row in zip(p, q, strict=True)])
    assert torch.allclose(values, due, atol=1e-6)
    assert torch.allclose(accepted, torch.minimum(p, q).sum(-1), atol=1e-6)
    (ours,), (theirs,) = (torch.autograd.grad(each.sum(), draft) for each in (values, due))
    assert torch.allclose(ours, theirs, atol=1e-6) and ours[:, :9].any() and not ours[:, 9:].any()
    same, all_of_it = compare(target, target.clone(), formula)
    assert torch.allclose(same, torch.zeros(5), atol=1e-6) and torch.allclose(all_of_it, torch.ones(5))


def test_own_replies_are_the_draft_models_samples(folder: Path) -> None:
    """Samples have the draft model's probabilities, with its weights at that step."""
    data = data_of(folder, [TWO_TURNS, *ROWS])
    teacher = data.reader.target
    model = shortened(teacher.model, 2)
    with torch.no_grad():  # so confident that samples are its most likely tokens
        model.lm_head.weight *= 1e4
    learner = DraftModelLoss(model, teacher, Distillation(own_share=1.0, new_tokens=6))
    made = learner.make(data, 0, 0)
    assert len(made.examples) == 3
    for example in made.examples:
        ids = example.inputs["input_ids"]
        reply = ids[0, example.answer :]
        likeliest = model(ids).logits[0, example.answer - 1 : -1].argmax(-1)
        assert torch.equal(reply, likeliest) and 1 <= len(reply) <= 6
        assert int(example.learnt.sum()) == len(reply)
    said = [example.inputs["input_ids"].tolist() for example in made.examples]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    assert [each.inputs["input_ids"].tolist() for each in learner.make(data, 0, 0).examples] != said


def test_replies_are_the_same_for_the_same_seed_and_share_zero_writes_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(folder)
    model = shortened(data.reader.target.model, 1)

    def replies(seed: int, step: int, share: float = 1.0) -> list[list[int]]:
        how = Distillation(own_share=share, new_tokens=5)
        made = DraftModelLoss(model, data.reader.target, how, seed).make(data, step, 0)
        return [example.inputs["input_ids"][0].tolist() for example in made.examples]

    assert replies(0, 0) == replies(0, 0) != replies(1, 0) != replies(1, 1)
    learnt = [replies(0, step, 0.5) == replies(0, step, 0.0) for step in range(20)]
    assert 4 < sum(learnt) < 16
    monkeypatch.setattr(distillation, "decode", None)
    expected = [each.inputs["input_ids"][0].tolist() for each in data.batch(3, 0).examples]
    assert replies(0, 3, 0.0) == expected


def test_the_loss_is_the_mean_over_replies_of_the_mean_over_their_tokens(folder: Path) -> None:
    """At reply tokens only, with each model's own logits and prompt."""
    data = data_of(folder, [TWO_TURNS] * 4 + ROWS[:1] + [TWO_TURNS] * 4)
    teacher = data.reader.target
    model = shortened(teacher.model, 2)
    for name in (*DIVERGENCES, "hard_labels"):
        learner = DraftModelLoss(model, teacher, Distillation(name, own_share=0.0))
        batch = data.batch(0, 0)
        loss, figures = learner(batch)
        due, shares = [], []
        for example in batch.examples:
            ids, places = example.inputs["input_ids"], example.learnt.nonzero()[:, 0] - 1
            p, q = (each(ids).logits[0, places].softmax(-1) for each in (teacher.model, model))
            labels = ids[0, places + 1].tolist()
            rows = [direct(name, *row) for row in zip(p, q, labels, strict=True)]
            due.append(torch.stack(rows).mean())
            shares.append(torch.minimum(p, q).sum(-1))
        assert torch.allclose(loss, torch.stack(due).mean(), atol=1e-5), name
        due_figures = {"accepted": torch.cat(shares).mean()} if name in DIVERGENCES else {}
        assert figures.keys() == due_figures.keys()
        assert all(torch.allclose(figures[each], value, atol=1e-5) for each, value in due_figures.items())
    loss.backward()
    assert all(each.grad is None for each in teacher.model.parameters())
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_restricted_output_says_some_tokens_as_before_and_no_others(make: Any) -> None:
    model = make()
    model.requires_grad_(True)
    ids, few = torch.arange(2, 14)[None], [5, 3, 9]
    whole, weights = model(ids).logits, model.state_dict()
    model.config.draft_tokens = few
    for _ in range(2):  # once more changes nothing
        restrict_output(model)
    logits = model(ids).logits
    others = [token for token in range(whole.shape[-1]) if token not in few]
    assert torch.allclose(logits[..., few], whole[..., few], atol=1e-6)
    assert (logits[..., others] == -math.inf).all()
    assert model.state_dict().keys() == weights.keys(), "it is saved as it was"
    logits[..., few].sum().backward()
    learnt = model.get_output_embeddings().weight.grad.any(-1).nonzero()[:, 0].tolist()
    assert set(learnt) == set(few) if make is tiny_llama else set(few) <= set(learnt)
    for wrong in ([], [3, 3], [-1], [whole.shape[-1]], [1.5], "abc"):
        model.config.draft_tokens = wrong
        with pytest.raises(CheckpointError, match="draft_tokens"):
            restrict_output(model)


def test_a_draft_model_of_frequent_tokens(folder: Path, tmp_path: Path) -> None:
    """The loss uses distributions over frequent tokens. Only these are drafted; outputs do not change."""
    data = data_of(folder)
    teacher = data.reader.target
    count = token_counts(data.learnt_texts(), teacher.vocabulary)
    few = sorted(count.topk(12).indices.tolist())
    model = shortened(teacher.model, 2)
    model.config.draft_tokens = few
    learner = DraftModelLoss(model, teacher, Distillation("tvd", own_share=0.0))
    restrict_output(model)
    batch = data.batch(0, 0)
    due, hard, unsaid = [], [], 0
    for example in batch.examples:
        ids, places = example.inputs["input_ids"], example.learnt.nonzero()[:, 0] - 1
        p, q = (each(ids).logits[0, places][:, few].softmax(-1) for each in (teacher.model, model))
        due.append((p - q).abs().sum(-1).mean() / 2)
        said = [few.index(token) if token in few else -1 for token in ids[0, places + 1].tolist()]
        rows = [-row[label].log() for row, label in zip(q, said, strict=True) if label >= 0]
        unsaid += len(said) - len(rows)
        hard.append(torch.stack(rows).mean())
    assert torch.allclose(learner(batch)[0], torch.stack(due).mean(), atol=1e-5)
    learner.how = Distillation("hard_labels", own_share=0.0)
    assert unsaid and torch.allclose(learner(batch)[0], torch.stack(hard).mean(), atol=1e-5)
    how: dict[str, Any] = {"steps": 2, "batch_size": 2, "new_tokens": 4}
    out = train_draft_model(folder, tmp_path / "out", ROWS, frequent_tokens=12, **how)
    drafting = MMSpecPipeline.from_pretrained(folder, accelerator="draft_model", drafter=out)
    drafter = drafting.accelerator.drafter.model
    assert drafter.model.config.draft_tokens == few and sum(count[few]) > 0.5 * count.sum()
    assert (drafter.model(torch.arange(2, 9)[None]).logits.isfinite().sum(-1) == 12).all()
    plain = MMSpecPipeline.from_pretrained(folder, accelerator="none")
    for how in ({}, {"temperature": 1.0, "seed": 3}):
        asked = ["tell 1 é", "the the the"]
        assert (
            drafting(asked, max_new_tokens=12, **how).tokens == plain(asked, max_new_tokens=12, **how).tokens
        )
    more = train_draft_model(folder, tmp_path / "more", ROWS, start=out, steps=1, batch_size=2)
    assert AutoModelForCausalLM.from_pretrained(more).config.draft_tokens == few


def accepted(target: CausalTarget, draft: CausalTarget, data: ConversationRows) -> tuple[float, float]:
    """The acceptance length of held-out prompts, greedy, and TVD on samples of the target."""
    length = acceptance_length(target, DraftModelDrafter(draft), data.trial())
    trial = data.trial()
    sampled = Trial(trial.requests, Sampler(temperature=1.0), 24)
    losses = []
    for request, reply in zip(
        trial.requests,
        decode(target, DraftModelDrafter(draft), sampled).outputs(),
        strict=True,
    ):
        start = request.inputs["input_ids"].shape[1]
        ids = torch.cat([request.inputs["input_ids"], torch.tensor([reply])], 1)
        with torch.no_grad():
            p, q = (
                each.model(ids).logits[0, start - 1 : -1].float().log_softmax(-1) for each in (target, draft)
            )
        losses.append(distillation.tvd(p, q).mean())
    return length, float(torch.stack(losses).mean())


@pytest.mark.parametrize(
    ("divergence", "steps", "share"),
    [("jsd", 20, 0.5), ("tvd", 12, 0.0), ("forward_kl", 12, 0.0), ("reverse_kl", 12, 0.0)],
)
@pytest.mark.every(4)
def test_training_lowers_the_total_variation_and_drafts_more(
    divergence: str, steps: int, share: float, folder: Path, tmp_path: Path
) -> None:
    """On held-out prompts. The trained folder drafts, and the output equals that of the target."""
    data = data_of(folder)
    target = data.reader.target
    before = accepted(target, adapt(shortened(target.model, 2)), data)
    how: dict[str, Any] = {"steps": steps, "own_share": share, "new_tokens": 16, "rate": 3.0, "batch_size": 6}
    how |= {} if share else {"regenerate": 16}  # of the target
    out = train_draft_model(folder, tmp_path / "out", ROWS, divergence=divergence, **how)
    draft = AutoModelForCausalLM.from_pretrained(out)
    assert draft.config.num_hidden_layers == 2
    after = accepted(target, adapt(draft), data)
    assert after[1] < before[1] - 0.015 and after[0] > before[0] + 0.1
    asked = ["tell 1 é", "the the the"]
    plain = MMSpecPipeline.from_pretrained(folder, accelerator="none")
    drafting = MMSpecPipeline.from_pretrained(folder, accelerator="draft_model", drafter=out)
    due = plain(asked, max_new_tokens=20)
    assert drafting(asked, max_new_tokens=20).tokens == due.tokens
    for text, tokens in zip(asked, due.tokens, strict=True):
        ids = plain._prepare(text, {"max_new_tokens": 1}).requests[0].inputs["input_ids"]
        mask = torch.ones_like(ids)  # the end token is the padding, too
        whole = plain.model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
        assert whole[0, ids.shape[1] :].tolist() == tokens


def test_a_parallel_draft_model_learns_to_draft_over_masks(folder: Path, tmp_path: Path) -> None:
    """Before, only its first token has a chance; afterwards more are accepted, and the output is the same."""
    data = data_of(folder)
    target, start = data.reader.target, shortened(data.reader.target.model, 2)
    start.config.pard_token = start.config.vocab_size - 1
    before = acceptance_length(target, DraftModelDrafter(adapt(start), 4), data.trial())
    how: dict[str, Any] = {"steps": 30, "own_share": 0.0, "rate": 3.0, "batch_size": 6, "regenerate": 16}
    out = train_draft_model(folder, tmp_path / "out", ROWS, parallel=4, **how)
    draft = AutoModelForCausalLM.from_pretrained(out)
    assert draft.config.pard_token == byte_level_tokenizer().pad_token_id and draft.config.spd_type == "pard"
    assert acceptance_length(target, DraftModelDrafter(adapt(draft), 4), data.trial()) > before + 0.1
    plain = MMSpecPipeline.from_pretrained(folder, accelerator="none")
    drafting = MMSpecPipeline.from_pretrained(folder, accelerator="draft_model", drafter=out)
    asked = ["tell 1 é", "the the the"]
    assert drafting(asked, max_new_tokens=20).tokens == plain(asked, max_new_tokens=20).tokens


def test_the_mask_of_a_parallel_draft_model_is_a_token_that_no_text_holds() -> None:
    tokenizer, model = byte_level_tokenizer(), tiny_llama(vocab=300)
    known = len(tokenizer)
    assert known < 300 and spare_token(model, tokenizer) == 299, "unknown to the tokenizer"
    model.resize_token_embeddings(known)
    assert spare_token(model, tokenizer) == tokenizer.pad_token_id
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>", "<|picture|>", "<|free|>"]})
    model.resize_token_embeddings(known + 3)
    model.config.image_token_id = known + 1
    assert spare_token(model, tokenizer) == known + 2
    model.resize_token_embeddings(known + 2)
    assert spare_token(model, tokenizer) == known
    tokenizer.chat_template += "<|turn|>"
    assert spare_token(model, tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template += "<|pad|>"
    with pytest.raises(InputError, match="must be in the config of `start`: .* '<|picture|>'"):
        spare_token(model, tokenizer)


def test_the_loss_of_masks_is_that_of_the_places_before_them(folder: Path) -> None:
    """Compared with one plain forward pass of each cut sequence."""
    data = data_of(folder)
    target, model = data.reader.target, shortened(data.reader.target.model, 2)
    model.config.pard_token = mask = model.config.vocab_size - 1
    learner = DraftModelLoss(model, target, Distillation(own_share=0.0, parallel=3))
    batch = data.batch(0, 0)
    seen, ends = learner.hide(batch)
    loss, _ = learner(batch)
    due = []
    for whole, cut, end in zip(batch.examples, seen.examples, ends.tolist(), strict=True):
        ids, read = whole.inputs["input_ids"], cut.inputs["input_ids"]
        (masks,) = (read[0] == mask).nonzero(as_tuple=True)
        known = int(masks[0])
        assert whole.learnt[known] and read.shape[1] == end == min(ids.shape[1], known + 2)
        assert torch.equal(read[0, :known], ids[0, :known]) and (read[0, known:] == mask).all()
        log_p, log_q = (
            each(one).logits[0].float().log_softmax(-1) for each, one in ((target.model, ids), (model, read))
        )
        places = [place - 1 for place in whole.learnt.nonzero()[:, 0].tolist() if place - 1 < end]
        due.append(torch.stack([(log_p[at].exp() * (log_p[at] - log_q[at])).sum() for at in places]).mean())
    torch.testing.assert_close(loss, torch.stack(due).mean(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_a_draft_model_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "target"
    kept.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (kept / name).write_bytes((folder / name).read_bytes())
    (kept / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no weights are there

    def refused(message: str, kind: type[MMSpecError] = InputError, **how: Any) -> None:
        with pytest.raises(kind, match=message):
            train_draft_model(kept, tmp_path / "out", ROWS, steps=1, **how)

    refused("^divergence .*did you mean 'forward_kl'", divergence="forward")
    refused("^beta must be between 0.001 and 0.999; got 1.0", beta=1.0)
    refused(r"^own_share must be between 0 .* and 1; got 1.5", own_share=1.5)
    refused("^new_tokens must be a positive integer; got 0", new_tokens=0)
    refused("^own_share must be 0 with hard_labels: .*; got 0.5", divergence="hard_labels")
    refused("^parallel must be an integer from 1 to 64; got 0", parallel=0)
    refused("^own_share must be 0 with parallel", parallel=3)
    refused("^rate must be above 0 and at most 100; got 0", rate=0)
    refused("^frequent_tokens must be a number of tokens, or 0 for all; got -1", frequent_tokens=-1)
    refused("^frequent_tokens must be 0 with regenerate: .*; got 9", frequent_tokens=9, regenerate=4)
    refused("states needs own_share=0", states=tmp_path / "states")
    refused(
        "states cannot be combined with hard labels",
        divergence="hard_labels",
        own_share=0.0,
        states=tmp_path / "states",
    )
    refused("layers:1 to layers:3: the target has 4", start="layers:4")
    refused("layers:1 to layers:3", start="layers:0")
    refused("^start is (not|neither) a local folder", CheckpointError, start="no/where")
    other = save(tiny_llama(vocab=400), tmp_path / "other")
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    tokens["model"]["vocab"] = {token: len(vocabulary) - 1 - place for token, place in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    refused("must use the target's tokenizer", CheckpointError, start=other)
    refused("missing keys", CheckpointError)  # nothing else is wrong
