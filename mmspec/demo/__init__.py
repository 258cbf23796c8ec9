"""Browser demos of captioning and image generation, built with Gradio.

The pages take loaded pipelines; `mmspec demo` loads a pipeline and serves its page.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it before each report
