"""Tasks (prompts with verifiable rewards), reward functions, and the runner that scores responses."""

from lit_asyncrl.tasks.digits import ReverseDigits, SortDigits
from lit_asyncrl.tasks.rewards import ExactMatch

__all__ = ["ExactMatch", "ReverseDigits", "SortDigits"]
