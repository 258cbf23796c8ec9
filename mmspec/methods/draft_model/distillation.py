"""Distillation of a draft model: a divergence of its distributions from the target's, on replies of either.

DistillSpec (Zhou et al., 2310.08461): a drafted token is accepted with probability 1 - TVD(p, q), for the
target's distribution p and the draft model's q, so that training lowers a divergence of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.heads.frequent_output import draft_tokens_of
from mmspec.heads.model import HIDDEN
from mmspec.models.weights import is_plain_linear
from mmspec.open_types import Keywords
from mmspec.registry import did_you_mean
from mmspec.targets import CausalTarget, adapt
from mmspec.training.data.audio import AudioRows
from mmspec.training.data.conversations import ConversationRows
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, decode
from mmspec.training.data.states import StoredStates
from mmspec.training.losses.base import read
from mmspec.training.losses.goals import PIECE
from mmspec.validation import is_integer, require_number

__all__ = [
    "DIVERGENCES",
    "HARD_LABELS",
    "Distillation",
    "DraftModelLoss",
    "forward_kl",
    "jsd",
    "reverse_kl",
    "tvd",
]

MOST_PARALLEL = 64
EXCLUDED = -1e4  # in place of -inf, which has no gradient
OWN = 13  # separates the random numbers of own replies from those of the data


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities [.., V], in nats [..]; minimising it makes q cover all of p."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) of log-probabilities [.., V], in nats [..]; minimising it keeps q where p is likely."""
    return forward_kl(log_q, log_p)


def jsd(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """Weighted Jensen-Shannon divergence: b KL(p || m) + (1 - b) KL(q || m), with m = b p + (1 - b) q."""
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def tvd(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation of log-probabilities [.., V]: half the sum of |p - q|, the share of rejected drafts."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


DIVERGENCES = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd, "tvd": tvd}
HARD_LABELS = "hard_labels"


@dataclass(frozen=True)
class Distillation:
    """Settings of a distillation.

    Args:
        divergence: a name in `DIVERGENCES`; or "hard_labels", the cross entropy of the data's tokens, which
            needs no target.
        beta: of "jsd", weight of the target's part.
        own_share: share of the steps whose replies the draft model generates, with its weights of that step;
            the other steps train on replies of the data.
        new_tokens: longest generated reply.
        parallel: number of tokens that one forward pass drafts (PARD, 2504.18583): behind a drawn place of
            each reply, the draft model reads masks in place of tokens. 1 for an ordinary draft model.

    Raises:
        InputError: a value is out of range.
    """

    divergence: str = "forward_kl"
    beta: float = 0.5
    own_share: float = 0.5
    new_tokens: int = 64
    parallel: int = 1

    def __post_init__(self) -> None:
        if self.divergence not in (known := [*DIVERGENCES, HARD_LABELS]):
            raise InputError("divergence", self.divergence, did_you_mean(self.divergence, known))
        require_number("beta", self.beta, 1e-3, 0.999, "must be between 0.001 and 0.999")
        require_number(
            "own_share", self.own_share, 0.0, 1.0, "must be between 0 (replies of the data alone) and 1"
        )
        if not is_integer(self.new_tokens) or self.new_tokens < 1:
            raise InputError("new_tokens", self.new_tokens, "must be a positive integer")
        if not is_integer(self.parallel) or not 1 <= self.parallel <= MOST_PARALLEL:
            raise InputError("parallel", self.parallel, f"must be an integer from 1 to {MOST_PARALLEL}")
        if self.divergence == HARD_LABELS and self.own_share:
            rule = "must be 0 with hard_labels: a model cannot learn from its own tokens as labels"
            raise InputError("own_share", self.own_share, rule)

    @property
    def formula(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The divergence as a function of log p and log q; there is none for hard labels."""
        if self.divergence == "jsd":
            return lambda log_p, log_q: jsd(log_p, log_q, self.beta)
        return DIVERGENCES[self.divergence]


class DraftModelLoss(nn.Module):
    """Divergence of a draft model's distributions from its target's, at the tokens of replies.

    `forward` takes a `DrafterBatch` and returns the mean over sequences of the mean over their reply tokens,
    and the figure "accepted": 1 - TVD, the mean over all tokens. For a model that drafts some tokens alone
    (`restrict_output`) both refer to the distributions conditional on these, and other tokens are not used as
    hard labels. Hard labels have no figure.

    Args:
        model: the draft model, which is trained; it reads the same inputs as the target.
        target: frozen.
        how: see `Distillation`.
        seed: of generated replies.

    Attributes:
        stored: hidden states of the target on these sequences; None runs the target along.
    """

    def __init__(
        self, model: PreTrainedModel, target: CausalTarget, how: Distillation | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.reader, self.target = adapt(model), target  # no modules: the target is not trained or saved
        self.how, self.seed = how or Distillation(), seed
        self.stored: StoredStates | None = None

    def make(self, data: ConversationRows | AudioRows, step: int, process: int) -> DrafterBatch:
        """Return the batch of a step for one training process: rows of the data, or replies to them."""
        rng = np.random.default_rng([self.seed, OWN, step, process])
        if isinstance(data, AudioRows) or rng.random() >= self.how.own_share:
            return data.batch(step, process)
        trial = data.prompts(step, process, self.how.new_tokens)
        prompts = [self.told(request.inputs) for request in trial.requests]
        requests = [
            replace(request, inputs=inputs) for request, inputs in zip(trial.requests, prompts, strict=True)
        ]
        trial = replace(trial, requests=requests, sampler=Sampler(temperature=1.0))
        replies = decode(self.reader, NoDrafter(), trial, int(rng.integers(2**62))).outputs()
        examples = (
            continued(request.inputs, reply) for request, reply in zip(trial.requests, replies, strict=True)
        )
        return DrafterBatch(tuple(examples), 0)

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss on a batch, and its figures."""
        values, row, figures = (self.hard if self.how.divergence == HARD_LABELS else self.soft)(batch)
        share = 1 / torch.bincount(row, minlength=len(batch.examples)).clamp_min(1)
        return (values * share[row]).sum() / len(batch.examples), figures

    def soft(self, batch: DrafterBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return divergences at reply tokens [n], their rows of the batch [n], and figures."""
        reading = read(self.target, batch.examples, (HIDDEN,), self.stored)
        seen, ends = self.hide(batch)
        row, before = reading.learnt[:, 1:].nonzero(as_tuple=True)  # the places that predict learnt tokens
        row, before = row[inside := before < ends[row]], before[inside]
        with torch.no_grad():
            logits = self.target.head_of(draft_tokens_of(self.model))(reading.taps[HIDDEN][row, before])
        values, accepted = compare(logits, self.logits(seen, row, before), self.how.formula)
        return values, row, {"accepted": accepted.mean()}

    def hard(self, batch: DrafterBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the nats of the reply tokens that the model can draft, their rows, and no figures."""
        ids = pad_sequence([each.inputs["input_ids"][0] for each in batch.examples], batch_first=True)[:, 1:]
        learnt = pad_sequence([each.learnt for each in batch.examples], batch_first=True)[:, 1:]
        output = self.model.get_output_embeddings()
        tokens = draft_tokens_of(self.model)
        tokens = (torch.arange(output.out_features) if tokens is None else tokens).to(ids.device)
        seen, ends = self.hide(batch)
        row, before = (learnt & torch.isin(ids, tokens)).nonzero(as_tuple=True)
        row, before = row[inside := before < ends[row]], before[inside]
        labels = torch.searchsorted(tokens, ids[row, before])
        return F.cross_entropy(self.logits(seen, row, before).float(), labels, reduction="none"), row, {}

    def hide(self, batch: DrafterBatch) -> tuple[DrafterBatch, Tensor]:
        """Return a batch as the draft model reads it, and the lengths [B] of its sequences.

        A parallel draft model reads `parallel` - 1 masks behind the token before a drawn learnt token, and no
        more. The masks predict the tokens after them, as the tokens in their places would.
        """
        generator, examples, ends = torch.Generator().manual_seed(batch.seed), [], []
        for example in batch.examples:
            ids, learnt = example.inputs["input_ids"], example.learnt.nonzero()[:, 0]
            end = ids.shape[1]
            if self.how.parallel > 1 and len(learnt):
                drawn = int(torch.randint(len(learnt), (), generator=generator, device="cpu"))
                known = max(1, int(learnt[drawn]))
                end = min(end, known + self.how.parallel - 1)
                inputs = {**example.inputs, "input_ids": ids[:, :end].clone()}
                inputs["input_ids"][:, known:] = int(self.model.config.pard_token)
                if (kinds := inputs.get("mm_token_type_ids")) is not None:
                    inputs["mm_token_type_ids"] = kinds[:, :end]
                inputs.pop("attention_mask", None)
                example = replace(example, inputs=inputs, only=example.learnt[:end])
            examples.append(example)
            ends.append(end)
        return replace(batch, examples=tuple(examples)), torch.tensor(ends, device=ids.device)

    def logits(self, batch: DrafterBatch, row: Tensor, before: Tensor) -> Tensor:
        """[n, V'] logits of the draft model at places of a batch, over the tokens that it drafts."""
        states = self.reader.read([self.told(each.inputs) for each in batch.examples], (HIDDEN,))[HIDDEN]
        tokens, output = draft_tokens_of(self.model), self.model.get_output_embeddings()
        if tokens is None or not is_plain_linear(output):
            drafted = self.reader.head(states[row, before])
            return drafted if tokens is None else drafted[:, tokens.to(drafted.device)]
        few = tokens.to(states.device)
        return F.linear(
            states[row, before], output.weight[few], None if output.bias is None else output.bias[few]
        )

    def told(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of a sequence in the precision of the draft model."""
        return {
            name: value.to(self.model.dtype) if value.is_floating_point() else value
            for name, value in inputs.items()
        }


def compare(
    target: Tensor, draft: Tensor, formula: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Compare the distributions of two models, in pieces of rows of which only the logits stay in memory.

    Args:
        target: [N, V] logits; they get no gradient.
        draft: [N, V'] logits; tokens that one of the two lacks are left out.
        formula: of log p and log q.

    Returns:
        [N] values of the formula; [N] shares of drafted tokens that are accepted.
    """
    size = min(target.shape[-1], draft.shape[-1])

    def measure(said: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        log_p, log_q = (
            each[:, :size].float().clamp_min(EXCLUDED).log_softmax(-1) for each in (said, drafted)
        )
        with torch.no_grad():
            accepted = 1 - tvd(log_p, log_q)
        return formula(log_p, log_q), accepted

    count = max(1, PIECE // size)
    how: Keywords = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [
        checkpoint(measure, *rows, **how)
        for rows in zip(target.split(count), draft.split(count), strict=True)
    ]
    values, shares = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(shares)


def continued(inputs: Mapping[str, Tensor], reply: list[int]) -> TrainingExample:
    """Return a prompt's inputs and a reply as a sequence of which the reply is learnt."""
    ids = inputs["input_ids"]
    whole = {**inputs, "input_ids": torch.cat([ids, ids.new_tensor([reply])], 1)}
    if (kinds := whole.get("mm_token_type_ids")) is not None:
        whole["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(1, len(reply))], 1)
    return TrainingExample(whole, ids.shape[1])
