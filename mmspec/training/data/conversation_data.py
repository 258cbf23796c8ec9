"""Former place of conversations in rows, `mmspec.training.data.conversations`."""

from mmspec.training.data.conversations import ConversationRows

__all__ = ["ConversationRows"]
