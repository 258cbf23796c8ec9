"""A smaller mixture of experts as the draft model of a larger one (UNCURL, 2409.01483).

In each layer, experts whose router logits correlate on the given prompts form a cluster. The members' hidden
units are matched with those of the most used expert, and weights are averaged by use, those of the router
too. Attention, embeddings and shared experts are the target's own. Nothing is trained.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from mmspec.errors import InputError, UnsupportedModelError
from mmspec.open_types import Keywords

COUNTS = ("num_local_experts", "num_experts")  # their names in configs


def expert_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Modules by name that have a router `gate` and stacked `experts`.

    Raises:
        UnsupportedModelError: there is none.
    """
    found: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if hasattr(getattr(module, "experts", None), "gate_up_proj")
        and isinstance(getattr(getattr(module, "gate", None), "weight", None), nn.Parameter)
    }
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts in the layout of Mixtral and Qwen-MoE in transformers"
        )
    return found


def router_logits(pipe: Any, calls: Sequence[Keywords]) -> dict[str, Tensor]:
    """Router logits [tokens, E] of each layer, in the plain decoding of some calls."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    handles = [
        layer.gate.register_forward_hook(lambda gate, args, output, name=name: seen[name].append(output[0]))
        for name, layer in expert_layers(pipe.model).items()
    ]
    try:
        for call in calls:
            pipe(**call)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(each).float() for name, each in seen.items()}


def cluster(logits: Tensor, count: int) -> list[list[int]]:
    """Group the columns of router logits [tokens, E] by correlation, with average linkage."""
    closeness = torch.corrcoef(logits.T).nan_to_num()
    groups = [[expert] for expert in range(logits.shape[1])]
    while len(groups) > count:
        pairs = [(one, other) for one in range(len(groups)) for other in range(one)]
        one, other = max(pairs, key=lambda pair: float(closeness[groups[pair[0]]][:, groups[pair[1]]].mean()))
        groups[other] += groups.pop(one)
    return groups


def matching(one: Tensor, other: Tensor) -> Tensor:
    """For each hidden unit of an expert, the unit of another that matches it, greedily by cosine.

    Args:
        one, other: [f, n] all weights of each of f units.
    """
    closeness = normalize(one, dim=-1) @ normalize(other, dim=-1).T
    order = torch.empty(len(one), dtype=torch.long, device=one.device)
    for _ in range(len(one)):
        row, column = divmod(int(closeness.argmax()), len(one))
        order[row] = column
        closeness[row], closeness[:, column] = -torch.inf, -torch.inf
    return order


def units(gate_up: Tensor, down: Tensor) -> Tensor:
    """Weights [f, 3d] of the hidden units of an expert: gate, up and down projection."""
    return torch.cat([*gate_up.chunk(2), down.T], 1)


@torch.no_grad()
def merged(layer: Any, groups: Sequence[Sequence[int]], use: Tensor) -> dict[str, Tensor]:
    """Weights of a layer whose experts are merged by group.

    Args:
        layer: of `expert_layers`.
        groups: indices of experts.
        use: [E] frequency of each expert.
    """
    experts, made = layer.experts, defaultdict(list)
    for group in groups:
        weight = use[group] / use[group].sum()
        anchor = group[int(weight.argmax())]
        target = units(experts.gate_up_proj[anchor], experts.down_proj[anchor])
        total = torch.zeros_like(target)
        for expert, share in zip(group, weight, strict=True):
            own = units(experts.gate_up_proj[expert], experts.down_proj[expert])
            total += share * own[matching(target, own)]
        gate, up, down = total.chunk(3, 1)
        made["experts.gate_up_proj"].append(torch.cat([gate, up]))
        made["experts.down_proj"].append(down.T)
        made["gate.weight"].append((weight[:, None] * layer.gate.weight[group]).sum(0))
    return {name: torch.stack(each).to(layer.gate.weight.dtype) for name, each in made.items()}


def merge_experts(pipe: Any, calls: Sequence[Keywords], count: int) -> PreTrainedModel:
    """Return a copy of a pipeline's model with fewer experts, which drafts for it as `draft_model`.

    Args:
        pipe: a pipeline with the accelerator "none".
        calls: keywords of calls, from whose router logits experts are grouped.
        count: number of experts of each layer.

    Raises:
        InputError: the count is not below the model's, or below the experts that a token uses.
    """
    model, layers = pipe.model, expert_layers(pipe.model)
    text = model.config.get_text_config(decoder=True)
    key = next(name for name in COUNTS if hasattr(text, name))
    least, most = text.num_experts_per_tok, getattr(text, key) - 1
    if not least <= count <= most:
        raise InputError("experts", count, f"must be between {least} and {most}")
    weights = dict(model.state_dict())
    for name, logits in router_logits(pipe, calls).items():
        chosen = logits.topk(least).indices.flatten()
        use = torch.bincount(chosen, minlength=logits.shape[1]).float() + 1e-3  # an unused expert has a share
        for part, tensor in merged(layers[name], cluster(logits, count), use).items():
            weights[f"{name}.{part}"] = tensor
    config = copy.deepcopy(model.config)
    setattr(config.get_text_config(decoder=True), key, count)
    smaller: PreTrainedModel = type(model)(config).to(model.device, model.dtype).eval()
    smaller.load_state_dict(weights)
    return smaller
