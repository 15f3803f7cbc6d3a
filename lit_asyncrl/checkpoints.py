"""Checkpoint files: written atomically, read without running any code in them, found again after a crash."""

from __future__ import annotations

import fcntl
import io
import os
import random
import uuid
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from lit_asyncrl.errors import CheckpointError
from lit_asyncrl.policy import load_model, load_tokenizer, resolve_policy_path

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

TEMPORARY = "lit-asyncrl-tmp"
"""Ending of the temporary files, which are named `.<file>.<random>.<this>`."""


# ------------------------------------------------------------------ one file


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write a file that is whole as soon as it has its name, and stays so if the machine goes down.

    Raises:
        CheckpointError: the folder cannot be written, the disk is full, or the content cannot be saved. A previous file of the
            name is as it was, and nothing else is left.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        with _temporary(path) as (file, temporary):
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except Exception as error:
        cause = _root(error)
        raise CheckpointError(
            f"Checkpoint {str(path)!r} could not be written ({type(cause).__name__}: {cause}). The previous one of this name is "
            "as it was. Make room, or give trainer.default_root_dir a folder that can be written."
        ) from error


_PLAIN = (type(None), bool, int, float, str, bytes)


def check_plain(content: Any, path: str | Path, key: str = "") -> None:
    """Refuse content that `read_checkpoint` would refuse: tensors and plain Python are read, objects of other classes are not.

    Raises:
        CheckpointError: naming the first key and its type.
    """
    if isinstance(content, Tensor) or type(content) in _PLAIN:
        return
    if type(content) in (dict, OrderedDict):
        parts = [(f"{key}.{name}" if key else str(name), item) for name, item in content.items()]
        for name in content:
            check_plain(name, path, f"{key} (a key)")
    elif type(content) in (list, tuple, set):
        parts = [(f"{key}[{i}]", item) for i, item in enumerate(content)]
    elif _is_read_again(content):
        return
    else:
        raise CheckpointError(
            f"Checkpoint {str(path)!r} must hold tensors and plain Python alone, got {type(content).__module__}."
            f"{type(content).__qualname__} at {key} (it could not be read again: no code of a checkpoint is run). Convert it "
            "in the `state_dict` that returns it; leave out `save_hyperparameters`."
        )
    for name, item in parts:
        check_plain(item, path, name)


def _is_read_again(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever the reason
        return False
    return True


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file beside `path`, locked as long as its writer lives, and gone afterwards unless it was given another name."""
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.{TEMPORARY}")
        with temporary.open("wb") as file:
            try:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.fstat(file.fileno()).st_nlink:
                    continue  # another run took it for a leftover before it was locked
                yield file, temporary
                return
            finally:
                temporary.unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of runs that were killed: those that nobody has locked."""
    for leftover in folder.glob(f".*.{TEMPORARY}"):
        with suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def read_checkpoint(path: str) -> dict[str, Any]:
    """The content of a checkpoint, without running any pickled code. Every byte is checked: holes in the middle are found.

    Raises:
        CheckpointError: the file is missing, torn or foreign.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # PyTorch writes the sums, and does not look at them
        if broken is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {broken!r}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"ckpt_path must name a whole checkpoint, got {path!r} ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(checkpoint, dict) or "lit_asyncrl" not in checkpoint:
        raise CheckpointError(f"ckpt_path must name a checkpoint written by lit-asyncrl, got {path!r}.")
    return checkpoint


def _root(error: BaseException) -> BaseException:
    """The operating system's error behind one of PyTorch's writer, where there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


# ------------------------------------------------------------------ finding one


def newest_checkpoint(trainer: Trainer) -> str | None:
    """What `--ckpt_path last` means: the newest whole checkpoint of this run or of an earlier one with the same settings.

    It looks into the folder of each ModelCheckpoint that has one, else into those of all versions of the first logger's
    experiment (`<save_dir>/<name>/*/checkpoints`), or `<default_root_dir>/checkpoints` without a logger. Torn files and those of
    other programs are skipped with a warning. A whole one of another format or model is not: resuming refuses it by name, since
    to go on with an older one unasked would undo what its run has learnt.

    Returns:
        Its path; None, with a warning, if there is none: a job that always passes `last` starts from the beginning.
    """
    given = [str(folder) for c in trainer.checkpoint_callbacks if (folder := getattr(c, "dirpath", None))]
    pattern = "*.ckpt"
    if given:
        folders = [Path(folder) for folder in given]
    elif trainer.loggers:
        logger = trainer.loggers[0]
        folders = [Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)]
        pattern = "*/checkpoints/*.ckpt"
    else:
        folders = [Path(trainer.default_root_dir) / "checkpoints"]
    found = {path: path.stat().st_mtime_ns for folder in folders for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found, key=lambda path: (found[path], path.name), reverse=True):
        try:
            read_checkpoint(str(path))
        except CheckpointError as error:
            warnings.warn(f"ckpt_path last: {path} is skipped, an older one is looked for. {error}", stacklevel=2)
        else:
            return str(path)
    places = ", ".join(str(folder) for folder in folders)
    warnings.warn(f"ckpt_path last: no whole checkpoint is in {places}; nothing is restored.", stacklevel=2)
    return None


# ------------------------------------------------------------------ random numbers


def rng_states() -> dict[str, Any]:
    """States of the random generators of Python, NumPy and PyTorch, as plain types and tensors."""
    numpy = cast("dict[str, Any]", np.random.get_state(legacy=False))
    state = numpy["state"]
    version, words, gauss = random.getstate()
    return {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (torch.from_numpy(state["key"].astype(np.int64)), state["pos"], numpy["has_gauss"], numpy["gauss"]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_states(states: dict[str, Any]) -> None:
    """Undo `rng_states`; those of GPUs only on a machine with as many."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    key, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", key.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


# ------------------------------------------------------------------ the policy


def export_policy(checkpoint_path: str, output_dir: str, policy_path: str | None = None) -> str:
    """Write the policy of a checkpoint as a Hugging Face folder (model, tokenizer, generation config).

    Args:
        checkpoint_path: a checkpoint written by lit-asyncrl.
        output_dir: folder to write; made if missing.
        policy_path: the model folder the run started from; None: as recorded in the checkpoint.

    Returns:
        The folder.

    Raises:
        CheckpointError: the file is missing, torn or foreign.
    """
    checkpoint = read_checkpoint(checkpoint_path)
    source = resolve_policy_path(policy_path or checkpoint["lit_asyncrl"]["policy_path"])
    model = load_model(source)
    state = checkpoint["state_dict"]
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # tensors of other shapes
        raise CheckpointError(f"ckpt_path must fit the model in {source!r}, got {checkpoint_path!r} ({error}).") from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise CheckpointError(
            f"ckpt_path must fit the model in {source!r}, got unexpected tensors {unexpected[:3]} and missing "
            f"{sorted(missing)[:3]}."
        )
    model.save_pretrained(output_dir)
    load_tokenizer(source).save_pretrained(output_dir)
    return output_dir
