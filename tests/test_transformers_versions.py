"""Versions of transformers: both names of the cache are accepted, untested versions cause a warning."""

import warnings

import pytest
import torch
from transformers import Cache, DynamicCache, LlamaModel

from mmspec import transformers_versions
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.targets import adapt
from mmspec.transformers_versions import CACHE, CACHE_NAMES, cache_name, describe, warn_of_untested
from tests.tiny_models import tiny_llama


def newest_plus(steps: int) -> str:
    major, minor = map(int, transformers_versions.NEWEST.split("."))
    return f"{major}.{minor + steps}.0"


@pytest.mark.parametrize(
    "version, said",
    [
        ("5.16.9", "older than 5.17"),
        ("5.17.0", "tested"),
        (newest_plus(0), "tested"),
        (newest_plus(1) + ".dev0", "newer than"),
        ("6.0.0rc1", "newer than"),
    ],
)
def test_what_is_known_of_a_version_is_said(version: str, said: str) -> None:
    assert describe(version).startswith(said)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_untested_version_is_warned_of_once_and_works(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_versions.transformers, "__version__", newest_plus(steps))
    warn_of_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            adapt(tiny_llama())
    warn_of_untested.cache_clear()
    said = [str(one.message) for one in caught if "newer than" in str(one.message)]
    assert len(said) == steps and all(newest_plus(steps) in one for one in said)


def test_the_name_of_the_cache_is_that_of_the_function_not_of_the_version() -> None:
    def published_before_the_renaming(ids: object, past_key_values: object = None) -> None: ...

    def hands_on(ids: object, **kwargs: object) -> None: ...

    assert cache_name(LlamaModel.forward) == CACHE
    assert cache_name(published_before_the_renaming) == "past_key_values"
    assert cache_name(hands_on, published_before_the_renaming) == "past_key_values"
    assert cache_name(hands_on) == CACHE


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_our_own_models_take_a_cache_by_either_name_and_give_it_back(name: str) -> None:
    config = LlamaGenConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
    model = LlamaGenForCausalLM(config).eval()
    ids = torch.tensor([[64 + 3, 5, 9]])
    with torch.inference_mode():
        whole = model(ids).logits
        output = model(ids[:, :2], **{name: DynamicCache()})
        cache = getattr(output, CACHE)
        assert isinstance(cache, Cache) and cache.get_seq_length() == 2
        torch.testing.assert_close(model(ids[:, 2:], **{name: cache}).logits, whole[:, 2:])
