"""Methods, a folder each; the entry point `mmspec.methods` names their records."""

from mmspec_extras.methods import judge

METHODS = (*judge.METHODS,)
