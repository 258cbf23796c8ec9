"""Model families, one per folder; the entry point `mmspec.families` names their records."""

from mmspec_extras.families import axial, ctf, distilled, nbp, nfig, xlnet

FAMILIES = (
    *axial.FAMILIES,
    *ctf.FAMILIES,
    *distilled.FAMILIES,
    *nbp.FAMILIES,
    *nfig.FAMILIES,
    *xlnet.FAMILIES,
)
