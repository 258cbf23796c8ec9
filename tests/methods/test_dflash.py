"""DFlash and DSpark: blocks equal those of single rows; published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.heads.checkpoint import load_head
from mmspec.methods.dflash.drafter import BlockSession, DFlashDrafter
from mmspec.methods.dflash.head import DFlashHead
from mmspec.models.official_files import replace_prefix
from mmspec.targets import CausalTarget
from tests.contracts.running import decode, generate, random_prompts
from tests.methods.dflash_checks import WITH_IMAGES, alone, drafter_for, head_for
from tests.methods.eagle_checks import Gullible
from tests.methods.flash_checks import answer, inputs_of, target_of
from tests.tiny_models import tiny_llama

PROMPTS = [random_prompts(1, shortest=n, longest=n, seed=n)[0] for n in (1, 5, 20)]


@pytest.mark.parametrize(("kind", "family"), WITH_IMAGES)
@pytest.mark.every(2)
def test_blocks_are_those_of_each_row_alone(kind: str, family: str) -> None:
    """Ragged prompts with images and accepted paths, in float64, compared with blocks without a cache."""
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    drafter, compared = drafter_for(target, kind), list[float]()
    cases = [inputs[case] for case in ("two images", "no image", "several turns")]

    class Compared(BlockSession):
        def _denoise(self, canvas: Canvas) -> Tensor:
            hidden = super()._denoise(canvas)
            for row, prompt in enumerate(cases):
                if canvas.finish_reasons[row] is None:  # the inputs of a finished row do not matter
                    due = alone(drafter.model, target, prompt, canvas.ids[row])
                    compared.append(float((hidden[row] - due).abs().max()))
            return hidden

    drafter.session = Compared  # type: ignore[assignment]
    canvas = answer(target, drafter, cases, Sampler(0.9), 14, Gullible())
    assert len(compared) >= 6 and max(canvas.stats.accepted_histogram) >= 2
    assert max(compared) < 2e-6  # the norms of transformers compute in single precision


def watched(drafter: DFlashDrafter) -> tuple[list[Tensor], list[Draft]]:
    """Collect the states [R, n, d] of each denoised block, and its draft, during the run."""
    states, drafts = list[Tensor](), list[Draft]()

    class Watched(BlockSession):
        def _denoise(self, canvas: Canvas) -> Tensor:
            states.append(super()._denoise(canvas))
            return states[-1]

        def propose(self, canvas: Canvas) -> Draft:
            drafts.append(super().propose(canvas))
            return drafts[-1]

    drafter.session = Watched  # type: ignore[assignment]
    return states, drafts


@pytest.mark.parametrize("kind", ["dspark", "dspark, gated", "dspark, rnn"])
def test_a_token_is_told_of_the_one_before_it(kind: str) -> None:
    """Compared with a chain computed from the weights, token by token."""
    target = CausalTarget(tiny_llama())
    drafter = drafter_for(target, kind)
    (states, drafts), head = watched(drafter), drafter.model
    decode(target, PROMPTS, drafter, max_new_tokens=8)
    assert drafts and head.markov_head is not None
    for hidden, draft in zip(states, drafts, strict=True):
        state, tokens = None, draft.tokens
        token = tokens[:, 0]
        for place in range(tokens.shape[1] - 1):
            bias, state = head.markov_head(token, hidden[:, place], state)
            token = (target.head(hidden[:, place]) + bias).argmax(-1)
            assert torch.equal(token, tokens[:, place + 1])


def test_an_unlikely_slot_ends_a_draft() -> None:
    target = CausalTarget(tiny_llama())
    head = head_for(target, "dspark")
    drafter = DFlashDrafter(head, least_confidence=0.5).fit(target)
    _, proposed = watched(drafter)
    expected = [generate(target.model, prompt, 16) for prompt in PROMPTS]
    for weight, drafted in ((-100.0, False), (100.0, True)):
        head.confidence_head.proj.weight.zero_()  # type: ignore[union-attr]
        head.confidence_head.proj.bias.fill_(weight)  # type: ignore[union-attr]
        run = decode(target, PROMPTS, drafter, max_new_tokens=16)
        assert run.outputs == expected
        drafts = [int(draft.valid[:, 1:].sum()) for draft in proposed]
        assert (max(drafts) > 0) == drafted
        proposed.clear()
    with pytest.raises(InputError, match="this head has no confidence"):
        DFlashDrafter(head_for(target), least_confidence=0.5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dspark", "dspark, rnn", "dflash"])
def test_paths_are_rated_by_the_overlap_that_the_head_expects(kind: str) -> None:
    """Each node by log q + log c of its parent's slot, computed path by path; a head without c by log q."""
    target, compared = CausalTarget(tiny_llama().double()), list[float]()
    drafter = drafter_for(target, kind, num_draft_tokens=9, top_k=3)
    head = drafter.model
    first = 0 if head.config.anchor_predicts else 1

    class Watched(BlockSession):
        def propose(self, canvas: Canvas) -> Draft:
            draft = super().propose(canvas)
            for row, prompt in enumerate(PROMPTS):
                if canvas.finish_reasons[row] is not None:
                    continue
                ids = canvas.ids[row]
                states = alone(head, target, {"input_ids": torch.tensor([prompt])}, ids)[first:]
                rated: dict[int, Any] = {0: (0.0, 0, None)}  # node: score, level, state behind it
                for node, parent in enumerate(draft.parents[row].tolist()[1:], start=1):
                    score, level, state = rated[parent]
                    before, slot = draft.tokens[row, parent], states[level]
                    bias, state = head.told(level, before[None], slot[None], state, target.embed)
                    log_q = (target.head(slot) + bias.squeeze(0)).log_softmax(-1)
                    score += float(log_q[draft.tokens[row, node]])
                    if head.confidence_head is not None:
                        score += float(head.confidences(slot, before).sigmoid().log())
                    rated[node] = score, level + 1, state
                    compared.append(abs(score - float(self.likelihoods[row, node])))
            return draft

    drafter.session = Watched  # type: ignore[assignment]
    decode(target, PROMPTS, drafter, max_new_tokens=6)
    assert len(compared) > 50 and max(compared) < 1e-4


def config_of(head: DFlashHead, layout: str) -> dict[str, Any]:
    """The config.json of a head, as each of its publishers writes it."""
    config = head.config
    shape: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "hidden_act", "rms_norm_eps",
        )
    }  # fmt: skip
    shape |= {"num_hidden_layers": config.num_layers, "vocab_size": config.vocabulary}
    shape |= {"rope_theta": config.rope_theta, "model_type": "qwen3"}
    own = {"mask_token_id": config.mask_token, "target_layer_ids": [tap - 1 for tap in config.taps]}
    layers = {"num_target_layers": config.target_layers}
    markov = {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
    if layout == "z-lab":
        made = {"architectures": ["DFlashDraftModel"], "block_size": config.block, **shape, **layers}
        return {**made, "dflash_config": own}
    if layout == "speculators":
        del own["target_layer_ids"]
        made = {"speculators_model_type": "dflash", "block_size": config.block, **own}
        return {**made, "aux_hidden_state_layer_ids": config.taps, "transformer_layer_config": shape}
    if layout == "deepspec":
        made = {"architectures": ["Qwen3DSparkModel"], "block_size": config.block, **shape, **layers}
        return {**made, **own, **markov, "enable_confidence_head": True}
    made = {"architectures": ["DSparkDraftModel"], "block_size": config.block, **shape, **layers}
    return {**made, "dflash_config": {**own, **markov, "projector_type": "dspark"}}


def publish(folder: Path, head: DFlashHead, config: dict[str, Any], **more: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file({**tensors, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("z-lab", "dflash, noise of the target"),
        ("speculators", "dflash, noise of the target"),
        ("deepspec", "dspark, rnn"),
        ("specforge", "dspark, gated"),
    ],
)
def test_published_heads_are_read(layout: str, kind: str, tmp_path: Path) -> None:
    target = CausalTarget(tiny_llama(layers=4))
    head = head_for(target, kind, mask_token=7, taps=[0, 2, 3])
    copies = {"embed_tokens.weight": torch.zeros(64, 32), "lm_head.weight": torch.zeros(64, 32)}
    publish(tmp_path, head, config_of(head, layout), **(copies if layout == "deepspec" else {}))
    name = kind.split(",")[0]
    read = load_head(name, tmp_path, target.config, target.dtype, target.device)
    settings = ("taps", "block", "anchor_predicts", "mask_token", "markov", "num_layers", "confidence")
    assert {one: getattr(read.config, one) for one in settings} == {
        one: getattr(head.config, one) for one in settings
    }
    assert all(torch.equal(read.state_dict()[one], own) for one, own in head.state_dict().items())
    drafter: Any = drafter_for(target, kind)
    run = decode(target, PROMPTS, type(drafter)(read).fit(target), max_new_tokens=12)
    assert run.outputs == [generate(target.model, prompt, 12) for prompt in PROMPTS]


def publish_domino(folder: Path, head: DFlashHead, early: bool = False, **changes: Any) -> dict[str, Tensor]:
    """Write a Domino head as SpecForge does; its tensors by the names there."""
    theirs = {"markov_head.prefix_gru.weight_ih": "prefix_gru.weight_ih_l0"}
    theirs |= {"markov_head.prefix_gru.weight_hh": "prefix_gru.weight_hh_l0", "markov_head.": ""}
    config = config_of(head, "specforge")
    sizes = {"emb_dim": head.config.markov_rank, "gru_hidden_dim": head.config.memory}
    told = {"projector_type": "domino", "pure_draft_prefix_len": head.config.plain_slots, **sizes}
    told["shift_label"] = head.config.anchor_predicts
    names = {"mask_token_id", "target_layer_ids"}
    own = {name: value for name, value in config["dflash_config"].items() if name in names}
    config |= {"architectures": ["DominoDraftModel"], "dflash_config": {**own, **told, **changes}}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {replace_prefix(name, theirs): tensor for name, tensor in head.state_dict().items()}
    stored = {("logit_head." if name[0] in "pe" else "") + name: each for name, each in tensors.items()}
    save_file(stored if early else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("shifted", [True, False])
def test_a_domino_head_corrects_a_block_as_the_published_one(shifted: bool, tmp_path: Path) -> None:
    """The published recurrent unit processes the whole block each time; mmspec continues from its state."""
    target = CausalTarget(tiny_llama(layers=4))
    made = head_for(target, "dspark, domino", mask_token=7, taps=[0, 2, 3], anchor_predicts=shifted)
    tensors = publish_domino(tmp_path, made, early=shifted)
    head: Any = load_head("dspark", tmp_path, target.config, target.dtype, target.device)
    assert head.config.depth == (4 if shifted else 3)
    assert all(torch.equal(head.state_dict()[one], own) for one, own in made.state_dict().items())
    unit = torch.nn.GRU(32, 5, bias=False, batch_first=True)
    unit.load_state_dict({name: tensors[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
    first, second = (tensors[f"embed_proj.{layer}.weight"] for layer in (0, 2))
    drafter = DFlashDrafter(head).fit(target)
    blocks, drafts = watched(drafter)
    run = decode(target, PROMPTS, drafter, max_new_tokens=8)
    assert run.outputs == [generate(target.model, prompt, 8) for prompt in PROMPTS] and drafts
    changed = 0
    for states, draft in zip(blocks, drafts, strict=True):
        hidden, tokens = states[:, 0 if shifted else 1 :], draft.tokens
        for place in range(tokens.shape[1] - 1):
            plain = target.head(hidden[:, place])
            memory = unit(target.embed(tokens[:, : place + 1]))[0][:, -1]
            inner = torch.cat([hidden[:, place], memory], -1) @ first.T
            due = plain + torch.nn.functional.silu(inner) @ second.T if place >= 1 else plain
            assert torch.equal(due.argmax(-1), tokens[:, place + 1])
            changed += int((due.argmax(-1) != plain.argmax(-1)).sum())
    assert changed, "some tokens were others than those of the slots alone"


def test_heads_of_others_are_refused_by_name_and_size(tmp_path: Path) -> None:
    target, deeper = CausalTarget(tiny_llama()), CausalTarget(tiny_llama(layers=3))
    head = head_for(target, "dflash, noise of the target")
    folder = publish(tmp_path / "a", head, config_of(head, "z-lab"))
    where = target.dtype, target.device
    with pytest.raises(
        CheckpointError, match="this target of 3 layers; got 'a head for a target of 2 layers"
    ):
        load_head("dflash", folder, deeper.config, *where)
    with pytest.raises(CheckpointError, match="accelerator='dflash'"):
        load_head("dspark", folder, target.config, *where)
    wider = CausalTarget(tiny_llama(hidden=64))
    read: Any = load_head("dflash", folder, wider.config, *where)
    with pytest.raises(InputError, match="hidden size is 64"):
        DFlashDrafter(read).fit(wider)
    spark = head_for(target, "dspark", mask_token=7)
    other = publish(tmp_path / "b", spark, config_of(spark, "deepspec"))
    with pytest.raises(CheckpointError, match="accelerator='dspark'"):
        load_head("dflash", other, target.config, *where)
    config = config_of(head, "z-lab")
    del config["block_size"]
    with pytest.raises(CheckpointError, match="block_size"):
        load_head("dflash", publish(tmp_path / "c", head, config), target.config, *where)
    config = config_of(head, "z-lab") | {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
    with pytest.raises(CheckpointError, match="rope_type must be one of default, .*; got 'dynamic'"):
        load_head("dflash", publish(tmp_path / "d", head, config), target.config, *where)
