"""Shared code of families that predict many cells of an image in a forward pass: LPD, NAR, PAR and VAR."""

FAMILIES = ()
