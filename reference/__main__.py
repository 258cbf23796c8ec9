"""`python -m reference`: train and score the reference models in assets/."""

import typer

from mmspec.cli import run
from reference.evaluate import evaluate_app
from reference.train import train_app

app = typer.Typer(
    help="Train and score the reference models in assets/.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(train_app, name="train")
app.add_typer(evaluate_app, name="evaluate")

if __name__ == "__main__":
    run(app)
