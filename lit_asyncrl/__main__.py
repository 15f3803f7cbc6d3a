"""`lit-asyncrl` and `python -m lit_asyncrl`: a signal during the imports and the set-up ends the process quietly.

Nothing is learnt and nothing of ours runs by then. `AsyncRollout` takes the signals over while its engine runs. Warnings of this
package are one line each.
"""

from __future__ import annotations

import os
import signal
import sys
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
    run()


if __name__ == "__main__":
    main()
