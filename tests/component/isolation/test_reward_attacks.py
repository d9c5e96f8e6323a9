"""Reward functions that attack the channel, the limits and the processes around them: each costs only its own sample."""

from __future__ import annotations

import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_cases import WatchedPool, alive, assert_gone, killed_parent, samples

from tandem.platform.rewards.functions import Outcome, Sample
from tandem.workers.isolation.frames import ProtocolError, new_nonce, receive, send

ATTACKS = '''
import multiprocessing, os, resource, signal, socket, stat, subprocess, sys, threading, time

def channels():
    """Descriptors of sockets and pipes of this process."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    kinds = {number: os.fstat(number).st_mode for number in numbers if os.path.exists(f"/proc/self/fd/{number}")}
    return [number for number, mode in kinds.items() if number > 2 and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))]

def write_everywhere(data):
    for number in channels():
        os.write(number, data)

def later(data):
    time.sleep(0.05)
    write_everywhere(data)

def in_background(note):
    """A process with a session of its own, whose parent ends at once."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(note, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists(note) or not os.path.getsize(note):
        time.sleep(0.01)

def twice(number):
    return 2 * number

def act(sample):
    what, _, note = sample.response.partition(" ")
    if what == "line":
        write_everywhere(b"[1.0, null, \\"\\", []]\\n" * 3)
    if what == "zeros":
        write_everywhere(bytes(100))
    if what == "flood":
        while True:
            write_everywhere(b"9" * 2**16)
    if what == "later":
        threading.Thread(target=later, args=(b"[1.0]",), daemon=True).start()
    if what == "nonces":
        frame = sys._getframe()
        while frame:
            nonce = frame.f_locals.get("nonce")
            if isinstance(nonce, bytes):
                write_everywhere((nonce + (19).to_bytes(4, "big") + b'[9.0, null, "", []]') * 3)
            frame = frame.f_back
    if what == "fork":
        os.fork()
        if note == "raise":
            raise KeyError("in both")
    if what == "exit":
        raise SystemExit(0)
    if what == "raise-limit":
        before = resource.getrlimit(resource.RLIMIT_AS)
        for wanted in (2 * before[0], resource.RLIM_INFINITY):
            for change in (
                lambda limits: resource.setrlimit(resource.RLIMIT_AS, limits),
                lambda limits: resource.prlimit(os.getpid(), resource.RLIMIT_AS, limits),
            ):
                try:
                    change((wanted, wanted))
                except (ValueError, PermissionError):
                    pass
        assert resource.getrlimit(resource.RLIMIT_AS) == before == (2**30, 2**30), before
    if what == "background":
        in_background(note)
    if what == "background-crash":
        in_background(note)
        os._exit(3)
    if what == "background-hang":
        in_background(note)
        time.sleep(1000)
    if what == "kill-parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    if what == "stop-parent":
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)
    if what == "kill-group":
        os.killpg(0, signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "close-all":
        os.closerange(3, 1024)
    if what == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return float(sum(pool.map(twice, [1, 2, 3])))
    if what == "child-sockets":
        listed = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
        return float("socket" in listed)
    if what == "forked-sockets":
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, b"1" if any(stat.S_ISSOCK(os.fstat(number).st_mode) for number in channels()) else b"0")
            os._exit(0)
        return float(os.read(reading, 1))
    if what == "print":
        sys.stdout.write("begins here\\n" + "x" * int(note) + "\\nends here\\n")
        sys.stdout.flush()
    return 0.25
'''


@pytest.fixture
def attacks(tmp_path: Path) -> str:
    (tmp_path / "attacks.py").write_text(ATTACKS)
    return f"{tmp_path}/attacks.py:act"


@pytest.fixture
def pool(attacks: str) -> Iterator[WatchedPool]:
    pool = WatchedPool(["exact_match", attacks, "exact_match"], timeout_s=1.0, memory_limit_mb=1024)
    yield pool
    pool.close()


def others_are_right(rows: list[list[Outcome]], attack: int = 1) -> bool:
    """Whether all samples of ("7", attack, "x", "7") except the attack itself have their correct scores."""
    right = [Outcome(1.0), Outcome(0.0), Outcome(0.0), Outcome(1.0)]
    fine = all(row[0] == row[2] == value for row, value in zip(rows, right, strict=True))
    return fine and all(row[1] == Outcome(0.25) for place, row in enumerate(rows) if place != attack)


@pytest.mark.parametrize(
    ("what", "problem", "detail"),
    [
        ("line", "crash", "wrote to the channel of its process: unrequested bytes"),
        ("zeros", "crash", "unrequested bytes"),
        ("flood", "crash", "unrequested bytes"),
        ("fork raise", "error", "in both"),
        ("exit", "error", "SystemExit"),
        ("kill-parent", "crash", "signal SIGKILL"),
        ("stop-parent", "timeout", "over 1 s"),
        ("kill-group", "crash", "signal SIGKILL"),
        ("stop", "timeout", "over 1 s"),
        ("close-all", "crash", "exit code 1"),
    ],
)
def test_costs_its_own_sample(pool: WatchedPool, what: str, problem: str, detail: str) -> None:
    start = time.monotonic()
    rows = pool.run(samples("7", what, "x", "7"))
    assert time.monotonic() - start < 5.0
    assert (rows[1][1].value, rows[1][1].problem) == (None, problem)
    assert detail in rows[1][1].detail
    assert others_are_right(rows)


@pytest.mark.parametrize(("what", "value"), [("fork", 0.25), ("raise-limit", 0.25), ("pool", 12.0)])
def test_is_scored_as_usual(pool: WatchedPool, what: str, value: float) -> None:
    rows = pool.run(samples("7", what, "x", "7"))
    assert rows[1][1] == Outcome(value)
    assert others_are_right(rows)
    assert pool.restarts == 0


@pytest.mark.parametrize("what", ["child-sockets", "forked-sockets"])
def test_what_a_function_starts_has_no_channel(pool: WatchedPool, what: str) -> None:
    assert pool.run(samples(what))[0][1] == Outcome(0.0)


def test_nonces_of_later_units_do_not_exist_yet(pool: WatchedPool) -> None:
    rows = pool.run(samples("7", "nonces", "x", "7"))
    assert rows[1][1] == Outcome(9.0)  # a function may return any score for its own sample
    assert others_are_right(rows)
    assert pool.restarts == 1


def test_who_writes_late_is_replaced_and_the_next_sample_is_not_to_blame(pool: WatchedPool) -> None:
    rows = pool.run([*samples("7", "later"), Sample("q", "slow", "7", 1, False), *samples("7")])
    assert rows[1][1] == Outcome(0.25)
    time.sleep(0.2)
    rows = pool.run(samples("7", "7", "x", "7"))
    assert [row[0].value for row in rows] == [1.0, 1.0, 0.0, 1.0]
    assert pool.restarts == 1


@pytest.mark.parametrize(("what", "problem"), [("background-crash", "crash"), ("background-hang", "timeout")])
def test_a_process_with_a_session_of_its_own_is_ended(pool: WatchedPool, tmp_path: Path, what: str, problem: str) -> None:
    note = tmp_path / "pid"
    assert pool.run(samples(f"{what} {note}"))[0][1].problem == problem
    assert_gone([int(note.read_text())])


def test_closing_ends_what_functions_started(attacks: str, tmp_path: Path) -> None:
    pool = WatchedPool([attacks])
    note = tmp_path / "pid"
    assert pool.run(samples(f"background {note}"))[0][0] == Outcome(0.25)
    assert alive(int(note.read_text()))
    pool.close()
    assert_gone([int(note.read_text())])


def test_a_killed_parent_leaves_nothing(attacks: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    background = f'pool.run([Sample("q", "background {note}", None, 1, False)])'
    pids = killed_parent(f"WatchedPool([{attacks!r}])", background, note)
    assert len(pids) == 2
    assert_gone(pids)


def test_what_functions_print_is_bounded(
    attacks: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret-of-some-length")
    pool = WatchedPool([attacks], memory_limit_mb=2048)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert pool.run(samples(*["print 100000000"] * 2)) == [[Outcome(0.25)]] * 2
    pool.close()
    log = capfd.readouterr().err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    assert len(log) < 3000
    assert log.startswith("begins here\nxxx")
    assert log.endswith("xxx\nends here\n")
    assert "bytes that reward functions printed are left out" in log
    left_out = int(log.partition("... about ")[2].partition(" bytes")[0])
    assert left_out == 2 * (100_000_000 + len("begins here\n") + len("\nends here\n")) - 2048


def test_little_print_is_passed_on_at_once_and_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talks.py"
    file.write_text("import os\ndef score(sample):\n    print(sample.response, 'ä')\n    return 1.0\n")
    pool = WatchedPool([f"{file}:score"])
    pool.run(samples("one"))
    time.sleep(0.2)
    assert capfd.readouterr().err == "one ä\n"
    pool.run(samples("two"))
    pool.close()
    assert capfd.readouterr().err == "two ä\n"


def test_secrets_are_not_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No secret is cut in two so that a part of it is printed, wherever the output is cut."""
    secret = "a-secret-of-some-length"
    monkeypatch.setenv("SOME_TOKEN", secret)
    file = tmp_path / "talks.py"
    file.write_text(
        "import os, sys\ndef score(sample):\n"
        "    sys.stdout.write('.' * int(sample.prompt) + os.environ['SOME_TOKEN'] * 900)\n"
        "    sys.stdout.flush()\n    return 1.0\n"
    )
    for dots in range(0, 24, 3):
        pool = WatchedPool([f"{file}:score"])
        pool.run([Sample(str(dots), "x", None, 1, False)])
        pool.close()
        log = capfd.readouterr().err
        assert "***" in log
        assert not any(secret[place : place + 6] in log for place in range(len(secret) - 6))


def test_the_deadline_is_for_the_whole_answer() -> None:
    ours, theirs = socket.socketpair()
    nonce = new_nonce()

    def drip() -> None:
        for byte in nonce + (100).to_bytes(4, "big") + b"x" * 100:
            try:
                theirs.send(bytes([byte]))
            except OSError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(ours, [nonce], timeout_s=0.5)
    assert time.monotonic() - start < 0.8
    ours.close()
    thread.join()
    theirs.close()


def test_an_answer_has_its_nonce_and_a_bounded_length() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        nonce = new_nonce()
        send(theirs, nonce, b"abc")
        assert receive(ours, [nonce]) == (nonce, b"abc")
        send(theirs, new_nonce(), b"abc")
        with pytest.raises(ProtocolError, match="unrequested bytes"):
            receive(ours, [nonce])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(nonce + (2**31).to_bytes(4, "big"))
        with pytest.raises(ProtocolError, match="2147483648 bytes"):
            receive(ours, [nonce], limit=1000)
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours, [nonce])


def test_the_command_line_tells_nothing() -> None:
    pool = WatchedPool(["exact_match"])
    (pid,) = pool.pids()
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    pool.close()
    assert command[1:4] == ["-P", "-m", "tandem.workers.isolation.reward_process"]
    assert command[4:] == [""]
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
