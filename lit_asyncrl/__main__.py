"""`lit-asyncrl` and `python -m lit_asyncrl`: a signal during the imports and the set-up ends the process quietly.

Nothing is learnt and nothing of ours runs by then. `AsyncRollout` takes the signals over while its engine runs. Warnings of this
package are one line each.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

Format = Callable[..., str]
"""What makes the text of a warning, as `warnings.formatwarning` does."""


def leave(number: int, frame: FrameType | None) -> None:
    """Exit at once with 128 + signal number."""
    os._exit(128 + number)


def one_line(others: Format) -> Format:
    """A format of one line for warnings of this package, over a progress bar on a terminal.

    Args:
        others: format of all other warnings.
    """

    def format_warning(message: Warning | str, *details: Any) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _module(frame).rpartition(".")[2] in ("warnings", "rank_zero"):
            frame = frame.f_back  # now at who called `warnings.warn` or Lightning's `rank_zero_warn`
        if frame is None or not _module(frame).startswith("lit_asyncrl"):
            return others(message, *details)
        start = "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""
        return f"{start}lit-asyncrl: warning: {message}\n"

    return format_warning


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def main() -> None:
    """Entry point of the command; see `lit_asyncrl.cli.main`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    from lit_asyncrl.cli import main as run  # seconds: Lightning, TorchRL, transformers

    warnings.formatwarning = one_line(warnings.formatwarning)  # Lightning has set its own, which hides ours
    try:
        run()
        code: Any = 0
    except SystemExit as leaving:
        code = leaving.code
    except Exception:  # noqa: BLE001 - told as the interpreter tells it, and left as below
        sys.excepthook(*sys.exc_info())
        code = 1
    end(code)


def end(code: Any) -> None:
    """Leave with this code (or message) when exit functions have run, without taking the interpreter apart.

    A thread that comes back from C++ while the interpreter is taken apart aborts the process, and PyTorch and vLLM have such
    threads. Threads that want to be waited for, which are not daemons, get the usual end.
    """
    if not all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        raise SystemExit(code)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)  # noqa: T201 - what the interpreter does
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
