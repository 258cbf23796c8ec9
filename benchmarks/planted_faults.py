"""Plants many faults in the package, one after the other, and reports which of them the tests find.

    python benchmarks/planted_faults.py                # about an hour on two cores
    python benchmarks/planted_faults.py --only media   # those whose name or place holds the word

A fault is a few characters of one function: mistakes of published code, bugs that this code once had, slips
that a rename or a merge makes. Each is planted in a copy of what is committed, where the tests of the rooms
that it concerns run until one fails. Exits with 1 if a fault is not found, or can no longer be planted.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("mmspec", "pipelines", "kernels")
LIMIT_S = 1200.0
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """A fault, and where its finding is looked for.

    Attributes:
        name: what is wrong then.
        inside: "function", "Class" or "Class.method" that holds the text, in whatever file.
        old: text that occurs there once.
        new: text in its place.
        tests: files or folders of tests, in the order in which they are run.
    """

    name: str
    inside: str
    old: str
    new: str
    tests: tuple[str, ...]


DRAFTERS = ("tests/drafters", "tests/contracts")
TARGETS = ("tests/targets", "tests/contracts")
DECODING = ("tests/decoding", "tests/contracts")
RULES = ("tests/acceptance", "tests/contracts")
KERNELS = ("tests/kernels",)
PIPELINES = ("tests/pipelines",)

FAULTS = (
    # the loop and its distributions
    Fault(
        "a pruned tree hangs its nodes at the places of old parents",
        "Tree.part_of",
        "place.gather(1, self.parents.gather(1, index))",
        "self.parents.gather(1, index).clamp_max(size)",
        DRAFTERS,
    ),
    Fault(
        "prompt tokens see those behind other candidates",
        "ProbedTree.nodes",
        "self.hosts[:, :, None] == self.hosts[:, None]",
        "self.hosts[:, :, None] >= self.hosts[:, None]",
        DRAFTERS,
    ),
    Fault(
        "prompt tokens learn with the token in sight that they stand in for",
        "nodes_at",
        "place < root",
        "place <= root",
        ("tests/training",),
    ),
    Fault(
        "chains that agree draw the same continuation",
        "SiblingDraws.__call__",
        "u.view(-1, nodes, count, 2)",
        "u.view(-1, nodes, count, 2)[:, :1].expand(-1, nodes, -1, -1)",
        DRAFTERS,
    ),
    Fault(
        "the likeliest siblings are judged as if they were drawn",
        "SiblingDraws.__call__",
        "(log_p + (noise",
        "(log_p + 0 * (noise",
        DRAFTERS,
    ),
    Fault(
        "a draft model keeps the keys of a refused branch",
        "DraftModelSession.observe",
        "[verdict.nodes[:, 1:-1]]",
        "[verdict.nodes[:, 1:-1] * 0 + 1]",
        DRAFTERS,
    ),
    Fault(
        "visual tokens that a draft model reads depend on the default dtype",
        "guided_and_even",
        "torch.arange(left, dtype=torch.float32, ",
        "torch.arange(left, ",
        ("tests/decoding/test_callers_defaults.py",),
    ),
    Fault(
        "the share of a text that is decided depends on the default dtype",
        "Places.progress",
        ".float() / self.length",
        " / self.length",
        ("tests/decoding/test_callers_defaults.py",),
    ),
    Fault(
        "text behind visual tokens that are not read moves to their positions",
        "CausalTarget.prefill_part",
        "offset + whole[row] - lengths[row]",
        "offset",
        ("tests/targets/test_thinned.py",),
    ),
    Fault(
        "a part of a prompt is read as the whole that was read before",
        "CausalTarget._read_prompt",
        "self.prefix_cache if part is None else None",
        "self.prefix_cache",
        ("tests/targets/test_thinned.py",),
    ),
    Fault(
        "evenly spread tokens are chosen among those that attention has chosen",
        "guided_and_even",
        "order[guided:].sort()",
        "order.sort()",
        ("tests/targets/test_thinned.py",),
    ),
    Fault(
        "an unlikely candidate is kept before its parent",
        "Calibration.rate",
        "key=lambda each: -each.path",
        "key=lambda each: each.path",
        DRAFTERS,
    ),
    Fault(
        "what rounds cost is learnt with the drafter's own time",
        "PruningPolicy.record",
        "record(choice, seconds - drafting)",
        "record(choice, seconds)",
        DRAFTERS,
    ),
    Fault(
        "pauses are no longer for what a head's own work took",
        "PruningPolicy.record",
        "self.config.drafting_weight * self.cost.plain(drafting)",
        "0.0 * self.cost.plain(drafting)",
        ("tests/drafters/test_length.py",),
    ),
    Fault(
        "transposed products leave the bias out",
        "transposed_product",
        "y if bias is None else y.add_(bias)",
        "y",
        ("tests/models/test_linear_layers.py",),
    ),
    Fault(
        "packed products of few rows leave the rows of zeros in",
        "packed_product",
        "y if rows >= PACKED_ROWS else y[:rows]",
        "y",
        ("tests/models/test_linear_layers.py",),
    ),
    Fault(
        "packed weights outlive writes",
        "Packed.is_of",
        "self._weight() is weight and self._state == state_of(weight)",
        "self._weight() is weight",
        ("tests/models/test_linear_layers.py",),
    ),
    Fault(
        "packed weights outlive writes that torch does not count",
        "Packed.is_current",
        "self.is_of(weight) and torch.equal(self._sample, sample(weight))",
        "self.is_of(weight)",
        ("tests/models/test_linear_layers.py",),
    ),
    Fault(
        "weights are packed whatever memory is free",
        "Packing.allows",
        "held + more <= self.share",
        "held <= self.share",
        ("tests/models/test_linear_layers.py",),
    ),
    Fault(
        "packed weights are kept when a model is disabled",
        "forget",
        "FORWARDS.pop(layer, None)",
        "FORWARDS.get(layer)",
        ("tests/models/test_linear_layers.py",),
    ),
    Fault(
        "layers are fast in every thread",
        "Fast",
        "threading.local",
        "object",
        ("tests/targets/test_threads.py",),
    ),
    Fault(
        "layers that another thread computes are put back",
        "LinearLayers.__call__",
        "if not forward.users and attributes",
        "if attributes",
        ("tests/models/test_linear_layers.py",),
    ),
    Fault(
        "what one thread replaces in a model, others compute too",
        "Replacements",
        "threading.local",
        "object",
        ("tests/targets/test_threads.py",),
    ),
    Fault(
        "a replaced forward goes when the first thread leaves",
        "replaced",
        "if switch.users or",
        "if",
        ("tests/targets/test_threads.py",),
    ),
    Fault(
        "drafts read the hidden states of another thread's forward",
        "HiddenStates._keep_input",
        "READING.now is not self",
        "READING.now is self and False",
        ("tests/targets/test_threads.py",),
    ),
    Fault(
        "hooks that steer the last place of a call steer drafts otherwise",
        "is_close",
        "rounding * spread",
        "(1e3 + rounding * spread)",
        ("tests/targets/test_hooks.py",),
    ),
    Fault(
        "a hook that is set later is not tried",
        "treats_alike",
        "tuple(hooks) == tried",
        "target.model in TRIED",
        ("tests/targets/test_hooks.py",),
    ),
    Fault(
        "a head beside copies is not told what was decided",
        "CopyBesideHeadSession.observe",
        "self.head.observe(draft, output, scores, verdict)",
        "super().observe(draft, output, scores, verdict)",
        ("tests/drafters/test_copy_beside_head.py",),
    ),
    Fault(
        "a bonus token from the place before",
        "_verify_chain",
        "p[row, node]",
        "p[row, node - (node == last).long()]",
        RULES,
    ),
    Fault("the residual is |p - q|", "residual", "(p - q).clamp_min(0.0)", "(p - q).abs()", RULES),
    Fault(
        "the last allowed token is exceeded by one",
        "Canvas.write",
        "(window >= self._limits)",
        "(window > self._limits)",
        DECODING,
    ),
    Fault(
        "a stop string that may not begin in the prompt does",
        "Canvas._extend",
        "self.ids[row][self.prompt_lengths[row] :]",
        "self.ids[row]",
        ("tests/pipelines/test_generate_parity.py",),
    ),
    Fault(
        "answers are guided as the images of the same model are",
        "VisionLanguagePipeline._prepare",
        "family is not None and family.draws",
        "False",
        ("tests/pipelines/test_published_configs.py",),
    ),
    Fault(
        "an end token inside a block is ignored",
        "Canvas.write",
        "missing[:, 1:] |= ends[:, :-1]",
        "missing = missing",
        DECODING,
    ),
    Fault(
        "noise of a tree is keyed by its nodes", "Scores.choose", "draft.depth)", "0 * draft.depth)", DECODING
    ),
    Fault(
        "the cache keeps a rejected token",
        "CausalTarget.commit",
        "verdict.decided",
        "(verdict.decided + 1)",
        TARGETS,
    ),
    Fault(
        "siblings see each other",
        "RaggedCache.attention_mask",
        "expand(rows, queries, extent), nodes.visible)",
        "expand(rows, queries, extent), torch.ones_like(nodes.visible).tril())",
        DECODING,
    ),
    Fault(
        "each row has the settings of another",
        "of_rows",
        "map(of, values)",
        "map(of, values[::-1])",
        DECODING,
    ),
    Fault("guidance of 1 takes the other prompt", "_guide", "logits.chunk(2)[0]", "unconditional", DECODING),
    Fault(
        "a state decays from before its ancestor",
        "path_decay",
        "total[..., None, :])",
        "(total - g)[..., None, :])",
        DECODING,
    ),
    Fault(
        "siblings are in each other's state",
        "state_space_tree",
        "(decay * alike) @ x",
        "alike @ x",
        DECODING,
    ),
    Fault(
        "inputs of a state space without their step sizes",
        "mamba2",
        "step[..., None] * x, b",
        "x, b",
        TARGETS,
    ),
    Fault(
        "rows that have ended change their state",
        "RecurrentLayer.commit",
        "new.where(active.view(-1, *[1] * (state.dim() - 1)), state)",
        "new",
        DECODING,
    ),
    Fault(
        "a variance stands for a deviation",
        "Gaussian.draw",
        "self.std *",
        "self.std.square() *",
        DECODING,
    ),
    Fault(
        "processors see what is committed alone",
        "Sampler.processed",
        "[*committed, *path]",
        "[*committed]",
        DECODING,
    ),
    Fault(
        "the last row of an image ends as the others",
        "ImageGrid.forced",
        "cells[-1] = self.last_row_end",
        "cells[-1] = cells[0]",
        DECODING + TARGETS,
    ),
    # acceptance rules
    Fault(
        "the budget is spent by every sibling",
        "Budget.remaining",
        "allowance - tv[:, None]",
        "allowance",
        RULES,
    ),
    Fault(
        "half of the total variation is reported",
        "RelaxedSampling.judge",
        "total_variation(output, p)",
        "total_variation(output, p) / 2",
        RULES,
    ),
    Fault(
        "neighbours make an impossible token acceptable",
        "Lantern.raised",
        "near.where(p > 0, 0.0)",
        "near",
        RULES,
    ),
    Fault(
        "a judge reads the state before the token",
        "Judge.decide",
        "self.head(hidden)",
        "self.head(hidden.roll(1, 1))",
        RULES,
    ),
    Fault(
        "a trusted sibling is taken beside the target's own token",
        "Judge.walk",
        " & ~is_decided",
        "",
        RULES,
    ),
    Fault(
        "a judge lets tokens pass that the request excludes",
        "Judge.walk",
        "draft.valid & (of_token > -math.inf)",
        "draft.valid.clone()",
        RULES,
    ),
    Fault(
        "a judge learns of a token one place late",
        "label_prompt",
        "*plain[1:place]",
        "*plain[:place]",
        ("tests/training",),
    ),
    Fault(
        "a judge's threshold is of states that are not centred",
        "fit_judge",
        "bias - (weight / scale * mean).sum()",
        "bias",
        ("tests/training",),
    ),
    Fault(
        "groups overlap",
        "_rank_ratio",
        "(0, surplus)).unflatten(-1, (-1, size))",
        "(0, surplus + size)).unfold(-1, 2 * size, size)",
        RULES,
    ),
    Fault(
        "a joint ratio has no cap",
        "weigh_prefixes",
        "total - total.cummax(-1).values.clamp_min(0.0)",
        "total.clamp_max(0.0)",
        ("tests/acceptance/test_block.py",),
    ),
    Fault(
        "what follows a kept prefix is as after token by token",
        "BlockVerification.verify",
        "weight[:, :-1, None] * p[:, :-1] - q",
        "p[:, :-1] - q",
        ("tests/acceptance/test_block.py",),
    ),
    Fault(
        "uniforms of a refused draft come again",
        "BlockVerification.verify",
        "random.at(emitted[:, None])",
        "random",
        ("tests/acceptance/test_block.py",),
    ),
    Fault(
        "candidates of a refused draft come again",
        "DraftModelSession.propose",
        "self.random.at(emitted[:, None])",
        "self.random",
        ("tests/acceptance/test_block.py",),
    ),
    Fault("the variance factor is upside down", "CSpD.last", "sign * std", "-sign * std", RULES),
    Fault("a reflected step is not mirrored", "reflect", "(z - 2 *", "(z - 0 *", RULES),
    Fault(
        "the least confident places are decided",
        "rank",
        "descending=True",
        "descending=False",
        ("tests/targets", "tests/acceptance"),
    ),
    # drafters
    Fault(
        "q of the draft model is of an older step",
        "DraftModelSession.propose",
        "stack(distributions)",
        "stack([distributions[0], *distributions[:-1]])",
        DRAFTERS,
    ),
    Fault(
        "keys of drafted nodes stay in the first layers",
        "EarlyExitSession._read",
        "self.passes += 1",
        "self.passes += 1; self.state.cache.commit(None, torch.ones_like(tokens[:, 0]))",
        ("tests/drafters/test_early_exit.py",),
    ),
    Fault(
        "a window advances by the least that any row accepted",
        "JacobiSession.propose",
        "node = accepted[:, None] +",
        "node = accepted.amin() + torch.zeros_like(place) +",
        DRAFTERS,
    ),
    Fault(
        "noise of a window is not keyed by the round",
        "JacobiSession._redraw_noise",
        ".at(self.round)",
        "",
        DRAFTERS,
    ),
    Fault(
        "rows that join with wider windows fill up what has no distribution",
        "Observed.joined",
        "self.finite.shape[1] != other.finite.shape[1]",
        "self.finite.shape[1] < 0 * other.finite.shape[1]",
        ("tests/pipelines/test_running_batch.py",),
    ),
    Fault(
        "the window of a row depends on the batch though its tokens do",
        "JacobiDrafter.fit",
        "fitted.shares = on_cpu and is_exact",
        "fitted.shares = on_cpu",
        ("tests/drafters/test_jacobi.py",),
    ),
    Fault(
        "states of a rejected path are kept",
        "StateWindowSession._enter_committed",
        "newest = accepted[:, None] + 1 +",
        "newest = (accepted[:, None] + 3).clamp_max(self.read.tokens.shape[1]) +",
        DRAFTERS,
    ),
    Fault(
        "a predecessor is taken before it is there",
        "StaircaseSession._front",
        "(work.done > 0) | ~self.begins_early",
        "(work.done >= 0) | ~self.begins_early",
        DRAFTERS,
    ),
    Fault(
        "states of an accepted path are shifted",
        "CachingSession.observe",
        "_copied(verdict.nodes)",
        "_copied(verdict.nodes).roll(1, 1)",
        DRAFTERS,
    ),
    Fault(
        "candidates of a head see their siblings",
        "TreeGrowth.nodes",
        "[:, -count:]",
        "[:, -count:] | True",
        DRAFTERS,
    ),
    Fault(
        "draft ids stand for those of the target",
        "TreeGrowth.grow",
        "self.names[candidates]",
        "candidates",
        DRAFTERS,
    ),
    Fault(
        "draft ids stand for those of the target, in chains",
        "FlashSession._chain",
        "self.names[likeliest.indices]",
        "likeliest.indices",
        DRAFTERS,
    ),
    Fault(
        "frequent tokens are read out by the first rows",
        "CausalTarget.output_rows",
        "output.weight.detach()[index]",
        "output.weight.detach()[: len(index)]",
        DRAFTERS,
    ),
    Fault(
        "a draft model of frequent tokens says them at the first places",
        "FrequentLinear.forward",
        "logits.index_copy(-1, self.tokens, said)",
        "logits.index_copy(-1, torch.arange(len(self.tokens)), said)",
        ("tests/training/test_draft_models.py",),
    ),
    Fault(
        "a block drafts its first offset everywhere",
        "FlashSession._tree",
        "logits[:, :, offset]",
        "logits[:, :, 0]",
        DRAFTERS,
    ),
    Fault(
        "the context's padding is seen by a block",
        "BlockSession._denoise",
        "(slot <= accepted[:, None])",
        "(slot < new)",
        DRAFTERS,
    ),
    Fault(
        "an assistant's window is one shorter",
        "AssistantSession",
        "behind <= text.sliding_window",
        "behind < text.sliding_window",
        DRAFTERS,
    ),
    Fault(
        "rounds without a draft are forgotten", "DraftModelSession.propose", "1 + self.unread", "2", DRAFTERS
    ),
    # targets
    Fault(
        "positions are those of the array",
        "CausalTarget.next_positions",
        "[:, None] + nodes.depth",
        "[:, None] + torch.arange(nodes.slots.shape[1])",
        TARGETS,
    ),
    Fault(
        "a cached prefix is found without its images",
        "PromptIdentity.shared_with",
        "not torch.equal(own, other[: len(own)])",
        "False",
        TARGETS,
    ),
    Fault(
        "keys of another adapter are taken over",
        "PromptIdentity.shared_with",
        "self.state != prompt.state or ",
        "",
        ("tests/targets/test_model_state.py",),
    ),
    Fault(
        "weights that are written through `data` count as they were",
        "ModelReading.hash",
        "middle_of(tensor)",
        "middle_of(tensor)[:0]",
        ("tests/targets/test_model_state.py",),
    ),
    Fault(
        "keys are kept of a prompt that a hook has changed",
        "state_of",
        "hooks := hooks_of_users(model)",
        "hooks := {}",
        ("tests/targets/test_model_state.py",),
    ),
    Fault(
        "every row gets the first row's states",
        "CausalTarget._read_prompt",
        "cache.row_states(row,",
        "cache.row_states(0,",
        TARGETS,
    ),
    Fault(
        "columns of an image of GLM are the first",
        "GlmImageTarget.next_positions",
        ".expand(-1, -1, 3)",
        ".expand(-1, -1, 3) * 0",
        TARGETS,
    ),
    Fault(
        "a walk goes on behind a wrong guess",
        "StateWalk.decide",
        "reached = leads.long().cumprod(-1).sum(-1)",
        "reached = leads.long().sum(-1)",
        DRAFTERS,
    ),
    Fault(
        "the block behind does not see the guessed one",
        "StatesSession._laid_out",
        "sees[:, -1] |= sees[row, full]",
        "sees[:, -1] |= sees[row, full] & False",
        DRAFTERS,
    ),
    Fault(
        "states of a block that begins inside the prompt are walked",
        "StatesSession.propose",
        "(self.begin == starts[:, 0]) & self._is_whole(block, width)",
        "self.begin == starts[:, 0]",
        DRAFTERS,
    ),
    Fault(
        "the block behind is predicted by the last state",
        "StatesBlock.before",
        "(self.full * width + size)",
        "(0 * self.full + self.states * width)",
        DRAFTERS,
    ),
    Fault(
        "a state of an image holds the guess of the group that it asks for",
        "nodes_of_states",
        "read[:, None] <= turns",
        "read[:, None] <= 1 + turns",
        ("tests/targets/test_parallel_images.py",),
    ),
    Fault(
        "the walk over states of an image goes on behind a wrong guess",
        "CellWalk.decide",
        "masked_fill(leads, cells.states).amin(",
        "masked_fill(~leads, -1).amax(",
        ("tests/targets/test_parallel_images.py",),
    ),
    Fault(
        "every published LPD is decoded with the settings of the smallest",
        "lpd_settings",
        "LPD.get(shape, OTHER_LPD)",
        "OTHER_LPD",
        ("tests/targets/test_parallel_images.py",),
    ),
    Fault(
        "every published PAR is guided as the smallest",
        "par_guidance",
        "config.group_size)",
        "0)",
        ("tests/targets/test_parallel_images.py",),
    ),
    Fault(
        "a rule computes the sizes of groups that were published",
        "published_sizes",
        "GROUPS_OF_SIZE.get((cells, steps))",
        "GROUPS_OF_SIZE.get((steps, cells))",
        ("tests/drafters/test_image_orders.py",),
    ),
    Fault(
        "control is that of the cell where a token stands",
        "control_of_tokens",
        "position_ids.expand(len(control), -1) + 1 -",
        "position_ids.expand(len(control), -1) -",
        ("tests/pipelines/test_control.py",),
    ),
    Fault(
        "a control image is resized bilinearly",
        "ControlEncoder.forward",
        "mode=self.resize, align_corners=corners",
        "mode='bilinear', align_corners=True",
        ("tests/pipelines/test_control.py",),
    ),
    Fault(
        "unconditional prompts are controlled too",
        "LlamaGenTarget.no_control",
        "torch.zeros(1, 1, 1, 1",
        "torch.ones(1, 1, 1, 1",
        ("tests/pipelines/test_control.py",),
    ),
    Fault(
        "a block of a clip is written over the first one",
        "NBPTarget.nodes",
        "blocks = [0, *(newest",
        "blocks = [1, *(newest",
        ("tests/pipelines/test_clips.py",),
    ),
    Fault(
        "a clip with a sparse context keeps the oldest blocks",
        "NBPTarget.nodes",
        "newest - (newest - 1 - lane) % kept",
        "1 + lane",
        ("tests/pipelines/test_clips.py",),
    ),
    Fault(
        "special tokens of a clip are seen before they are read",
        "PARTarget.nodes",
        "draft.begin >= self.group_size",
        "draft.begin >= 1",
        ("tests/targets/test_parallel_images.py", "tests/pipelines/test_clips.py"),
    ),
    Fault(
        "a scale reads the sum without the newest one",
        "VARTarget.score",
        "state.features + self.quantizer.vectors(tokens, self.sides, scale - 1)",
        "state.features + 0 * self.quantizer.vectors(tokens, self.sides, scale - 1)",
        ("tests/targets/test_scales.py",),
    ),
    Fault(
        "places of a scale do not see each other",
        "VARTarget.nodes",
        "before.visible.scatter(2, draft.starts[:, None], True)",
        "before.visible",
        ("tests/targets/test_scales.py",),
    ),
    Fault(
        "the refiner reads coarse tokens as a causal model does",
        "CTFRefiner.__init__",
        "is_causal = False",
        "is_causal = True",
        ("tests/reference/test_coarse.py",),
    ),
    Fault(
        "fine tokens leave their cluster",
        "CTFRefiner.forward",
        "self.cluster_of != coarse[..., None]",
        "self.cluster_of < 0 * coarse[..., None]",
        ("tests/reference/test_coarse.py",),
    ),
    Fault(
        "masks of one block do not see each other",
        "BlockTree.nodes",
        "plain.visible | (block[:, None] == block)",
        "plain.visible",
        DRAFTERS,
    ),
    Fault(
        "an entropy counts against itself",
        "within",
        "before = ascending.cumsum(-1) - ascending",
        "before = ascending.cumsum(-1)",
        RULES,
    ),
    Fault(
        "a canvas of noise is told the logits of the one before",
        "DiffusionGemmaTarget.commit",
        "~done[:, 0]",
        "done[:, 0] | True",
        TARGETS,
    ),
    Fault(
        "noise of a canvas is the same in every step",
        "Renoise.decide",
        "at = random.at(draft.steps.repeat_interleave(shape[1])[:, None])",
        "at = random.at(0)",
        TARGETS,
    ),
    Fault(
        "a token that a masked model drew and did not keep comes back in the next forward",
        "draw_anew",
        "random.at(count.reshape(-1, 1))",
        "random.at(0)",
        ("tests/targets/test_masked_sampling.py",),
    ),
    Fault(
        "a guessed state is drawn with the noise of the first state",
        "places_of",
        "count = begin + (exists & ~is_open).sum(-1)",
        "count = begin + 0 * (exists & ~is_open).sum(-1)",
        ("tests/targets/test_masked_sampling.py",),
    ),
    Fault(
        "confidences of LLaDA are those behind temperature and truncation",
        "UnmaskingDrafter.fit",
        'target.confidence == "own"',
        "False",
        ("tests/targets/test_masked_sampling.py",),
    ),
    Fault(
        "the last block of an SDAR ends at the limit, and has another text",
        "UnmaskingSession.open",
        "-(first + asked) % size if",
        "0 if",
        ("tests/targets/test_masked_cache.py",),
    ),
    Fault(
        "an enabled masked model is decoded by the next token where a setting is refused",
        "make_loop.loop",
        "if not passes_on or has_no_next_token(model):",
        "if not passes_on:",
        ("tests/targets/test_masked_models.py",),
    ),
    Fault(
        "what is forbidden at the first places of a block is forbidden at all of it",
        "Sampler.processed_places",
        "bisect_right(edges, prompts[row] + place)",
        "bisect_right(edges, place)",
        ("tests/targets/test_masked_models.py",),
    ),
    Fault(
        "padding of masked models is written over keys",
        "MaskedTarget._nodes",
        "(place - first).where(place < last, junk)",
        "place - first",
        TARGETS,
    ),
    Fault(
        "cells see the candidates after them",
        "MARTarget.score",
        "known & seen, labels",
        "known | seen, labels",
        ("tests/acceptance", "tests/targets"),
    ),
    Fault(
        "kept features of later blocks are lost",
        "CachedBlocks.compute",
        "self._keep(layer, places, key, value)",
        "self._keep(layer, places[:, :0], key[:, :0], value[:, :0])",
        TARGETS,
    ),
    # kernels
    Fault(
        "a kernel's last token is not raced",
        "_tile_kernel",
        "inside = index < vocabulary",
        "inside = index < vocabulary - 1",
        KERNELS,
    ),
    Fault("a nucleus keeps its edge out", "_cut", "bound - below)", "bound - below + 1)", KERNELS),
    Fault(
        "attention's sums do not fade",
        "_read_block",
        "mass = mass * fade + tl.sum(p, 1)",
        "mass = mass + tl.sum(p, 1)",
        KERNELS,
    ),
    Fault(
        "keys are moved from the wrong row",
        "_compact_kernel",
        "row * capacity + tl.load(lengths_ptr + row)",
        "row * capacity",
        KERNELS,
    ),
    Fault(
        "kernels for tensors of a second GPU are launched on the first",
        "launcher",
        "place.get_device() != torch.cuda.current_device()",
        "not place.is_cuda",
        ("tests/kernels/test_launchers.py",),
    ),
    # models and training
    Fault(
        "a head's state has passed its norm",
        "FeatureHead.forward",
        "hidden: Tensor = output.last_hidden_state",
        "hidden = self.norm(output.last_hidden_state)",
        ("tests/models", *DRAFTERS),
    ),
    Fault(
        "Hydra sees the newest token alone",
        "HydraHead.predict",
        "path.flatten(-2)",
        "path[..., -1:, :].expand_as(path).flatten(-2)",
        ("tests/models", *DRAFTERS),
    ),
    Fault(
        "text after an image is cut",
        "splice",
        "range(place, length)",
        "range(place, length - tokens)",
        ("tests/compressors", "tests/training"),
    ),
    Fault(
        "the prompt is learnt too",
        "learnt_pairs",
        "[:, 1 : learnt.shape[1] + 1]",
        "[:, :-1]",
        ("tests/training",),
    ),
    Fault(
        "steps of EAGLE-3 see other chains",
        "unroll",
        "[seen, own]",
        "[seen, torch.ones_like(own)]",
        ("tests/training",),
    ),
    Fault(
        "replies are learnt as a template writes them before others",
        "sequences",
        "alike = alike and whole.startswith(text)",
        "alike = True",
        ("tests/training/test_thoughts_in_templates.py",),
    ),
    Fault(
        "a resumed training begins again",
        "Training._restore",
        'self.step, self.seconds = state["step"], state["seconds"]',
        "pass",
        ("tests/training",),
    ),
    Fault(
        "a draft model is the goal of its target",
        "compare",
        "for each in (said, drafted)",
        "for each in (drafted, said)",
        ("tests/training",),
    ),
    Fault(
        "the target writes a draft model's own replies",
        "DraftModelLoss.make",
        "decode(self.reader, NoDrafter()",
        "decode(self.target, NoDrafter()",
        ("tests/training",),
    ),
    # pipelines, serving, media, evaluation
    Fault(
        "max_length counts one too many",
        "GenerationSettings._left_by",
        "min(most - prompt, MAX_NEW_TOKENS)",
        "min(most - prompt + 1, MAX_NEW_TOKENS)",
        PIPELINES,
    ),
    Fault(
        "do_sample=False samples",
        "GenerationSettings.sampler",
        "return sampled if self.do_sample else replace(sampled, temperature=0.0)",
        "return sampled",
        PIPELINES,
    ),
    Fault(
        "a request enters a batch that is full",
        "RunningBatch.enter",
        "if count > self.free:",
        "if count > self.rows:",
        (*PIPELINES, "tests/serving"),
    ),
    Fault(
        "a special token that is pasted into a message is one",
        "SpellingTokenizer._read",
        "if token in known and not pasted",
        "if token in known and pasted",
        ("tests/pipelines/test_pasted_tokens.py",),
    ),
    Fault(
        "streamed text holds characters of bytes that a later byte spoils",
        "TextDeltas._is_open",
        "reversed(self._window)",
        "self._window[:0]",
        ("tests/pipelines/test_streaming.py",),
    ),
    Fault(
        "a stream decodes anew from a space, which tokenizers take from the beginning of a text",
        "TextDeltas._shift",
        "if alone and text.endswith(alone):",
        "if text.endswith(alone):",
        ("tests/pipelines/test_streaming.py",),
    ),
    Fault(
        "a stop string that ends before the last token ends a row",
        "StopStringsCriterion._ends",
        "length - len(one) + 1",
        "length - len(one)",
        ("tests/pipelines/test_stop_strings.py",),
    ),
    Fault(
        "a stop string is sent by halves",
        "StopText.add",
        "longest = max((len(stop) for stop in self._stops), default=1) - 1",
        "longest = 0",
        ("tests/serving",),
    ),
    Fault(
        "a request that is refused counts as a row that failed",
        "Engine._fail",
        "if answer.status >= 500:",
        "if answer.status >= 400:",
        ("tests/serving",),
    ),
    Fault(
        "text that comes before all rows have entered is lost",
        "Ticket.entered",
        "early.append((index, event))",
        "pass",
        ("tests/serving",),
    ),
    Fault(
        "a private address hides in an IPv6 one",
        "_is_public",
        "ip = embedded or ip",
        "ip = ip",
        ("tests/media", "tests/bad_inputs"),
    ),
    Fault(
        "a key of a message that nothing reads vanishes",
        "Keys.unread",
        "return name",
        "continue",
        ("tests/pipelines/test_messages.py",),
    ),
    Fault(
        "calls of tools may hold special tokens",
        "check_texts",
        "int | float | None",
        "int | float | str | None",
        ("tests/pipelines/test_messages.py",),
    ),
    Fault(
        "images of parts are read in one size",
        "read_sized",
        "if not sizes or",
        "if sizes or",
        ("tests/pipelines/test_messages.py",),
    ),
    Fault(
        "base64 is taken before a file of that name",
        "_is_bare_base64",
        "name in _MEDIA and not os.path.exists(text)",
        "name in _MEDIA",
        ("tests/media", "tests/bad_inputs"),
    ),
    Fault(
        "an image is measured in width alone",
        "check_size",
        "width * height > limits.max_pixels",
        "width > limits.max_pixels",
        ("tests/media", "tests/bad_inputs"),
    ),
    Fault(
        "more frames are taken than allowed",
        "choose_frames",
        "if count > limits.max_frames:",
        "if count > 2 * limits.max_frames:",
        ("tests/media", "tests/bad_inputs"),
    ),
    Fault(
        "later turns do not see the answers to earlier ones",
        "converse",
        "said if number else turn",
        "turn",
        ("tests/cli/test_caption.py",),
    ),
    Fault(
        "any file is read line by line for prompts",
        "read_prompt_file",
        "elif suffix in TEXT:",
        "elif suffix not in JSON:",
        ("tests/evaluation/test_prompt_files.py",),
    ),
    Fault(
        "an interval is that of one group",
        "jackknife",
        "* (groups - 1) / groups",
        "/ groups",
        ("tests/evaluation",),
    ),
    Fault(
        "a tuned accelerator is found on other weights",
        "fingerprint",
        "digest.update(start.numpy().tobytes())",
        "pass",
        ("tests/cli", "tests/evaluation", *PIPELINES),
    ),
)


def find(root: Path, fault: Fault) -> tuple[Path, str]:
    """Return the one file that holds a fault's text inside its function, and its source with the fault in it.

    Raises:
        LookupError: no such place, or several.
    """
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue  # the same files behind the package's two links
            source = path.read_text(encoding="utf-8")
            if fault.old in source:
                found += [(path, planted) for planted in _planted(source, fault)]
    if len(found) != 1:
        raise LookupError(f"{fault.inside} holds {fault.old!r} in {len(found)} places: plant the fault anew")
    return found[0]


def _planted(source: str, fault: Fault) -> Iterator[str]:
    """Yield the source with the fault, for each function of that name which holds the text once."""
    lines = source.splitlines(keepends=True)
    for name, node in _definitions(ast.parse(source), ""):
        if name != fault.inside:
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        body = "".join(lines[first:last])
        if body.count(fault.old) == 1:
            yield "".join(lines[:first]) + body.replace(fault.old, fault.new) + "".join(lines[last:])


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")
        else:
            yield from _definitions(node, prefix)


def first_failure(root: Path, tests: tuple[str, ...], workers: str) -> str | None:
    """Run tests until one fails; return its name, or None if all pass."""
    # Tests that plant a bug themselves fail where its text is gone, which would be no finding.
    without_planting = "not a_planted_bug and not planted_bugs_are and not bug_planted"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", workers, "-k", without_planting]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    for place in tests:
        try:
            run = subprocess.run(
                [sys.executable, "-m", "pytest", place, *options],
                cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{place}: no end after {LIMIT_S:g} s"
        if run.returncode in (1, 2):  # a test failed, or a module could not be imported
            marks = ("FAILED ", "ERROR ")
            named = [line for line in run.stdout.splitlines() if line.startswith(marks)]
            return named[0].split(" ", 1)[1].split(" - ")[0] if named else f"{place}: {run.stdout[-300:]}"
        if run.returncode:
            raise RuntimeError(f"pytest {place} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return None


def main(
    only: Annotated[str, typer.Option(help="Plant those whose name or place holds this text.")] = "",
    workers: Annotated[str, typer.Option(help="Processes of pytest-xdist.")] = "2",
    check: Annotated[bool, typer.Option("--check", help="Look only whether all can be planted.")] = False,
    root: Annotated[Path, typer.Option(help="Checkout whose committed files are tried.")] = ROOT,
) -> None:
    """Plant faults one after the other, and say which test found each."""
    console = Console(width=160, soft_wrap=True, markup=False, highlight=False)
    chosen = [fault for fault in FAULTS if only in f"{fault.name} {fault.inside} {fault.tests}"]
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(root), str(copy)], check=True)
        for fault in track(chosen, "faults", console=console):
            began = time.monotonic()
            try:
                path, source = find(copy, fault)
            except LookupError as error:
                lost.append(fault.name)
                console.print(f"NOT PLANTED {fault.name}: {error}")
                continue
            if check:
                continue
            real = path.read_text(encoding="utf-8")
            path.write_text(source, encoding="utf-8")
            found = first_failure(copy, fault.tests, workers)
            path.write_text(real, encoding="utf-8")
            if found is None:
                lost.append(fault.name)
            place = path.relative_to(copy)
            verdict = "MISSED" if found is None else f"found by {found}"
            console.print(f"{fault.name} ({place}): {verdict}, {time.monotonic() - began:.0f} s")
    console.print(
        f"{len(chosen) - len(lost)} of {len(chosen)} faults {'can be planted' if check else 'found'}"
    )
    raise typer.Exit(bool(lost))


if __name__ == "__main__":
    typer.run(main)
