"""Pages rendered by headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.launch.views.palette import COLOURS

# Puts into the page's title which texts lie outside their figure or overlap another text.
LOOK = """<script>
let bad = [];
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")];
  texts.forEach((one, i) => {
    const a = one.getBoundingClientRect();
    if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1)
      bad.push("out: " + one.textContent);
    for (const other of texts.slice(i + 1)) {
      const b = other.getBoundingClientRect();
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        bad.push(one.textContent + " over " + other.textContent);
    }
  });
}
document.title = JSON.stringify({bad, wide: document.documentElement.scrollWidth > innerWidth});
parent.postMessage(document.title, "*");
</script>"""
NARROWEST = 500  # the smallest window of headless Chromium; a narrower page is shown in a frame
FRAME = """<title></title><script>onmessage = (message) => { document.title = message.data; };</script>
<iframe src="page.html" width="%d" height="1000" style="border: 0"></iframe>"""


@dataclass(frozen=True)
class Seen:
    """A rendered page: its text, and its drawing errors."""

    text: str
    faults: dict[str, Any]


def browser(page: Path, *arguments: str) -> str:
    """The output of headless Chromium for a page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here; .ci/run installs one")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={page.parent / 'profile'}"]
    command = [chromium, *quiet, *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def look_at(page: Path, folder: Path, width: int) -> Seen:
    """Renders a copy of the page, in `folder`, in a window of this width."""
    copy = folder / "page.html"
    copy.write_text(page.read_text().replace("</body>", LOOK + "</body>"))
    shown, wait = copy, list[str]()
    if width < NARROWEST:
        shown, wait = folder / "frame.html", ["--virtual-time-budget=2000"]
        shown.write_text(FRAME % width)
    text = browser(shown, "--dump-dom", f"--window-size={width},1000", *wait)
    found = re.search("<title>(.*?)</title>", text)
    assert found is not None
    return Seen(text if shown == copy else copy.read_text(), json.loads(found[1].replace("&gt;", ">")))


def screenshot(page: Path, folder: Path, height: int = 1400) -> Path:
    """Takes a picture of the page."""
    copy, picture = folder / "page.html", folder / "shot.png"
    copy.write_text(page.read_text())
    browser(copy, f"--screenshot={picture}", f"--window-size=1440,{height}")
    return picture


def colours_on(picture: Path) -> set[str]:
    """The colours of series that occur in a picture."""
    from matplotlib.image import imread

    pixels = (imread(picture)[..., :3] * 255).round().astype(int)

    def is_there(colour: str) -> bool:
        wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        return bool((abs(pixels - wanted).sum(axis=-1) < 12).sum() > 100)

    return {colour for colour in COLOURS if is_there(colour)}
