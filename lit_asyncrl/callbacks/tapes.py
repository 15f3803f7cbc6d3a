"""Puts a run's record, or the replay of one, between its engine, prompts and pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.recording.configuration import refuse_resumed
from lit_asyncrl.recording.file import Header
from lit_asyncrl.recording.recorder import RunRecorder
from lit_asyncrl.recording.replay import RunReplay

if TYPE_CHECKING:
    from lit_asyncrl.callbacks.async_rollout import AsyncRollout


def open_tape(
    rollout: AsyncRollout, make_engine: Callable[[], GenerationEngine], *, resumed: bool
) -> RunRecorder | RunReplay | None:
    """What `record_run` or `replay_run` asks for in a `fit`; a replay also sets the recorded number of the trainer's threads.

    Args:
        rollout: set up, its engine not started.
        make_engine: gives the engine to be recorded; not called by a replay, which has its own.
        resumed: whether the run goes on from a checkpoint.

    Raises:
        ConfigurationError: the run is resumed, the record exists, or the replay's settings are not those of its record.
    """
    module, data = rollout.module, rollout.data
    key = "record_run" if rollout.record_run is not None else "replay_run"
    path = rollout.record_run or rollout.replay_run
    if path is None or module.trainer.state.fn != "fit":
        return None
    if resumed:
        raise refuse_resumed(key)
    header = Header(rollout.configuration, data.run_seed, torch.get_num_threads(), module.device.type, torch.__version__)
    tape: RunRecorder | RunReplay
    if key == "record_run":
        tape = RunRecorder(path, header, make_engine(), data.prompts, rollout.supervisor)
    else:
        tape = RunReplay(path, header, data.prompts, module.probe_logprobs)
        tape.set_threads()
        data.pool.ledger.on_settled(lambda group_id, state: None)  # the record says which prompts were sent again
    data.pool.tape = tape
    return tape
