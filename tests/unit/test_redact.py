"""Secrets stay out of what is written."""

from __future__ import annotations

import pytest

from tandem.platform.redact import redacted, redacted_values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:secret@bucket/runs", "s3://***@bucket/runs"),
        ("https://host/a?api_key=abc&x=1", "https://host/a?api_key=***&x=1"),
        ("https://host/a?X-Amz-Signature=0f0f", "https://host/a?X-Amz-Signature=***"),
        ("nothing to hide: lr=1e-5", "nothing to hide: lr=1e-5"),
    ],
)
def test_credentials_in_addresses(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MY_TOKEN", "0123456789")  # within the other: the longer one goes first
    monkeypatch.setenv("SHORT_TOKEN", "gpu")
    monkeypatch.setenv("OPENAI_KEY", "keykeykeykey1")
    monkeypatch.setenv("MY_PASS", "passpasspass")
    monkeypatch.setenv("KEYBOARD_LAYOUT", "colemak-dh")
    monkeypatch.setenv("TOKEN_FOLDER", "/tmp/somewhere")
    assert redacted("0123456789abcdef and 0123456789 on gpu") == "*** and *** on gpu"
    assert redacted("keykeykeykey1 passpasspass colemak-dh") == "*** *** colemak-dh"
    assert redacted_values({"a": ["x 0123456789"], "n": 3}) == {"a": ["x ***"], "n": 3}
