"""The numbers of a step."""

from __future__ import annotations

Metrics = dict[str, float]
"""Values by key, as `reward/mean`."""
