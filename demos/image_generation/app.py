"""The image demo as a Space: `mmspec demo generate` with what the Space's variables name."""

import os
import sys

from mmspec.cli import main

model = os.environ.get("MMSPEC_MODEL")
accelerator = os.environ.get("MMSPEC_ACCELERATOR")
options = ["--host", os.environ.get("GRADIO_SERVER_NAME", "0.0.0.0")]
options += ["--port", os.environ.get("GRADIO_SERVER_PORT", "7860")]
options += ["--model", model] if model else []
options += ["--accelerator", accelerator] if accelerator else []
sys.argv = ["mmspec", "demo", "generate", *options]
main()
