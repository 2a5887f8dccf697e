"""Log lines, as text for people or as JSON for collectors: one object a line, whatever it is about."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from novainfer.server.settings import LogSettings

FIELDS = "nova_fields"  # of a record: what it says beside its message, as JSON has it
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """`{"time": …, "level": …, "logger": …, "message": …}`, the fields of the record, a traceback as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def _encodable(text: str) -> str:
    """Names of files may hold bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


def set_up_logging(settings: LogSettings, *, access_log: bool = False) -> None:
    """Our loggers to standard error at the level asked for; all others from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=TEXT)
    if settings.log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
    level = settings.log_level.upper()
    logging.getLogger("novainfer").setLevel(level)
    if level == "INFO":
        logging.getLogger("novainfer.http").setLevel(logging.WARNING)  # Hypercorn tells where it runs; so do we
    if access_log:
        logging.getLogger("novainfer.access").setLevel(min(logging.INFO, logging.getLogger("novainfer").level))


def is_json() -> bool:
    """Whether lines are for collectors."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def announce(text: str, *, to: TextIO | None = None) -> None:
    """Tell people something, by default on standard error; collectors get a line of their own kind instead."""
    if is_json():
        logging.getLogger("novainfer.server").info("%s", text.strip())
    else:
        print(text, file=to if to is not None else sys.stderr, flush=True)
