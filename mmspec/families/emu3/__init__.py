"""Emu3 and Emu3.5; the auto classes of transformers then know the folders of the latter."""

import mmspec.families.emu3.emu3_5  # noqa: F401
