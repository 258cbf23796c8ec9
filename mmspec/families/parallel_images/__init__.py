"""What families share that predict many cells of an image in a forward: LPD, NAR, PAR and VAR."""

FAMILIES = ()
