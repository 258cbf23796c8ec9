"""Vocabulary of the scenes' language and of some synonyms: all words that a tokenizer needs."""

from __future__ import annotations

from mmspec.scenes.questions import CAPTION_PROMPTS, DESCRIPTION_PROMPTS, PLURALS
from mmspec.scenes.world import BACKGROUNDS, COLOURS, COLUMNS, PATTERNS, ROWS, SHAPES, SIZES

__all__ = ["DIGITS", "PUNCTUATION", "words"]

PUNCTUATION = tuple(".,?!:;'\"()-")
DIGITS = tuple("0123456789")
_GRAMMAR = """
a an and of on is it its in the this there that are you do what where how many from to with left right
above below level place size shape colour color pattern background texture fills rest corner picture
pictures image images part object objects named nothing else first second third zero one two three yes no
moves stays still up down
"""
_PEOPLE = """
clip video frame frames which who describe caption tell me i see say please about does has have was his
her they them or not only more most other another same different both all any some next near between
under over than then big bigger smaller larger biggest smallest leftmost rightmost four five six photo
scene long short detail brief hello hi thanks can could would name list count show look at here now
shapes colours colors for be as by
"""


def words() -> tuple[str, ...]:
    """All words in a fixed order, each once."""
    prompts = " ".join(CAPTION_PROMPTS + DESCRIPTION_PROMPTS)
    for mark in PUNCTUATION:
        prompts = prompts.replace(mark, " ")
    sources = [*SHAPES, *PLURALS.values(), *COLOURS, *SIZES, *PATTERNS, *BACKGROUNDS, *ROWS, *COLUMNS]
    return tuple(dict.fromkeys([*sources, *_GRAMMAR.split(), *prompts.split(), *_PEOPLE.split()]))
