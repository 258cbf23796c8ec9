"""The core: drafts, distributions, verdicts and the decoding loop, independent of methods and models."""
