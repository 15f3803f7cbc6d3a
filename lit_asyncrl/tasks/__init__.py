"""Tasks (prompts with verifiable rewards), reward functions, and the runner that scores responses."""

from lit_asyncrl.tasks.arithmetic import Arithmetic
from lit_asyncrl.tasks.countdown import Countdown, CountdownReward
from lit_asyncrl.tasks.digits import ReverseDigits, SortDigits
from lit_asyncrl.tasks.jsonl import JsonlTask
from lit_asyncrl.tasks.killable import KillableReward
from lit_asyncrl.tasks.math_verify import MathVerify
from lit_asyncrl.tasks.mixture import TaskMixture
from lit_asyncrl.tasks.rewards import CharacterShare, ExactMatch, LastNumber, LengthPenalty, OverlongPenalty
from lit_asyncrl.tasks.runner import RewardRunner

__all__ = [
    "Arithmetic",
    "CharacterShare",
    "Countdown",
    "CountdownReward",
    "ExactMatch",
    "JsonlTask",
    "KillableReward",
    "LastNumber",
    "LengthPenalty",
    "MathVerify",
    "OverlongPenalty",
    "ReverseDigits",
    "RewardRunner",
    "SortDigits",
    "TaskMixture",
]
