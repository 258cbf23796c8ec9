"""Candidate trees: how they grow, how candidates are drawn, and the acceptance rules."""

#: Shared acceptance rules, by their names for `acceptance=`.
RULES = {
    "greedy": "mmspec.trees.matching:Greedy",
    "sample_and_match": "mmspec.trees.matching:SampleAndMatch",
    "speculative_sampling": "mmspec.trees.rejection:SpeculativeSampling",
    "recursive_rejection": "mmspec.trees.rejection:RecursiveRejection",
    "k_sequential": "mmspec.trees.rejection:KSequential",
    "budget": "mmspec.trees.budget:Budget",
}
