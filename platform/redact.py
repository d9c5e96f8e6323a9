"""Keeps secrets out of what a run writes and says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

SECRET_NAMES = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_(KEY|PASS)$)", re.IGNORECASE
)
SHORTEST = 8  # characters: shorter values are too likely to be something else
HIDDEN = "***"


def redacted(text: str) -> str:
    """Text without the credentials in addresses (scheme://user:password@host, ?token=...) and without the values of
    environment variables whose names speak of secrets.
    """
    text = re.sub(r"(\w+://)[^/@\s]+@", rf"\1{HIDDEN}@", text)
    text = re.sub(
        r"([?&][\w-]*(?:token|secret|password|key|signature)[\w-]*=)[^&\s]+", rf"\1{HIDDEN}", text, flags=re.IGNORECASE
    )
    for value in _secrets():
        text = text.replace(value, HIDDEN)
    return text


def redacted_values(value: Any) -> Any:
    """The same for every text within lists and mappings."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {name: redacted_values(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(one) for one in value]
    return value


def _secrets() -> list[str]:
    """Longest first, so that none hides a part of another."""
    found = {value for name, value in os.environ.items() if SECRET_NAMES.search(name) and len(value) >= SHORTEST}
    return sorted((value for value in found if not os.path.exists(value)), key=len, reverse=True)
