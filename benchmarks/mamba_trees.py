"""Tokens a forward of trees against chains of as many nodes, and forwards in closed form, on a tiny Mamba-2.

The target has random weights. Its draft model, a Llama of one layer, learned from what the target sampled,
and agrees in part. All is sampled at temperature 1: with coupled noise, which must say what plain decoding
says, or with drafts of their own noise, judged by rejection. The seconds are of the CPU, not of the clock: of
a scoring forward in closed form (STree, 2505.14969), and by the mixers' own forwards node after node.

    python -m benchmarks.mamba_trees --prompts 8 --tokens 64
"""

from __future__ import annotations

import time
from itertools import pairwise, product
from typing import Annotated, Any

import rich
import torch
import typer
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from mmspec.accelerators.accelerator import Accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.evaluation.tables import figures
from mmspec.methods.draft_model.choice import draft_model
from mmspec.methods.none.drafter import none
from mmspec.targets import CausalTarget
from mmspec.targets.mixers import CLOSED_FORMS

VOCABULARY, LENGTH, SEQUENCES = 64, 64, 64
LONGEST_CHAIN = 24  # nothing is accepted behind so many
KINDS = (("coupled", "coupled"), ("sampled", "without_replacement"))  # of a chain, and of a tree's siblings
ENDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)


def random_target() -> Mamba2ForCausalLM:
    """A Mamba-2 of random weights, whose next token depends on many before it."""
    config = Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16,
        n_groups=1, **ENDS,
    )  # fmt: skip
    model = Mamba2ForCausalLM(config)
    for matrix in (each for each in model.parameters() if each.dim() > 1):
        torch.nn.init.normal_(matrix, std=(matrix.numel() / len(matrix)) ** -0.5)
    torch.nn.init.normal_(model.backbone.embeddings.weight)
    model.lm_head.weight.data *= 2.0
    return model.eval().requires_grad_(False)


def learned_draft(target: Mamba2ForCausalLM, sequences: Tensor, steps: int) -> LlamaForCausalLM:
    """A draft model that learned the target's distributions in its own output [M, L]."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, **ENDS,
    )  # fmt: skip
    draft = LlamaForCausalLM(config)
    p = target(sequences).logits.softmax(-1)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(len(sequences), (16,))
        q = draft(sequences[rows]).logits.log_softmax(-1)
        optimizer.zero_grad()
        kl_div(q, p[rows], reduction="batchmean").div(sequences.shape[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return draft.eval().requires_grad_(False)


def forward_seconds(target: CausalTarget, prompts: Tensor, nodes: int, repeats: int = 3) -> float:
    """CPU seconds of a forward that scores a draft of so many nodes, the least of several."""
    state, _ = target.prefill([{"input_ids": ids[None]} for ids in prompts], LENGTH)
    draft = Tree.chain(torch.randint(VOCABULARY, (len(prompts), nodes)), DraftKind.POINT)
    starts = []
    for _ in range(repeats + 1):
        starts.append(time.process_time())
        target.score(state, draft)
    return min(end - start for start, end in pairwise(starts))


def run(target: CausalTarget, accelerator: Accelerator, prompts: Tensor, tokens: int) -> Canvas:
    """Decode prompts [B, L] at temperature 1, with drafts of one length, whatever a forward costs."""
    requests = [Request({"input_ids": ids[None]}) for ids in prompts]
    random = RandomStream.from_seed(0, len(prompts))
    call = accelerator.with_length("fixed").call(target, Sampler(1.0), requests, Stopping(tokens), random)
    for _ in call.rounds():
        pass
    return call.canvas


@torch.no_grad()
def main(
    prompts: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 32,
    trees: Annotated[str, typer.Option(help="Children of every node of each level.")] = "4x2x1,8x4x1",
    steps: Annotated[int, typer.Option(min=0, help="Of the draft model's training.")] = 200,
) -> None:
    """Print a row for each tree: its tokens a forward, and those of the chain of as many nodes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = random_target()
    starts = torch.randint(VOCABULARY, (SEQUENCES + prompts, 4))
    told = dict(attention_mask=torch.ones_like(starts[prompts:]), do_sample=True, top_k=0)
    sequences: Any = model.generate(starts[prompts:], max_new_tokens=LENGTH, **told)
    with torch.enable_grad():
        draft = CausalTarget(learned_draft(model, sequences, steps))
    target, starts = CausalTarget(model), starts[:prompts]
    plain = run(target, none(), starts, tokens).ids
    rows = []
    for tree, kinds in product(trees.split(","), KINDS):
        wide = draft_model(draft, sampling=kinds[1], tree=tree)
        nodes = wide.drafter.num_draft_tokens
        chain, shaped = (
            run(target, one, starts, tokens)
            for one in (draft_model(draft, min(nodes, LONGEST_CHAIN), kinds[0]), wide)
        )
        lengths = chain.stats.acceptance_length, shaped.stats.acceptance_length
        same = sum(map(list.__eq__, shaped.ids, plain)) / prompts if kinds[1] == "coupled" else None
        closed = forward_seconds(target, starts, 1 + nodes)
        own = CLOSED_FORMS.pop("Mamba2Mixer")
        stepped = forward_seconds(target, starts, 1 + nodes)
        CLOSED_FORMS["Mamba2Mixer"] = own
        figure = *lengths, lengths[1] / lengths[0]
        times = (f"{1000 * each:.1f}" for each in (closed, stepped))
        told_same = "-" if same is None else f"{same:.0%}"
        rows.append((tree, kinds[0], str(nodes), *(f"{each:.2f}" for each in figure), told_same, *times))
    heads = ("nodes", "chain", "tree", "ratio", "identical", "closed\nCPU ms", "stepped\nCPU ms")
    rich.print(figures(("tree", "siblings", *heads), rows, words=2))


if __name__ == "__main__":
    typer.run(main)
