"""Hash of a model's state that cached keys depend on: weights, adapters, module options, user code."""

from __future__ import annotations

import functools
import logging
import marshal
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from mmspec.targets.hooks import hooks_of_users, names_of

__all__ = ["computation_of", "state_of"]

logger = logging.getLogger(__name__)

OPTIONS = frozenset({bool, int, float, complex, str, bytes})
PLAIN = OPTIONS | {type(None)}  # types that marshal writes directly
#: Attributes that are handled separately, or that transformers sets in a model's first forward pass.
PASSED_OVER = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_output_capturing_hooks_installed"}
RUN = 16


def state_of(model: nn.Module, apart: Sequence[nn.Module] = ()) -> int | None:
    """Hash the model's state that a prompt's keys depend on; None if it cannot be determined.

    The hash covers parameters and buffers (address and version counter), the tree of modules, and the
    modules' attributes: numbers and strings, and for classes outside PyTorch and transformers also tensors,
    lists, dicts and data classes. It therefore changes with training, loading and moving, and with adapters
    that are added, switched, scaled, merged or disabled.

    PyTorch does not count writes through `tensor.data`. To detect these, `RUN` elements in the middle of each
    tensor are hashed too: a write to a whole tensor, as by an EMA, is detected, but one to a few rows is not.
    Offloaded weights, the contents of tensor subclasses and of other objects, and patched classes are not
    detected either.

    The result is None while a user hook or a replaced `forward` is set (`hooks_of_users`), because its
    computation may depend on anything.

    Args:
        model: the model that processes prompts.
        apart: its modules whose tensors change in forward passes.
    """
    if hooks := hooks_of_users(model):
        warn_of_hooks(type(model).__name__, names_of(hooks))
        return None
    return ModelReading.of(model, apart).hash()


def computation_of(model: nn.Module, apart: Sequence[nn.Module] = ()) -> int:
    """Hash what a captured forward pass of a model fixes; takes about a millisecond, and reads no tensor.

    The hash covers what that of `state_of` does, except for the values of tensors, which a graph reads at
    their addresses, and in addition which user hooks and replaced `forward` methods are set.

    Args:
        model, apart: see `state_of`.
    """
    return ModelReading.of(model, apart).outline(hooks_of_users(model))


class ModelReading:
    """Collects the parts of a model's modules that its keys depend on.

    Attributes:
        plain: numbers, strings and type names, in the order of the traversal.
        tensors: parameters, buffers and other tensors.
        modules: each once.
        numbers: of the modules, by id; repeated modules are represented by their number.
        open: ids of the containers that are being added.
    """

    def __init__(self) -> None:
        self.plain: list[object] = []
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.numbers: dict[int, int] = {}
        self.open: set[int] = set()

    def add(self, value: object) -> None:
        """Add a module, an attribute, or a value inside an attribute."""
        kind = type(value)
        if kind in PLAIN:
            self.plain.append(value)
        elif isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, nn.Module) and id(value) in self.numbers:
            self.plain.append(self.numbers[id(value)])
        elif isinstance(value, nn.Module):
            self.numbers[id(value)] = len(self.numbers)
            self.plain.append(kind.__name__)
            self.modules.append(value)
        elif isinstance(value, dict):
            self.add_all(value, [*value, *value.values()])
        elif isinstance(value, list | tuple | set | frozenset):
            self.add_all(value, list(value))
        elif is_dataclass(value) and not isinstance(value, type | PreTrainedConfig):
            self.add_all(value, list(vars(value).values()))
        else:
            self.plain.append(kind.__name__)

    def add_all(self, container: object, values: list[object]) -> None:
        """Add a container with its values, except for a container that contains itself."""
        self.plain += type(container).__name__, len(values)
        if id(container) not in self.open:
            self.open.add(id(container))
            for value in values:
                self.add(value)
            self.open.discard(id(container))

    def add_parts(self, module: nn.Module) -> None:
        """Add a module's attributes, tensors and submodules."""
        own, home = vars(module), type(module).__module__
        if home.startswith("torch."):
            self.plain.append(module.training)
        else:
            # other attributes of transformers' modules are set by their forward passes
            is_of_transformers = home.startswith("transformers.")
            for name, value in list(own.items()):
                if name in PASSED_OVER:
                    continue
                if type(value) in OPTIONS:
                    self.plain.append(value)
                elif not is_of_transformers:
                    self.add(value)
        for part in (*own["_parameters"].values(), *own["_buffers"].values(), *own["_modules"].values()):
            self.add(part)

    @classmethod
    def of(cls, model: nn.Module, apart: Sequence[nn.Module]) -> ModelReading:
        """Collect the parts of a model; the arguments are those of `state_of`."""
        reading = cls()
        reading.add(model)
        for module in reading.modules:  # grows during the loop
            if not any(module is each for each in apart):
                reading.add_parts(module)
        return reading

    def outline(self, hooks: Iterable[int]) -> int:
        """Hash everything collected but the values of tensors, and the ids of hooks."""
        where = [tensor.data_ptr() for tensor in self.tensors if has_memory(tensor)]
        return hash(marshal.dumps((self.plain, where, [*hooks]), 2))

    @torch.inference_mode()
    def hash(self) -> int:
        """Hash everything collected; synchronises once per device."""
        where: list[object] = []
        runs: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in self.tensors:
            where.append(None if tensor.is_inference() else tensor._version)
            if has_memory(tensor):
                where.append(tensor.data_ptr())
                runs[tensor.device, tensor.dtype].append(middle_of(tensor))
        contents: dict[torch.device, list[Tensor]] = defaultdict(list)
        for (device, dtype), each in runs.items():
            where.append(str(dtype))
            contents[device].append(torch.cat(each).view(torch.uint8))
        samples = [torch.cat(each).cpu().numpy().tobytes() for each in contents.values()]
        # version 2 of the format has equal bytes for equal values
        return hash(marshal.dumps((self.plain, where, samples), 2))


def has_memory(tensor: Tensor) -> bool:
    """True if a tensor's memory can be read directly."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    return type(tensor) in (nn.Parameter, Tensor) or not is_traceable_wrapper_subclass(tensor)


def middle_of(tensor: Tensor) -> Tensor:
    """Up to `RUN` elements in the middle of a tensor [RUN]."""
    count = tensor.numel()
    if count > RUN and tensor.is_contiguous():
        return tensor.as_strided((RUN,), (1,), tensor.storage_offset() + (count - RUN) // 2)
    while tensor.dim() > 1 and len(tensor):
        tensor = tensor[len(tensor) // 2]
    return tensor.reshape(-1)[:RUN]


@functools.cache
def warn_of_hooks(model: str, hooks: str) -> None:
    """Log once for each set of hooks that the prefix cache is off."""
    logger.warning(
        "the prefix cache is off: %s has hooks (%s), whose computation may change; remove them to reuse "
        "prefixes",
        model,
        hooks,
    )
