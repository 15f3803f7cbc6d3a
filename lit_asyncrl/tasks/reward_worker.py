"""The process behind `MathVerify`: reads one JSON request a line, answers with one JSON line.

It is started as a file (`python -P reward_worker.py`), so that it loads math-verify and nothing of this package. It ends when its
standard input does, that is, with its parent; and a request that outlives its limit ends it through the kernel's alarm, which
also stops a computation that never returns to Python.

    on start: {"ready": true}
    {"answer": str, "completion": str, "limit_s": float}  ->  {"score": 0.0 or 1.0}  or  {"error": str}
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

from math_verify import parse, verify


def score(answer: str, completion: str) -> float:
    """1.0 if math-verify finds the response equivalent to the answer."""
    # math-verify reads LaTeX only inside its delimiters; a plain answer is given them.
    gold = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    # Its own time limits rest on Python's signal handlers, and count as a wrong answer: switched off.
    target = parse(completion, parsing_timeout=None)
    return float(verify(parse(gold, parsing_timeout=None), target, timeout_seconds=None))


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not mix with the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable(logging.WARNING)  # math-verify warns at each call that its time limits are off
    replies.write('{"ready": true}\n')
    replies.flush()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        try:
            reply: dict[str, Any] = {"score": score(request["answer"], request["completion"])}
        except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
