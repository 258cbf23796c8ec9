"""Small tokenizers with the decoders of published tokenizers."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.pipelines.byte_level import byte_level_tokenizer

BYTES = byte_level_tokenizer()
SPECIAL = ["<unk>", "</s>", "<pad>"]
SPACED = ["▁", "▁the", "▁a", "b", "é", "▁▁", ".", "abcdef", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES = ["abcdef", "the", "red", "##a", "##s", ".", "do", "n't", "##n't"]


def made(words: list[str], decoder: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of these words that decodes in this way."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


OF_BYTES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {
    "byte level": BYTES,
    "byte fallback": made(SPACED, decoders.Sequence([*OF_BYTES, decoders.Strip(" ", 1, 0)])),
    "byte fallback with all spaces": made(SPACED, decoders.Sequence(OF_BYTES)),
    "byte fallback with no first spaces": made(
        SPACED, decoders.Sequence([*OF_BYTES, decoders.Strip(" ", 3, 0)])
    ),
    "metaspace": made(SPACED, decoders.Metaspace()),
    "pieces of words": made(PIECES, decoders.WordPiece()),
    "ends of words": made(["abcdef</w>", "a</w>", "b</w>", "c", "é"], decoders.BPEDecoder()),
    "repeats that count once": made(["abcdef", "a", "b", "|"], decoders.CTC()),
    "words": made(["a", "b"], None),
    "words of scenes": AutoTokenizer.from_pretrained("assets/scenes-llava"),
}
