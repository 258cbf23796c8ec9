"""scenes-smol: the vision tower of scenes-llava and a projector in front of a frozen language model.

The layout is that of Aya Vision in transformers, which merges patches two by two and has a gated projector
behind any tower. The processor is that of LLaVA.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import reduce
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    GenerationConfig,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from mmspec.families.smollm2.language_model import MARKER, PACKAGE, rename_token
from mmspec.scenes.language import ORDINALS
from mmspec.scenes.reader import label_heads
from mmspec.scenes.world import BACKGROUNDS
from mmspec.training.record import half_precision, write_record
from reference.processors import build_processor
from reference.smol_data import CHAT_TEMPLATE, IMAGE, RepliesBatch, SpokenBatch
from reference.trainer import float8_matrices
from reference.vlm_data import ATTRIBUTES, MENTION_CLASSES, PatchBatch
from reference.vlm_model import MENTION_WEIGHT, label_loss

__all__ = ["IMAGE_TOKEN", "SpeechLoss", "WordsLoss", "build_smol", "build_smol_processor", "save_smol"]

IMAGE_TOKEN = "<empty_output>"  # a special token that SmolLM2 does not generate
MERGE = 2
NEW_TOKENS = 256
ADAPTED = ("q_proj", "v_proj")


def build_smol(
    language: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tower: PreTrainedModel
) -> AyaVisionForConditionalGeneration:
    """Build a model from a language model and a tower, which keep their weights, and a new projector."""
    text: Any = language.config
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = AyaVisionConfig(
        vision_config=tower.config.to_dict(),
        text_config=text.to_dict(),
        image_token_index=int(tokenizer.vocab[IMAGE_TOKEN]),
        vision_feature_select_strategy="default",
        downsample_factor=MERGE,
        tie_word_embeddings=text.tie_word_embeddings,
        **ids,
        **{"alignment_intermediate_size": 2 * text.hidden_size},
    )
    model = AyaVisionForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(tower.state_dict())
    model.model.language_model, model.lm_head = language.model, language.lm_head
    model.generation_config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, **ids)
    return model


def build_smol_processor(tokenizer: TokenizersBackend, config: Any) -> LlavaProcessor:
    """Build the processor, whose visual tokens are merged patches."""
    renamed = rename_token(tokenizer, config.image_token_id, IMAGE)
    return build_processor(MERGE * config.vision_config.patch_size, renamed, CHAT_TEMPLATE)


def save_smol(
    model: AyaVisionForConditionalGeneration,
    adapters: Adapters,
    processor: LlavaProcessor,
    folder: Path,
    record: Mapping[str, Any],
) -> None:
    """Save all parts except the language model, with matrices in float8.

    `mmspec.families.smollm2.language_model` adds the language model when the folder is loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    matrices = {"vision_tower": "encoder.layers.", "multi_modal_projector": "linear_"}
    weights = {
        f"model.{part}.{name}": weight
        for part, within in matrices.items()
        for name, weight in float8_matrices(getattr(model.model, part), within).items()
    }
    for name, weight in half_precision(adapters).items():
        weights[f"model.language_model.{name.replace('/', '.')}"] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    processor.save_pretrained(folder)
    for file in folder.glob("tokenizer*.json"):  # those of the language model, with one token renamed
        file.unlink()
    (folder / MARKER).write_text(json.dumps({"package": PACKAGE}, indent=2) + "\n")
    write_record(folder, record)


class Adapters(nn.Module):
    """LoRA (2106.09685) of the query and value projections of a frozen language model.

    Args:
        language: the language model without its output layer.
        rank: rank of the matrices; 0 for no adapters.
    """

    def __init__(self, language: nn.Module, rank: int) -> None:
        super().__init__()
        self.active = True
        for name, linear in language.named_modules():
            if rank and isinstance(linear, nn.Linear) and name.endswith(ADAPTED):
                down = nn.Linear(linear.in_features, rank, bias=False)
                up = nn.Linear(rank, linear.out_features, bias=False)
                nn.init.zeros_(up.weight)
                self.add_module(name.replace(".", "/"), nn.ModuleDict({"lora_A": down, "lora_B": up}))
                linear.register_forward_hook(partial(self._adapt, down, up))

    def _adapt(
        self, down: nn.Linear, up: nn.Linear, _: nn.Module, inputs: tuple[Tensor], output: Tensor
    ) -> Tensor:
        if not self.active:
            return output
        rows = F.linear(inputs[0], down.weight.to(output.dtype))
        return output + F.linear(rows, up.weight.to(output.dtype))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters in a `with` block."""
        self.active = False
        try:
            yield
        finally:
            self.active = True


class WordsLoss(nn.Module):
    """Squared distance of visual tokens from the sum of the embeddings of the words that describe them.

    Used in the first stage. A language model recognises words in a sum of their embeddings, so that the next
    stage learns sentences many times faster. The goal of a visual token is the mean over its patches.
    """

    vision_tower: Any
    tables: list[Tensor]

    def __init__(self, model: AyaVisionForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.vision_tower = model.model.vision_tower
        self.multi_modal_projector = model.model.multi_modal_projector
        weight: Any = model.get_input_embeddings().weight
        embeddings = weight.detach().float()
        tables = []
        for words in (*ATTRIBUTES.values(), ORDINALS, BACKGROUNDS):
            ids = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words]
            tables.append(torch.stack([embeddings[one].mean(0) for one in ids]))
        nothing = torch.zeros_like(tables[0][:1])
        vars(self)["tables"] = [*(torch.cat([nothing, table]) for table in tables[:-1]), tables[-1]]

    def forward(self, batch: PatchBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, divided by the variance of the goals."""
        visual = self.multi_modal_projector(self.vision_tower(batch.pixels).last_hidden_state[:, 1:])
        tables = [table.to(visual.device) for table in self.tables]
        *objects, background = batch.labels.unbind(-1)
        covered = (objects[0] > 0)[..., None]
        told = sum(table[labels] for table, labels in zip(tables, objects, strict=False))
        told = torch.where(covered, told, tables[-1][background])
        grid = math.isqrt(told.shape[1])
        wanted = reduce(
            told, "b (h i w j) d -> b (h w) d", "mean", h=grid // MERGE, w=grid // MERGE, i=MERGE, j=MERGE
        )
        loss = F.mse_loss(visual.reshape(wanted.shape), wanted) / wanted.var()
        return loss, {"left": loss}


class SpeechLoss(nn.Module):
    """Loss of replies to images.

    The loss of a `SpokenBatch` is the cross entropy of the replies, with the loss of mentions that
    `ConversationLoss` has too. The loss of a `RepliesBatch` is the KL divergence from the distributions of
    the language model itself, given descriptions of the images in words.

    Args:
        model: the model in training. Its language model is not trained, and is not part of the training
            state.
        rank: rank of the adapters of the language model.
        device, dtype: device and dtype of the language model.
    """

    vision_tower: Any
    language: Any
    lm_head: Any

    def __init__(
        self, model: AyaVisionForConditionalGeneration, rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.vision_tower = model.model.vision_tower
        self.multi_modal_projector = model.model.multi_modal_projector
        self.adapters = Adapters(model.model.language_model, rank)
        language = model.model.language_model.requires_grad_(False).to(device, dtype)
        language.set_attn_implementation("eager")  # half the backward time of SDPA in bfloat16 on a CPU
        vars(self)["language"] = language
        vars(self)["lm_head"] = model.lm_head.requires_grad_(False).to(device, dtype)
        self.image_token = model.config.image_token_id
        self.middle = len(language.layers) // 2
        self.mention_heads = label_heads(language.config.hidden_size, MENTION_CLASSES)

    def forward(self, batch: SpokenBatch | RepliesBatch) -> tuple[Tensor, Tensor]:
        """Return the loss, and for each row whether greedy decoding gives its reply: bool [B]."""
        visual = self.multi_modal_projector(self.vision_tower(batch.pixels).last_hidden_state[:, 1:])
        embedded = self.language.embed_tokens(batch.tokens)
        places = (batch.tokens == self.image_token)[..., None]
        embedded = embedded.masked_scatter(places, visual.to(embedded.dtype))
        logits, states = self.predict(embedded, batch.learnt)
        labels = batch.tokens[batch.learnt]
        exact = torch.ones(len(batch.tokens), dtype=torch.bool, device=labels.device)
        rows = batch.learnt.nonzero()[:, 0]
        exact[rows[logits.argmax(-1) != labels]] = False
        if not isinstance(batch, RepliesBatch):
            found = states[batch.mention_at.unbind(-1)].float()
            named, _ = label_loss(found, batch.mention_labels, self.mention_heads)
            return F.cross_entropy(logits, labels) + MENTION_WEIGHT * named, exact
        with torch.no_grad(), self.adapters.off():
            told, _ = self.predict(self.language.embed_tokens(batch.told), batch.told_learnt)
        loss = F.kl_div(logits.log_softmax(-1), told.log_softmax(-1), reduction="batchmean", log_target=True)
        return loss, exact

    def take_over(self, folder: Path) -> None:
        """Load the weights of a folder that `save_smol` wrote."""
        known = {name.replace("/", "."): name for name, _ in self.adapters.named_parameters()}
        own = {f"mention_heads.{name}": weight for name, weight in self.mention_heads.state_dict().items()}
        for name, weight in load_file(folder / "model.safetensors").items():
            name = name.removeprefix("model.")
            within = name.removeprefix("language_model.")
            own[f"adapters.{known[within]}" if within in known else name] = weight
        self.load_state_dict(own)

    def predict(self, embedded: Tensor, learnt: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 logits [learnt, V] of rows [B, L, d], and states of the middle layer [B, L, d]."""
        output = self.language(inputs_embeds=embedded, use_cache=False, output_hidden_states=True)
        logits: Tensor = self.lm_head(output.last_hidden_state[:, :-1][learnt[:, 1:]])
        return logits.float(), output.hidden_states[self.middle]
