"""Measure `assd`, which fills several gaps of a text at a time, on an XLNet trained on scene descriptions.

    python -m extras.benchmarks.gaps                             # eight minutes of training, then the table
    python -m extras.benchmarks.gaps --minutes 60 --out my-gaps  # keeps the model
    python -m extras.benchmarks.gaps --model my-gaps             # the table alone

The model learns the density of the gaps from left to right, given the known text around them, as AS-ARM does
(2504.20456, section 4); 85 to 99 % of the places are gaps. It sees no image, so that a gap may have several
likely tokens. Its text is that of a toy world.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, XLNetConfig, XLNetLMHeadModel

from mmspec.evaluation.machine import environment
from mmspec.evaluation.speed.record import ratio_interval
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import describe, sample_scene, training_seeds
from mmspec.training.run import flush_subnormals

WORDS = Path(__file__).parents[2] / "assets" / "scenes-diffusion"  # its tokenizer has a mask token
STAGE = 15  # of the seeds of the scenes
LENGTH = 96  # of a text
SHARES = (0.85, 0.99)
HELD_OUT = 20_000  # seed of the first held-out scene
RATE = 1e-3
LENGTHS = (1, 2, 3, 5, 8)


def windows(tokenizer: Any, seeds: Any) -> Tensor:
    """Return tokens [B, LENGTH] from the middle of scene descriptions; the seed selects the place."""
    rows = []
    for seed in map(int, seeds):
        ids = tokenizer(describe(sample_scene(seed)), add_special_tokens=False).input_ids
        begin = seed % max(1, len(ids) - LENGTH)
        rows.append(ids[begin : begin + LENGTH])
    return torch.tensor([row for row in rows if len(row) == LENGTH])


def hide(tokens: Tensor, share: Tensor, noise: torch.Generator) -> Tensor:
    """Return [B, L] whether each place is a gap: a share [B] of each row, at least one place."""
    rank = torch.rand(tokens.shape, generator=noise).argsort(-1).argsort(-1)
    return rank < (share * tokens.shape[1]).long().clamp_min(1)[:, None]


def loss_of(model: PreTrainedModel, tokens: Tensor, gaps: Tensor, mask: int) -> Tensor:
    """Return the nats per gap, given the known text and the gaps left of it; `mask` is never predicted."""
    place = torch.arange(tokens.shape[1])
    sees = ~gaps[:, None] | (gaps[:, :, None] & (place < place[:, None]))  # [B, L, L]
    mapping = torch.eye(len(place)).expand(len(tokens), -1, -1)
    logits = model(tokens, perm_mask=(~sees).float(), target_mapping=mapping, use_mems=False).logits
    predicted = logits[gaps].float().index_fill(1, torch.tensor(mask), -torch.inf)
    return F.cross_entropy(predicted, tokens[gaps])


@flush_subnormals()
def train(tokenizer: Any, minutes: float, layers: int, width: int, batch: int = 16) -> PreTrainedModel:
    """Train an XLNet on descriptions of scenes that the table does not use."""
    torch.manual_seed(0)
    config = XLNetConfig(
        vocab_size=len(tokenizer),
        d_model=width,
        n_layer=layers,
        n_head=width // 32,
        d_inner=4 * width,
        dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id,
    )
    model = XLNetLMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    noise, started, seconds, step = torch.Generator().manual_seed(0), time.monotonic(), 60 * minutes, 0
    with tqdm(total=round(seconds), unit="s", desc="training") as progress:
        while (spent := time.monotonic() - started) < seconds:
            warm = min(1.0, (step + 1) / 100)
            for group in optimizer.param_groups:
                group["lr"] = RATE * warm * (0.5 + 0.5 * math.cos(math.pi * spent / seconds))
            tokens = windows(tokenizer, training_seeds(0, STAGE, step, 0, batch))
            share = torch.empty(len(tokens)).uniform_(*SHARES, generator=noise)
            loss = loss_of(model, tokens, hide(tokens, share, noise), tokenizer.mask_token_id)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            progress.set_postfix(nats=f"{loss.item():.3f}", step=step)
            progress.update(round(spent) - progress.n)
    return model.eval()


def fill(pipe: Any, prompts: list[str], temperature: float) -> tuple[list[list[int]], list[int]]:
    """Fill the gaps of prompts one by one; return the tokens, and the forward passes of both kinds."""
    tokens, forwards = list[list[int]](), list[int]()
    for seed, prompt in enumerate(prompts):
        said = pipe(
            prompt, apply_chat_template=False, max_new_tokens=LENGTH, temperature=temperature, seed=seed
        )
        tokens += said.tokens
        forwards.append(said.stats.nfe[0] + said.stats.draft_passes)
    return tokens, forwards


def main(
    model: Annotated[Path | None, typer.Option(help="Trained folder; trains one if None.")] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="Duration of the training.")] = 8.0,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    width: Annotated[int, typer.Option(min=32, help="Width of the states, a multiple of 32.")] = 192,
    texts: Annotated[int, typer.Option(min=1, help="Held-out texts to fill.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Folder for the trained model.")] = None,
) -> None:
    """Print tokens per forward pass of `assd`, and of plain decoding with one gap per forward pass."""
    console = Console()
    with tempfile.TemporaryDirectory() as made:
        folder = model or out or Path(made)
        if model is None:
            tokenizer = AutoTokenizer.from_pretrained(WORDS)
            tokenizer.mask_token = "<mask>"
            train(tokenizer, minutes, layers, width).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        console.print(table(folder, texts))
    machine = environment(torch.device("cpu"), torch.float32)
    console.print(
        f"{texts} held-out texts of {LENGTH} tokens; {machine['device_name']}, torch {machine['torch']}"
    )


def table(folder: Path, texts: int) -> Table:
    """Return a table of accelerators; drafting forward passes count, and so does the first one of a text."""
    pipe: Any = MMSpecPipeline.from_pretrained(folder)
    tokenizer, noise = pipe.tokenizer, torch.Generator().manual_seed(0)
    tokens = windows(tokenizer, range(HELD_OUT, HELD_OUT + texts))
    made = Table("gaps", "temperature", "accelerator", "identical", "tokens per forward pass, all (95 %)")
    for share in (0.5, 0.95):
        gaps = hide(tokens, torch.full((len(tokens),), share), noise)
        prompts = [tokenizer.decode(row) for row in tokens.masked_fill(gaps, tokenizer.mask_token_id)]
        for temperature in (0.0, 1.0):
            plain: list[list[int]] = []
            for count in (0, *LENGTHS):
                options = {"num_draft_tokens": count, "sampling": "coupled"} if count else {}
                pipe.set_accelerator("assd" if count else "none", **options)
                filled, forwards = fill(pipe, prompts, temperature)
                plain = plain or filled
                same = sum(one == other for one, other in zip(filled, plain, strict=True)) / len(plain)
                counts = [len(each) for each in filled]
                low, high = ratio_interval(counts, forwards) or (math.nan, math.nan)
                label = f"assd:num_draft_tokens={count}" if count else "none"
                figure = f"{sum(counts) / sum(forwards):.2f} ({low:.2f}-{high:.2f})"
                made.add_row(f"{share:.0%}", f"{temperature:.0f}", label, f"{same:.0%}", figure)
    return made


if __name__ == "__main__":
    typer.run(main)
