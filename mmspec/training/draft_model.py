"""Trainer of draft models: small models of the target's tokenizer, distilled from it.

DistillSpec (Zhou et al., 2310.08461).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from mmspec.errors import CheckpointError, InputError, UnsupportedModelError
from mmspec.heads.model import HIDDEN
from mmspec.methods.draft_model.distillation import HARD_LABELS, Distillation, DraftModelLoss
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.models.checkpoint import (
    check_same_tokenizer,
    check_source,
    load_config,
    load_model,
    load_processor,
)
from mmspec.open_types import Json
from mmspec.targets import CausalTarget, adapt
from mmspec.training.data.conversations import ConversationRows, tokenizer_of
from mmspec.training.data.sequences import acceptance_length
from mmspec.training.data.sources import Rows, is_language_model, open_target, pick_dtype
from mmspec.training.data.states import StoredStates
from mmspec.training.drafter import drafter_training
from mmspec.training.losses.base import token_counts
from mmspec.training.record import training_record, write_record
from mmspec.training.run import RunOptions, Stage, flush_subnormals
from mmspec.validation import is_integer, require_number

__all__ = ["shortened", "train_draft_model"]

LAYERS = re.compile(r"layers:(\d+)")
RATE_OF_LAYERS, RATE_OF_TRAINED = 1.0, 0.05  # AdamW's is then 1e-3, or the 5e-5 of trained models
NEAR = 1e-2  # of the largest logit; caps and scales of logits change more


@flush_subnormals()
def train_draft_model(
    target: str | Path,
    out: str | Path,
    data: Rows,
    *,
    start: str | Path = "layers:2",
    divergence: str = "forward_kl",
    beta: float = 0.5,
    own_share: float = 0.5,
    new_tokens: int = 64,
    rate: float | None = None,
    max_length: int | None = None,
    regenerate: int = 0,
    dtype: str = "auto",
    save_dtype: str | None = None,
    states: str | Path | None = None,
    frequent_tokens: int = 0,
    accumulate: int = 1,
    log_dir: str | Path | None = None,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a draft model by distillation and save it as a folder of transformers, which `drafter=` takes.

    A target that sees images is drafted for by a model of its own kind; what is not its language model stays
    as it is.

    Args:
        target: folder or hub id of a vision-language or language model.
        out: the folder to write.
        data: conversations, as a file or as rows; see `read_conversations`.
        start: the draft model to begin with: a folder or hub id, or "layers:k" for the target itself with
            k of its layers: half of them its first ones, half its last.
        divergence, beta, own_share, new_tokens: see `Distillation`.
        rate: factor of the learning rates, of which AdamW's is 1e-3 and Muon's 2e-3; by default 1 for layers
            of the target, and 0.05 for a trained model.
        max_length, regenerate, dtype, accumulate, log_dir: as of `train_drafter`.
        save_dtype: of the folder's weights; None for the target's.
        states: as of `train_drafter`, where the data's replies alone are learnt.
        frequent_tokens: tokens that it drafts, those learnt most often in the data; 0 for all, or for what it
            began with.
        how: see `RunOptions`; by default 10 minutes, of 8 sequences at once.

    Returns:
        The folder. Its `training.json` records how it was made.

    Raises:
        InputError: a value that is not allowed, or more layers than the target has.
        CheckpointError: one of the models cannot be read, or they have different tokenizers.
        UnsupportedModelError: the model cannot draft, or says its logits otherwise than by its output matrix.
    """
    settings = Distillation(divergence, beta, own_share, new_tokens)
    if rate is not None:
        require_number("rate", rate, 0.0, 100.0, "above 0, at most 100", open_below=True)
    if not is_integer(frequent_tokens) or frequent_tokens < 0:
        raise InputError("frequent_tokens", frequent_tokens, "a number of tokens, or 0 for all")
    if frequent_tokens and regenerate:
        raise InputError("frequent_tokens", frequent_tokens, "0: replies are not there to be counted")
    if states is not None and own_share:
        raise InputError("states", str(states), "nothing: own replies are new in every step; own_share=0")
    if states is not None and divergence == HARD_LABELS:
        raise InputError("states", str(states), "nothing: hard labels need no states of the target")
    layers = check_start(target, start)
    training = drafter_training(Path(out), how, accumulate, log_dir)
    accelerator = training.accelerator
    if accelerator.is_fsdp2:
        allowed = "several processes with whole weights: a draft model is small, and it writes replies itself"
        raise InputError("accelerate launch", "FSDP", allowed)
    saved = None if save_dtype is None else pick_dtype(save_dtype, accelerator.device)
    teacher, source = open_target(
        target,
        accelerator.device,
        training.batch_size,
        training.seed,
        data,
        dtype=dtype,
        max_length=max_length,
        regenerate=regenerate,
    )
    if not isinstance(source, ConversationRows):
        raise InputError("data", type(source).__name__, "conversations")
    model: Any = shortened(teacher.model, layers) if layers else load_start(str(start), accelerator.device)
    nn.Module.requires_grad_(model, False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(True)
    learner = DraftModelLoss(model, teacher, settings, training.seed)
    learner.stored = None if states is None else StoredStates(teacher, states)
    trial = source.trial()
    asked = trial.requests[0].inputs
    check_logits(teacher, asked, "target")
    check_logits(learner.reader, learner.told(asked), "start")
    if frequent_tokens:
        count = token_counts(source.learnt_texts(), teacher.vocabulary)
        model.config.draft_tokens = sorted(count.topk(min(frequent_tokens, len(count))).indices.tolist())
    DraftModelDrafter(learner.reader)  # refuses what cannot draft

    def check(module: nn.Module) -> dict[str, float]:
        # as it will be run: in the target's precision
        checked = deepcopy(model).to(teacher.dtype) if model.dtype != teacher.dtype else model
        length = acceptance_length(teacher, DraftModelDrafter(adapt(checked)), trial)
        return {"acceptance": round(length, 3)}

    training.train(
        Stage(
            f"draft model, {divergence}",
            learner,
            lambda step: learner.make(source, step, accelerator.process_index),
            check,
            slow="",  # is in every name
            slow_factor=rate or (RATE_OF_LAYERS if layers else RATE_OF_TRAINED),
            outer=tables_of(learner),
            halved=teacher.dtype != torch.float32,
        )
    )
    if accelerator.is_main_process:
        options = {
            "target": target,
            "from": start,
            "out": out,
            **training.length,
            "data": data if isinstance(data, str | Path) else None,
            "divergence": divergence,
            "beta": beta if divergence == "jsd" else None,
            "own-share": own_share,
            "new-tokens": new_tokens if own_share else None,
            "rate": rate,
            "max-length": max_length,
            "regenerate": regenerate or None,
            "dtype": None if dtype == "auto" else dtype,
            "save-dtype": save_dtype,
            "states": states,
            "frequent-tokens": frequent_tokens or None,
            "accumulate": accumulate if accumulate > 1 else None,
        }
        about: Json = {"target": Path(target).name, "target_dtype": str(teacher.dtype)[6:]}
        about |= {"skipped_rows": source.left_out} if source.left_out else {}
        record = training_record("mmspec train draft-model", options, training, model, **about)
        model.to(saved or teacher.dtype).save_pretrained(out)
        source.reader.processor.save_pretrained(out)
        write_record(Path(out), record)
    accelerator.wait_for_everyone()
    return Path(out)


def check_start(target: str | Path, start: str | Path) -> int:
    """Check that a draft model fits a target, before weights are read.

    Returns:
        How many layers of the target are to be kept; 0 for a model of its own.

    Raises:
        InputError: the target has fewer layers, or the draft model is of another kind.
        CheckpointError: one of them cannot be read, or they have different tokenizers.
    """
    name = check_source(target, "target")
    config = load_config(name, argument="target")
    if not sees(config) and not is_language_model(config):
        raise CheckpointError("target", config.model_type, "a vision-language or causal language model")
    if found := LAYERS.fullmatch(str(start)):
        count, depth = int(found[1]), config.get_text_config(decoder=True).num_hidden_layers
        if not 1 <= count < depth:
            raise InputError("start", str(start), f"layers:1 to layers:{depth - 1}: the target has {depth}")
        return count
    own = check_source(start, "start")
    drafting = load_config(own, argument="start")
    if sees(config) and drafting.model_type != config.model_type:
        allowed = f"a {config.model_type!r} as the target is, or layers of it: both read the same images"
        raise InputError("start", drafting.model_type, allowed)
    if not sees(config) and not is_language_model(drafting):
        raise CheckpointError("start", drafting.model_type, "a causal language model, as the target is")
    processors = [
        load_processor(source, each, argument=argument)
        for source, each, argument in ((name, config, "target"), (own, drafting, "start"))
    ]
    theirs, ours = map(tokenizer_of, processors)
    check_same_tokenizer(theirs, ours, own)
    return 0


def sees(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a vision-language model."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def load_start(source: str, device: torch.device) -> PreTrainedModel:
    """Load a draft model in single precision."""
    config = load_config(source, argument="start")
    return load_model(source, config, argument="start", dtype=torch.float32, device_map={"": device})


def shortened(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A copy of a model in single precision with `count` of its layers: half its first ones, half its last.

    Its class is the same, and whatever shares weights goes on to do so. A model that loses its middle agrees
    most with the whole: twelve of SmolLM2's thirty layers predict its likeliest token in 6 % of places, its
    first eleven and its last in none.

    Raises:
        UnsupportedModelError: a layer is of another shape where the copy has it.
    """
    config = deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    kept = [*range(count // 2), *range(depth - count + count // 2, depth)]
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:  # an entry for each layer, such as `layer_types`
            setattr(text, name, [value[layer] for layer in kept])
    text.num_hidden_layers = count
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))
    prefix = next(name for name, module in model.named_modules() if module is layers)
    places = {f"{prefix}.{layer}": f"{prefix}.{place}" for place, layer in enumerate(kept)}
    weights = {}
    for name, weight in model.state_dict().items():
        found = re.match(rf"{re.escape(prefix)}\.\d+(?=\.)", name)
        if found is None or found[0] in places:
            weights[places[found[0]] + name[found.end() :] if found else name] = weight
    with torch.random.fork_rng(devices=[]), torch.device(model.device):
        made: PreTrainedModel = type(model)(config).float()
    try:
        made.load_state_dict(weights)
    except RuntimeError as error:
        problem = f"{type(model).__name__} has layers that cannot stand in each other's places"
        raise UnsupportedModelError(f"{problem}; begin with a model of its own ({error})"[:400]) from error
    made.generation_config = deepcopy(model.generation_config)
    made.eval()
    return made


def tables_of(learner: DraftModelLoss) -> tuple[str, ...]:
    """Names of the weights that embed tokens or write logits, which Muon is not for."""
    output: Any = learner.model.get_output_embeddings()
    tables = {id(each.weight) for each in learner.modules() if isinstance(each, nn.Embedding)}
    tables.add(id(output.weight))
    return tuple(name for name, weight in learner.named_parameters() if id(weight) in tables)


@torch.no_grad()
def check_logits(reader: CausalTarget, inputs: Mapping[str, torch.Tensor], argument: str) -> None:
    """Raise UnsupportedModelError unless a model's logits are what its output matrix makes of its states.

    Some cap or scale them afterwards, and losses on hidden states would miss it.
    """
    state, output = reader.prefill([inputs], inputs["input_ids"].shape[1], (HIDDEN,))
    state.close()
    made, logits = reader.head(output.taps[HIDDEN][0][:, -1:]).float(), output.logits.float()
    if (made - logits).abs().max() > NEAR * logits.abs().max():
        problem = "caps or scales its logits after its output matrix, so that it cannot be distilled here"
        raise UnsupportedModelError(f"{argument}: {type(reader.model).__name__} {problem}")
