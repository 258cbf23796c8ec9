"""OpenAI-compatible HTTP server, started by `mmspec serve`.

Requests enter the running batch as rows and leave it when they are finished (continuous batching). They are
served in order of arrival; there is no scheduler.
"""
