"""Training of draft models: small models that share the target's tokenizer, distilled from the target.

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
from mmspec.methods.draft_model.drafter import DraftModelDrafter, mask_token_of
from mmspec.models.checkpoint import (
    check_same_tokenizer,
    check_source,
    load_config,
    load_model,
    load_processor,
    tokenizer_of,
)
from mmspec.open_types import Json
from mmspec.targets import CausalTarget, adapt
from mmspec.training.data.audio import AudioRows, hears
from mmspec.training.data.conversations import ConversationRows
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
DECODER_DEPTHS = ("decoder_layers", "decoder_num_hidden_layers", "num_decoder_layers", "num_hidden_layers")
RATE_OF_LAYERS, RATE_OF_TRAINED = 1.0, 0.05  # so that AdamW's rate is 1e-3, or 5e-5 for trained models
NEAR = 1e-2  # as a share of the largest logit; capping or scaling logits changes them more


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
    parallel: int = 1,
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
    """Train a draft model by distillation and save it as a transformers folder, for use as `drafter=`.

    The draft model of a vision-language target has the same model type. Only its language model is trained.
    That of a speech encoder-decoder reads the output of the target's encoder, as distil-whisper does
    (2311.00430). Its decoder's layers are trained; its encoder and its embeddings are those of the target.

    Args:
        target: folder or hub id of a vision-language or language model, or of a speech encoder-decoder.
        out: the folder to write.
        data: conversations, as a file or as rows; see `read_conversations`. For speech, clips of audio; see
            `read_clips`.
        start: the initial draft model: a folder or hub id, or "layers:k" for a copy of the target with k of
            its layers, half of them its first layers and half its last.
        divergence, beta, own_share, new_tokens, parallel: see `Distillation`. The mask of a parallel draft
            model is the initial model's `pard_token`, or else the last token that no text holds.
        rate: factor of the learning rates (AdamW: 1e-3, Muon: 2e-3). The default is 1 for layers of the
            target, and 0.05 for a trained model.
        max_length, regenerate, dtype, accumulate, log_dir: see `train_drafter`.
        save_dtype: dtype of the saved weights; None for the target's.
        states: see `train_drafter`; needs `own_share=0`.
        frequent_tokens: number of tokens that the model drafts: the most frequent learnt tokens of the data.
            0 keeps those of the initial model, or all.
        how: see `RunOptions`; the defaults are 10 minutes and a batch size of 8 sequences.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: a value is not allowed, or `layers:k` does not fit the target.
        CheckpointError: one of the models cannot be read, or their tokenizers differ.
        UnsupportedModelError: the model cannot draft, or changes its logits after its output matrix.
    """
    settings = Distillation(divergence, beta, own_share, new_tokens, parallel)
    if parallel > 1 and own_share:
        raise InputError("own_share", own_share, "must be 0 with parallel: it learns replies of the data")
    if rate is not None:
        require_number("rate", rate, 0.0, 100.0, "must be above 0 and at most 100", open_below=True)
    if not is_integer(frequent_tokens) or frequent_tokens < 0:
        raise InputError("frequent_tokens", frequent_tokens, "must be a number of tokens, or 0 for all")
    if frequent_tokens and regenerate:
        rule = "must be 0 with regenerate: the replies that are counted do not exist yet"
        raise InputError("frequent_tokens", frequent_tokens, rule)
    if states is not None and own_share:
        rule = "needs own_share=0: the draft model's own replies differ in every step"
        raise InputError("states", str(states), rule)
    if states is not None and divergence == HARD_LABELS:
        rule = "cannot be combined with hard labels, which do not use the target's states"
        raise InputError("states", str(states), rule)
    layers, of_speech = check_start(target, start), hears(load_config(str(target), argument="target"))
    if of_speech and own_share:
        rule = "must be 0 for a speech model: it learns transcripts of the data"
        raise InputError("own_share", own_share, rule)
    if of_speech and parallel > 1:
        raise InputError("parallel", parallel, "must be 1 for a speech model")
    training = drafter_training(Path(out), how, accumulate, log_dir)
    accelerator = training.accelerator
    if accelerator.is_fsdp2:
        rule = "cannot shard draft models: they are small and generate replies; run DDP processes instead"
        raise InputError("accelerate launch", "FSDP", rule)
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
    if not isinstance(source, ConversationRows | AudioRows):
        raise InputError("data", type(source).__name__, "must be conversations, or audio for a speech model")
    if layers:
        model: Any = shortened(teacher.model, layers)
    else:
        config, where = load_config(str(start), argument="start"), {"": accelerator.device}
        model = load_model(str(start), config, argument="start", dtype=torch.float32, device_map=where)
    if parallel > 1 and isinstance(source, ConversationRows):
        known = mask_token_of(model.config)
        model.config.pard_token = spare_token(model, source.reader.processor) if known is None else known
        model.config.spd_type = "pard"
    nn.Module.requires_grad_(model, False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(True)
    if of_speech:  # its tables are large beside its layers; training them would take half of a step
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
    learner = DraftModelLoss(model, teacher, settings, training.seed)
    learner.stored = None if states is None else StoredStates(teacher, states)
    trial = source.trial()
    asked = trial.requests[0].inputs
    check_logits(teacher, asked, "target")
    check_logits(learner.reader, learner.told(asked), "start")
    if frequent_tokens:
        count = token_counts(source.learnt_texts(), teacher.vocabulary)
        often = count.sort(descending=True, stable=True).indices  # ties prefer lower ids, commoner in BPE
        model.config.draft_tokens = sorted(often[:frequent_tokens].tolist())
    DraftModelDrafter(learner.reader)  # raises if the model cannot draft

    def check(module: nn.Module) -> dict[str, float]:
        # measured in the dtype that it runs in: the target's
        checked = deepcopy(model).to(teacher.dtype) if model.dtype != teacher.dtype else model
        length = acceptance_length(teacher, DraftModelDrafter(adapt(checked)), trial)
        return {"acceptance": round(length, 3)}

    training.train(
        Stage(
            f"draft model, {divergence}",
            learner,
            lambda step: learner.make(source, step, accelerator.process_index),
            check,
            slow="",  # matches every name
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
            "parallel": parallel if parallel > 1 else None,
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
        (source if isinstance(source, AudioRows) else source.reader).processor.save_pretrained(out)
        write_record(Path(out), record)
    accelerator.wait_for_everyone()
    return Path(out)


def spare_token(model: Any, processor: Any) -> int:
    """Return the last token of a model's vocabulary that no text holds: unknown to its tokenizer, or special.

    Tokens of the chat template and of media are not spare, nor are those that begin or end texts.

    Raises:
        InputError: there is none.
    """
    tokenizer, size = getattr(processor, "tokenizer", processor), model.get_output_embeddings().out_features
    settings = model.config.to_dict() | model.config.get_text_config(decoder=True).to_dict()
    settings |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk")}
    used = set()
    for name, value in settings.items():
        if name.endswith(("_token_id", "_token_index")) and name != "pad_token_id":
            used |= set(value) if isinstance(value, list) else {value}
    template = f"{tokenizer.chat_template}{getattr(processor, 'chat_template', '')}"
    for token in reversed(range(size)):
        added = tokenizer.added_tokens_decoder.get(token)
        is_special = added is not None and added.special and str(added) not in template
        if token not in used and (token >= len(tokenizer) or is_special):
            return token
    last = tokenizer.convert_ids_to_tokens(size - 1)
    rule = f"must be in the config of `start`: texts can hold every token, such as the last one, {last!r}"
    raise InputError("pard_token", None, rule)


def check_start(target: str | Path, start: str | Path) -> int:
    """Check that a draft model fits a target, before weights are read.

    Returns:
        The number of target layers to keep; 0 if `start` is a separate model.

    Raises:
        InputError: the target has too few layers, or the draft model has another model type.
        CheckpointError: one of the models cannot be read, or their tokenizers differ.
    """
    name = check_source(target, "target")
    config = load_config(name, argument="target")
    if not (sees(config) or hears(config) or is_language_model(config)):
        raise CheckpointError(
            "target", config.model_type, "must be a vision-language, causal language or speech model"
        )
    if found := LAYERS.fullmatch(str(start)):
        count, depth = int(found[1]), config.get_text_config(decoder=True).num_hidden_layers
        if not 1 <= count < depth:
            rule = f"must be from layers:1 to layers:{depth - 1}: the target has {depth}"
            raise InputError("start", str(start), rule)
        return count
    own = check_source(start, "start")
    drafting = load_config(own, argument="start")
    if sees(config) and drafting.model_type != config.model_type:
        rule = f"must be a {config.model_type!r} like the target, or layers:k: both process the same images"
        raise InputError("start", drafting.model_type, rule)
    if hears(config) != hears(drafting):
        rule = "must be a speech model if and only if the target is one"
        raise CheckpointError("start", drafting.model_type, rule)
    if not (sees(config) or hears(config) or is_language_model(drafting)):
        raise CheckpointError("start", drafting.model_type, "must be a causal language model like the target")
    processors = [
        load_processor(source, each, argument=argument)
        for source, each, argument in ((name, config, "target"), (own, drafting, "start"))
    ]
    theirs, ours = map(tokenizer_of, processors)
    check_same_tokenizer(theirs, ours, own)
    return 0


def sees(config: PreTrainedConfig) -> bool:
    """Whether a config belongs to a vision-language model."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def shortened(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a float32 copy of a model with `count` of its layers: half its first layers, half its last.

    The class and the weight sharing stay the same. Dropping the middle layers preserves the predictions best:
    with twelve of its thirty layers, SmolLM2 predicts its likeliest token in 6 % of places; with its first
    eleven and its last layer in none.

    Raises:
        UnsupportedModelError: a kept layer has another shape than its new position requires.
    """
    config = deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    kept = [*range(count // 2), *range(depth - count + count // 2, depth)]
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:  # one entry per layer, such as `layer_types`
            setattr(text, name, [value[layer] for layer in kept])
    if config.is_encoder_decoder:
        for part in (config, text):  # `text` may be a copy
            stated = next((each for each in DECODER_DEPTHS if each in vars(part)), None)
            if stated is not None:
                setattr(part, stated, count)
    else:
        text.num_hidden_layers = count
    decoder = model.get_decoder()
    layers = next(
        (each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == depth), None
    )
    if layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {depth} decoder layers; start from a separate model"
        )
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
        problem = f"The layers of {type(model).__name__} are not interchangeable"
        raise UnsupportedModelError(f"{problem}; start from a separate model ({error})"[:400]) from error
    made.generation_config = deepcopy(model.generation_config)
    made.eval()
    return made


def tables_of(learner: DraftModelLoss) -> tuple[str, ...]:
    """Names of the embedding and output matrices, which Muon does not train."""
    output: Any = learner.model.get_output_embeddings()
    tables = {id(each.weight) for each in learner.modules() if isinstance(each, nn.Embedding)}
    tables.add(id(output.weight))
    return tuple(name for name, weight in learner.named_parameters() if id(weight) in tables)


@torch.no_grad()
def check_logits(reader: CausalTarget, inputs: Mapping[str, torch.Tensor], argument: str) -> None:
    """Raise UnsupportedModelError unless a model's logits are its output matrix times its hidden states.

    Some models cap or scale their logits afterwards, which losses on hidden states would miss.
    """
    state, output = reader.prefill([inputs], inputs["input_ids"].shape[1], (HIDDEN,))
    state.close()
    made, logits = reader.head(output.taps[HIDDEN][0][:, -1:]).float(), output.logits.float()
    if (made - logits).abs().max() > NEAR * logits.abs().max():
        problem = "caps or scales its logits after its output matrix, which distillation does not support"
        raise UnsupportedModelError(f"{argument}: {type(reader.model).__name__} {problem}")
