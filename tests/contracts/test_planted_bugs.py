"""Planted bugs: the checks must find each of them, and must pass on the real code.

The bugs are those of published code, common mistakes, and every bug that the loop itself once had. A bug is a
few characters of the real code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.contracts import checks, edge_checks
from tests.contracts.mutation import PlantedBug
from tests.trees.exact_distribution import check_edges

REJECTION, SAMPLING = "mmspec.trees.rejection", "mmspec.core.sampling"
CACHE, TARGET = "mmspec.core.cache:RaggedCache", "mmspec.targets.causal"
CHAIN, RECURSIVE = "mmspec.kernels.chain:_verify_chain", "mmspec.kernels.tree_rejection:_reject_tree"
DRAFTING = "mmspec.methods.draft_model.drafter:DraftModelSession"
ACCEPTED = "(drawn & passes).long().cumprod(-1).sum(-1)"
DISTRIBUTION = "mmspec.core.distributions"
RESIDUAL = "mmspec.kernels.chain:residual"


# Most bugs change distributions so much that a third of the samples finds each with p < 1e-15 (of five
# seeds); those that correlate two draws, or move a pair by less, need all.
few_speculative, few_cold, few_iid, few_without, few_k_sequential = (
    functools.partial(check, 6_000)
    for check in (
        checks.speculative_distribution,
        checks.speculative_distribution_at_low_temperature,
        checks.recursive_distribution_of_iid_siblings,
        checks.recursive_distribution_without_replacement,
        checks.k_sequential_distribution,
    )
)
few_of_a_model = functools.partial(checks.real_model_distribution, rows=6_000)


def bug(check: Callable[[], None], where: str, *edits: tuple[str, str]) -> PlantedBug:
    return PlantedBug(where, edits, check)


BUGS = {
    # rejection sampling: the residual, the bonus, the ratio, q, the random numbers
    "residual is p": bug(few_speculative, RESIDUAL, ("(p - q).clamp_min(0.0)", "p")),
    "residual is |p - q|": bug(few_speculative, RESIDUAL, ("(p - q).clamp_min(0.0)", "(p - q).abs()")),
    "bonus drawn from q": bug(
        few_speculative,
        CHAIN,
        ("p[row, node]", "torch.where((node == last)[:, None], q[:, -1], p[row, node])"),
    ),
    "bonus from the position before": bug(
        few_speculative, CHAIN, ("p[row, node]", "p[row, node - (node == last).long()]")
    ),
    "ratio is q / p": bug(few_speculative, CHAIN, ("(u * q_x <= p_x)", "(u * p_x <= q_x)")),
    "draft by arg-max, q reported soft": bug(
        few_of_a_model,
        f"{DRAFTING}.propose",
        (
            "scores.sample(random, emitted[:, None] + depth, Purpose.DRAFT)[:, 0]",
            "scores.p[:, 0].argmax(-1)",
        ),
    ),
    "draft at temperature 0.7, q reported at 1": bug(
        few_of_a_model,
        f"{DRAFTING}.propose",
        ("scores.sample(", "type(scores)(scores.logits / 0.7, False).sample("),
    ),
    "one uniform for the whole round": bug(
        checks.speculative_distribution,
        "mmspec.trees.verification:place_uniforms",
        ("emitted[:, None] + steps", "emitted[:, None] + 0 * steps"),
    ),
    "accept uniform reused for the residual": bug(
        checks.speculative_distribution,
        f"{DISTRIBUTION}:Categorical.verify_chain",
        ("draft.last_purpose", "torch.full_like(emitted, Purpose.ACCEPT)"),
    ),
    "accepting beyond the first rejection": bug(
        few_speculative, CHAIN, (ACCEPTED, "(drawn & passes).long().sum(-1)")
    ),
    "cache keeps the rejected token": bug(
        checks.cache_equals_a_fresh_prefill,
        f"{TARGET}:CausalTarget.commit",
        ("verdict.decided", "(verdict.decided + 1)"),
    ),
    "lenience 1.2": bug(
        checks.speculative_distribution, CHAIN, ("(u * q_x <= p_x)", "(u * q_x <= 1.2 * p_x)")
    ),
    "last accepted token treated as rejected": bug(
        few_speculative, CHAIN, (ACCEPTED, f"{ACCEPTED}.clamp_max(last - 1)")
    ),
    # of SJD's and SCD's code (2410.01699, 2510.24211)
    "q of an older step": bug(
        few_of_a_model,
        f"{DRAFTING}._draft",
        ("(distributions) if", "([distributions[0], *distributions[:-1]]) if"),
    ),
    "all rows advance by the least of the batch": bug(
        few_speculative, CHAIN, (ACCEPTED, f"{ACCEPTED}.amin().expand_as(row)")
    ),
    "temperature applied twice": bug(
        few_cold,
        "mmspec.kernels.sampling:_divide",
        ("return logits / temperature", "return logits / temperature**2"),
    ),
    # output that is silently not exact: trees of top-k, draft lengths by q, siblings without a residual
    "deterministic top-k judged with the ratio of q": bug(
        few_without,
        "tests.oracles:SampledTreeDrafter.perturb",
        ("distribution.log() + noise", "distribution.log()"),
    ),
    "a sampled token dropped for its own low q": bug(
        few_speculative,
        "tests.oracles:SampledTreeDrafter.keep",
        ("return drawable", "return pad(mass(draft.q, draft.tokens[:, 1:]) > 0.25, (1, 0), value=True)"),
    ),
    "siblings tried with the same p": bug(
        few_iid,
        RECURSIVE,
        ("p = torch.where(rejected, residual(p, q), p)", "p = p"),
        ("return chosen, p", "return chosen, residual(p, q)"),
    ),
    # of FLASH's and EAGLE's code (2505.12728, 2406.16858), and their like
    "residual of the raw softmax at T = 0.6": bug(
        few_cold, CHAIN, ("residual(p, q[row", "residual(normalise(p**0.6, p), q[row")
    ),
    "noise drawn in sequence": bug(
        checks.rows_are_independent,
        "mmspec.core.random_stream:RandomStream.gumbel",
        (
            "philox_gumbel(self.keys, position,",
            "philox_gumbel(self.keys[:1].expand_as(self.keys), "
            "len(position) * position + torch.arange(len(position))[:, None],",
        ),
    ),
    "position is the index in the array": bug(
        checks.identity_on_trees,
        f"{TARGET}:CausalTarget.next_positions",
        ("[:, None] + nodes.depth", "[:, None] + torch.arange(nodes.slots.shape[1])"),
    ),
    "cache commit off by one": bug(
        checks.cache_equals_a_fresh_prefill,
        f"{TARGET}:CausalTarget.commit",
        ("verdict.decided", "verdict.accepted"),
    ),
    "end token inside a block ignored": bug(
        edge_checks.end_token_anywhere,
        "mmspec.core.canvas:Canvas.write",
        ("missing[:, 1:] |= ends[:, :-1]", "missing = missing"),
    ),
    "processors see the committed prefix only": bug(
        checks.processors_see_the_path,
        f"{SAMPLING}:Sampler.processed",
        ("[*committed, *path]", "[*committed]"),
    ),
    # other mistakes
    "stop criteria asked once a round": bug(
        edge_checks.stops_inside_a_block,
        "mmspec.core.canvas:Canvas._extend",
        ("if self.stopping[row].criteria:", "if self.stopping[row].criteria and index == len(block):"),
    ),
    "one token more than max_new_tokens": bug(
        edge_checks.length_is_cut_inside_a_block,
        "mmspec.core.canvas:Canvas.write",
        ("(window >= self._limits)", "(window > self._limits)"),
    ),
    "accepted path of a tree not gathered": bug(
        checks.cache_equals_a_fresh_prefill,
        f"{TARGET}:CausalTarget.commit",
        ("None if draft.lanes.is_chain else verdict.nodes.repeat(copies, 1)", "None"),
    ),
    "siblings see each other": bug(
        checks.tree_logits_are_path_logits,
        f"{CACHE}.attention_mask",
        (
            "expand(rows, queries, extent), nodes.visible)",
            "expand(rows, queries, extent), torch.ones_like(nodes.visible).tril())",
        ),
    ),
    "window counted in columns": bug(
        checks.sliding_identity_on_trees,
        f"{CACHE}.attention_mask",
        (".scatter(1, new[:, 0], self.lengths[:, None] + nodes.depths)", ""),
    ),
    "noise not keyed by output index": bug(
        checks.gumbel_exactness, f"{DISTRIBUTION}:Scores.choose", ("+ torch.arange(", "+ 2 * torch.arange(")
    ),
    "noise of a tree keyed by node": bug(
        checks.gumbel_exactness, f"{DISTRIBUTION}:Scores.choose", ("draft.depth)", "0 * draft.depth)")
    ),
    "noise of the draft reused for the residual": bug(
        checks.speculative_distribution,
        "tests.oracles:SampledTreeDrafter.siblings",
        (
            "random.gumbel(index[:, None], Purpose.DRAFT",
            "random.at(0).gumbel(index[:, None], Purpose.RESIDUAL",
        ),
    ),
    "noise of the draft reused to accept it": bug(
        few_of_a_model,
        f"{DRAFTING}.propose",
        ("Purpose.DRAFT", "Purpose.ACCEPT"),
        ("self.random.at(emitted[:, None])", "self.random"),
    ),
    "k-SEQ without rho": bug(
        few_k_sequential,
        f"{REJECTION}:KSequential.verify",
        ("self.solve(p, q, count)", "torch.ones_like(count)"),
    ),
    "drawn sibling not removed from q": bug(
        checks.recursive_distribution_without_replacement, RECURSIVE, ("q.scatter(-1, x, 0.0)", "q")
    ),
    # earlier bugs of the loop
    "a sibling that q cannot draw is accepted": bug(check_edges, RECURSIVE, (" & (q_x > 0)", "")),
    "a ragged tree taken for a chain": bug(
        checks.ragged_ancestors_are_found,
        "mmspec.core.draft:Tree.is_chain",
        ("self.max_children <= 1 and ", ""),
    ),
    "a finished row writes beyond its place": bug(
        edge_checks.finished_rows_leave_the_others_alone,
        f"{TARGET}:CacheState.tighten",
        ("self.cache.lengths.clamp_(max=self.cache.longest)", "pass"),
    ),
    "the longest row is that of the prompts alone": bug(
        edge_checks.guidance_with_a_longer_negative_prompt,
        f"{TARGET}:CacheState.tighten",
        ("max(prompt + count", "max(self.prompt_lengths[0] + count"),
    ),
    "faults of the draft ignored": bug(
        edge_checks.faults_of_the_draft_are_dropped,
        f"{DRAFTING}.propose",
        ("sound & scores.is_finite()[:, 0]", "sound"),
    ),
}
WHOLE = [getattr(planted.check, "func", planted.check) for planted in BUGS.values()]
CHECKS = {check.__name__: check for check in WHOLE}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.every(6)
def test_the_real_code_passes(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.every(12)
def test_a_planted_bug_is_caught(name: str) -> None:
    with BUGS[name].planted(), pytest.raises((AssertionError, IndexError, RuntimeError)):
        BUGS[name].check()
