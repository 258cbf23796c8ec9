"""Continuous tokens: distributions, samplers and acceptance rules of vectors."""

#: Shared acceptance rules, by their names for `acceptance=`.
RULES = {
    "reflection": "mmspec.vectors.rules:Reflection",
    "last_step": "mmspec.vectors.rules:LastStep",
}
