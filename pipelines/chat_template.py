"""Conversations as text, by the chat template of a processor or tokenizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from mmspec.errors import InputError
from mmspec.pipelines.prompts import Prompt, check_special_tokens, check_text
from mmspec.registry import did_you_mean

__all__ = ["apply_template", "template_variables"]

NEW_TURN = "add_generation_prompt"
OF_TRANSFORMERS = {"messages", "raise_exception", "strftime_now"}
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # transformers' own tag


def apply_template(
    prompt: Prompt, processor: Any, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]
) -> str:
    """Return the text of a prompt, up to where the output begins.

    Args:
        prompt: of one row.
        processor: with a chat template; may be the tokenizer.
        tokenizer: of the processor.
        variables: of the template, of the caller.

    Raises:
        InputError: there is no template, it refuses the conversation, or it does not read a variable.
    """
    if prompt.text is not None:
        if variables:
            allowed = "nothing with apply_chat_template=False: the prompts are templated already"
            raise InputError("chat_template_kwargs", variables, allowed)
        return prompt.text
    if getattr(processor, "chat_template", None) is None:
        allowed = "False, with templated prompts: this model has no chat template"
        raise InputError("apply_chat_template", True, allowed)
    check_variables(variables, processor, tokenizer)
    if prompt.continues and variables.get(NEW_TURN):
        allowed = f"no {NEW_TURN} with a last message that is continued; or continue_final_message=False"
        raise InputError("chat_template_kwargs", variables, allowed)
    messages = prompt.messages
    if processor is tokenizer:  # text templates take strings, not parts
        messages = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]
    how = {NEW_TURN: not prompt.continues, **variables}
    if prompt.continues:
        how["continue_final_message"] = True
    try:
        return str(processor.apply_chat_template(messages, tokenize=False, **how))
    except (TemplateError, TypeError, ValueError) as error:
        # templates refuse turns in an order they do not know, and drop parts of those that are continued
        raise InputError("prompt", messages, f"the chat template says: {error}"[:200]) from error


def check_variables(variables: object, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise InputError for what a template does not read, or what could forge a turn."""
    if not isinstance(variables, Mapping):
        raise InputError("chat_template_kwargs", variables, "a dict of variables of the chat template")
    known = template_variables(processor) if variables else set()
    for name, value in variables.items():
        where = f"chat_template_kwargs[{name!r}]"
        if name not in known:
            allowed = f"a variable that the chat template reads; {did_you_mean(name, known)}"
            raise InputError(where, value, allowed)
        if not isinstance(value, str | int | float | None):
            raise InputError(where, value, "a string, a number, a boolean or None")
        if isinstance(value, str):
            check_text(value, where)
            check_special_tokens(value, where, tokenizer)


def template_variables(processor: Any) -> set[str]:
    """Names that the chat template of a processor or tokenizer reads, and that callers may set."""
    template = getattr(processor, "chat_template", None) or ""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701  # parsed, never rendered
    read: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template]:
        read |= find_undeclared_variables(environment.parse(GENERATION.sub("", text)))
    own = {*inspect.signature(processor.apply_chat_template).parameters, *environment.globals}
    return (read - own - OF_TRANSFORMERS) | {NEW_TURN}
