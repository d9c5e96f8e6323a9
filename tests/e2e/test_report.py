"""The page of a run, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tandem.launch.compose import compose
from tandem.launch.report import main, render
from tandem.launch.run import run

pytestmark = pytest.mark.slow

# What is drawn outside its figure, or over another text of it, as the title of the page.
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
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of PPO with a KL term and held-out samples."""
    place = tmp_path_factory.mktemp("runs")
    small = ["model.warmstart.steps=0", "data.prompts_per_step=4", "rollout.samples_per_prompt=2", "task.eval_size=4"]
    more = ["algo.kl_loss_coef=0.1", "eval.every=2", "eval.samples_per_prompt=2", "tracking.samples_every=2"]
    own = [
        "cluster=inline",
        "run.steps=6",
        "run.name=r",
        f"run.dir={place}",
        "tracking.console=none",
        "reward.functions.boxed=0",
    ]
    config, _ = compose(["algo=ppo", *small, *more, *own, "reward.functions.exact_match=1"])
    assert run(config, time.time()) == 0
    return place / "r"


def browser(page: Path, *arguments: str) -> str:
    """What headless Chromium prints of a page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here; .ci/run installs one")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={page.parent / 'profile'}"]
    command = [chromium, *quiet, *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_run_leaves_its_page(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    for title in (
        "reward",
        "held-out accuracy",
        "KL",
        "entropy",
        "explained variance",
        "time per phase",
        "memory per role",
    ):
        assert f">{title}" in text
    assert "log-prob gap" in text
    assert len(re.findall("<tr>", text)) > 8
    # Nothing is fetched from anywhere.
    assert not re.findall(r"(?:src|href)=|@import|url\(", text)


@pytest.mark.parametrize("width", [1440, 700])
def test_it_looks_right_in_a_browser(folder: Path, tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    page.write_text((folder / "report.html").read_text().replace("</body>", LOOK + "</body>"))
    seen = browser(page, "--dump-dom", f"--window-size={width},1000")
    found = re.search("<title>(.*?)</title>", seen)
    assert found is not None
    assert json.loads(found[1].replace("&gt;", ">")) == {"bad": [], "wide": False}
    assert seen.count("<svg") >= 11


def test_a_screenshot_shows_the_curves(folder: Path, tmp_path: Path) -> None:
    """Every colour of a series is on it."""
    from matplotlib.image import imread

    shot = tmp_path / "shot.png"
    page = tmp_path / "page.html"
    page.write_text((folder / "report.html").read_text())
    browser(page, f"--screenshot={shot}", "--window-size=1440,1400")
    pixels = (imread(shot)[..., :3] * 255).round().astype(int)
    for colour in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0), (0, 0x9E, 0x73)):
        assert (abs(pixels - colour).sum(axis=-1) < 12).sum() > 100


def test_samples_cannot_break_the_page(folder: Path) -> None:
    """Whatever a model writes is shown as text."""
    path = max((folder / "samples").iterdir())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["response"] = "<script>alert(1)</script>&"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in render(folder)
    assert "<script>alert" not in render(folder)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "report.html").unlink()
    assert main([str(folder)]) == 0
    assert (folder / "report.html").exists()
    assert main([str(folder / "nothing")]) == 2
    assert "no run there" in capsys.readouterr().err
