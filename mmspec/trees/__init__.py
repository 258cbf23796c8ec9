"""Trees of candidates: how they grow, what draws them, and the rules that judge any of them."""

#: Rules that methods share, by the names that `acceptance=` takes.
RULES = {
    "greedy": "mmspec.trees.matching:Greedy",
    "sample_and_match": "mmspec.trees.matching:SampleAndMatch",
    "speculative_sampling": "mmspec.trees.rejection:SpeculativeSampling",
    "recursive_rejection": "mmspec.trees.rejection:RecursiveRejection",
    "k_sequential": "mmspec.trees.rejection:KSequential",
    "budget": "mmspec.trees.budget:Budget",
}
