"""The demos: captioning and image generation in a browser, by Gradio.

Pages are built of loaded pipelines; `mmspec demo` loads those and serves the page.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read whenever gradio would report something
