"""Keeps secrets out of the files and messages of a run.

Values are redacted before they are written as JSON, YAML or HTML, which escape quotes and line breaks and fold long text.
Text from other sources is also searched for the escaped forms. Time is linear in the length of the text.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|WEBHOOK|(?:^|_)(?:KEY|PASS|PAT|DSN)$",
    re.IGNORECASE,
)
SHORTEST = 8  # characters; shorter values probably match unrelated text
SHORTEST_LINE = 16  # characters of a line of a multi-line secret, such as a private key
HIDDEN = "***"
_ADDRESS = re.compile(r"(://)[^/@\s]+@")
_PARAMETER = re.compile(r"([?&][\w-]+=)[^&\s]+")
_SECRET_PARAMETER = re.compile(r"token|secret|password|key|signature", re.IGNORECASE)


def redacted(text: str) -> str:
    """Removes credentials in addresses (scheme://user:password@host, ?token=...) from a text, and the values of environment
    variables whose names suggest secrets.
    """
    text = _ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _PARAMETER.sub(lambda match: match[1] + HIDDEN if _SECRET_PARAMETER.search(match[1]) else match[0], text)
    secrets = _secrets_pattern(_secrets())
    return secrets.sub(HIDDEN, text) if secrets else text


def redacted_values(value: Any) -> Any:
    """Applies `redacted` to every text within lists and mappings, including keys."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redacted_values(key): redacted_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(item) for item in value]
    return value


def _secrets() -> tuple[str, ...]:
    """Secret values in the environment of this process. Paths of existing files do not count as secrets."""
    values = [os.environ.get(name, "") for name in os.environ if _speaks_of_secrets(name)]
    return tuple(value for value in sorted(values) if len(value) >= SHORTEST and not os.path.exists(value[:4096]))


@lru_cache(maxsize=1024)
def _speaks_of_secrets(name: str) -> bool:
    return SECRET_NAMES.search(name) is not None


@lru_cache(maxsize=4)
def _secrets_pattern(values: tuple[str, ...]) -> re.Pattern[str] | None:
    forms = {form for value in values for form in _forms(value) if len(form) >= SHORTEST}
    # Longest first, because a shorter secret may be part of a longer one.
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


def _forms(value: str) -> Iterator[str]:
    """A secret verbatim, in escaped forms, and its longer lines."""
    yield from (value, value.strip(), repr(value)[1:-1], value.replace("'", "''"))
    yield from (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    yield from (
        quote(value, errors="replace"),
        quote(value, safe="", errors="replace"),
        quote_plus(value, errors="replace"),
    )
    yield from (html.escape(value), html.escape(value, quote=False))
    yield from (line.strip() for line in value.splitlines() if len(line.strip()) >= SHORTEST_LINE)
