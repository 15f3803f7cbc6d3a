"""Checkpoint files: whole or not there, refused when torn or foreign, found again; and the states of random generators."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import random
import resource
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_asyncrl.checkpoint_io import AtomicCheckpointIO, install_atomic_io
from lit_asyncrl.checkpoints import (
    TEMPORARY,
    newest_checkpoint,
    read_checkpoint,
    rng_states,
    set_rng_states,
    write_checkpoint,
)
from lit_asyncrl.errors import CheckpointError


def content(number: int = 0, size: int = 1000) -> dict:
    return {"lit_asyncrl": {"policy_version": number}, "state_dict": {"w": torch.arange(float(size)) + number}}


def version_of(path: Path) -> int:
    return read_checkpoint(str(path))["lit_asyncrl"]["policy_version"]


@contextmanager
def small_disk(num_bytes: int):
    """Files cannot grow above this size meanwhile: the system's error of a write that does not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------ writing


def test_a_checkpoint_round_trips_and_leaves_one_file(tmp_path):
    write_checkpoint(content(3), tmp_path / "new" / "last.ckpt")
    assert names(tmp_path / "new") == ["last.ckpt"]
    assert version_of(tmp_path / "new" / "last.ckpt") == 3


def test_a_write_that_does_not_fit_leaves_the_previous_checkpoint_and_nothing_else(tmp_path):
    path = tmp_path / "last.ckpt"
    write_checkpoint(content(1), path)
    with small_disk(20_000), pytest.raises(CheckpointError, match=r"last\.ckpt' could not be written \(OSError") as caught:
        write_checkpoint(content(2, size=100_000), path)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert names(tmp_path) == ["last.ckpt"]
    assert version_of(path) == 1


def test_a_folder_that_cannot_be_made_is_named_with_its_cause(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/last\.ckpt' could not be written \((FileExists|NotADirectory)Error"):
        write_checkpoint(content(), tmp_path / "file" / "last.ckpt")


def test_content_that_cannot_be_saved_leaves_the_previous_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    write_checkpoint(content(1), path)
    with pytest.raises(CheckpointError, match="could not be written"):
        write_checkpoint({"lit_asyncrl": lambda: None}, path)
    assert names(tmp_path) == ["last.ckpt"]
    assert version_of(path) == 1


def test_leftovers_of_killed_runs_are_removed_and_nobody_else_s_files(tmp_path):
    (tmp_path / f".last.ckpt.0123456789ab.{TEMPORARY}").write_bytes(b"torn")
    (tmp_path / ".other.tmp").touch()
    write_checkpoint(content(), tmp_path / "last.ckpt")
    assert names(tmp_path) == [".other.tmp", "last.ckpt"]


def test_the_temporary_file_of_a_run_that_is_writing_stays(tmp_path):
    mine = tmp_path / f".last.ckpt.0123456789ab.{TEMPORARY}"
    with mine.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_checkpoint(content(), tmp_path / "last.ckpt")
        assert mine.exists()


# ------------------------------------------------------------------ beside the training


def test_a_checkpoint_beside_the_training_holds_what_was_there_at_the_save(tmp_path):
    writer, state = AtomicCheckpointIO(beside=lambda: True), content(5)
    writer.save_checkpoint(state, tmp_path / "last.ckpt")
    state["state_dict"]["w"].zero_()
    writer.wait()
    assert read_checkpoint(str(tmp_path / "last.ckpt"))["state_dict"]["w"][1] == 6.0  # 1 + 5


def test_tied_tensors_stay_tied_in_the_copy(tmp_path):
    writer, weight = AtomicCheckpointIO(beside=lambda: True), torch.zeros(100_000)
    writer.save_checkpoint(content() | {"state_dict": {"a": weight, "b": weight}}, tmp_path / "last.ckpt")
    writer.wait()
    assert (tmp_path / "last.ckpt").stat().st_size < 500_000  # once: 400,000 bytes


def test_saves_that_follow_each_other_are_written_in_order(tmp_path):
    writer = AtomicCheckpointIO(beside=lambda: True)
    for number in range(5):
        writer.save_checkpoint(content(number), tmp_path / "last.ckpt")
    writer.teardown()
    assert version_of(tmp_path / "last.ckpt") == 4


def test_the_previous_file_is_removed_once_the_next_one_is_whole(tmp_path):
    writer = AtomicCheckpointIO(beside=lambda: True)
    writer.save_checkpoint(content(1), tmp_path / "1.ckpt")
    writer.save_checkpoint(content(2, size=1_000_000), tmp_path / "2.ckpt")
    writer.remove_checkpoint(tmp_path / "1.ckpt")
    writer.wait()
    assert names(tmp_path) == ["2.ckpt"]


def test_the_previous_file_stays_if_the_next_one_could_not_be_written(tmp_path):
    writer = AtomicCheckpointIO(beside=lambda: True)
    write_checkpoint(content(1), tmp_path / "1.ckpt")
    with small_disk(20_000):
        writer.save_checkpoint(content(2, size=1_000_000), tmp_path / "2.ckpt")
        writer.remove_checkpoint(tmp_path / "1.ckpt")
        with pytest.raises(CheckpointError, match=r"2\.ckpt"):
            writer.teardown()
    assert names(tmp_path) == ["1.ckpt"]


def test_a_failed_write_is_raised_once_and_later_saves_go_on(tmp_path):
    writer = AtomicCheckpointIO(beside=lambda: True)
    with small_disk(20_000):
        writer.save_checkpoint(content(1, size=1_000_000), tmp_path / "1.ckpt")
        with pytest.raises(CheckpointError, match=r"1\.ckpt"):
            writer.wait()
    writer.save_checkpoint(content(2), tmp_path / "2.ckpt")
    writer.teardown()
    assert names(tmp_path) == ["2.ckpt"]


def test_a_failed_write_does_not_hide_the_fault_that_ends_the_run(tmp_path):
    writer = AtomicCheckpointIO(beside=lambda: True)
    with small_disk(20_000):
        writer.save_checkpoint(content(1, size=1_000_000), tmp_path / "1.ckpt")
        with pytest.warns(UserWarning, match=r"1\.ckpt"):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                writer.teardown()


def test_the_plugin_takes_the_place_of_lightning_s_default_alone(tmp_path):
    class Own(AtomicCheckpointIO):
        pass

    default, chosen = pl.Trainer(logger=False, accelerator="cpu"), pl.Trainer(logger=False, accelerator="cpu", plugins=Own())
    for trainer in (default, chosen):
        install_atomic_io(trainer)
    assert type(default.strategy.checkpoint_io) is AtomicCheckpointIO
    assert type(chosen.strategy.checkpoint_io) is Own


# ------------------------------------------------------------------ reading


class Code:
    def __reduce__(self):
        return (print, ("code ran",))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def holed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (torn, "must name a whole checkpoint"),
        (holed, "wrong checksum"),
        (lambda path: path.write_bytes(b""), "must name a whole checkpoint"),
        (lambda path: path.write_text("not a checkpoint"), "must name a whole checkpoint"),
        (lambda path: path.unlink(), "must name a whole checkpoint.*FileNotFoundError"),
        (lambda path: path.write_bytes(pickle.dumps(Code())), "must name a whole checkpoint"),
        (lambda path: torch.save({"lit_asyncrl": Code()}, path), "must name a whole checkpoint"),
        (lambda path: torch.save({"state_dict": {}}, path), "written by lit-asyncrl"),
        (lambda path: torch.save([1], path), "written by lit-asyncrl"),
    ],
    ids=["torn", "holed", "empty", "text", "missing", "pickle", "code", "foreign", "list"],
)
def test_what_is_no_whole_checkpoint_is_refused_by_name(tmp_path, capsys, harm, message):
    path = tmp_path / "last.ckpt"
    write_checkpoint(content(), path)
    harm(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    assert str(path) in str(caught.value)
    assert "code ran" not in capsys.readouterr().out


# ------------------------------------------------------------------ last


def aged(path: Path, number: int) -> Path:
    """A checkpoint, the newer the higher its number."""
    write_checkpoint(content(number), path)
    os.utime(path, (1000 + number, 1000 + number))
    return path


def trainer_of(folder: Path, *callbacks: pl.Callback, **arguments) -> pl.Trainer:
    settings = {"logger": CSVLogger(folder, name="run"), "accelerator": "cpu", "default_root_dir": folder}
    return pl.Trainer(callbacks=list(callbacks), **(settings | arguments))


def test_last_is_the_newest_checkpoint_of_all_versions_of_the_run(tmp_path):
    aged(tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt", 1)
    newest = aged(tmp_path / "run" / "version_1" / "checkpoints" / "epoch=0-step=9.ckpt", 3)
    aged(tmp_path / "run" / "version_1" / "checkpoints" / "last.ckpt", 2)
    aged(tmp_path / "other" / "version_0" / "checkpoints" / "last.ckpt", 4)
    assert newest_checkpoint(trainer_of(tmp_path)) == str(newest)


def test_torn_and_foreign_files_are_skipped_with_a_warning_that_names_them(tmp_path):
    folder = tmp_path / "run" / "version_0" / "checkpoints"
    whole = aged(folder / "a.ckpt", 1)
    torn(aged(folder / "b.ckpt", 2))
    os.utime(folder / "b.ckpt", (2000, 2000))
    torch.save({"state_dict": {}}, folder / "c.ckpt")
    with pytest.warns(UserWarning) as caught:
        assert newest_checkpoint(trainer_of(tmp_path)) == str(whole)
    messages = [str(w.message) for w in caught if "ckpt_path last" in str(w.message)]
    assert ["c.ckpt is skipped" in messages[0], "b.ckpt is skipped" in messages[1], len(messages)] == [True, True, 2]


def test_last_looks_into_the_folder_that_model_checkpoint_was_given(tmp_path):
    aged(tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt", 5)
    mine = aged(tmp_path / "mine" / "last.ckpt", 1)
    assert newest_checkpoint(trainer_of(tmp_path, ModelCheckpoint(tmp_path / "mine"))) == str(mine)


def test_last_without_a_logger_looks_into_the_root_folder(tmp_path):
    mine = aged(tmp_path / "checkpoints" / "last.ckpt", 1)
    assert newest_checkpoint(trainer_of(tmp_path, logger=False)) == str(mine)


def test_last_without_any_checkpoint_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"no whole checkpoint is in .*run; nothing is restored"):
        assert newest_checkpoint(trainer_of(tmp_path)) is None


# ------------------------------------------------------------------ random numbers


def test_random_generators_go_on_where_their_states_were_taken(tmp_path):
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]

    draw()
    torch.save(rng_states(), tmp_path / "rng")
    expected = draw()
    draw()
    set_rng_states(torch.load(tmp_path / "rng", weights_only=True))
    assert draw() == expected
