"""`lit-asyncrl` and `python -m lit_asyncrl`: a signal during the imports and the set-up ends the process quietly.

Nothing is learnt and nothing of ours runs by then. `AsyncRollout` takes the signals over while its engine runs.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Exit at once with 128 + signal number."""
    os._exit(128 + number)


def main() -> None:
    """Entry point of the command; see `lit_asyncrl.cli.main`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    from lit_asyncrl.cli import main as run  # seconds: Lightning, TorchRL, transformers

    run()


if __name__ == "__main__":
    main()
