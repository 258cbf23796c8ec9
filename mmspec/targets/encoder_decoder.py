"""Target adapter for encoder-decoder models of transformers: Whisper, BART, TrOCR, Florence-2 and others.

The encoder runs once for each prompt, as `generate` runs it. The keys and values of its output are cached by
row and constant from then on; all nodes of a draft attend to the same ones. Tokens are those of the decoder,
whose prompt is `input_ids`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from mmspec.core.cache import RaggedCache
from mmspec.core.rows import concat, overwrite, select
from mmspec.models.replaced import Maker, Replacement, replaced_forwards
from mmspec.open_types import AnyFunction, Keywords
from mmspec.targets.admission import places_of, refusal
from mmspec.targets.causal import CausalTarget, to_device
from mmspec.transformers_versions import ENCODE

__all__ = [
    *("ENCODED", "ENCODER_TOKENS", "MASK", "CrossCache", "EncoderDecoderTarget"),
    *("prompt_of", "shares_encoder"),
]

ENCODED, MASK = "encoder_outputs", "attention_mask"
#: Name of the encoder's own token ids in a prompt, whose `input_ids` are the decoder's.
ENCODER_TOKENS = "encoder_input_ids"


class CrossCache(RaggedCache):
    """A decoder's cache, with the keys and values of the encoder's output of each row.

    Attributes:
        encoded: these keys and values, one entry for each state of the encoder.
        visible: [B, S] which states each row attends to.
        is_even: whether all rows attend to all of S states, so that attention needs no mask.
        inputs: R arguments of the model with the output of the encoder, for models that share it.
    """

    def __init__(self, config: PreTrainedConfig, rows: int, capacity: int, device: torch.device) -> None:
        super().__init__(config, rows, capacity, device)
        self.encoded = RaggedCache(config, rows, 0, device)
        self.visible = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self.is_even = True
        self.inputs: list[Keywords] = [{} for _ in range(rows)]

    def begin_reading(self) -> None:
        super().begin_reading()
        self.encoded.begin_reading()

    def begin_encoded(self, states: Tensor, mask: Tensor | None, inputs: Keywords) -> None:
        """Prepare the prefill of a row to cache the keys of its encoder states.

        Args:
            states: [1, S, d].
            mask: [1, S], 0 for states that the decoder must not attend to; None for none.
            inputs: see the attribute.
        """
        row, length = self.plan.prefill_row, states.shape[1]
        if row is None:  # whole sequences are read without caching
            return
        self.inputs[row] = inputs
        before = self.encoded.longest
        self.encoded.begin_prefill(row, length)
        self.visible = pad(self.visible, (0, self.encoded.longest - before))
        self.visible[row, :length] = True if mask is None else mask[0] != 0
        self.is_even &= before in (0, length) and (mask is None or bool(mask.all()))

    @property
    def has_keys(self) -> bool:
        """Whether all layers have cached keys of the encoder's output, where they are kept."""
        return not self.plan.keeps or all(layer.is_initialized for layer in self.encoded.ragged)

    def known(self) -> Cache:
        """The cached keys and values of all rows, as attention reads them."""
        self.encoded._settle()
        width = self.encoded.longest
        layers: list[Any] = []
        for layer in self.encoded.ragged:
            shown = DynamicLayer()
            shown.keys, shown.values = (
                each[:, :width].transpose(1, 2) for each in (layer.keys, layer.values)
            )
            shown.is_initialized = True
            layers.append(shown)
        return Cache(layers=layers)

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        inputs, visible = select(self.inputs, rows, count), select(self.visible, rows, count)
        part = super().part(rows, count)
        part.encoded, part.visible, part.inputs = self.encoded.part(rows, count), visible, inputs
        return part

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        both = super().joined(other, counts)
        both.encoded = self.encoded.joined(other.encoded, counts)
        both.visible = concat(self.visible, other.visible, counts)
        both.inputs = concat(self.inputs, other.inputs, counts)
        both.is_even = self._is_even_with(other)
        return both

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        self.is_even = self._is_even_with(other)
        super().overwritten(slots, other, counts)
        self.encoded = self.encoded.overwritten(slots, other.encoded, counts)
        self.visible = overwrite(self.visible, slots, other.visible, counts)
        self.inputs = overwrite(self.inputs, slots, other.inputs, counts)
        return self

    def _is_even_with(self, other: Self) -> bool:
        return self.is_even and other.is_even and self.encoded.longest == other.encoded.longest

    def nbytes(self) -> int:
        return super().nbytes() + self.encoded.nbytes()


class EncoderDecoderTarget(CausalTarget):
    """Adapter from an encoder-decoder of transformers to the `Target` interface.

    A prompt has the decoder's tokens as `input_ids`, and the inputs of the encoder by the names of its
    processor; token ids of an encoder are `encoder_input_ids`. It may have `encoder_outputs` in their place,
    as the encoder returns them or as a tensor [1, S, d].
    `prompt_of` makes one from the output of a processor.

    Args:
        model: an encoder-decoder whose decoder caches the keys of the encoder's output.

    Raises:
        UnsupportedModelError: see `CausalTarget`.
    """

    cache_class = CrossCache
    can_split = False  # the encoder's output comes with the first token

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        accepted = inspect.signature(self._decoder.forward).parameters
        self._takes_mask = "encoder_attention_mask" in accepted
        self._takes_positions = "position_ids" in accepted
        self._places = places_of(model)
        self.config = config_of(self._decoder)

    def compile(self) -> None:
        """Do nothing: the forward passes of encoder-decoders are not compiled yet."""

    def encode(self, inputs: Mapping[str, Any]) -> Keywords:
        """Run the encoder on the inputs of one prompt, as `generate` does.

        Args:
            inputs: a prompt without the decoder's tokens. The encoder does not run if they have its output.

        Returns:
            The model's arguments: `encoder_outputs`, and the `attention_mask` of the encoder if there is one.
        """
        known = dict(inputs)
        if ENCODED not in known:
            if ENCODER_TOKENS in known:
                known["input_ids"] = known.pop(ENCODER_TOKENS)
            tensor, name, known = self.model._prepare_model_inputs(None, None, known)
            known = getattr(self.model, ENCODE)(tensor, known, name, self.model.generation_config)
        if isinstance(known[ENCODED], tuple | Tensor):
            states = known[ENCODED]
            known[ENCODED] = BaseModelOutput(states if isinstance(states, Tensor) else states[0])
        return {name: known[name] for name in (ENCODED, MASK) if known.get(name) is not None}

    def arguments(self, prompt: Mapping[str, Tensor]) -> tuple[Keywords, int]:
        inputs = to_device(prompt, self.device)
        tokens = inputs.pop("input_ids")
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        return {"input_ids": tokens, "position_ids": positions, **self.encode(inputs)}, 0

    def _identify(self, *_: object) -> None:
        return None  # a prompt of a few tokens has no prefix worth keeping

    def forward(self, inputs: Mapping[str, Any], cache: Any, keep: int = 0, whole: bool = False) -> Tensor:
        """Run the decoder, and cache the keys of the encoder's output if `inputs` have it.

        The decoder is called by the model, which adds what is its own (biases, soft caps). What the model
        would pass to it is completed here, since models differ in the names of these arguments.
        """
        given = {name: inputs[name] for name in (ENCODED, MASK) if name in inputs}
        is_prefill, replacements = ENCODED in given, []
        if is_prefill:
            known: Cache = cache.encoded
            replacements.append(Replacement(self._decoder, self._caching(cache, given)))
        else:
            known, first = cache.known(), cache.inputs[0][ENCODED]
            positions = inputs["position_ids"]
            if self._places is not None:  # deeper nodes of a draft are never emitted
                positions = positions.clamp_max(self._places - 1)
            replacements.append(
                Replacement(self._decoder, self._attending(cache, given.pop(MASK), positions))
            )
            if not self._takes_positions:
                replacements.append(Replacement(self._decoder.embed_positions, embedding_at(positions)))
            # the model reads only whether there is any
            given[ENCODED] = type(first)(last_hidden_state=first.last_hidden_state[:, :1])
        tokens = {
            f"decoder_{name}": inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs
        }
        both = {self._cache_name: EncoderDecoderCache(cache, known), "use_cache": True}
        with replaced_forwards(replacements):
            output = self.model(**tokens, **given, **both)
        if (
            is_prefill
            and cache.plan.keeps
            and not all(layer.is_initialized for layer in cache.encoded.ragged)
        ):
            raise refusal(self.model, "does not cache the keys of its encoder's output")
        logits: Tensor = output.logits[:, -keep:]
        return logits

    def _caching(self, cache: CrossCache, given: Keywords) -> Maker:
        """Prepare the cache for the encoder states that the model passes to its decoder."""

        def make(own: AnyFunction) -> AnyFunction:
            def decode(*args: Any, **kwargs: Any) -> Any:
                states = kwargs["encoder_hidden_states"]
                cache.begin_encoded(states, kwargs.get("encoder_attention_mask"), given)
                # Moonshine streaming adds positions in place, and draft models read the same states
                return own(*args, **kwargs | {"encoder_hidden_states": states.clone()})

            return decode

        return make

    def _attending(self, cache: CrossCache, mask: object, positions: Tensor) -> Maker:
        """Pass the masks of a draft and of the encoder states, and positions, to the decoder."""
        visible = None if cache.is_even else cache.visible
        if visible is not None and not self._takes_mask:
            raise refusal(
                self.model, "has no mask for encoder states, so that rows cannot differ in their number"
            )
        passed = {MASK: mask}
        passed |= {"encoder_attention_mask": visible} if self._takes_mask else {}
        passed |= {"position_ids": positions} if self._takes_positions else {}

        def make(own: AnyFunction) -> AnyFunction:
            def decode(*args: Any, **kwargs: Any) -> Any:
                first = kwargs["encoder_hidden_states"]
                # whose keys are known: decoders project them or add to them, but do not use the result
                states = first.new_empty(*cache.visible.shape, first.shape[-1])
                return own(*args, **kwargs | passed | {"encoder_hidden_states": states})

            return decode

        return make

    def embed(self, tokens: Tensor) -> Tensor:
        embeddings: Tensor = self._decoder.get_input_embeddings()(tokens)
        return embeddings


def config_of(decoder: Any) -> PreTrainedConfig:
    """Return the config of a decoder alone; that of an MBart or Florence-2 counts the encoder's layers."""
    config: PreTrainedConfig = copy.deepcopy(decoder.config.get_text_config(decoder=True))
    config.is_encoder_decoder = False
    if hasattr(decoder, "layers"):
        config.num_hidden_layers = len(decoder.layers)
    return config


def embedding_at(positions: Tensor) -> Maker:
    """Replace a table of learned positions, which counts on from the cache, for positions [B, n]."""

    def make(own: AnyFunction) -> AnyFunction:
        def embed(tokens: object, *args: object, **kwargs: object) -> Tensor:
            # such tables add a dimension to the positions of one row
            found: Tensor = own(tokens, position_ids=positions.flatten())
            return found.reshape(*positions.shape, -1)

        return embed

    return make


def shares_encoder(draft: object, target: object) -> bool:
    """Whether two targets have the same encoder, so that one reads the output of the other's."""
    if not (isinstance(draft, EncoderDecoderTarget) and isinstance(target, EncoderDecoderTarget)):
        return False
    own, other = draft.model.get_encoder(), target.model.get_encoder()
    if own is other:
        return True
    weights, others = own.state_dict(), other.state_dict()
    return (
        type(own) is type(other)
        and weights.keys() == others.keys()
        and all(torch.equal(weight, others[name]) for name, weight in weights.items())
    )


def prompt_of(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make a prompt of the output of a processor, one row, whose decoder begins as in `generate`.

    Args:
        model: the encoder-decoder.
        inputs: inputs of the encoder, and `decoder_input_ids` [1, L] if the decoder has a prompt.
    """
    prompt, config = dict(inputs), model.generation_config
    if "input_ids" in prompt:
        prompt[ENCODER_TOKENS] = prompt.pop("input_ids")
    first = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    start = torch.tensor(first, device=next(iter(inputs.values())).device)
    prepare: AnyFunction = model._prepare_decoder_input_ids_for_generation  # type: ignore[assignment]
    prompt["input_ids"], _ = prepare(1, model.main_input_name, prompt, start, start.device)
    return prompt
