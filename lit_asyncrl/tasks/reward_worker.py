"""The process behind `MathVerify` and `KillableReward`: reads one JSON request a line, answers with one JSON line.

It is started as a file (`python -P reward_worker.py`), so that for math-verify it loads nothing of this package. It ends when its
standard input does, that is, with its parent. While it computes, the kernel ends it, which also stops what never returns to
Python: by SIGIO when the other end of its standard input is closed, and by an alarm when a request outlives its limit.

    first line: {"reward": null}, math-verify, or {"reward": pickled in base64, "path": of modules}  ->  {"ready": true}
    then, to math-verify: {"answer": str, "completion": str, "limit_s": float}  ->  {"score": 0.0 or 1.0}
    to another reward: {"call": (completion, example) pickled in base64, "limit_s": float}  ->  {"score": what it returned}

Instead of any answer: {"error": str}.
"""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Grader = Callable[[dict[str, Any]], Any]


def load(first: dict[str, Any]) -> Grader:
    """What answers the requests."""
    if first["reward"] is None:
        import math_verify

        # Its own time limits rest on Python's signal handlers, and count as a wrong answer: switched off.
        parse = partial(math_verify.parse, parsing_timeout=None)
        verify = partial(math_verify.verify, timeout_seconds=None, raise_on_error=True)
        logging.disable(logging.WARNING)  # it warns at each call that they are off
        return lambda request: judge(request["answer"], request["completion"], parse, verify)
    sys.path[:] = first["path"]
    reward = pickle.loads(base64.b64decode(first["reward"]))
    return lambda request: plain(reward(*pickle.loads(base64.b64decode(request["call"]))))


def judge(answer: str, completion: str, parse: Callable[[str], Any], verify: Callable[[Any, Any], bool]) -> float:
    """1.0 if math-verify finds the response equivalent to the answer.

    Raises:
        Exception: the answer holds no mathematics, or cannot be compared with itself.
    """
    # math-verify reads LaTeX only inside its delimiters; a plain answer is given them.
    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise ValueError(f"no mathematics found in the answer {answer!r}")
    try:
        return float(verify(gold, parse(completion)))
    except Exception:  # noqa: BLE001 - of the response, such as an infinite number, unless the answer alone causes it too
        verify(gold, gold)
        return 0.0


def plain(value: Any) -> Any:
    """A number as JSON has it; what is no number is sent as it is, and refused by the parent."""
    return value if value is None or isinstance(value, (bool, int, float, str, list)) else float(value)


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
    graders: list[Grader] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if not graders:
            graders.append(load(request))
            return {"ready": True}
        with mortal(request["limit_s"]):
            return {"score": graders[0](request)}

    for line in sys.stdin:
        try:
            reply = json.dumps(answer(json.loads(line)))
        except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        replies.write(f"{reply}\n")
        replies.flush()


if __name__ == "__main__":
    main()
