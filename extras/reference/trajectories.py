"""Training of the reference diffusion model on the states of its own decoding (CJ-GRPO, 2509.23924).

The model describes scenes with few forward passes, at temperature 1. The reward of a text is its share of
right sentences. Plain GRPO, which learns every token from a wholly masked block, is there for comparison.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mmspec.accelerator import Accelerator
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import Scene, describe, render, sample_scene, training_seeds
from mmspec.scenes.world import CANVAS
from mmspec.training.record import save_trained
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from mmspec_extras.trajectories import Recorder, advantages, trajectories, trajectory_loss
from reference.diffusion import DiffusionLoss, Layout
from reference.trainer import finish
from reference.vlm_data import image_pixels
from reference.vlm_model import patch_states, visual_tokens
from reference.vlm_scores import DESCRIPTION_PROMPT

__all__ = ["TrajectoryBatch", "masked_states", "share_right", "states_layout", "train_trajectories"]

PROGRAM = "python -m extras.reference"
STAGE = 21  # of the seeds of the scenes
DEFAULT_MINUTES = 30.0
SAMPLES = 6  # texts per scene
UPDATES = 4  # steps on the same texts
MOST_TOKENS = 256
CHECK_SCENES = 24
LEAST_ADVANTAGE = 1e-3
SLOWNESS = 0.01  # of the usual learning rates


def share_right(text: str, scene: Scene) -> float:
    """Return the share of the sentences of a scene's description that a text has, each in its place."""
    right = describe(scene).split(". ")
    said = text.strip().split(". ")
    return sum(one == other for one, other in zip(right, said, strict=False)) / max(len(right), len(said))


def states_layout(
    prompt: Tensor, tokens: Tensor, step: Tensor, mask: int, block: int
) -> tuple[Layout, Tensor]:
    """Make a sequence of the outputs and the states of their blocks in all forward passes.

    Args:
        prompt: [B, P] tokens of the prompts.
        tokens, step: [B, N] tokens of the outputs, and the forward passes that decided them; see
            `trajectories`.
        mask: the mask token.
        block: places per block, counted from the first token of the prompt.

    Returns:
        The layout, which learns every token in the forward pass that decided it, and [n] these passes.
    """
    rows, length = len(prompt), prompt.shape[1] + tokens.shape[1]
    whole = torch.cat([prompt, tokens.masked_fill(step < 0, mask)], 1)
    when = torch.cat([torch.full_like(prompt, -1), step], 1)
    place = torch.arange(length)
    of, passes = place // block, [row[row >= 0].unique() for row in step]
    most = max(map(len, passes))
    sequence = torch.cat([whole, whole.new_full((rows, most * block), mask)], 1)
    places = torch.cat([place.expand(rows, -1), place.new_zeros(rows, most * block)], 1)
    sees = torch.zeros(rows, length + most * block, length + most * block, dtype=torch.bool)
    sees[:, :length, :length] = of[:, None] >= of
    sees |= torch.eye(sees.shape[1], dtype=torch.bool)  # padding sees itself, so that no softmax is empty
    row_of, at, goal, pass_of = [], [], [], []
    for row in range(rows):
        for copy, number in enumerate(passes[row].tolist()):
            now = (when[row] == number).nonzero()[:, 0]
            first = int(of[now[0]]) * block
            inside = place[first : first + block]
            slots = length + copy * block + inside - first
            sequence[row, slots] = whole[row, inside].masked_fill(when[row, inside] >= number, mask)
            places[row, slots] = inside
            sees[row, slots[:, None], place[:first]] = True
            sees[row, slots[:, None], slots] = True
            row_of += [row] * len(now)
            at.append(torch.where(now == first, now - 1, length + copy * block + now - first - 1))
            goal.append(whole[row, now])
            pass_of += [number] * len(now)
    learnt = torch.tensor(row_of), torch.cat(at), torch.cat(goal)
    layout = Layout(sequence, places, sees, *learnt, torch.ones(len(row_of)))
    return layout, torch.tensor(pass_of)


def masked_states(step: Tensor, before: int, block: int) -> Tensor:
    """Move all tokens to the forward pass in which their block was wholly masked, as plain GRPO learns them.

    Args:
        step: [B, N] forward passes that decided the tokens; -1 for none.
        before: tokens of the prompt.
        block: places per block, counted from the first token of the prompt.
    """
    of = (before + torch.arange(step.shape[1])) // block - before // block
    of, never = of.expand_as(step), int(step.max()) + 1
    first = step.new_full((len(step), int(of.max()) + 1), never)
    first = first.scatter_reduce(1, of, step.where(step >= 0, never), "amin")
    return first.gather(1, of).where(step >= 0, -1)


@dataclass(frozen=True)
class TrajectoryBatch:
    """Decoded texts: their states, log-probabilities [n] of their tokens then and before, and advantages."""

    layout: Layout
    visual: Tensor
    step: Tensor
    advantage: Tensor
    old: Tensor
    base: Tensor

    def to(self, device: torch.device) -> TrajectoryBatch:
        """Return the batch; these models are trained on the CPU."""
        return self


class TrajectoryLoss(nn.Module):
    """Loss of CJ-GRPO for texts that the model in training decodes.

    Args:
        pipe: the pipeline of the model in training, whose accelerator decodes.
        is_plain: learn from masked blocks alone (plain GRPO).
    """

    def __init__(self, pipe: MMSpecPipeline, is_plain: bool = False) -> None:
        super().__init__()
        model: Any = pipe.model
        self.block = int(model.config.text_config.block_length)
        self.reader = DiffusionLoss(model, self.block, pipe.tokenizer.eos_token_id)
        self.base = [DiffusionLoss(deepcopy(model), self.block, self.reader.end)]  # no module of the learner
        rule: Any = pipe.accelerator.rule
        self.pipe, self.seen, self.is_plain = pipe, Recorder(rule=rule), is_plain
        self.decoding = Accelerator("recorded", pipe.accelerator.drafter, self.seen, "fixed")

    def decode(
        self, scenes: list[Scene], seed: int, *, temperature: float = 1.0, most: int = MOST_TOKENS
    ) -> tuple[list[str], Any]:
        """Describe scenes, and return the texts and (prompt, tokens, steps) of all rows."""
        self.seen.fills.clear()
        images = [render(scene) for scene in scenes]
        self.pipe.set_accelerator(self.decoding)
        output: Any = self.pipe(
            [DESCRIPTION_PROMPT] * len(scenes),
            images=images,
            max_new_tokens=most,
            temperature=temperature,
            seed=[seed + row for row in range(len(scenes))],
        )
        content = [{"type": "image"}, {"type": "text", "text": DESCRIPTION_PROMPT}]
        text = self.pipe.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        encoded = self.pipe.processor(text=[text], images=images[:1], return_tensors="pt")
        prompt = encoded["input_ids"].expand(len(scenes), -1)
        return output.text, (prompt, *trajectories(self.seen.fills))

    def batch(self, scenes: list[Scene], seed: int) -> TrajectoryBatch:
        """Describe each scene several times, and keep the texts of scenes whose texts differ in reward."""
        repeated = [scene for scene in scenes for _ in range(SAMPLES)]
        texts, (prompt, tokens, step) = self.decode(repeated, seed)
        rewards = torch.tensor(
            [share_right(text, scene) for text, scene in zip(texts, repeated, strict=True)]
        )
        each = advantages(rewards.view(len(scenes), SAMPLES)).flatten()
        kept = (each.abs() > LEAST_ADVANTAGE).nonzero()[:, 0]
        kept = kept if len(kept) else torch.arange(1)
        prompt, tokens, step = prompt[kept], tokens[kept], step[kept]
        mask = int(self.reader.vlm.config.text_config.mask_token_id)
        step = masked_states(step, prompt.shape[1], self.block) if self.is_plain else step
        layout, step = states_layout(prompt, tokens, step, mask, self.block)
        with torch.no_grad():
            pixels = image_pixels([repeated[row] for row in kept.tolist()], CANVAS)
            visual = visual_tokens(self.reader.vlm, patch_states(self.reader.tower.module, pixels))
            old, base = (log_probabilities(one, layout, visual) for one in (self.reader, self.base[0]))
        return TrajectoryBatch(layout, visual, step, each[kept][layout.row], old, base)

    def forward(self, batch: TrajectoryBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and the mean ratio of probabilities."""
        new = log_probabilities(self.reader, batch.layout, batch.visual)
        loss = trajectory_loss(new, batch.old, batch.base, batch.advantage, batch.layout.row, batch.step)
        return loss, {"ratio": (new - batch.old).exp().mean().detach()}


def log_probabilities(reader: DiffusionLoss, layout: Layout, visual: Tensor) -> Tensor:
    """[n] log-probabilities of the tokens that a layout learns."""
    logits = reader.logits(layout, visual)
    return logits.log_softmax(-1).gather(1, layout.goal[:, None])[:, 0]


@flush_subnormals()
def train_trajectories(
    out: str | Path,
    *,
    start: str | Path,
    denoising_steps: int = 2,
    is_plain: bool = False,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a masked-block model on the states of its decoding, and save it as a transformers folder.

    Args:
        out: the folder to write.
        start: the trained model.
        denoising_steps: forward passes per block.
        is_plain: learn from masked blocks alone (plain GRPO).
        how: see `RunOptions`; by default 30 minutes, with 4 scenes per step.

    Returns:
        The folder. Its `training.json` records the training.
    """
    out = Path(out)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=4, check_s=600.0)
    pipe = MMSpecPipeline.from_pretrained(
        start, accelerator="low_confidence", denoising_steps=denoising_steps
    )
    model: Any = pipe.model
    learner = TrajectoryLoss(pipe, is_plain)
    made: list[TrajectoryBatch] = []

    def make(step: int) -> TrajectoryBatch:
        if step % UPDATES == 0 or not made:
            seeds = training_seeds(training.seed, STAGE, step, 0, training.batch_size)
            made[:] = [learner.batch([sample_scene(int(seed)) for seed in seeds], int(seeds[0]))]
        return made[0]

    def check(_: nn.Module) -> dict[str, float]:
        scenes = [sample_scene(seed) for seed in range(CHECK_SCENES)]
        texts, _ = learner.decode(scenes, 0)
        rewards = list(map(share_right, texts, scenes))
        right = sum(reward == 1 for reward in rewards)
        return {"reward": round(sum(rewards) / len(rewards), 4), "right": round(right / len(scenes), 4)}

    training.train(Stage("trajectories", learner, make, check, slow_factor=SLOWNESS))

    def save(record: dict[str, Any]) -> None:
        # in half precision: in float8, as the model that it begins with, the small changes would be lost
        save_trained(model, out, record, parts=("vision_config", "text_config"))
        pipe.processor.save_pretrained(out)

    options = {
        "from": start,
        "denoising-steps": denoising_steps,
        "plain": is_plain or None,
        **training.length,
    }
    return finish(training, out, save, command="trajectories", options=options, model=model, program=PROGRAM)
