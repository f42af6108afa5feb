"""Log lines as JSON or text, each with trace_id, span_id and request_id where there are such."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Final

from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found] # grpc.aio does not export it

from telemetry.tracing import current_ids

_GRPC_LOGGER: Final = "grpc._cython.cygrpc"

request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")


class HarmlessCancelFilter(logging.Filter):
    """Drops one kind of record: grpc.aio's own traceback when a client cancelled before the first response, so that the headers could not be sent.

    Headers are part of a batch only before anything was sent, and that batch fails only when the call is over; a handler's error has a record of its own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that record only."""
        error = record.exc_info[1] if record.exc_info else None
        harmless = isinstance(error, ExecuteBatchError) and "SendInitialMetadataOperation" in str(error)
        return not (harmless and record.name == _GRPC_LOGGER)


class _ContextFilter(logging.Filter):
    """Puts the ids of the current context into the record, on the thread and in the task that logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        ids = current_ids()
        record.trace_id, record.span_id = ids or ("", "")
        record.request_id = request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, service, ids, traceback."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Renders a record."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "service": self._service,
        }
        line |= {key: value for key in ("trace_id", "span_id", "request_id") if (value := getattr(record, key, ""))}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A line for people: time, level, logger, message, then the ids."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Renders a record without its traceback."""
        ids = " ".join(f"{key}={value}" for key in ("request_id", "trace_id", "span_id") if (value := getattr(record, key, "")))
        return super().formatMessage(record) + (f" [{ids}]" if ids else "")


def configure_logging(service: str, *, log_format: str, log_level: str) -> None:
    """Sends all logging to standard error as `log_format` (json or text) from `log_level` up; replaces handlers that were there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter())
    handler.addFilter(_ContextFilter())
    handler.addFilter(HarmlessCancelFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
