"""Model families, one per folder; the entry point `mmspec.families` names their records."""

from mmspec_extras.families import axial, ctf, distilled, nbp, nfig, xlnet

FOLDERS = (axial, ctf, distilled, nbp, nfig, xlnet)
FAMILIES = tuple(family for folder in FOLDERS for family in folder.FAMILIES)
