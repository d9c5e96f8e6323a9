"""The report of a run, built from the files of a folder."""

from __future__ import annotations

import copy
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from run_folders import FILES, SAMPLES, write_run

from tandem.launch.views.page import render


def page(folder: Path, **changes: Any) -> str:
    """The page of the run, with these settings by section besides, or another content of a file."""
    files = copy.deepcopy(FILES)
    for section, values in changes.items():
        files["config.yaml"].setdefault(section, {}).update(values)
    return render(write_run(folder / "a", files))


def words(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_the_header_says_model_data_score_and_what_was_set(folder: Path) -> None:
    text = page(
        folder, model={"path": "/models/m"}, data={"train": "sums.jsonl", "eval": "held.jsonl"}, train={"minibatches": 4}
    )
    head = words(text.partition(">Training<")[0])
    assert "Model /models/m" in head
    assert "Training data sums.jsonl" in head
    assert "Held-out data held.jsonl" in head
    assert "0.25 held-out accuracy, held 0.25 at first" in head
    assert "0.25 mean reward of the last step" in head
    assert "Reward exact_match" in head
    assert "algorithm ppo" in head
    differs = head.partition("Differs from the defaults")[2]
    assert "train.minibatches=4" in differs
    assert "run.seed=0" not in differs


def test_the_embedded_model_and_task_are_named(folder: Path) -> None:
    text = words(page(folder, model={"tiny": {"layers": 4, "hidden_size": 128}}, task={"name": "addition"}))
    assert "Model embedded model, 4 layers of width 128" in text
    assert "Training data embedded task addition Held-out data embedded task addition" in text


def test_charts_have_titles_for_people_keys_and_axes(folder: Path) -> None:
    text = page(folder)
    figures = re.findall("<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) >= 5
    for figure in figures:
        title, key = re.findall('<figcaption><b>(.*?)</b><span class="key">(.*?)</span>', figure)[0]
        assert "/" not in title
        assert "/" in key
        assert ">training step</text>" in figure or title.startswith("Memory")
    assert any("Response length" in figure and "response/length_mean (tokens)" in figure for figure in figures)


def test_why_a_chart_is_missing_is_said_once(folder: Path) -> None:
    once = "Not shown: policy/approx_kl, policy/clip_frac, policy/ratio_max. One optimizer step per batch"
    assert page(folder, train={"minibatches": 1, "epochs_per_batch": 1}).count(once) == 1
    assert once not in page(folder, train={"minibatches": 2, "epochs_per_batch": 1})


def test_samples_are_cards_with_the_worst_and_the_best_marked(folder: Path) -> None:
    rows = [{**SAMPLES[0], "reward": reward, "prompt": f"p{number}"} for number, reward in enumerate((0.0, 0.5, 1.0, None))]
    write_run(folder / "a", {**FILES, "samples/step-000001.jsonl": rows, "samples/step-000020.jsonl": rows[:1]})
    text = render(folder / "a")
    cards = [words(card) for card in re.findall("<article.*?</article>", text)]
    # The newest step first; one sample alone is neither best nor worst.
    assert [card.partition(" 2 answer")[0] for card in cards] == [
        "reward 0 p0",
        "reward 0 lowest reward p0",
        "reward 0.5 p1",
        "reward 1 highest reward p2",
        "reward - p3",
    ]
    assert words(text).index("Step 20") < words(text).index("Step 1 ")


def test_the_page_is_made_for_a_phone_too(folder: Path) -> None:
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in page(folder)
