"""A byte-level BPE tokenizer with a few merges: characters of several bytes are split over tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ġ", "ð"), ("r", "e")]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """<|end|> 0, <|pad|> 1, the 256 bytes, the merges."""
    tokens = ["<|end|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["".join(pair) for pair in MERGES]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast
