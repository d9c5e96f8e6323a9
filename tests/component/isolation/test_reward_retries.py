"""Reward functions that call other services: transient errors are retried, and async functions run concurrently."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from reward_cases import WatchedPool, alive, rollout, samples

from tandem.platform.rewards.functions import Outcome, RewardError, Sample, TransientError, is_transient
from tandem.workers.isolation import reward_pool
from tandem.workers.roles.reward import RewardWorker

FUNCTIONS = """
import asyncio, os, time, urllib.request
from pathlib import Path
from tandem.platform.rewards.functions import TransientError

def judge(sample):
    '''Asks the server whose address is the prompt.'''
    with urllib.request.urlopen(sample.prompt + sample.response) as answer:
        return float(answer.read())

def forgetful(sample):
    note = Path(sample.prompt)
    note.write_text(note.read_text() + "x" if note.exists() else "x")
    if len(note.read_text()) < int(sample.response):
        raise TransientError("not yet")
    return 1.0

def mistaken(sample):
    raise KeyError("no such key")

async def ponder(sample):
    what = sample.response
    if what == "block":
        time.sleep(60)
    if what == "exit":
        os._exit(3)
    if what == "raise":
        raise KeyError("no such key")
    if what == "late":
        await asyncio.sleep(60)
    if what == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if what == "fork":
        os.fork()
    await asyncio.sleep(0.5)
    return float(len(what))

def length(sample):
    return float(len(sample.response))
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"{tmp_path}/functions.py"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_pool, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(reward_pool, "ASYNC_GRACE_S", 0.5)


@pytest.fixture
def server() -> Iterator[str]:
    """A server that answers the first two requests of each path with 429, later ones with 0.5, and `/missing` with 404."""
    asked: dict[str, int] = {}

    class Judge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] = asked.get(self.path, 0) + 1
            body = json.dumps(0.5).encode()
            self.send_response(404 if self.path == "/missing" else 429 if asked[self.path] < 3 else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def pool(file: str) -> Iterator[Callable[..., WatchedPool]]:
    pools: list[WatchedPool] = []

    def make(*names: str, **settings: float) -> WatchedPool:
        pools.append(WatchedPool([f"{file}:{name}" for name in names], **settings))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def test_an_overloaded_judge_is_asked_again(pool: Callable[..., WatchedPool], server: str) -> None:
    outcomes = pool("judge").run([Sample(server, f"/{name}", None, 1, False) for name in "abc"])
    assert outcomes == [[Outcome(0.5)]] * 3


def test_what_stays_down_is_an_error_that_says_so(pool: Callable[..., WatchedPool], server: str) -> None:
    [[missing], [refused]] = pool("judge", retries=2).run(
        [Sample(server, "/missing", None, 1, False), Sample("http://127.0.0.1:9/", "", None, 1, False)]
    )
    assert (missing.problem, refused.problem) == ("error", "error")
    assert missing.detail.endswith("HTTP Error 404: Not Found")  # a retry does not help
    assert "Connection refused" in refused.detail
    assert refused.detail.endswith(", after 2 retries")


def test_retries_are_counted_and_hold_up_nobody(pool: Callable[..., WatchedPool], tmp_path: Path) -> None:
    made = pool("forgetful", "length", retries=3)
    needs = [Sample(str(tmp_path / f"note{number}"), str(number), None, 1, False) for number in (4, 5, 1)]
    start = time.monotonic()
    rows = made.run(needs)
    assert time.monotonic() - start < 2.0
    assert [row[0].value for row in rows] == [1.0, None, 1.0]
    assert rows[1][0].detail.endswith("TransientError: not yet, after 3 retries")
    assert [len((tmp_path / f"note{number}").read_text()) for number in (4, 5, 1)] == [4, 4, 1]
    assert [row[1].value for row in rows] == [1.0] * 3


def test_a_mistake_is_not_tried_again(file: str) -> None:
    worker = RewardWorker(_config(file, "mistaken"))
    start = time.monotonic()
    with pytest.raises(RewardError, match="no such key"):
        worker.score([rollout("a")])
    assert time.monotonic() - start < 0.5
    worker.close()


def _config(file: str, name: str, **more: object) -> object:
    from tandem.platform.config.schema import RewardConfig

    return RewardConfig(function=f"{file}:{name}", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransientError("busy"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ValueError(), False),
        (OSError("disk"), False),
        (type("HTTPError", (Exception,), {"code": 503})(), True),
        (type("StatusError", (Exception,), {"response": type("R", (), {"status_code": 429})})(), True),
        (type("StatusError", (Exception,), {"status_code": 401})(), False),
    ],
)
def test_what_is_transient(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected
    wrapped = RuntimeError("the library says")
    wrapped.__cause__ = error
    assert is_transient(wrapped) is expected


def test_async_samples_are_scored_beside_each_other(pool: Callable[..., WatchedPool]) -> None:
    made = pool("ponder", "length", concurrency=20)
    start = time.monotonic()
    rows = made.run(samples(*["four"] * 40))
    assert 1.0 <= time.monotonic() - start < 1.0 + 0.6  # two rounds of 20
    assert rows == [[Outcome(4.0), Outcome(4.0)]] * 40


def test_more_samples_join_while_others_are_scored(pool: Callable[..., WatchedPool]) -> None:
    made = pool("ponder", timeout_s=3.0)
    first = made.submit(samples("late"))
    time.sleep(0.2)
    start = time.monotonic()
    assert made.run(samples("abc")) == [[Outcome(3.0)]]
    assert time.monotonic() - start < 1.0
    assert first.wait()[0][0].problem == "timeout"


@pytest.mark.parametrize(
    ("what", "problem", "detail"),
    [
        ("late", "timeout", "took over 1 s"),
        ("stubborn", "timeout", "took over 1 s"),
        ("raise", "error", "no such key"),
        ("exit", "crash", "exit code 3"),
    ],
)
def test_an_async_sample_costs_itself_only(pool: Callable[..., WatchedPool], what: str, problem: str, detail: str) -> None:
    made = pool("ponder", timeout_s=1.0)
    rows = made.run(samples("a", what, "bb", "ccc", "dd"))
    assert [row[0].value for row in rows] == [1.0, None, 2.0, 3.0, 2.0]
    assert rows[1][0].problem == problem
    assert detail in rows[1][0].detail


def test_a_loop_that_is_blocked_is_ended(pool: Callable[..., WatchedPool]) -> None:
    """A function that blocks the event loop makes concurrent units time out; later units are scored."""
    made = pool("ponder", timeout_s=0.7)
    assert made.run(samples("block"))[0][0].problem == "timeout"
    assert made.run(samples("abc")) == [[Outcome(3.0)]]
    assert len(made.pids()) == 2


def test_a_fork_in_an_async_function_answers_once(pool: Callable[..., WatchedPool]) -> None:
    made = pool("ponder")
    assert made.run(samples("fork", "a", "bb")) == [[Outcome(4.0)], [Outcome(1.0)], [Outcome(2.0)]]
    assert made.restarts == 0


def test_closing_ends_async_samples(pool: Callable[..., WatchedPool]) -> None:
    made = pool("ponder", timeout_s=60)
    call = made.submit(samples("late", "stubborn"))
    time.sleep(0.3)
    pids = made.pids()
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 2.0
    with pytest.raises(RuntimeError, match="closed"):
        call.wait()
    assert not any(map(alive, pids))
