"""Makes text safe to show: removes secrets and escapes characters that control a terminal or hide text."""

from __future__ import annotations

import re
import sys

from tandem.platform.system.redact import redacted

STEERING = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except newline and tab: ESC, CSI, carriage return, backspace, ...
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible
    "\ud800-\udfff\ufffe\uffff"  # not characters: half surrogate pairs, as in file names that are not UTF-8
    "]"
)


def shown(value: object) -> str:
    """A value as text that is safe to show: without secrets, invisible and control characters as \\x1b, \\u202e etc."""
    return STEERING.sub(lambda match: _code(ord(match[0])), redacted(str(value)))


def one_line(value: object) -> str:
    """The result of `shown` in one line, for a table cell."""
    return shown(value).replace("\n", "\\n").replace("\t", "\\t")


def say(value: object, *, error: bool = False, end: str = "\n") -> None:
    """Writes a value to standard output or standard error, made safe by `shown`. Characters that the terminal's encoding
    lacks are written as \\uXXXX.
    """
    to = sys.stderr if error else sys.stdout
    encoding = getattr(to, "encoding", None) or "utf-8"
    print(shown(value).encode(encoding, "backslashreplace").decode(encoding), file=to, end=end, flush=True)


def _code(point: int) -> str:
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
