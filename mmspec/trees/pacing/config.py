"""Constants of pacing, with their units."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PacingConfig:
    """Constants of pacing. Costs and losses are in plain rounds, as the package's docstring defines them.

    Attributes:
        trials: rounds of a choice that are measured before its cost is used.
        measured_rounds: latest rounds of a choice that its cost is computed from.
        decay: factor by which counts of accepted tokens shrink each round; omega of DEL (2504.05598).
        fade: the same for data about one size alone, each round, and for the counts of one bin of
            probabilities, each observation; the text may have changed.
        prior: weight, in observed tokens, of the initial estimate of an acceptance rate.
        revisit_rounds: drafted rounds after which a choice other than the best gets one round.
        remeasure_rounds: rounds after which a plain round is measured again, because contexts grow and the
            load of the machine changes.
        node_cost: estimated cost of one more candidate of a single row if no round of that size was measured.
        costs_scale: whether the measured cost of a candidate is expected to grow with the number of rows.
        least_speedup: speed-up over plain decoding from which drafting pays off.
        stall: multiple of its expected cost at which the cost of a round is capped; other work took the rest.
        first_pause: rounds of the first pause; each further one is twice as long until drafting has gained
            `proven_gain` after a pause.
        proven_gain: plain rounds.
        longest_pause: rounds of the longest pause.
        longest_trial: rounds after which `SizePolicy` ends a trial at any cost.
        trial_loss: plain rounds that a trial may lose before it ends.
        next_rate: assumed probability that the next candidate after a correct path is correct, for levels
            that are not drafted yet.
        least_nodes: smallest number of candidates that each recent draft counts as in the limit of the next
            one.
        bin_edges: probabilities that separate the bins of the calibration.
    """

    trials: int = 3
    measured_rounds: int = 8
    decay: float = 0.95
    fade: float = 0.98
    prior: float = 4.0
    revisit_rounds: int = 64
    remeasure_rounds: int = 32
    node_cost: float = 0.06
    costs_scale: bool = True
    least_speedup: float = 1.02
    stall: float = 2.0
    first_pause: int = 32
    proven_gain: float = 1.0
    longest_pause: int = 1024
    longest_trial: int = 16
    trial_loss: float = 2.0
    next_rate: float = 0.7
    least_nodes: int = 2
    bin_edges: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)

    def for_gpus(self) -> PacingConfig:
        """Return constants for GPUs, which compute some 200 tokens while they read the weights once.

        Until then, neither a token nor a level of a drafter costs more for more rows.
        """
        return replace(self, node_cost=0.005, costs_scale=False)


DEFAULT_PACING = PacingConfig()
