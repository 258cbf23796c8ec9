"""Random weights that behave like a trained model's: varied arg-max, no ties, the same on every version.

The initial weights of a transformers model (standard deviation 0.02) give nearly flat logits and one token
forever, so that identity tests find nothing. `randomise` draws every matrix at 1 / sqrt(fan-in) and the head
larger. Each parameter has its own generator, seeded by its name, so that neither the order of construction
nor the version of transformers changes a model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel


def _noise(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Standard normal noise in float64 of the shape of `like`, keyed by name and seed."""
    stable = name.replace("vision_model.", "")  # 5.17 has one module level more in a CLIP tower
    generator = torch.Generator().manual_seed(zlib.crc32(stable.encode()) ^ seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


@torch.no_grad()
def randomise(
    model: PreTrainedModel, seed: int, logit_scale: float = 3.0, silent_ids: Iterable[int] = ()
) -> PreTrainedModel:
    """Redraw all weights of a model in place, and put it in evaluation mode without gradients.

    Args:
        model: the model; its vectors (norms, biases) become their constant initial value plus a little noise.
        seed: changes all weights.
        logit_scale: about the standard deviation of the logits over the vocabulary.
        silent_ids: tokens whose logit is exactly 0, so that they are never the arg-max. With the end token
            and the placeholders among them a greedy output has any length, and words alone.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = _noise(name, parameter, seed)
        if id(parameter) in embeddings:
            parameter.copy_(noise)
        elif parameter.dim() < 2:
            first = parameter.flatten()[0]
            constant = bool((parameter == first).all())  # ones of a norm, zeros of a bias
            parameter.copy_(0.1 * noise + (first if constant else 0.0))
        else:
            parameter.copy_(noise / math.sqrt(parameter.numel() / parameter.shape[0]))
    head = model.get_output_embeddings()
    head.weight.mul_(logit_scale)
    head.weight[list(silent_ids)] = 0.0
    return model.eval().requires_grad_(False)


@torch.no_grad()
def let_states_last(model: PreTrainedModel) -> PreTrainedModel:
    """Slow the decay of recurrent states: random ones fade within two tokens, and errors with them."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            rates = torch.linspace(0.003, 0.3, len(parameter)).log()
            parameter.copy_(rates.view(-1, *[1] * (parameter.dim() - 1)))
    return model


@torch.no_grad()
def scale_head_to_entropy(model: PreTrainedModel, nats: float) -> PreTrainedModel:
    """Scale the head so that the next-token distribution has this entropy on average over random contexts."""
    vocabulary = model.config.vocab_size
    context = torch.randint(vocabulary, (64, 12), generator=torch.Generator().manual_seed(0))
    logits = model(context).logits.double().flatten(0, 1)
    low, high = 1e-3, 1e3
    for _ in range(60):
        scale = math.sqrt(low * high)
        entropy = torch.distributions.Categorical(logits=scale * logits).entropy().mean().item()
        low, high = (scale, high) if entropy > nats else (low, scale)
    model.get_output_embeddings().weight.mul_(scale)
    return model
