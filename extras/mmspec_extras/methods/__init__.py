"""Methods, a folder each; the entry point `mmspec.methods` names their records."""

from mmspec_extras.methods import assd, early_exit, judge, lazymar, ssd

METHODS = (*assd.METHODS, *early_exit.METHODS, *judge.METHODS, *lazymar.METHODS, *ssd.METHODS)
