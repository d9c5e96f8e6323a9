"""The rooms of the packages and which of them import which: `python tests/unit/rooms.py` prints the picture."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    *("platform.config", "platform.system", "platform.experience", "platform.data", "platform.rewards"),
    *("platform.algorithms", "platform.loop", "platform.planning", "platform.records"),
    *("workers.cluster", "workers.models", "workers.isolation", "workers.sync", "workers.training", "workers.engines"),
    *("workers.roles", "workers.groups"),
    *("launch.compose", "launch.storage", "launch.views", "launch.trackers", "launch.assembly", "launch"),
)
"""From the ground up: a room imports itself and those before it. `launch` itself holds a file per command."""


def room_of(module: str) -> str:
    """The room of a module: `tandem.platform.loop.driver` -> `platform.loop`, or its top folder if it is in no room."""
    _, top, *rest = module.split(".")
    is_room = bool(rest) and (ROOT / top / rest[0]).is_dir()
    return f"{top}.{rest[0]}" if is_room else top


def imports_of_rooms() -> dict[str, dict[str, list[str]]]:
    """For each room, the rooms that it imports, each with the importing files."""
    found: dict[str, dict[str, list[str]]] = {}
    for top in ("platform", "workers", "launch"):
        for path in sorted((ROOT / top).rglob("*.py")):
            file = path.relative_to(ROOT)
            own = room_of(f"tandem.{'.'.join(file.with_suffix('').parts)}")
            edges = found.setdefault(own, {})
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("tandem.p", "tandem.w", "tandem.l")):
                    edges.setdefault(room_of(str(node.module)), []).append(str(file))
    return found


def picture() -> str:
    """A line per room with the rooms that it imports; the lowest room is last."""
    found = imports_of_rooms()
    lines = []
    for room in reversed(ORDER):
        below = [other for other in ORDER if other in found.get(room, {}) and other != room]
        lines.append(f"{room:<21}{' '.join(below) or '-'}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
