"""Lightning's plugin that writes checkpoints atomically and beside the training, and the save at the end of a run."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_asyncrl.checkpoints import check_plain, read_checkpoint, write_checkpoint
from lit_asyncrl.errors import CheckpointError
from lit_asyncrl.waits import Changed, start_thread

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

WRITE_TIMEOUT_S = 600.0
"""Longest time, in seconds, that a write beside the training may take until the next one, or the run's end."""

MAX_WRITES = 2
"""Files under way at most: each holds a copy of the weights and of the optimizer's state."""

_POOL_KEY = "RolloutDataModule"  # the datamodule's snapshot: made anew for each checkpoint, never changed


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin for checkpoint files: what has the file's name is always a whole checkpoint.

    A checkpoint is written to a temporary file in the same folder, which is synchronised with the disk and then takes the name;
    a fault leaves the previous file as it was. While `beside` holds, only tensors that training changes are copied at once, and
    a thread writes the file. At most two files are under way (a ModelCheckpoint with `save_last` saves twice at an update); a
    third save waits. An error is raised by the next save or by `teardown`, which waits. Runs need not ask for the plugin:
    `RolloutDataModule.setup` puts it in the place of Lightning's default. URLs are left to Lightning.

    Args:
        beside: whether a save may return before the file is written; by default never.
    """

    def __init__(self, beside: Callable[[], bool] = lambda: False) -> None:
        self._beside = beside
        self._changed = Changed()
        self._jobs: deque[tuple[Any, dict[str, Any] | None]] = deque()  # path and content; None: to be removed
        self._error: Exception | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, after those before it.

        Raises:
            CheckpointError: it holds what could not be read again, or it or one before it could not be written; names path and
                cause.
        """
        if _is_url(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        check_plain(checkpoint, path)
        if self._beside() and _fits_twice(checkpoint):
            self.wait(num_left=MAX_WRITES - 1)
            copies: dict[tuple[Any, ...], Tensor] = {}
            self._enqueue(path, {key: value if key == _POOL_KEY else _copied(value, copies) for key, value in checkpoint.items()})
        else:
            self.wait()
            write_checkpoint(checkpoint, path)

    def _enqueue(self, path: Any, content: dict[str, Any] | None) -> None:
        with self._changed:
            self._jobs.append((path, content))
            if len(self._jobs) == 1:
                start_thread(self._work, "checkpoint-writer")

    def _work(self) -> None:
        """Do the jobs in order. Files are not removed after a failed write: they may be the only whole ones."""
        while True:
            path, content = self._jobs[0]
            error = None
            try:
                if content is not None:
                    write_checkpoint(content, path)
                elif self._error is None:
                    super().remove_checkpoint(path)
            except Exception as fault:  # noqa: BLE001 - raised in the trainer's thread
                error = fault
            with self._changed:
                self._error = self._error or error
                self._jobs.popleft()
                self._changed.notify_all()
                if not self._jobs:
                    return

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way."""
        return bool(self._jobs)

    def wait(self, num_left: int = 0) -> None:
        """Until no more than `num_left` writes are under way.

        Raises:
            CheckpointError: one failed, or takes longer than ten minutes.
        """

        def done() -> bool:
            return sum(content is not None for _, content in self._jobs) <= num_left and bool(num_left or not self._jobs)

        with self._changed:
            if not self._changed.wait_until(done, WRITE_TIMEOUT_S):
                raise CheckpointError(
                    f"Checkpoint {str(self._jobs[0][0])!r} must be written within {WRITE_TIMEOUT_S:.0f} s, got no end of it. "
                    "Look at the disk or its network."
                )
            error, self._error = self._error, None
        if error is not None:
            raise error

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU; see `read_checkpoint`. Code in it never runs, whatever `weights_only` says."""
        if _is_url(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        self.wait()
        return read_checkpoint(str(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file; not before the ones that take its place are whole."""
        with self._changed:
            if self._jobs:
                self._jobs.append((path, None))
                return
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for the last write, at the end of a run. After an exception, a failed write is only warned of."""
        in_fault = sys.exc_info()[0] is not None
        try:
            self.wait()
        except Exception as error:
            if not in_fault:
                raise
            warnings.warn(f"{error}", stacklevel=2)


def install_atomic_io(trainer: Trainer) -> None:
    """Give a trainer the plugin, unless its user chose another one."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO(
            beside=lambda: trainer.training and not _file_is_wanted_at_once(trainer)
        )


def _file_is_wanted_at_once(trainer: Trainer) -> bool:
    """Whether somebody looks for a file right after its save: another ModelCheckpoint, a link, or a logger that uploads it."""
    callbacks = trainer.checkpoint_callbacks
    return (
        len(callbacks) > 1
        or any(getattr(callback, "save_last", None) == "link" for callback in callbacks)
        or any(getattr(logger, "_log_model", False) for logger in trainer.loggers)
    )


def checkpoint_dir(trainer: Trainer) -> str:
    """Where checkpoints of this run go: the ModelCheckpoint's folder, else `<log_dir>/checkpoints`."""
    callback: Any = trainer.checkpoint_callback
    if callback is not None and getattr(callback, "dirpath", None):
        return str(callback.dirpath)
    return os.path.join(trainer.log_dir or trainer.default_root_dir, "checkpoints")  # noqa: PTH118 - may be a URL


def save_last(trainer: Trainer) -> None:
    """Write `last.ckpt`, and tell ModelCheckpoint that it is its own, so that it does not write another beside it.

    A file of another run that has the name keeps it: then it is `last-v1.ckpt`, as Lightning's would be.
    """
    callback: Any = trainer.checkpoint_callback
    path = getattr(callback, "last_model_path", "")
    if not path:
        names = itertools.chain(["last.ckpt"], (f"last-v{i}.ckpt" for i in itertools.count(1)))
        paths = (os.path.join(checkpoint_dir(trainer), name) for name in names)  # noqa: PTH118 - may be a URL
        path = next(path for path in paths if path == trainer.ckpt_path or not Path(path).exists())
    with _epoch_open(trainer):
        trainer.save_checkpoint(path, weights_only=False)
    if callback is not None:
        callback.last_model_path = path


def save_passed_over(trainer: Trainer, reached: Callable[[int], bool]) -> None:
    """Let each ModelCheckpoint save that was to do so within the updates of one batch; Lightning looks at the last one alone.

    Args:
        trainer: after the batch.
        reached: whether that batch ended at or passed a multiple of so many updates.
    """
    for callback in trainer.checkpoint_callbacks:
        every = callback._every_n_train_steps if isinstance(callback, ModelCheckpoint) else 0
        if not reached(every) or trainer.global_step % every == 0:
            continue
        assert isinstance(callback, ModelCheckpoint)
        candidates = callback._monitor_candidates(trainer)
        if callback.monitor is not None and callback.monitor not in candidates:
            callback._defer_save_until_validation = True
        elif not callback._should_skip_saving_checkpoint(trainer):
            callback._save_topk_checkpoint(trainer, candidates)
            callback._save_last_checkpoint(trainer, candidates)


@contextmanager
def _epoch_open(trainer: Trainer) -> Iterator[None]:
    """Undo meanwhile that Lightning has counted an epoch that was broken off: a resumed run makes the rest of it."""
    loop = trainer.fit_loop
    progress: tuple[Any, ...] = (loop.epoch_progress.current, loop.epoch_progress.total)
    counted = loop.epoch_loop.batch_progress.current.ready < loop.max_batches and all(
        state.completed == state.processed == state.started > 0 for state in progress
    )
    for state in progress if counted else ():
        state.processed -= 1
        state.completed -= 1
    try:
        yield
    finally:
        for state in progress if counted else ():
            state.processed += 1
            state.completed += 1


def _is_url(path: Any) -> bool:
    return "://" in str(path)


def _copied(value: Any, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    """The same with copies of all tensors on the CPU; tied ones stay tied."""
    if isinstance(value, Tensor):
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        return type(value)((key, _copied(item, copies)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_copied(item, copies) for item in value)
    return value


def _fits_twice(checkpoint: dict[str, Any]) -> bool:
    """Whether copies of the tensors that training changes take no more than half of the memory that is available."""

    def size(value: Any) -> int:
        if isinstance(value, Tensor):
            return value.nbytes
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return sum(map(size, items))

    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        return 2 * sum(size(value) for key, value in checkpoint.items() if key != _POOL_KEY) <= available
    return False
