"""One line per event on stderr: `TIME LEVEL PROCESS EVENT key=value …`."""

import json
import logging
import sys
import time

ROOT = "kvloom"


class Logger:
    """Events with fields. The event is a constant phrase; everything that varies goes into the fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: object) -> None:
        """For the one who reads the code."""
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: object) -> None:
        """For the one who runs the cluster."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        """Something was put right."""
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, *, exc: BaseException | None = None, **fields: object) -> None:
        """Something failed; `exc` adds its traceback below the line."""
        self._logger.error(event, extra={"fields": fields}, exc_info=exc)


def get_logger(name: str) -> Logger:
    """Logger of a module or subject; silent below WARNING until `configure_logging` ran."""
    return Logger(logging.getLogger(f"{ROOT}.{name}"))


def configure_logging(process: str, level: str = "INFO") -> None:
    """Sends all events of this process to stderr; `process` is e.g. "coordinator" or "rank1". Replaces an earlier set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


class LineFormatter(logging.Formatter):
    """The line above; a value with blanks, quotes or line ends is written as a JSON string."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it if there is one."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = "".join(f" {key}={_value(value)}" for key, value in getattr(record, "fields", {}).items())
        line = f"{now} {record.levelname} {self._process} {' '.join(record.getMessage().split())}{fields}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)
