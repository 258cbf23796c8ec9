"""How the models in assets/ were made: training, scores and cards. Run from a clone, not installed."""

TRAIN = "python -m reference train"
