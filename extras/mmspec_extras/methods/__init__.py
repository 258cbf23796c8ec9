"""Methods, one per folder; the entry point `mmspec.methods` names their records."""

from mmspec_extras.methods import (
    adablock,
    ascending,
    assd,
    cool,
    early_exit,
    end_weight,
    factor,
    judge,
    lazymar,
    learned,
    prophet,
    released,
    sparse_context,
    spot,
    ssd,
)

METHODS = (
    *adablock.METHODS,
    *ascending.METHODS,
    *assd.METHODS,
    *cool.METHODS,
    *early_exit.METHODS,
    *end_weight.METHODS,
    *factor.METHODS,
    *judge.METHODS,
    *lazymar.METHODS,
    *learned.METHODS,
    *prophet.METHODS,
    *released.METHODS,
    *sparse_context.METHODS,
    *spot.METHODS,
    *ssd.METHODS,
)
