"""The command-line option of the chaos tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everywhere", action="store_true", help="hurt every role in every phase")
