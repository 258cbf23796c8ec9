"""Log of the server: one line a request, as text or as JSON, never with prompts or answers."""

from __future__ import annotations

import json
import logging
import urllib.parse
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from mmspec.core.statistics import merge_stats
from mmspec.open_types import Json

if TYPE_CHECKING:
    from mmspec.serving.engine import Ticket

__all__ = ["RECORD", "LogFormatter", "RequestRecord", "fields_of", "request_id", "start_log"]

RECORD = "mmspec.record"  # key of a scope: the RequestRecord
MOST_PATH = 200  # characters

#: Id of the request that this task serves; "" outside of requests.
request_id: ContextVar[str] = ContextVar("request_id", default="")


@dataclass
class RequestRecord:
    """Record of a request for the log.

    Args:
        id: id of the request, sent as X-Request-ID.
        method, path: from the request; the path is logged in percent-encoding, without the query.

    Attributes:
        size: length of the body in bytes.
        status: status of the response; 499 if the client disconnected before its end.
        model: name of the model, once it is known.
        ticket: rows of the request, once they are in the queue.
    """

    id: str
    method: str
    path: str
    size: int = 0
    status: int = 499
    model: str | None = None
    ticket: Ticket | None = None

    def __post_init__(self) -> None:
        self._began = perf_counter()

    def fields(self) -> Json:
        """Return the fields of the line; those about tokens are missing if no rows entered the queue."""
        found: Json = {
            "id": self.id,
            "method": self.method,
            "route": urllib.parse.quote(self.path)[:MOST_PATH],
            "model": self.model,
            "status": self.status,
            "bytes": self.size,
            "seconds": perf_counter() - self._began,
        }
        if self.ticket is not None:
            stats, rows = merge_stats(self.ticket.stats), self.ticket.rows
            counts = zip(rows, self.ticket.prompt_tokens, strict=True)
            prompts = {id(row.prompt): count for row, count in counts}  # one prompt of several choices
            firsts = [row.times.first for row in rows if row.times.first is not None]
            found |= {
                "prompt_tokens": sum(prompts.values()),
                "new_tokens": sum(row.times.tokens for row in rows),
                "time_to_first_token": min(firsts) - self.ticket.began if firsts else None,
                "tokens_per_forward_pass": stats.acceptance_length if stats.rounds else None,
            }
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in found.items()
            if value is not None
        }


def fields_of(**fields: object) -> Json:
    """Return the keyword `extra` of a log call, for fields beside the message."""
    return {"fields": fields}


class LogFormatter(logging.Formatter):
    """Writes the message and the fields of a record: as `name=value`, or as one JSON object a line.

    Args:
        as_json: whether to write JSON.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__("%(asctime)s %(message)s")
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: Json = {"id": request_id.get()} if request_id.get() else {}
        fields |= getattr(record, "fields", {})
        if not self._as_json:
            first, *others = super().format(record).split("\n", 1)
            shown = " ".join(f"{name}={as_word(value)}" for name, value in fields.items())
            return "\n".join([f"{first} {shown}".rstrip(), *others])
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def as_word(value: object) -> str:
    """Write a value of a text line, quoted if it has spaces or control characters."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def start_log(*, as_json: bool) -> None:
    """Write the log of this process to stderr: requests, and warnings of all packages."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(as_json=as_json))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("mmspec.serving").setLevel(logging.INFO)
