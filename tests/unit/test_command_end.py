"""How the command leaves: exit functions run, output is written, and no thread can spoil the exit code."""

import subprocess
import sys

import pytest

START = "import atexit, threading, time; from lit_asyncrl.__main__ import end; atexit.register(print, 'bye'); print('out');"


def _leave(script: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", START + script], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("code", "seen"), [("0", 0), ("None", 0), ("143", 143)])
def test_the_code_is_kept_and_exit_functions_run(code: str, seen: int) -> None:
    assert _leave(f"end({code})") == (seen, "out\nbye\n", "")


def test_a_message_is_told_and_means_one() -> None:
    assert _leave("end('no such file')") == (1, "out\nbye\n", "no such file\n")


def test_a_daemon_thread_is_not_waited_for() -> None:
    assert _leave("threading.Thread(target=time.sleep, args=(50,), daemon=True).start(); end(2)") == (2, "out\nbye\n", "")


def test_a_thread_that_wants_to_be_waited_for_ends_first() -> None:
    script = "threading.Thread(target=lambda: (time.sleep(0.2), print('saved'))).start(); end(2)"
    assert _leave(script) == (2, "out\nsaved\nbye\n", "")
