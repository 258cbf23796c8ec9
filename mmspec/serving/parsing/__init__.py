"""Parsers of answers: tool calls and reasoning, in text that grows."""
