"""Tables of blocks: which blocks are found, which are dropped, by random use compared with a simple model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.targets.blocks import BlockTable, chain, digest

ROOT = digest(b"root")
#: Prompts of up to 6 blocks with few different contents, so that many begin alike.
PROMPTS = st.lists(st.sampled_from([b"a", b"b"]), max_size=6)


def test_keys_agree_up_to_the_first_difference() -> None:
    one, other = chain(ROOT, [b"a", b"b", b"c", b"d"]), chain(ROOT, [b"a", b"b", b"x", b"d"])
    assert one[:2] == other[:2] and not set(one[2:]) & set(other[2:])
    assert not set(one) & set(chain(digest(b"another root"), [b"a", b"b", b"c", b"d"]))


@given(PROMPTS, PROMPTS)
def test_as_many_keys_agree_as_blocks(one: list[bytes], other: list[bytes]) -> None:
    ours, theirs = chain(ROOT, one), chain(ROOT, other)
    agree = [a == b for a, b in zip(one, other, strict=False)]
    count = agree.index(False) if False in agree else len(agree)
    assert [a == b for a, b in zip(ours, theirs, strict=False)] == [
        index < count for index in range(len(agree))
    ]
    assert len(set(ours)) == len(ours)


@given(st.integers(0, 8), st.lists(st.tuples(st.booleans(), PROMPTS), max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_table_holds_what_was_used_last(limit: int, uses: list[tuple[bool, list[bytes]]]) -> None:
    """The model: each block with the time of its last use, where later blocks of a prompt count as older."""
    table, written = BlockTable(limit), dict[int, bytes]()
    used: dict[bytes, tuple[int, int]] = {}
    for time, (adds, prompt) in enumerate(uses):
        keys = chain(ROOT, prompt)
        known = next((index for index, key in enumerate(keys) if key not in used), len(keys))
        if adds:
            slots, added = table.add(keys)
            fitting = keys[:limit]
            assert len(slots) == len(fitting)
            assert added == [index for index, key in enumerate(fitting) if key not in used]
            used |= {key: (time, -index) for index, key in enumerate(fitting)}
            used = dict(sorted(used.items(), key=lambda entry: entry[1])[max(0, len(used) - limit) :])
            written |= {slots[index]: fitting[index] for index in added}
        else:
            slots, fitting = table.find(keys), keys[:known]
            used |= {key: (time, -index) for index, key in enumerate(fitting)}
        assert [written[slot] for slot in slots] == fitting, "a slot holds the block that was written there"
        assert len(table) == len(used) <= limit
        assert all(0 <= slot < limit for slot in slots)
    for key in used:  # every block can be found from the start of its prompt
        prompts = [chain(ROOT, prompt) for _, prompt in uses]
        path = next(keys[: keys.index(key) + 1] for keys in prompts if key in keys)
        assert len(table.find(path)) == len(path)


@given(PROMPTS, st.integers(0, 6))
def test_a_slot_that_does_not_fit_ends_the_prefix(prompt: list[bytes], bad: int) -> None:
    table, keys = BlockTable(8), chain(ROOT, prompt)
    slots, _ = table.add(keys)
    assert table.find(keys, lambda slot: slot not in slots[bad:]) == slots[:bad]
