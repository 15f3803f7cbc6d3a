"""An engine that is started anew when it dies, with its unfinished requests going on where they were.

    died --> `engine-restart` thread: stop, take over what was reported, start --> needs_weights
         --> trainer's thread: begin_update --> unanswered requests are sent again, each with its `partial`

Only the trainer's thread may read the model, so weights are not kept here: who delivers them is told through `needs_weights` and
`DeliveryLost`. Until then requests are kept, and there are no completions.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lit_asyncrl.errors import ConfigurationError, DeliveryLost, EngineDiedError, EngineError, WeightSyncError
from lit_asyncrl.interfaces import GenerationEngine
from lit_asyncrl.supervisor import POLL_S, Supervisor
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, Purpose
from lit_asyncrl.waits import Changed, Countdown, Thread, start_thread

WHO = "generation engine"
CONFIRM_S = 2.0
"""Seconds from the first look that finds the engine silent for too long to the look that believes it: a trainer that was stopped
itself must read what has arrived meanwhile."""
CALLS_TIMEOUT_S = 30.0
"""Longest time until calls of a stopped engine return, and until a start that is given up ends."""


class RestartingEngine(GenerationEngine):
    """See the module. Every call goes to the engine within; attributes that are not of the interface too. Thread-safe.

    Calls that need the engine wait for a restart under way (`begin_update`, `pause`, `resume`: by the supervisor, which can end
    the wait); the others do not. Each request is answered once: what was answered before a death is not sent again.

    Args:
        engine: to be watched over; not started.
        supervisor: bounds waits, and gets the fault of a restart that fails.
        max_restarts: restarts in all after one `start`; then the engine's error goes on. With 0, errors pass as they are.
        silent_timeout_s: seconds without a sign of life after which the engine counts as dead (longer than its longest decode
            step, prefill and weight update).
        on_lost: told of training tokens that were lost with an engine.

    Attributes:
        restarts: how often the engine was started anew.
        down_s: seconds, all restarts together, from an engine's last sign of life to the weights of the next one.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        *,
        supervisor: Supervisor,
        max_restarts: int = 3,
        silent_timeout_s: float = 120.0,
        on_lost: Callable[[int], None] | None = None,
    ) -> None:
        if max_restarts < 0 or not silent_timeout_s > 0:
            raise ConfigurationError(
                "max_restarts must be 0 or above and silent_timeout_s above 0 seconds, got "
                f"{max_restarts} and {silent_timeout_s}."
            )
        self.restarts = 0
        self._earlier_down_s = 0.0
        self._down_since: float | None = None
        self._lost_tokens = 0
        self._on_lost = on_lost or (lambda tokens: None)
        self._inner = engine
        self._supervisor = supervisor
        self._max_restarts = max_restarts
        self._silent_timeout_s = silent_timeout_s
        self._changed = Changed()
        self._start_inner: Callable[[], None] = lambda: None
        self._outstanding: dict[tuple[Purpose, int], GenerationRequest] = {}  # submitted and unanswered
        self._life = 0  # which start of the engine is meant
        self._calls = 0  # in the engine now
        self._delivery: int | None = None  # life that the weights under way were given to
        self._is_restarting = self._needs_weights = self._paused = self._closed = False
        self._failure: EngineError | None = None
        self._thread: Thread | None = None
        self._confirming: Countdown | None = None
        self._earlier_tokens = self._tokens_at_start = self._answered_tokens = self._most_tokens = 0

    @property
    def rounds_weights(self) -> bool:  # type: ignore[override]
        """As the engine's."""
        return self._inner.rounds_weights

    @property
    def lost_tokens(self) -> int:
        """Training tokens that were counted in `generated_tokens`, and are in no answer and no `partial`."""
        return self._lost_tokens

    @property
    def down_s(self) -> float:
        """See the class."""
        with self._changed:
            return self._earlier_down_s + (0.0 if self._down_since is None else time.monotonic() - self._down_since)

    @property
    def num_threads(self) -> int:
        """As the engine's."""
        return self._inner.num_threads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def needs_weights(self) -> bool:
        """Whether the engine was started anew and waits for `begin_update`."""
        with self._changed:
            return self._needs_weights and not self._is_restarting and not self._closed

    @property
    def silent_s(self) -> float:
        """As the engine's; 0 while it is started anew."""
        return 0.0 if self._is_restarting else self._inner.silent_s

    @property
    def generated_tokens(self) -> int:
        """As `GenerationEngine.generated_tokens`, over all restarts; never falls."""
        with self._changed:
            life, earlier, at_start, restarting = self._life, self._earlier_tokens, self._tokens_at_start, self._is_restarting
        total = earlier + (0 if restarting else self._inner.generated_tokens - at_start)
        with self._changed:
            if (life, restarting) == (self._life, self._is_restarting):
                self._most_tokens = max(self._most_tokens, total)
            return self._most_tokens

    # ---------------------------------------------------------------- life

    def start(
        self, policy_path: str, *, eos_token_ids: Sequence[int], probe_ids: Sequence[int], max_model_len: int | None
    ) -> None:
        """Start the engine, and remember how. A failure of this first start is not repeated."""

        def start_inner() -> None:
            self._inner.start(policy_path, eos_token_ids=eos_token_ids, probe_ids=probe_ids, max_model_len=max_model_len)

        with self._changed:
            self.restarts = self._lost_tokens = 0
            self._earlier_down_s, self._down_since = 0.0, None
            self._outstanding = {}
            self._delivery = self._failure = self._confirming = None
            self._needs_weights = self._paused = self._closed = False
            self._earlier_tokens = self._answered_tokens = self._most_tokens = 0
            self._start_inner = start_inner
            self._life += 1
        start_inner()
        self._tokens_at_start = self._inner.generated_tokens

    def stop(self) -> None:
        """End the engine, also one that is being started anew; no restart follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._inner.stop()
        deadline = time.monotonic() + CALLS_TIMEOUT_S
        # The start under way may not have come to where it can be stopped.
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(POLL_S)
            self._inner.stop()

    # ---------------------------------------------------------------- requests

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`; kept while the engine is started anew."""
        with self._changed:
            self._raise_if_over()
            self._outstanding |= {(request.purpose, request.request_id): request for request in requests}
            if not self._serves:
                return
            life = self._begin_call()
        with self._ending_call(life):
            try:
                self._inner.submit(requests)
            except ConfigurationError:
                with self._changed:
                    for request in requests:
                        self._outstanding.pop((request.purpose, request.request_id), None)
                raise

    def completions(self, timeout_s: float) -> list[Completion]:
        """See `GenerationEngine.completions`; none while the engine is started anew."""
        return self._take("train", self._inner.completions, timeout_s)

    def evaluation_completions(self, timeout_s: float) -> list[Completion]:
        """See `GenerationEngine.evaluation_completions`; none while the engine is started anew."""
        return self._take("evaluation", self._inner.evaluation_completions, timeout_s)

    def partial_completions(self) -> list[Completion]:
        """See `GenerationEngine.partial_completions`; what was taken over from an engine that died is among them."""
        reported = [] if self._needs_weights else self._inner.partial_completions()
        with self._changed:
            carried = [r.partial for (purpose, _), r in self._outstanding.items() if purpose == "train" and r.partial is not None]
            longest = _longest([*carried, *reported])
            return [partial for partial in longest.values() if ("train", partial.request_id) in self._outstanding]

    def _take(self, purpose: Purpose, take: Callable[[float], list[Completion]], timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_until(lambda: self._serves or self._is_over, timeout_s)
            self._raise_if_over()
            if not self._serves:
                return []
            life = self._begin_call()
        finished: list[Completion] = []
        with self._ending_call(life):
            finished = take(max(0.0, deadline - time.monotonic()))
            with self._changed:
                for completion in finished:
                    request = self._outstanding.pop((purpose, completion.request_id), None)
                    if purpose == "train":
                        carried = request.partial if request is not None else None
                        self._answered_tokens += len(completion.token_ids) - (len(carried.token_ids) if carried else 0)
            if not finished:
                self._raise_if_silent()
        return finished

    # ---------------------------------------------------------------- weights

    def begin_update(self, version: int, weights: NamedTensors) -> None:
        """See `GenerationEngine.begin_update`; an engine that was started anew then gets its unanswered requests again."""
        while True:
            life = self._begin_call_when_up("the trainer")
            with self._ending_call(life):
                self._inner.begin_update(version, weights)
                with self._changed:
                    self._delivery = life
                    again = list(self._outstanding.values()) if self._needs_weights else []
                    if self._down_since is not None:
                        self._earlier_down_s += time.monotonic() - self._down_since
                    self._needs_weights, self._down_since = False, None
                    self._changed.notify_all()
                if again:
                    self._inner.submit(again)
                return

    def finish_update(self, timeout_s: float) -> DeliveryReport:
        """See `GenerationEngine.finish_update`.

        Raises:
            DeliveryLost: the engine died with the weights of `begin_update`; it needs them again.
        """
        with self._changed:
            self._raise_if_over()
            if self._is_restarting or self._delivery != self._life:
                raise DeliveryLost("The generation engine died before it had proved the weights it was sent.")
            life = self._begin_call()
        with self._ending_call(life):
            try:
                return self._inner.finish_update(timeout_s)
            except WeightSyncError:
                self._raise_if_silent(at_once=True)
                raise
        raise DeliveryLost("The generation engine died before it had proved the weights it was sent.")

    def pause(self) -> None:
        """See `GenerationEngine.pause`; holds for an engine that is started anew."""
        self._set_paused(True, self._inner.pause)

    def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._set_paused(False, self._inner.resume)

    def _set_paused(self, paused: bool, call: Callable[[], None]) -> None:
        while True:
            life = self._begin_call_when_up("the trainer")
            with self._ending_call(life):
                call()
                self._paused = paused
                return

    # ---------------------------------------------------------------- calls of the engine, and its death

    @property
    def _serves(self) -> bool:
        return not self._is_restarting and not self._needs_weights

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineError("The generation engine was stopped.")

    def _begin_call(self) -> int:
        """Count a call of the engine, with the lock held: a restart begins when those before it have returned."""
        self._calls += 1
        return self._life

    def _begin_call_when_up(self, who: str) -> int:
        with self._changed:
            if self._is_restarting:
                self._supervisor.wait_for(
                    self._changed,
                    lambda: not self._is_restarting or self._is_over,
                    timeout_s=math.inf,  # the engine's own start timeout ends it
                    who=who,
                    what="the restart of the generation engine",
                )
            self._raise_if_over()
            return self._begin_call()

    @contextmanager
    def _ending_call(self, life: int) -> Iterator[None]:
        """The rest of a call; the error of an engine that is started anew ends it without a word."""
        try:
            yield
        except EngineError as error:
            if not self._is_replaced(life, error):
                raise
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _is_replaced(self, life: int, error: EngineError) -> bool:
        """Whether the engine that raised is started anew, by this call or already."""
        with self._changed:
            if self._is_over:
                return False
            if self._is_restarting or life != self._life:
                return True  # the error may be that the engine was stopped
            if not isinstance(error, EngineDiedError) or self.restarts >= self._max_restarts:
                return False
            self._is_restarting = True
            if self._down_since is None:  # not yet served again since it died the last time
                self._down_since = time.monotonic() - self._inner.silent_s
            self._changed.notify_all()
            self._thread = start_thread(lambda: self._restart(error), "engine-restart")
            return True

    def _raise_if_silent(self, *, at_once: bool = False) -> None:
        silent_s = self._inner.silent_s
        if silent_s <= self._silent_timeout_s:
            self._confirming = None
            return
        if self._confirming is None:
            self._confirming = Countdown(CONFIRM_S)
        if at_once or not self._confirming.left_s:
            raise EngineDiedError(
                f"The generation engine must give a sign of life within silent_timeout_s = {self._silent_timeout_s:g} s, and has "
                f"given none for {silent_s:.0f} s."
            )

    def _restart(self, error: EngineError) -> None:
        """In a thread of its own: stop what is left, take over its requests, start anew."""
        try:
            with self._supervisor.busy(WHO, "its restart", math.inf):
                reported = self._inner.partial_completions()  # before `stop`, and after: an engine may forget, or finish
                self._inner.stop()
                if not self._changed.wait_until(lambda: self._calls == 0, CALLS_TIMEOUT_S):
                    raise EngineError(f"Calls of the stopped generation engine must return within {CALLS_TIMEOUT_S:.0f} s.")
                self._take_over([*reported, *self._inner.partial_completions()])
                self._start_again(error)
        except BaseException as failure:  # noqa: BLE001 - handed to whoever calls next, and to the supervisor
            self._give_up(failure)

    def _take_over(self, reported: Sequence[Completion]) -> None:
        """Give unanswered requests what was sampled of them, and count what is lost."""
        sampled = self._inner.generated_tokens - self._tokens_at_start
        partials = _longest(reported)
        with self._changed:
            kept = 0
            for key, request in self._outstanding.items():
                partial = partials.get(request.request_id) if request.purpose == "train" else None
                more = (
                    0 if partial is None else len(partial.token_ids) - (len(request.partial.token_ids) if request.partial else 0)
                )
                if more > 0:
                    kept += more
                    self._outstanding[key] = replace(request, partial=partial)
            self._earlier_tokens += sampled
            lost = max(0, sampled - self._answered_tokens - kept)
            self._lost_tokens += lost
            self._answered_tokens = 0
        if lost:
            self._on_lost(lost)

    def _start_again(self, error: EngineError) -> None:
        """Start the engine, as often as it takes and is allowed."""
        while True:
            with self._changed:
                if self._closed:
                    return
                self.restarts += 1
            warnings.warn(
                f"The generation engine is started anew ({self.restarts} of {self._max_restarts}): {error}", stacklevel=2
            )
            try:
                self._start_inner()
                if self._paused:
                    self._inner.pause()
                break
            except EngineError as failure:
                self._inner.stop()
                if self.restarts >= self._max_restarts:
                    raise
                error = failure
        with self._changed:
            self._tokens_at_start = self._inner.generated_tokens
            self._life += 1
            self._confirming = None
            self._is_restarting, self._needs_weights = False, True
            closed = self._closed
            self._changed.notify_all()
        if closed:
            self._inner.stop()

    def _give_up(self, cause: BaseException) -> None:
        with self._changed:
            self._is_restarting = False
            if not self._closed:
                self._failure = EngineDiedError(f"The generation engine died and cannot be started anew: {cause}")
                self._failure.__cause__ = cause
                self._supervisor.fail(self._failure, WHO)
            self._changed.notify_all()


def _longest(completions: Sequence[Completion]) -> dict[int, Completion]:
    """By request, the completion with the most tokens."""
    longest: dict[int, Completion] = {}
    for completion in completions:
        known = longest.get(completion.request_id)
        if known is None or len(completion.token_ids) > len(known.token_ids):
            longest[completion.request_id] = completion
    return longest
