"""The assistant that is published with a Gemma 4."""

from mmspec.plugins import Head, Method

METHODS = (
    Method(
        "assistant",
        "the assistant that is published with a Gemma 4 attends to the target's own keys and values",
        head=Head(
            model="mmspec.methods.assistant.head:AssistantHead",
            drafter="mmspec.methods.assistant.drafter:AssistantDrafter",
            published="mmspec.methods.assistant.head:read_official",
        ),
        needs="a head that was trained for the target",
    ),
)
