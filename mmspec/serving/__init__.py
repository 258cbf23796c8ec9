"""An HTTP server with OpenAI's routes: requests join the running batch as rows, and leave it when done.

First come, first served; there is no scheduler. `mmspec serve` starts it.
"""
