"""Exceptions of lit-asyncrl: one family, so that a caller can catch `AsyncRLError` and nothing else.

A message reads `<key> must <contract>, got <value> (<context>). <remedy>.`, with the key as it is typed on the command line.
"""

from __future__ import annotations


class AsyncRLError(Exception):
    """Root of every error that lit-asyncrl raises on purpose."""


class ConfigurationError(AsyncRLError, ValueError):
    """The user asked for something impossible or contradictory. Raised before any resource exists."""


class DataError(AsyncRLError, ValueError):
    """A user's data file has a row that cannot be used; the message names file and line."""


class EngineError(AsyncRLError, RuntimeError):
    """The generation engine died, answered wrongly, or did not answer within its timeout."""


class EngineDiedError(EngineError):
    """The generation engine's process is gone or gives no sign of life: one that is started anew may go on with its requests."""


class WeightSyncError(EngineError):
    """New weights were not delivered, or the proof of delivery failed."""


class DeliveryLost(WeightSyncError):  # noqa: N818 - no fault of the delivery: it is sent again
    """The engine was started anew before it had proved the weights: it serves none until they are sent again."""


class RewardError(AsyncRLError, RuntimeError):
    """A reward function raised, returned a value that is not finite, or exceeded its timeout."""


class PoolError(AsyncRLError, RuntimeError):
    """A malformed group reached the trajectory pool, or the pool was used after it was closed."""


class WaitTimeoutError(AsyncRLError, TimeoutError):
    """A bounded wait ended without what it waited for; the message names who waited, for what, and how long."""


class StallError(AsyncRLError, TimeoutError):
    """A part of the run gave no sign of life, or the whole run made no progress; the message names the part and every wait."""


class StopRequested(AsyncRLError):  # noqa: N818 - a request, not a fault
    """The run was asked to stop (signal or end of training) while a thread was waiting."""


class CheckpointError(AsyncRLError, RuntimeError):
    """A checkpoint is torn, foreign or does not fit the configuration it is resumed with."""
