"""DiffusionGemma, a model of canvases of noise."""
