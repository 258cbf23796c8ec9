"""Losslessness checks: tokens of plain decoding, or the target's distribution."""
