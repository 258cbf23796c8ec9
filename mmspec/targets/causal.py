"""Target adapter for decoder-only transformers models: by Cache, 4-D mask and position_ids."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mmspec.core.cache import RaggedCache
from mmspec.core.chunked_prefill import ChunkedPrefill, finish
from mmspec.core.draft import Block, Nodes
from mmspec.core.graphs import has_graphs
from mmspec.core.interfaces import AnyDraft, AnyVerdict, PromptOutput, TargetOutput, TargetState
from mmspec.core.round_graphs import RoundGraphs
from mmspec.core.rows import named
from mmspec.core.verdict import Fill
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.models.linear_layers import Product
from mmspec.models.weights import execution_device, is_offloaded, is_plain_linear
from mmspec.open_types import Inputs, Keywords
from mmspec.targets.admission import check_model, decoder_of, takes
from mmspec.targets.attention import attends_by_kernel, attends_plainly, attention_on_tree, mask_dtype
from mmspec.targets.batches import SHORT_SHARE, batches, join
from mmspec.targets.fused import find_fused, fused
from mmspec.targets.hooks import hooks_of_users, treats_alike
from mmspec.targets.media_items import MediaItem
from mmspec.targets.memory import check_draft, measure_states
from mmspec.targets.merged import merge_projections
from mmspec.targets.mixers import closed_form, find_mixers, mixers_in_turn, mixers_on_tree
from mmspec.targets.model_state import computation_of, state_of
from mmspec.targets.model_target import ModelTarget
from mmspec.targets.prefix import MEDIA, TYPES, PrefixCache, PromptIdentity, identify, part_of
from mmspec.targets.rotary import change_of, find_changing, turned
from mmspec.targets.steps import CapturedForward, CompiledForward, HiddenStates
from mmspec.targets.thinned import reading_only
from mmspec.transformers_versions import cache_name

logger = logging.getLogger(__name__)
S = TypeVar("S", bound="CausalState")

#: The state of a batch, of the class that a target creates in `prefill`.
AnyState: TypeAlias = Any


@dataclass
class CacheState(TargetState):
    """Cached rows of a batch, and the positions that follow them.

    Attributes:
        cache: keys and values, with per-row lengths.
        offset: [B] difference between a row's next position id and its token count (M-RoPE: the row's rope
            delta; 0 for linear positions).
        prompt_lengths: B prompt lengths, 2B under guidance.
    """

    row_fields = named("cache", "offset", "prompt_lengths")

    cache: RaggedCache
    offset: Tensor
    prompt_lengths: list[int]

    def tighten(self, emitted: Sequence[int]) -> None:
        copies = self.cache.rows // len(emitted)
        lengths = zip(self.prompt_lengths, list(emitted) * copies, strict=True)
        longest = max(prompt + count for prompt, count in lengths) - 1
        self.cache.longest = min(self.cache.longest, longest)
        # a row that stopped early has cached more than it kept; nothing may be written beyond `longest`
        self.cache.lengths.clamp_(max=self.cache.longest)

    def nbytes(self) -> int:
        return self.cache.nbytes()


@dataclass
class CausalState(CacheState):
    """State of a causal target: the cached rows of a batch, and further data for forward passes.

    Attributes:
        hidden: reader of the hidden states for the drafter.
        change: smallest length of a row from which rotary frequencies are computed per token (`rotary`).
        additive: data type of additive attention masks; None for boolean masks.
        queries: [Q, d] embeddings of query nodes: token V + q is the q-th. Queries are never committed. A
            drafter may set its own in `DraftSession.attach`.
        starts: [R] prompt lengths.
        most_nodes: largest draft that is known to fit in memory, if recurrent layers keep data for each node.
        prompts: R prompts as the prefix cache identifies them, None for those that it cannot hold; empty if
            replies are not stored.
    """

    row_fields = named("starts", "prompts")
    scratch = CacheState.scratch | {"prompts"}  # no round reads them

    hidden: HiddenStates
    change: float
    additive: torch.dtype | None
    queries: Tensor
    starts: Tensor
    most_nodes: int = field(default=1, kw_only=True)
    prompts: list[PromptIdentity | None] = field(default_factory=list, kw_only=True)

    def index(self, nodes: Nodes) -> Tensor:
        """[R, n] output index of scored nodes."""
        # `lengths - starts` is the output index of the first slot
        return (self.cache.lengths - self.starts)[:, None] + nodes.depth

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        other.close()
        return replace(super().joined(other, counts), change=min(self.change, other.change))

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        other.close()
        return replace(super().overwritten(slots, other, counts), change=min(self.change, other.change))

    def close(self) -> None:
        self.hidden.close()


@dataclass(eq=False)
class Reading:
    """A prompt that is prefilled.

    Attributes:
        row: of the batch.
        inputs: the model's arguments.
        length: number of tokens, of `places` alone if there are some.
        prompt: its identity; None if it is prefilled in one forward pass.
        places: of the prompt, [K]; None for all.
        size: largest number of tokens of a chunk.
        start: number of tokens that have been prefilled, or that the prefix cache supplied.
        cached: number of those that the prefix cache supplied.
        taps: hidden states of these tokens, one dict for each part of the prompt.
        logits: [1, V] after the last part.
    """

    row: int
    inputs: Keywords
    length: int
    prompt: PromptIdentity | None
    places: Tensor | None
    size: int
    start: int = 0
    cached: int = 0
    taps: list[dict[int, Tensor]] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))

    @property
    def left(self) -> int:
        """Number of tokens that have not been prefilled."""
        return self.length - self.start

    def part(self, end: int) -> Keywords:
        """The model's arguments for the next tokens, up to `end`."""
        return self.inputs if self.prompt is None else part_of(self.inputs, self.prompt, self.start, end)

    def images(self, end: int) -> list[tuple[MediaItem, Keywords]]:
        """Images and clips of these tokens, with the arguments of the whole prompt."""
        items = () if self.prompt is None else self.prompt.items
        return [(item, self.inputs) for item in items if self.start <= item.start < end]


class CausalTarget(ModelTarget[AnyState]):
    """Adapter from a transformers model to the `Target` interface.

    Prompts are prefilled one row at a time and never padded, so that a row of a batch is computed as it is
    alone, unless `prefill_tokens` is set: short ones then share forward passes. Decoding rounds, and `read`,
    which is for training, run all rows at once.

    Args:
        model: a loaded decoder-only model with an LM head, on its device, in eval mode.

    Attributes:
        vocabulary, device, grid, codebook, vector_size: see `Target`.
        prefix_cache: prefix cache of all batches; None, the default, for no cache.
        prefill_tokens: largest number of prompt tokens of a forward pass; None, the default, for one forward
            pass for each prompt. A longer image exceeds it, and a prompt that `can_split` excludes.

    Raises:
        UnsupportedModelError: the model cannot be decoded speculatively; the message gives the reason.
    """

    rope_arguments: ClassVar[frozenset[str]] = frozenset()  # arguments of positions besides grids
    cache_class: ClassVar[type[RaggedCache]] = RaggedCache

    def __init__(self, model: PreTrainedModel) -> None:
        check_model(model, self.rope_arguments)
        self.model = model
        self.config = model.config
        text = model.config.get_text_config(decoder=True)
        self.vocabulary: int = text.vocab_size
        self.device = execution_device(model, model.get_input_embeddings())
        self.dtype: torch.dtype = model.dtype
        self.prefix_cache: PrefixCache | None = None
        self.prefill_tokens: int | None = None
        self._decoder = decoder_of(model)
        self._cache_name = cache_name(model.forward, self._decoder.forward)
        self._takes_positions = takes(model, "position_ids")
        self._plain = attends_plainly(self._decoder)
        self._fused = find_fused(self._decoder)
        self._changing, self._change = find_changing(model), change_of(model.config)[0]
        self.steps: CapturedForward | CompiledForward | None = None
        self._readers: dict[tuple[int, ...], HiddenStates] = {}

    def compile(self) -> None:
        """Compile scoring forward passes, each on first use; the prefill is not compiled.

        A partly offloaded model is not compiled: its weights are loaded anew for each forward pass.
        """
        if is_offloaded(self.model):
            logger.warning("%s runs uncompiled: parts of it are offloaded", type(self.model).__name__)
            return
        if has_graphs(self.device):
            self.steps = CapturedForward(self.model, self._step)
        else:
            self.steps = CompiledForward(type(self.model).__name__, self._step)

    @functools.cached_property
    def node_bytes(self) -> int:
        """Bytes that recurrent layers keep for each node of a draft until the commit."""
        return sum(states.node for states in measure_states(self.model))

    def treats_alike(self, prompt: Mapping[str, Tensor]) -> bool:
        one_by_one = not (self.by_blocks or self.any_order or self.vector_size)
        return not one_by_one or treats_alike(self, prompt)

    @property
    def graphs(self) -> RoundGraphs | None:
        if not isinstance(self.steps, CapturedForward) or self._changing:
            return None
        return self.steps.rounds

    @property
    def has_fixed_rows(self) -> bool:
        return isinstance(self.steps, CapturedForward)

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[AnyState, PromptOutput]:
        """Prefill the prompts one after another. Returns the state, and the logits [B, 1, V]."""
        return self.prefill_part(prompts, [None] * len(prompts), capacity, taps)

    def prefill_part(
        self,
        prompts: Sequence[Mapping[str, Tensor]],
        places: Sequence[Tensor | None],
        capacity: int,
        taps: Sequence[int] = (),
    ) -> tuple[CausalState, PromptOutput]:
        """Prefill only some places [K] of each prompt, each at its own position; None for all."""
        return finish(self._chunked_prefill(prompts, places, capacity, taps))

    def chunked_prefill(
        self,
        prompts: Sequence[Mapping[str, Tensor]],
        capacity: int,
        taps: Sequence[int] = (),
        is_copied: bool = False,
    ) -> ChunkedPrefill[tuple[AnyState, PromptOutput]]:
        if self._is_replaced or self.prefill_tokens is None:
            return (yield from super().chunked_prefill(prompts, capacity, taps))
        return (yield from self._chunked_prefill(prompts, [None] * len(prompts), capacity, taps, is_copied))

    @property
    def _is_replaced(self) -> bool:
        return getattr(self.prefill, "__func__", None) is not CausalTarget.prefill

    @property
    def reads_together(self) -> bool:
        splits = self.prefill_tokens is not None and not self._is_replaced
        return splits and self._can_pad and not hooks_of_users(self.model)  # see `_chunk_size`

    @functools.cached_property
    def _can_pad(self) -> bool:
        """Whether padding behind a prompt changes nothing: there are no recurrent layers, and no encoder."""
        return self.cache_class is RaggedCache and not find_mixers(self.model)

    @functools.cached_property
    def can_split(self) -> bool:
        """Whether prompts can be prefilled in chunks: all recurrent mixers have a closed form.

        The others continue from a state token by token, which is slower than reading the prompt whole.
        """
        return all(closed_form(mixer) is not None for mixer in find_mixers(self.model))

    def _chunked_prefill(
        self,
        prompts: Sequence[Mapping[str, Tensor]],
        places: Sequence[Tensor | None],
        capacity: int,
        taps: Sequence[int],
        is_copied: bool = False,
    ) -> ChunkedPrefill[tuple[CausalState, PromptOutput]]:
        """Prefill the prompts in forward passes of up to `prefill_tokens` tokens; see `prefill_part`."""
        whole = [prompt["input_ids"].shape[1] for prompt in prompts]
        lengths = [all if part is None else len(part) for all, part in zip(whole, places, strict=True)]
        pool = self.steps.caches if isinstance(self.steps, CapturedForward) and not is_copied else None
        take = self.cache_class if pool is None else pool.take
        cache = take(self.config, len(prompts), capacity, self.device)
        cache.plan.reads_all = attends_by_kernel(self._decoder, self._plain, self.device)
        if cache.plan.reads_all:
            merge_projections(each.module for each in self._fused)
        if isinstance(self.steps, CapturedForward):
            self.steps.renew(computation_of(self.model, self._changing))
        model_state = None if self.prefix_cache is None else state_of(self.model, self._changing)
        # replies are stored without hidden states, with which heads could not use them
        keeps_replies = self.prefix_cache is not None and not taps
        state = CausalState(
            cache=cache,
            offset=torch.empty(0, dtype=torch.long, device=self.device),  # known when the prompts are read
            prompt_lengths=lengths,
            hidden=self._reader(taps),
            change=self._change,
            additive=mask_dtype(self._decoder),
            queries=torch.empty(0, 0, dtype=torch.float32, device=self.device),
            starts=torch.tensor(lengths, device=self.device),
        )
        if pool is not None:
            pool.lend(cache, state)
        memory, joins = None if model_state is None else self.prefix_cache, self.reads_together
        readings, offsets, waiting = list[Reading](), list[int](), list[Reading]()
        try:
            for row, prompt in enumerate(prompts):
                inputs, offset = self.arguments(prompt)
                offset += whole[row] - lengths[row]
                offsets.append(offset)
                state.change = min(state.change, self._change - offset)
                identity = None
                size = self._chunk_size(lengths[row])
                if places[row] is None and (model_state is not None or size < lengths[row]):
                    identity = self._identify(prompt, inputs, offset, model_state or 0)
                if keeps_replies:
                    state.prompts.append(None if model_state is None else identity)
                new = Reading(row, inputs, lengths[row], identity, places[row], size)
                readings.append(new)
                if memory is not None and identity is not None:
                    others = [each.prompt for each in waiting if each.prompt is not None]
                    if memory.is_worth_waiting(identity, others):
                        yield from self._read_together(waiting, state, taps, memory)
                        waiting = []
                    self._load_prefix(new, state.cache, taps, memory)
                if joins and new.places is None and new.left <= (self.prefill_tokens or 0):
                    waiting.append(new)
                    continue
                for end in [new.length] if identity is None else identity.chunks(new.start, size):
                    yield from self._read_parts([new], [end], state, taps, memory)
            yield from self._read_together(waiting, state, taps, memory)
        except BaseException:
            state.close()
            raise
        state.offset = torch.tensor(offsets, device=self.device)
        hidden = {tap: [joined([part[tap] for part in each.taps]) for each in readings] for tap in taps}
        ends = [each.logits for each in readings]
        logits = (ends[0] if len(ends) == 1 else torch.cat(ends))[:, None]
        return state, PromptOutput(logits, hidden, [each.cached for each in readings], cache=cache)

    @torch.inference_mode()
    def encode_ahead(self, prompt: Mapping[str, Tensor]) -> None:
        """Encode the images of a prompt that is prefilled later, in any thread.

        The prefill then finds them in the image cache. Models without one, or on several devices, encode
        their images in the prefill.
        """
        memory, placed = self.prefix_cache, getattr(self.model, "hf_device_map", None) or {}
        if memory is None or not MEDIA & prompt.keys() or len({*placed.values()}) > 1:
            return
        with memory.images.beside(self.device), self.computing()():
            inputs, offset = self.arguments(prompt)
            state = state_of(self.model, self._changing)
            identity = None if state is None else self._identify(prompt, inputs, offset, state)
            if identity is not None:
                held = memory.held(identity)
                images = [(item, inputs) for item in identity.items if item.stop > held]
                memory.images.encode_ahead(self.model, images, identity.state)

    def extended(self, state: CausalState, kind: type[S], **fields: Any) -> S:
        """Return a state with further fields, of a class that has them; it replaces the given state."""
        new = kind(**vars(state), **fields)
        if isinstance(self.steps, CapturedForward):
            self.steps.caches.lend(new.cache, new)
        return new

    def _chunk_size(self, length: int) -> int:
        """Largest number of tokens of a forward pass of a prompt of this length."""
        most = self.prefill_tokens
        if most is None or length <= most or not self.can_split:
            return length
        return length if hooks_of_users(self.model) else most  # hooks may depend on the number of tokens

    def unread(
        self, kind: type[S], prompt_lengths: list[int], capacity: int, taps: Sequence[int], **fields: Any
    ) -> tuple[S, PromptOutput]:
        """Create the state of prompts that have no prefill. Returns it, and empty logits [R, 0, V].

        Args:
            kind: class of the state.
            prompt_lengths: number of slots before each image.
            capacity, taps: see `prefill`.
            fields: further fields of the state.
        """
        if taps:
            rule = "must be empty: this model has no hidden states of a prompt alone"
            raise InputError("taps", tuple(taps), rule)
        rows = len(prompt_lengths)
        state = kind(
            cache=RaggedCache(self.config, rows, capacity, self.device),
            prompt_lengths=prompt_lengths,
            starts=torch.tensor(prompt_lengths, device=self.device),
            hidden=self._reader(()),
            change=self._change,
            additive=mask_dtype(self._decoder),
            **fields,
        )
        logits = torch.empty(rows, 0, self.vocabulary, dtype=self.dtype, device=self.device)
        return state, PromptOutput(logits, forwards=0)

    def read(self, sequences: Sequence[Mapping[str, Tensor]], taps: Sequence[int]) -> dict[int, Tensor]:
        """Compute the hidden states of whole sequences for training, without caching.

        Sequences that `batches` groups share a forward pass, padded on the right.

        Returns:
            Tap -> [B, L, d]; zeros after the end of a sequence.
        """
        lengths = [sequence["input_ids"].shape[1] for sequence in sequences]
        rows = [self.joinable(self.arguments(sequence)[0]) for sequence in sequences]
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        states = {tap: [nothing] * len(rows) for tap in taps}
        with closing(HiddenStates(self.model, taps)) as reader:
            for together in batches(self.model, rows):
                cache = self.cache_class(self.config, len(together), 0, self.device)
                cache.begin_reading()
                with turned(self._changing):
                    self.forward(join([rows[row] for row in together]), cache, keep=1, whole=True)
                for tap, hidden in reader.take().items():
                    for row, padded in zip(together, hidden, strict=True):
                        states[tap][row] = padded[: lengths[row]]
        return {tap: pad_sequence(found, batch_first=True) for tap, found in states.items()}

    def arguments(self, prompt: Mapping[str, Tensor]) -> tuple[Keywords, int]:
        """The model's arguments for one prompt, and the offset of the positions that follow it."""
        inputs = to_device(prompt, self.device)
        positions, offset = self.positions(inputs)
        inputs.pop("attention_mask", None)  # rows are never padded, and plain causal attention is faster
        return {**inputs, "position_ids": positions}, offset

    def joinable(self, inputs: Keywords) -> Keywords:
        """The arguments of one sequence in a form that `join` accepts."""
        return inputs

    def _identify(
        self, prompt: Mapping[str, Tensor], inputs: Inputs, offset: int, model_state: int
    ) -> PromptIdentity | None:
        """Identify a prompt for the prefix cache; None if the cache cannot hold it.

        Args:
            prompt: as the caller passed it.
            inputs: its arguments of the model.
            offset: see `positions`.
            model_state: see `state_of`.
        """
        if int(inputs["position_ids"].max()) >= self._change:
            return None  # its prefix has other rotary frequencies than that of a shorter prompt
        return identify(self.model, inputs, model_state, offset, prompt)

    def _load_prefix(
        self, reading: Reading, cache: RaggedCache, taps: Sequence[int], memory: PrefixCache
    ) -> None:
        """Load the longest prefix of a prompt that the prefix cache holds."""
        known = None if reading.prompt is None else memory.find(reading.prompt, taps, bool(cache.recurrent))
        if known is None:
            return
        reading.start = reading.cached = known.length
        reading.taps.append(known.taps)
        cache.begin_prefill(reading.row, known.length)
        cache.load(known.states)
        for layer, before in zip(cache.recurrent, known.recurrent, strict=True):
            layer.load(reading.row, before)

    def _read_together(
        self, readings: Sequence[Reading], state: CausalState, taps: Sequence[int], memory: PrefixCache | None
    ) -> ChunkedPrefill[None]:
        """Prefill the rest of short prompts, several in one forward pass."""
        rows = [each.part(each.length) for each in readings]
        for together in batches(self.model, rows, SHORT_SHARE, self.prefill_tokens or 0):
            group = [readings[index] for index in together]
            yield from self._read_parts(group, [each.length for each in group], state, taps, memory)

    def _read_parts(
        self,
        readings: Sequence[Reading],
        ends: Sequence[int],
        state: CausalState,
        taps: Sequence[int],
        memory: PrefixCache | None,
    ) -> ChunkedPrefill[None]:
        """Prefill the next tokens of prompts in one forward pass, with their cached images.

        Args:
            readings: the prompts; one alone if it is not prefilled to its end.
            ends: where the tokens of each end.
            state: of the batch.
            taps: see `prefill`.
            memory: prefix cache; None for none.
        """
        cache, first = state.cache, readings[0]
        rows, starts = [each.row for each in readings], [each.start for each in readings]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        yield len(rows) * max(counts)
        parts = list(zip(readings, ends, strict=True))
        inputs = join([each.part(end) for each, end in parts])
        if memory is not None and first.prompt is not None:
            images = [image for each, end in parts for image in each.images(end)]
            inputs = memory.images.with_encoded(self.model, inputs, images, first.prompt.state)
        cache.begin_prefill_rows(rows, counts, starts)
        state.hidden.begin()
        with turned(self._changing), reading_only(self._decoder, first.places):
            logits = self._read_chunk(inputs, cache, rows[0], counts, whole=bool(taps))
        hidden = state.hidden.take()
        for index, (each, count) in enumerate(zip(readings, counts, strict=True)):
            each.start, each.logits = each.start + count, logits[index : index + 1]
            each.taps.append({tap: hidden[tap][index : index + 1, :count] for tap in taps})
            if memory is not None and each.prompt is not None and not each.left:
                tapped = {tap: joined([part[tap] for part in each.taps]) for tap in taps}
                recurrent = [layer.row_states(each.row) for layer in cache.recurrent]
                memory.keep(each.prompt, cache.row_states(each.row, each.length), tapped, recurrent)

    def _read_chunk(
        self, inputs: Keywords, cache: RaggedCache, row: int, counts: Sequence[int], whole: bool
    ) -> Tensor:
        """Prefill the tokens that `begin_prefill_rows` prepared.

        Args:
            inputs: the model's arguments.
            cache: of the batch.
            row: of the batch, the first one.
            counts: number of tokens of each row.
            whole: see `forward`.

        Returns:
            Logits [G, V] after the last token of each row.
        """
        last = sorted(set(counts))
        if len(counts) > 1:
            inputs = {**inputs, "logits_to_keep": torch.tensor(last, device=self.device) - 1}
        if not cache.plan.start:  # plain causal attention is faster than a mask
            logits = self.forward(inputs, cache, keep=len(last), whole=whole)
        else:
            mask = cache.chunk_mask(mask_dtype(self._decoder), image_of(inputs.get(TYPES)))
            with cache.recurrent_from(row), mixers_in_turn(self.model):
                logits = self.forward({**inputs, "attention_mask": mask}, cache, keep=len(last), whole=whole)
        if len(counts) == 1:
            return logits[:, -1]
        return torch.stack([logits[index, last.index(count)] for index, count in enumerate(counts)])

    def remember(self, state: AnyState, outputs: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Store the keys of replies in the prefix cache. Hidden states and recurrent states are not stored.

        Args:
            state: of a batch.
            outputs: B lists of output tokens. The last token of a row may have no keys.
            rows: of the batch, whose replies are complete.
        """
        if self.prefix_cache is None or self.grid is not None:
            return
        cache: RaggedCache = state.cache
        if cache.recurrent:  # their state may be that after tokens that a stop has cut off
            return
        for first in range(0, len(state.prompts), len(outputs)):  # a second copy under guidance
            for row in rows:
                prompt = state.prompts[first + row]
                if prompt is None or len(outputs[row]) < 2:
                    continue
                whole = prompt.followed_by(outputs[row][:-1])
                if len(whole.tokens) < state.change:  # from there on keys depend on the length
                    self.prefix_cache.keep(whole, cache.row_states(first + row, len(whole.tokens)), {})

    def score(self, state: AnyState, draft: AnyDraft) -> TargetOutput:
        """Score every node of the draft in one forward pass."""
        cache, nodes = state.cache, draft.nodes
        if cache.recurrent and isinstance(draft, Block):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} keeps a recurrent state, which depends on the order of the "
                "tokens; decode them in order"
            )
        output = self.score_nodes(state, nodes.repeat_rows(cache.rows // len(nodes.tokens)))
        count, own = output.logits.shape[1], draft.valid[0].numel()
        if count <= own:
            return output
        logits, queried = output.logits.split([own, count - own], 1)
        return replace(output, logits=logits.contiguous(), queried=queried)

    def score_nodes(self, state: AnyState, nodes: Nodes) -> TargetOutput:
        """Score nodes [R, n] of all rows in one forward pass."""
        cache: RaggedCache = state.cache
        is_apart = bool(self._changing) and cache.longest + nodes.deepest + 1 >= state.change
        if cache.recurrent and nodes.extent > state.most_nodes:
            check_draft(cache.rows, nodes.extent, self.node_bytes, self.device)
            state.most_nodes = nodes.extent
        cache.begin_score(nodes.slots, nodes.extent)
        inputs: Keywords = {"position_ids": self.next_positions(state, nodes)}
        if len(state.queries):
            inputs["inputs_embeds"] = self._embed_queries(state.queries, nodes.tokens)
        else:
            inputs["input_ids"] = nodes.tokens
        # the `forward` of these layers is replaced while a draft is scored, each time by new functions
        step = self._step if self.steps is None or cache.recurrent or is_apart else self.steps
        plain = self._plain and not isinstance(step, CompiledForward)  # dynamo traces no threads
        attention = attention_on_tree(self._decoder, plain, cache, nodes, state.additive)
        turning = turned(self._changing if step == self._step else (), one_by_one=is_apart)
        state.hidden.begin(nodes)
        with attention as mask, mixers_on_tree(self.model, cache, nodes), turning:
            inputs |= {"attention_mask": mask, **self.further_inputs(state, nodes)}
            logits = step(inputs, cache, state.hidden)
        return TargetOutput(logits, state.hidden.take())

    def _embed_queries(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """Embed tokens [R, n], those from V on with the queries of the state."""
        known = self.embed(tokens.clamp_max(self.vocabulary - 1))
        found = queries[(tokens - self.vocabulary).clamp_min(0)]
        return torch.where((tokens >= self.vocabulary)[..., None], found, known)

    def _reader(self, taps: Sequence[int]) -> HiddenStates:
        """Hooks that collect hidden states: new ones, or those that the model was compiled with."""
        if self.steps is None:
            return HiddenStates(self.model, taps)
        if tuple(taps) not in self._readers:
            self._readers[tuple(taps)] = HiddenStates(self.model, taps, stays=True)
        self._readers[tuple(taps)].begin()
        return self._readers[tuple(taps)]

    def next_positions(self, state: AnyState, nodes: Nodes) -> Tensor:
        """Position ids of scored nodes [R, n], or with several axes in front."""
        # the depth on the path, never the index in the array
        after: Tensor = state.cache.lengths + state.offset
        return after[:, None] + nodes.depth

    def further_inputs(self, state: AnyState, nodes: Nodes) -> Keywords:
        """Additional arguments of this kind of model for a scoring forward pass."""
        return {}

    def forward(
        self, inputs: Mapping[str, object], cache: RaggedCache, keep: int = 0, whole: bool = False
    ) -> Tensor:
        """Run the model, from token ids to logits.

        Args:
            inputs: the model's keyword arguments, with `input_ids` [B, n] and `position_ids`.
            cache: prepared by `begin_prefill`, `begin_reading` or `begin_score`.
            keep: 1 for the logits of the last token alone, 0 for all.
            whole: whether every layer processes every token, although only the last one's logits are
                returned.

        Returns:
            [B, n or 1, V].
        """
        # Gemma 4: with a number, layers without a cache process the last token alone; with indices, all
        # tokens
        which = torch.tensor([-1], device="cpu") if whole else keep
        if not self._takes_positions:
            inputs = {name: value for name, value in inputs.items() if name != "position_ids"}
        output = self.model(**{"logits_to_keep": which, **inputs}, **self.told(cache))
        logits: Tensor = output.logits[:, -keep:]
        return logits

    def told(self, cache: RaggedCache) -> Keywords:
        """Arguments of the model, or of its decoder, that pass the cache."""
        return {self._cache_name: cache, "use_cache": True}

    def _step(
        self, inputs: Mapping[str, object], cache: RaggedCache, taps: HiddenStates | None = None
    ) -> Tensor:
        """Run a scoring forward pass, in which the hooks of `taps` collect states."""
        if torch.compiler.is_compiling():
            return self.forward(inputs, cache)
        with fused(self._fused, inputs["attention_mask"]):
            return self.forward(inputs, cache)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed output tokens [B, n] of this target's vocabulary: the inputs of the first layer [B, n, d]."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        """Final normalised hidden states [B, n, d] -> logits [B, n, V], possibly without the grammar."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def output_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Copy the rows [n, d] of the output matrix, and of the biases [n], for tokens [n].

        None if they are not accessible: quantised, spread over devices, or not the language model's.
        """
        output = self.model.get_output_embeddings()
        if type(self).head is not CausalTarget.head or not is_plain_linear(output):
            return None
        index = tokens.to(output.weight.device)
        bias = None if output.bias is None else output.bias.detach()[index]
        return output.weight.detach()[index], bias

    def head_of(self, tokens: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return `head` restricted to tokens [n]: states [..., d] -> logits [..., n].

        Rows of the output matrix are gathered once, if they are accessible; otherwise all logits are
        computed. None returns `head` itself.
        """
        if tokens is None:
            return self.head
        rows = self.output_rows(tokens)
        if rows is None:
            return lambda hidden: self.head(hidden)[..., tokens]
        weight, bias = rows
        return functools.partial(Product(self.packing), weight=weight, bias=bias)

    def commit(self, state: AnyState, draft: AnyDraft, verdict: AnyVerdict, active: Tensor) -> None:
        """Commit the accepted nodes of the active rows; the next token has no keys yet.

        The keys of a fill stay in their slots.
        """
        if isinstance(verdict, Fill):
            return
        copies = state.cache.rows // len(active)
        counts = (verdict.decided * active).repeat(copies)
        state.cache.commit(None if draft.lanes.is_chain else verdict.nodes.repeat(copies, 1), counts)
        state.cache.longest += draft.reach

    def positions(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Position ids of a prompt [1, L] and the offset of the positions that follow it."""
        length = inputs["input_ids"].shape[1]
        return torch.arange(length, device=self.device)[None], 0


def to_device(inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move tensors to a device; other values (images encoded by `generate`) are unchanged."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def joined(states: Sequence[Tensor]) -> Tensor:
    """Hidden states [1, L, d] of consecutive parts of a prompt."""
    return states[0] if len(states) == 1 else torch.cat(tuple(states), 1)


def image_of(types: Tensor | None) -> Tensor | None:
    """Number of the image of each token, from token types [G, n]; -1 for text. None without types."""
    if types is None:
        return None
    is_image = types == 1
    starts = is_image & ~pad(is_image, (1, 0))[:, :-1]
    return torch.where(is_image, starts.cumsum(1), -1)
