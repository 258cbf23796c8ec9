"""Causal transformers over continuous tokens."""

from mmspec.models.continuous.modeling import ContinuousConfig, ContinuousForCausalLM

__all__ = ["ContinuousConfig", "ContinuousForCausalLM"]
