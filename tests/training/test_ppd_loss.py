"""The loss of PPD's prompt tokens, compared with slow drafting."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from mmspec.heads.model import EMBEDDINGS, HIDDEN
from mmspec.methods.ppd.loss import PromptTokensLoss
from tests.methods.flash_checks import target_of
from tests.methods.test_ppd import drafter_for
from tests.training.own_answers import own_answers


def test_the_loss_is_that_of_each_cut_read_alone() -> None:
    """Prompt tokens after each token before an answer token, in separate sequences."""
    target = target_of("llava", torch.float64)
    head = drafter_for(target).model.requires_grad_(True)
    loss, figures = PromptTokensLoss(head, target, cuts=100, discount=0.7)(own_answers())
    nats, weight, hits = torch.zeros(()), 0.0, list[torch.Tensor]()
    for example in own_answers().examples:
        read = target.read([example.inputs], (EMBEDDINGS, HIDDEN))
        said = target.head(read[HIDDEN])[0].softmax(-1)
        length = len(said)
        for root in range(example.answer - 1, length - 1):
            embeddings = torch.cat([read[EMBEDDINGS][:, :root], head.embeddings[None]], 1)
            hidden = target.model.get_decoder()(inputs_embeds=embeddings).last_hidden_state
            logits, count = target.head(hidden)[0, root:], min(3, length - 1 - root)
            each = -(said[root : root + count] * logits[:count].log_softmax(-1)).sum(-1)
            discount = 0.7 ** torch.arange(count)
            nats, weight = nats + (discount * each).sum(), weight + float(discount.sum())
            right = logits[:count].argmax(-1) == said[root : root + count].argmax(-1)
            hits.append(right.double())
    torch.testing.assert_close(loss.double(), nats / weight, rtol=1e-5, atol=0)
    shares = pad_sequence(hits, batch_first=True, padding_value=torch.nan).nanmean(0)
    assert torch.allclose(figures["agreement"].double(), shares, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, [head.embeddings])
    (due,) = torch.autograd.grad(nats / weight, [head.embeddings])
    torch.testing.assert_close(gradient, due, rtol=1e-4, atol=1e-6)
