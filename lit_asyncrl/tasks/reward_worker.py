"""The process behind `MathVerify`: reads one JSON request a line, answers with one JSON line.

It is started as a file (`python -P reward_worker.py`), so that it loads math-verify and nothing of this package. It ends when its
standard input does, that is, with its parent. While it computes, the kernel ends it, which also stops what never returns to
Python: by SIGIO when the other end of its standard input is closed, and by an alarm when a request outlives its limit.

    on start: {"ready": true}
    {"answer": str, "completion": str, "limit_s": float}  ->  {"score": 0.0 or 1.0}  or  {"error": str}
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from math_verify import parse, verify


def score(answer: str, completion: str) -> float:
    """1.0 if math-verify finds the response equivalent to the answer."""
    # math-verify reads LaTeX only inside its delimiters; a plain answer is given them.
    gold = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    # Its own time limits rest on Python's signal handlers, and count as a wrong answer: switched off.
    target = parse(completion, parsing_timeout=None)
    return float(verify(parse(gold, parsing_timeout=None), target, timeout_seconds=None))


@contextmanager
def mortal(limit_s: float) -> Iterator[None]:
    """The process ends meanwhile with its parent, and after `limit_s` seconds. The parent sends nothing before the answer."""
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO at any change of the pipe; its default is the process's end
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    if poll.poll(0):  # closed before SIGIO was asked for
        sys.exit(0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        fcntl.fcntl(0, fcntl.F_SETFL, flags)


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not mix with the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    for number in (signal.SIGALRM, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    logging.disable(logging.WARNING)  # math-verify warns at each call that its time limits are off
    replies.write('{"ready": true}\n')
    replies.flush()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        with mortal(request["limit_s"]):
            try:
                reply: dict[str, Any] = {"score": score(request["answer"], request["completion"])}
            except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
                reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
