"""Log lines of a process, on stderr: text, or one JSON object a line."""

import logging
import re
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_CONVERSION = re.compile(r"(?:\b([A-Za-z_]\w*)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
"""A conversion of a %-format, with the name of the field before it."""

logger = logging.getLogger(__name__)


class LogSettings(msgspec.Struct, frozen=True):
    """Settings of a process's log. `rank` is that of a process that shares a model."""

    level: int
    format: LogFormat = "text"
    part: str = ""
    """Peer id of the process."""
    rank: int | None = None


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object a line: time, level, part, logger, message, and each `name=%s` of the format."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self.settings = settings

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": rfc3339(record.created), "level": record.levelname}
        line["part"] = self.settings.part
        if self.settings.rank is not None:
            line["rank"] = self.settings.rank
        line |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_line(line | {name: value for name, value in _fields(record) if name not in line})


def json_line(members: dict[str, object]) -> str:
    """Encode one line of a log. Numbers and truth values stay; other values become text without lone surrogates."""
    return msgspec.json.encode({name: _plain(value) for name, value in members.items()}).decode()


def rfc3339(seconds: float) -> str:
    """Return a time of `time.time` in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def start_logging(settings: LogSettings) -> None:
    """Configure the root logger. In JSON, uncaught exceptions become one line, too."""
    handler = logging.StreamHandler()
    if settings.format == "json":
        handler.setFormatter(JsonFormatter(settings))
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    else:
        rank = "" if settings.rank is None else f" [rank {settings.rank}]"
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s %(name)s{rank}: %(message)s"))
    logging.basicConfig(level=settings.level, handlers=[handler])


def settings_of_rank(rank: int) -> LogSettings:
    """Return the settings of this process's log for the process of another rank."""
    root = logging.getLogger()
    formatter = root.handlers[0].formatter if root.handlers else None
    own = formatter.settings if isinstance(formatter, JsonFormatter) else LogSettings(0)
    return msgspec.structs.replace(own, level=root.getEffectiveLevel(), rank=rank)


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """Yield the arguments that the message shows as `name=value`.

    They are found in the format, not in the message, so that a value cannot pose as a field.
    """
    if isinstance(record.args, tuple):
        values = iter(record.args)
        for match in _CONVERSION.finditer(str(record.msg)):
            if not match[0].endswith("%%"):
                value = next(values, None)
                if match[1]:
                    yield match[1], value


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).encode(errors="replace").decode()


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        logger.critical("uncaught exception: type=%s error=%s", kind.__name__, error, exc_info=(kind, error, trace))
