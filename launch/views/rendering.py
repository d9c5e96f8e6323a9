"""Self-contained pages from templates. Every value is escaped, and made safe to show, on its way into the page."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tandem.launch.views.palette import DARK, LIGHT
from tandem.platform.system.terminal import shown

TEMPLATES = Path(__file__).parent / "templates"


def rendered(template: Path, **values: object) -> str:
    """The page of a template, which may extend or import the templates of this folder.

    Raises:
        jinja2.UndefinedError: the template uses a value that is not given.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, TEMPLATES]),
        autoescape=True,
        finalize=_safe,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(light=LIGHT, dark=DARK, **values)


def _safe(value: object) -> object:
    """Markup as it is, which is a chart or the output of a macro; everything else as text that is safe to show."""
    return value if isinstance(value, Markup) else shown(value)
