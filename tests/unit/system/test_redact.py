"""Secrets stay out of written files."""

from __future__ import annotations

import html
import json
import time
from urllib.parse import quote_plus

import pytest
import yaml

from tandem.platform.system.redact import redacted, redacted_values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:secret@bucket/runs", "s3://***@bucket/runs"),
        ("https://host/a?api_key=abc&x=1", "https://host/a?api_key=***&x=1"),
        ("https://host/a?X-Amz-Signature=0f0f", "https://host/a?X-Amz-Signature=***"),
        ("https://host/a?x=1&my_token=t&y=2 and https://u@h/b", "https://host/a?x=1&my_token=***&y=2 and https://***@h/b"),
        ("nothing to hide: lr=1e-5", "nothing to hide: lr=1e-5"),
    ],
)
def test_credentials_in_addresses(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MY_TOKEN", "0123456789")  # contained in the other secret: the longer secret is replaced first
    monkeypatch.setenv("SHORT_TOKEN", "gpu")
    monkeypatch.setenv("OPENAI_KEY", "keykeykeykey1")
    monkeypatch.setenv("MY_PASS", "passpasspass")
    monkeypatch.setenv("KEYBOARD_LAYOUT", "colemak-dh")
    monkeypatch.setenv("TOKEN_FOLDER", "/tmp/somewhere")
    assert redacted("0123456789abcdef and 0123456789 on gpu") == "*** and *** on gpu"
    assert redacted("keykeykeykey1 passpasspass colemak-dh") == "*** *** colemak-dh"
    assert redacted_values({"a": ["x 0123456789"], "n": 3}) == {"a": ["x ***"], "n": 3}
    assert redacted_values({"keykeykeykey1": 1}) == {"***": 1}


@pytest.mark.parametrize(
    "name", ["GITHUB_PAT", "SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "KEY", "ssh_passphrase"]
)
def test_names_that_speak_of_secrets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "planted-value-1")
    assert redacted("it is planted-value-1.") == "it is ***."


@pytest.mark.parametrize("name", ["PATH", "PATTERN", "COMPAT", "MONKEY", "COMPASS_DIRECTION"])
def test_names_that_do_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "planted-value-1")
    assert redacted("it is planted-value-1.") == "it is planted-value-1."


SECRETS = {
    "quotes": 'it\'s "quoted" & <b>',
    "lines": "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn\nAbCdEfGhIjKlMnOpQrStUvWxYz012345\n-----END KEY-----\n",
    "long": "x1y2z3" * 400,
    "words": "several words with spaces in them, and more of them, so that a line of YAML at its usual width is folded",
    "letters": "pässwörd-ключ-秘密",
    "slashes": "a/b\\c+d=e%f",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_found_in_every_form_it_is_written_in(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    secret = SECRETS[kind]
    monkeypatch.setenv("MY_SECRET", secret)
    for text in (
        secret,
        repr({"a": secret}),
        str(ValueError(secret)),
        json.dumps({"a": secret}),
        json.dumps({"a": secret}, ensure_ascii=False),
        html.escape(secret),
        f"https://host/?x={quote_plus(secret)}",
        f"https://host/?x={quote_plus(secret, safe='/')}",
    ):
        assert "***" in redacted(text)
        assert not any(part in redacted(text) for part in (secret[:12], secret[-12:], "MIIEpAIB", "AbCdEfGh"))
    assert yaml.safe_load(yaml.safe_dump(redacted_values({"a": [secret], "b": 1}))) == {"a": ["***"], "b": 1}


@pytest.mark.parametrize(
    "unit", ["a", "aaaa://", "://a", "?token", "?a=", "&key=b", "https://u@", "token", "x1y2", "\\", "'", "secret="]
)
def test_time_is_linear_in_the_text(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    """A megabyte without a break is redacted quickly; quadratic time would take hours."""
    monkeypatch.setenv("MY_SECRET", "x1y2" * 5 + "z")
    start = time.process_time()
    redacted(unit * (1_000_000 // len(unit)))
    assert time.process_time() - start < 5
