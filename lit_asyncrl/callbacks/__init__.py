"""Lightning callbacks: the asynchronous rollout, the controls of the optimizer step, and the report of a run."""

from lit_asyncrl.callbacks.async_rollout import AsyncRollout
from lit_asyncrl.callbacks.collapse_guard import CollapseGuard
from lit_asyncrl.callbacks.ess_lr import EssLrScale
from lit_asyncrl.callbacks.gac import GradientAlignmentControl
from lit_asyncrl.callbacks.report import RunReport

__all__ = ["AsyncRollout", "CollapseGuard", "EssLrScale", "GradientAlignmentControl", "RunReport"]
