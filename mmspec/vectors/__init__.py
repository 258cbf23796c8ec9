"""Continuous tokens: distributions, drafts and rules of vectors."""

#: Rules that methods share, by the names that `acceptance=` takes.
RULES = {
    "reflection": "mmspec.vectors.rules:Reflection",
    "last_step": "mmspec.vectors.rules:LastStep",
}
