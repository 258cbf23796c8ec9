"""Assistants that Google publishes with Gemma 4."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "assistant",
        "drafts with the assistant of a Gemma 4, which reads the target's keys and values",
        drafter="mmspec.methods.assistant.drafter:AssistantDrafter",
        head=Head(
            model="mmspec.methods.assistant.head:AssistantHead",
            published="mmspec.methods.assistant.head:read_official",
        ),
        needs="an assistant that was trained for the target",
    ),
)
