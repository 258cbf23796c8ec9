"""The image demo as a Space: `mmspec demo generate` with the model that the Space's variables name."""

from mmspec.cli.demo import run_space

run_space("generate")
