"""Trains a recorded run again: the engine's answers, the prompts' order and the pool's decisions come from the record.

An answer is given in its place of the recorded order: not before its request was sent, nor before the weights that sampled it are
served, nor before the batches were taken that were taken before it. Each of these happened before it in the recorded run, so
none of them waits for it, and the replay cannot stand still. What groups come to (rewards, drops) is computed anew and compared.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from lit_asyncrl.errors import AsyncRLError, StopRequested
from lit_asyncrl.pool.tape import Decision
from lit_asyncrl.recording.configuration import check_header
from lit_asyncrl.recording.events import Event, checksum, decision_of, floats, floats_of
from lit_asyncrl.recording.file import Header, read_events, read_header
from lit_asyncrl.recording.replay_engine import ReplayEngine, ScoreProbe
from lit_asyncrl.tasks.prompt_source import PromptSource
from lit_asyncrl.types import Prompt, TrajectoryGroup


class ReplayError(AsyncRLError, RuntimeError):
    """A replayed run does something else than the recorded one; the message names the first difference."""


class RunReplay:
    """The pool's `Tape` that says what is taken, and checks that the run is the recorded one.

    Args:
        path: of the record.
        present: this run's header.
        prompts: what makes prompts; nothing was taken from it.
        score_probe: the trainer's log-probs of the probe, for the proof of delivery.

    Attributes:
        engine, prompts: to be used in place of the run's own.
        header: of the record.

    Raises:
        ConfigurationError: the file is no record, or the configuration is not the recorded one.
    """

    def __init__(self, path: str, present: Header, prompts: PromptSource, score_probe: ScoreProbe) -> None:
        self.header = read_header(path)
        for warning in check_header(self.header, present):
            warnings.warn(warning, stacklevel=2)
        self._path = path
        events = read_events(path)
        self._takes: deque[Event] = deque(event for event in events if event[0] == "take")
        self._num_taken = 0
        self._previous_threads: int | None = None
        self._outcomes = {event[1]: event for event in events if event[0] in ("added", "left")}
        self._here: set[int] = set()  # groups that have reached the pool
        self.prompts = ReplayPrompts(prompts, [event[1:] for event in events if event[0] == "dispatch"])
        self.engine = ReplayEngine(events, score_probe)

    @property
    def num_takes(self) -> int:
        """Batches of the record."""
        return self._num_taken + len(self._takes)

    def next_decision(self, policy_version: int) -> Decision:
        """The recorded decision of the next `take`.

        Raises:
            ReplayError: it was made at another version.
            StopRequested: the record has ended.
        """
        if not self._takes:
            warnings.warn(f"The record {self._path!r} ends after {self._num_taken} batches: so does the replay.", stacklevel=2)
            raise StopRequested("the end of the record")
        recorded = self._takes[0][1]
        if recorded != policy_version:
            raise ReplayError(
                f"policy_version must be {recorded} when batch {self._num_taken} is taken, as in the recorded run, got "
                f"{policy_version}: an update was made or skipped that was not there."
            )
        return decision_of(self._takes[0])

    def taken(self, decision: Decision) -> None:
        """Go on to what was recorded after it."""
        self._takes.popleft()
        self._num_taken += 1
        self.engine.advance(self._num_taken)

    def added(self, group: TrajectoryGroup) -> None:
        """Compare a group that has reached the pool with the recorded one.

        Raises:
            ReplayError: it had other rewards, or did not reach the pool.
        """
        self._here.add(group.group_id)
        recorded = self._outcomes.get(group.group_id)
        rewards = floats(group.rewards)
        if recorded is None or (recorded[0] == "added" and recorded[2] == rewards):  # None: the record ends before it
            return
        if recorded[0] == "left":
            raise ReplayError(f"Group {group.group_id} was {recorded[2]} ({recorded[3]}) in the recorded run, and is not here.")
        raise ReplayError(
            f"Group {group.group_id} (prompt {group.prompt_index} of task {group.task!r}) must have the rewards "
            f"{floats_of(recorded[2])} of the recorded run, got {group.rewards.tolist()}. The task or its rewards are others, or "
            "do not give the same twice."
        )

    def left(self, group_id: int, state: str, reason: str) -> None:
        """Compare a group that has not reached the pool with the recorded one.

        Raises:
            ReplayError: it came to another end.
        """
        recorded = self._outcomes.get(group_id)
        if recorded is None or (recorded[0] == "left" and recorded[2:] == [state, reason]):
            return
        was = "reached the pool" if recorded[0] == "added" else f"was {recorded[2]} ({recorded[3]})"
        raise ReplayError(f"Group {group_id} {was} in the recorded run, and is {state} ({reason}) here.")

    def missing(self, decision: Decision, group_ids: set[int]) -> None:
        """Groups of a decision are not in the pool.

        Raises:
            ReplayError: they were, and have left.
        """
        gone = sorted(group_ids & self._here)
        if gone:
            raise ReplayError(
                f"Group {gone[0]} must wait in the pool when batch {self._num_taken} is taken, as in the recorded run, got it "
                f"gone before (policy_version {decision.policy_version}): it was too old here."
            )

    def set_threads(self) -> None:
        """Give the trainer the recorded number of CPU threads, until `close`."""
        self._previous_threads = torch.get_num_threads()
        torch.set_num_threads(self.header.num_threads)

    def close(self) -> None:
        """Give the threads back."""
        if self._previous_threads is not None:
            torch.set_num_threads(self._previous_threads)


class ReplayPrompts:
    """Gives out the recorded prompts, in the recorded order and under their ids; then no more.

    Args:
        source: makes them; its position is moved past them, so that a checkpoint of the replay can be resumed without it.
        keys: (group_id, source index, epoch, attempt, checksum of the prompt's ids) of each.
    """

    def __init__(self, source: PromptSource, keys: Sequence[Sequence[int]]) -> None:
        self._source = source
        self._expected: deque[Sequence[int]] = deque(keys)
        state = source.state_dict() | {
            "requeued": [list(key[:4]) for key in keys],
            "position": Counter(key[3] for key in keys)[0],
            "next_group_id": max((key[0] + 1 for key in keys), default=0),
        }
        source.load_state_dict(state)

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """The next recorded ones.

        Raises:
            ReplayError: another prompt is under its id.
        """
        prompts = self._source.next_prompts(min(num_prompts, len(self._expected)))
        for prompt in prompts:
            recorded = self._expected.popleft()
            now: tuple[Any, ...] = (prompt.group_id, prompt.source_index, prompt.epoch, prompt.attempt)
            if (*now, checksum(prompt.token_ids)) != tuple(recorded):
                raise ReplayError(
                    f"Group {recorded[0]} must be of the prompt of the recorded run (index {recorded[1]}, epoch {recorded[2]}), "
                    f"got other token ids ({prompt.example}). The task's data or the tokenizer are others."
                )
        return prompts

    @property
    def ended(self) -> bool:
        """Whether all were given out."""
        return not self._expected
