"""The file of a record: a header, then one event a line, only ever appended to; what is in it survives a kill of the run."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.recording.events import Event, to_line
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.waits import Inbox, start_thread

FORMAT = 1
"""Version of the file's format."""
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Header:
    """What a replay has to have in common with the run.

    Attributes:
        configuration: settings by key, plain values.
        seed: of prompts and sampling.
        num_threads: CPU threads of the trainer: sums run in an order that depends on them.
        device: kind of the trainer's device.
        torch: version of PyTorch.
    """

    configuration: dict[str, Any]
    seed: int
    num_threads: int
    device: str
    torch: str


class RecordWriter:
    """Appends events in the background, so that who reports one never waits for a disk.

    A disk that is full ends the record, with a warning, and not the run.

    Args:
        path: of the new file.
        supervisor: gets other faults.
    """

    def __init__(self, path: str, supervisor: Supervisor) -> None:
        self._path = Path(path)
        self._supervisor = supervisor
        self._inbox: Inbox[Callable[[], Event]] = Inbox()

    def start(self, header: Header) -> None:
        """Make the file and write the header.

        Raises:
            ConfigurationError: it exists, or cannot be written.
        """
        check_new(str(self._path))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb", buffering=0)
            self._write(to_line(["header", FORMAT, asdict(header)]))
        except OSError as error:
            raise _unwritable(str(self._path), error) from error
        self._thread = start_thread(self._run, "run-recorder")

    def put(self, make: Callable[..., Event], *arguments: Any) -> None:
        """Append the event that `make(*arguments)` gives, whose arguments must not change any more; returns at once."""
        self._inbox.put(partial(make, *arguments))

    def close(self) -> None:
        """Write what was put, and close the file; idempotent."""
        self._inbox.close()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with self._file:
                for make in self._inbox:
                    self._write(to_line(make()))
        except OSError as error:
            warnings.warn(
                f"The record {str(self._path)!r} ends here ({error.strerror or error}); the run goes on, and can be replayed up "
                "to here.",
                stacklevel=2,
            )
        except Exception as error:  # noqa: BLE001 - raised by the supervisor in the trainer's thread
            self._supervisor.fail(error, "run recorder")
        finally:
            self._inbox.discard()

    def _write(self, line: bytes) -> None:
        if self._file.write(line) != len(line):
            raise OSError("a line was written in part: no space left")


def check_new(path: str) -> None:
    """Refuse a path where no record can be begun. Nothing is made.

    Raises:
        ConfigurationError: the file exists (a record is never overwritten), or cannot be written.
    """
    if Path(path).exists():
        raise ConfigurationError(
            f"AsyncRollout.record_run must name a new file, got {path!r}, which exists. Give another path, or remove it."
        )
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits say nothing to root, nor of a read-only file system
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"AsyncRollout.record_run must be a file that can be written, got {path!r} ({error.strerror}).")


def read_header(path: str) -> Header:
    """The header of a record.

    Raises:
        ConfigurationError: there is no such file, it is no record, or one of another format.
    """
    try:
        with Path(path).open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error
    try:
        kind, version, fields = json.loads(line) if line.endswith(b"\n") else (None, None, {})
    except (ValueError, TypeError):  # no JSON, or no list of three
        kind, version, fields = None, None, {}
    if kind != "header":
        raise _refusal(path, "it does not begin with the header of a record")
    if version != FORMAT:
        raise _refusal(path, f"its format is {version}, and {FORMAT} is read here")
    try:
        return Header(**fields)
    except TypeError as error:
        raise _refusal(path, "its header lacks a field, or has one too many") from error


def read_events(path: str) -> list[Event]:
    """All events of a record; a last line that was not written to its end is left out.

    Raises:
        ConfigurationError: a line that is not the last one is damaged; names it.
    """
    events = []
    with Path(path).open("rb") as file:
        file.readline()
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                break
            try:
                events.append(json.loads(line))
            except ValueError as error:
                raise _refusal(path, f"line {number} is damaged: {error}") from error
    return events


def _refusal(path: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"AsyncRollout.replay_run must name a record that AsyncRollout.record_run has written, got {path!r} ({why})."
    )
