"""Acceptance rules: how much of a draft is committed."""

from mmspec.decoding.interfaces import AcceptanceRule
from mmspec.registry import Registry

__all__ = ["ACCEPTANCE_RULES", "AcceptanceRule"]

ACCEPTANCE_RULES: Registry[type[AcceptanceRule]] = Registry(
    "acceptance",
    {
        "greedy": "mmspec.acceptance.matching:Greedy",
        "sample_and_match": "mmspec.acceptance.matching:SampleAndMatch",
        "speculative_sampling": "mmspec.acceptance.rejection:SpeculativeSampling",
        "recursive_rejection": "mmspec.acceptance.rejection:RecursiveRejection",
        "k_sequential": "mmspec.acceptance.rejection:KSequential",
        "block": "mmspec.acceptance.block:BlockVerification",
        "typical": "mmspec.acceptance.typical:Typical",
        "top_beta": "mmspec.acceptance.top_beta:TopBeta",
        "judge": "mmspec.acceptance.judge:Judge",
        "budget": "mmspec.acceptance.budget:Budget",
        "lantern": "mmspec.acceptance.lantern:Lantern",
        "lantern++": "mmspec.acceptance.lantern:LanternPlusPlus",
        "grouped": "mmspec.acceptance.grouped:Grouped",
        "cool": "mmspec.acceptance.cool:Cool",
        "suffix": "mmspec.acceptance.suffix:Suffix",
        "cspd": "mmspec.acceptance.denoising:CSpD",
        "low_confidence": "mmspec.acceptance.confidence:LowConfidence",
        "sequential": "mmspec.acceptance.sequential:Sequential",
        "threshold": "mmspec.acceptance.threshold:Threshold",
        "factor": "mmspec.acceptance.factor:Factor",
        "entropy_bound": "mmspec.acceptance.entropy_bound:EntropyBound",
        "adablock": "mmspec.acceptance.adablock:AdaBlock",
        "learned": "mmspec.acceptance.learned:Learned",
        "prophet": "mmspec.acceptance.prophet:Prophet",
        "end_weight": "mmspec.acceptance.ascending:EndWeight",
        "ascending": "mmspec.acceptance.ascending:Ascending",
        "maskgit": "mmspec.acceptance.maskgit:MaskGIT",
        "renoise": "mmspec.acceptance.renoise:Renoise",
        "state_walk": "mmspec.acceptance.state_walk:StateWalk",
        "reflection": "mmspec.acceptance.denoising:Reflection",
        "last_step": "mmspec.acceptance.denoising:LastStep",
        "shared_noise": "mmspec.acceptance.denoising:SharedNoise",
    },
)
