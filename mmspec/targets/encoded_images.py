"""Cache of encoded images: outputs of the vision encoder by a digest of the pixels.

A prompt whose prefix is not cached, such as another question in front of the same image, then runs the vision
encoder for new images alone. Encoded images are passed to the model as `mm_encoder_outputs`, an argument of
transformers' vision-language models. Models without it encode their images in every prefill.

A thread that prepares a request can encode its images while another one decodes rounds. On a GPU it has a
stream of its own, and a prefill that uses the results waits for them on its stream.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from mmspec.open_types import Keywords
from mmspec.targets.admission import takes
from mmspec.targets.media_items import IMAGE, MediaItem

__all__ = ["ImageCache"]

ARGUMENT = "mm_encoder_outputs"
#: Fields of an encoder's output that models read, and those that they do not.
Key = tuple[int, bytes]  # hash of the model's state, and digest of the image
READ = ("pooler_output", "deepstack_features")
NOT_READ = {"last_hidden_state", "hidden_states", "attentions"}


class Encoded(NamedTuple):
    """An encoded image.

    Attributes:
        output: of the vision encoder.
        is_done: recorded after it on its stream; None on a CPU.
    """

    output: ModelOutput
    is_done: torch.cuda.Event | None

    def awaited(self) -> ModelOutput:
        """The output, for which the current stream waits."""
        if self.is_done is not None:
            tensors = list(tensors_in(tuple(self.output.values())))
            stream = torch.cuda.current_stream(tensors[0].device)
            stream.wait_event(self.is_done)
            for each in tensors:
                each.record_stream(stream)  # its memory is not used again before that stream has read it
        return self.output


class ImageCache:
    """Encoded images within a memory limit; the least recently used are dropped first. For several threads.

    Args:
        max_bytes: the limit.

    Attributes:
        queries: number of images that prefills needed.
        hits: number of those that were cached.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.queries = self.hits = 0
        self._outputs: OrderedDict[Key, Encoded] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._ahead: set[Key] = set()  # encoded for prefills that have not begun
        self._lock, self._encoder = threading.Lock(), threading.Lock()
        self._side: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Number of images."""
        return len(self._outputs)

    def nbytes(self) -> int:
        """Size in bytes."""
        return self._bytes

    def with_encoded(
        self,
        model: PreTrainedModel,
        arguments: Keywords,
        images: Sequence[tuple[MediaItem, Mapping[str, Any]]],
        state: int,
    ) -> Keywords:
        """Replace the pixels in a model's arguments by encoded images, of which only new ones are encoded.

        Args:
            model: a vision-language model.
            arguments: of its next forward pass.
            images: of that pass, each with the arguments of its whole prompt, to whose rows it refers.
            state: hash of the model's state.

        Returns:
            The arguments, unchanged if the model does not accept encoded images.
        """
        items = [item for item, _ in images]
        if not items or not accepts_encoded(model, items):
            return arguments
        outputs = [self._encode(model, item, whole, state) for item, whole in images]
        if any(output is None for output in outputs):
            return arguments
        pixels = {name for item in items for name in item.rows}
        rest = {name: value for name, value in arguments.items() if name not in pixels}
        return {**rest, ARGUMENT: {IMAGE: joined([output for output in outputs if output is not None])}}

    def _encode(
        self, model: Any, item: MediaItem, whole: Mapping[str, Tensor], state: int
    ) -> ModelOutput | None:
        """Return the encoded image; None if the encoder's output has fields that are not known."""
        key = state, item.digest
        self.queries += 1
        known = self._find(key)
        if known is None:
            return self._run(model, item, whole, key)
        self.hits += key not in self._ahead
        self._ahead.discard(key)
        return known

    def encode_ahead(
        self,
        model: PreTrainedModel,
        images: Sequence[tuple[MediaItem, Mapping[str, Any]]],
        state: int,
    ) -> None:
        """Encode those images of a later prefill that are not held; the arguments are those above."""
        if not accepts_encoded(model, [item for item, _ in images]):
            return
        for item, whole in images:
            if self._find(key := (state, item.digest)) is None:
                self._ahead.add(key)
                self._run(model, item, whole, key)

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Run the work of this thread on a stream of its own, on a GPU."""
        if device.type != "cuda":
            yield
            return
        self._side = self._side or torch.cuda.Stream(device)
        with torch.cuda.stream(self._side):
            yield

    def _find(self, key: Key) -> ModelOutput | None:
        with self._lock:
            known = self._outputs.get(key)
            if known is None:
                return None
            self._outputs.move_to_end(key)
        return known.awaited()

    def _run(self, model: Any, item: MediaItem, whole: Mapping[str, Tensor], key: Key) -> ModelOutput | None:
        """Encode an image, unless another thread does."""
        with self._encoder:
            if (known := self._find(key)) is not None:
                return known
            output = model.model.get_image_features(**item.part(whole), return_dict=True)
            if {name for name, value in output.items() if value is not None} - {*READ, *NOT_READ}:
                return None
            kept: ModelOutput = type(output)(
                **{name: output[name] for name in READ if output.get(name) is not None}
            )
            self._keep(key, kept)
            return kept

    def _keep(self, key: Key, output: ModelOutput) -> None:
        size = nbytes_of(tuple(output.values()))
        if size > self.max_bytes:
            return
        device, is_done = next(tensors_in(tuple(output.values()))).device, None
        if device.type == "cuda":
            is_done = torch.cuda.Event()
            is_done.record(torch.cuda.current_stream(device))
        with self._lock:
            self._outputs[key] = Encoded(output, is_done)
            self._bytes += size
            while self._bytes > self.max_bytes:
                dropped, oldest = self._outputs.popitem(last=False)
                self._ahead.discard(dropped)
                self._bytes -= nbytes_of(tuple(oldest.output.values()))


def accepts_encoded(model: PreTrainedModel, items: Sequence[MediaItem]) -> bool:
    """Whether a model accepts encoded images, and can encode these items one by one."""
    encode = getattr(getattr(model, "model", None), "get_image_features", None)
    if encode is None or not takes(model, ARGUMENT) or any(item.kind != IMAGE for item in items):
        return False
    accepted = inspect.signature(encode).parameters
    return all(name in accepted for item in items for name in item.rows)


def joined(outputs: Sequence[ModelOutput]) -> ModelOutput:
    """Join the encoded images of a prompt in their order."""
    first = outputs[0]
    if len(outputs) == 1:
        return type(first)(**first)  # models may write into it
    fields: Keywords = {"pooler_output": concat([output["pooler_output"] for output in outputs])}
    if "deepstack_features" in first:  # one per layer
        layers = zip(*(output["deepstack_features"] for output in outputs), strict=True)
        fields["deepstack_features"] = [concat(layer) for layer in layers]
    return type(first)(**fields)


def concat(images: Sequence[Any]) -> Any:
    """Concatenate features: tensors [n, ...], or lists with one tensor for each image."""
    if isinstance(images[0], Tensor):
        return torch.cat(tuple(images))
    return list(chain.from_iterable(images))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        yield from chain.from_iterable(map(tensors_in, value))


def nbytes_of(value: Any) -> int:
    """Size of all tensors in nested lists."""
    return sum(each.nbytes for each in tensors_in(value))
