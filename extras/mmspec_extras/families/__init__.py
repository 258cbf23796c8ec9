"""Model families, a folder each; the entry point `mmspec.families` names their records."""

from mmspec_extras.families import xlnet

FAMILIES = (*xlnet.FAMILIES,)
