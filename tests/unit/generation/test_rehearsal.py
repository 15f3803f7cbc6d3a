"""The rehearsal of weight delivery, against a real transformers model behind the inline engine, whole and broken."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tiny_models
import torch

from lit_asyncrl.errors import WeightSyncError
from lit_asyncrl.generation.hf import HFEngine
from lit_asyncrl.generation.rehearsal import MIN_TOLERANCE, perturb, rehearse, tensor_groups
from lit_asyncrl.policy import load_model, named_weights
from lit_asyncrl.types import NamedTensors

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=[tiny_models.save_qwen3, tiny_models.save_llama], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(request.param(tmp_path_factory.mktemp("policy")))


@pytest.fixture
def engine(folder: str) -> Iterator[HFEngine]:
    engine = HFEngine(mode="inline")
    engine.start(folder, eos_token_ids=tiny_models.EOS_IDS, probe_ids=tiny_models.PROBE_IDS, max_model_len=64)
    yield engine
    engine.stop()


def _rehearse(engine: HFEngine, model: Any, on_the_way: Change = dict) -> float:
    def deliver(weights: NamedTensors) -> Any:
        engine.begin_update(0, on_the_way(dict(weights)))
        return engine.finish_update(10.0).probe_logprobs

    def score(changed: NamedTensors) -> list[float]:
        row = torch.tensor([tiny_models.PROBE_IDS])
        with torch.no_grad():
            logits = torch.func.functional_call(model, dict(changed), kwargs={"input_ids": row}).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, row[0, 1:, None]).squeeze(1).tolist()

    return rehearse(named_weights(model), deliver, score, rounds_weights=engine.rounds_weights, max_noise=1e-3)


def test_an_engine_that_takes_every_tensor_passes_and_gives_the_tolerance_of_float32(engine: HFEngine, folder: str):
    assert _rehearse(engine, load_model(folder)) < 10 * MIN_TOLERANCE


def test_each_single_tensor_that_stays_stale_is_caught_and_its_kind_named(engine: HFEngine, folder: str):
    model = load_model(folder)
    for stale, old in named_weights(model).items():
        kind = next(group[0] for group in tensor_groups(named_weights(model)) if stale in group)
        with pytest.raises(WeightSyncError, match=kind.replace(".", r"\.")):
            _rehearse(engine, model, lambda weights, stale=stale, old=old: weights | {stale: old})


def test_an_engine_of_another_model_is_refused_before_anything_is_perturbed(engine: HFEngine, folder: str):
    with pytest.raises(WeightSyncError, match="must compute the trainer's log-probs"):
        _rehearse(engine, load_model(folder), lambda weights: {name: tensor * 1.1 for name, tensor in weights.items()})


def test_a_perturbation_is_the_same_each_time_and_moves_zeros():
    tensor = torch.zeros(4)
    assert torch.equal(perturb("bias", tensor, 0.5), perturb("bias", tensor, 0.5))
    assert (perturb("bias", tensor, 0.5) != 0).all()


def test_groups_join_the_layers_of_a_role_and_hold_every_name_once(folder: str):
    weights = named_weights(load_model(folder))
    groups = tensor_groups(weights)
    assert sorted(name for group in groups for name in group) == sorted(weights)
    assert ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"] in groups


class Rounding:
    """Four probe tokens whose log-probs move with the mean of one matrix; the engine's answers are up to 0.04 nats off.

    Attributes:
        rehearsed: number of perturbed deliveries.
        chaotic: which of them round so badly that the answer is of no use.
        stale: the engine keeps the matrix it has.
    """

    def __init__(self, chaotic: Sequence[int] = (), stale: bool = False) -> None:
        self.weights = {"layers.0.w": torch.full((4, 4), 0.5)}
        self.rehearsed = 0
        self._chaotic, self._stale = chaotic, stale

    def score(self, changed: NamedTensors) -> list[float]:
        # Standard deviation of a mean of 16 numbers: a quarter of one number's. Times 40: 10 per unit of strength at this scale.
        moved = 40.0 * float(changed.get("layers.0.w", self.weights["layers.0.w"]).mean() - 0.5)
        return [-1.0 + moved, -2.0 - moved, -3.0 + moved, -4.0 - moved]

    def deliver(self, weights: NamedTensors) -> list[float]:
        noise = (0.01, -0.01, 0.02, 0.04)  # 0.02 in the mean
        if weights["layers.0.w"] is self.weights["layers.0.w"]:
            return [a + b for a, b in zip(self.score({}), noise, strict=True)]
        self.rehearsed += 1
        served = self.score({} if self._stale else weights)
        return [a + b * (100.0 if self.rehearsed in self._chaotic else 1.0) for a, b in zip(served, noise, strict=True)]

    def rehearse(self) -> float:
        return rehearse(self.weights, self.deliver, self.score, rounds_weights=True, max_noise=1.0)


def test_the_tolerance_of_a_rounding_engine_is_four_times_its_noise():
    assert Rounding().rehearse() == pytest.approx(4 * 0.04)


def test_a_perturbation_under_which_everything_rounds_badly_is_drawn_anew():
    engine = Rounding(chaotic=[1, 2])
    assert engine.rehearse() == pytest.approx(4 * 0.04)
    assert engine.rehearsed == 3


def test_a_rounding_engine_that_keeps_a_stale_tensor_follows_no_draw():
    engine = Rounding(stale=True)
    with pytest.raises(WeightSyncError, match=r"after changing layers\.0\.w"):
        engine.rehearse()
    assert engine.rehearsed == 3


def test_draws_differ():
    assert not torch.equal(perturb("a", torch.ones(4), 0.5, draw=0), perturb("a", torch.ones(4), 0.5, draw=1))
