from collections.abc import Callable, Iterator

import pytest
import torch

from lit_asyncrl.errors import WeightSyncError
from lit_asyncrl.generation.publisher import Snapshot, WeightPublisher, check_delivery
from lit_asyncrl.generation.scripted import ScriptedEngine
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import Completion, DeliveryReport, GenerationRequest, NamedTensors, SamplingParams


def _respond(request: GenerationRequest, version: int) -> Completion:
    return Completion(request.request_id, [3], [-1.0], [version], "length")


def _probe(weights: NamedTensors) -> list[float]:
    """A stand-in for log-probs: the weights themselves."""
    return weights["w"].tolist()


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor()


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(_respond, lambda version, weights, ids: _probe(weights))
    engine.start("", eos_token_ids=[1], probe_ids=[1, 2, 3], max_model_len=None)
    return engine


@pytest.fixture
def make_publisher(engine: ScriptedEngine, supervisor: Supervisor) -> Iterator[Callable[..., WeightPublisher]]:
    made: list[WeightPublisher] = []

    def make(**arguments: object) -> WeightPublisher:
        made.append(WeightPublisher(engine, supervisor=supervisor, timeout_s=5.0, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def _publish(publisher: WeightPublisher, version: int) -> None:
    weights = {"w": torch.tensor([float(version), -1.0])}
    publisher.publish(version, weights, _probe(weights))
    publisher.wait_delivered()


def _sampled_version(engine: ScriptedEngine) -> int:
    engine.submit([GenerationRequest(0, (3,), SamplingParams(), seed=0)])
    return engine.completions(1.0)[0].token_versions[0]


def test_without_a_lag_each_version_is_served_once_delivered(make_publisher, engine):
    delivered: list[tuple[int, int]] = []
    publisher = make_publisher(on_delivered=lambda published, served: delivered.append((published, served)))
    for version in range(3):
        _publish(publisher, version)
    assert delivered == [(0, 0), (1, 1), (2, 2)]
    assert (publisher.served_version, _sampled_version(engine), publisher.deliveries) == (2, 2, 3)


def test_a_lag_of_two_serves_the_version_two_updates_back(make_publisher, engine):
    delivered: list[tuple[int, int]] = []
    publisher = make_publisher(publish_lag=2, on_delivered=lambda published, served: delivered.append((published, served)))
    for version in range(5):
        _publish(publisher, version)
    assert delivered == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2)]
    assert _sampled_version(engine) == 2


def test_a_lag_that_starts_later_builds_up_from_there(make_publisher):
    delivered: list[tuple[int, int]] = []
    publisher = make_publisher(
        publish_lag=2, publish_lag_start=1, on_delivered=lambda published, served: delivered.append((published, served))
    )
    for version in range(5):
        _publish(publisher, version)
    assert delivered == [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2)]


def test_lagged_weights_are_copies_that_later_updates_do_not_change(make_publisher):
    publisher = make_publisher(publish_lag=1)
    weights = {"w": torch.tensor([0.0, 0.0])}
    for version in range(4):  # the proof would fail if version 1 were sent with the values of version 2
        weights["w"].fill_(float(version))
        publisher.publish(version, weights, _probe(weights))
    publisher.wait_delivered()
    assert publisher.served_version == 2


def test_evaluation_with_a_lag_gets_the_newest_version_and_training_the_lagged_one_again(make_publisher, engine):
    publisher = make_publisher(publish_lag=2)
    for version in range(5):
        _publish(publisher, version)
    with publisher.serve_current() as version:
        engine.submit([GenerationRequest(9, (3,), SamplingParams(), seed=0, purpose="evaluation")])
        assert (version, engine.evaluation_completions(1.0)[0].token_versions) == (4, [4])
        engine.submit([GenerationRequest(8, (3,), SamplingParams(), seed=0)])
        assert engine.completions(0.01) == []
    assert engine.completions(1.0)[0].token_versions == [2]
    assert publisher.served_version == 2


def test_an_evaluation_that_raises_leaves_the_engine_running(make_publisher, engine):
    publisher = make_publisher(publish_lag=2)
    for version in range(3):
        _publish(publisher, version)
    with pytest.raises(ZeroDivisionError), publisher.serve_current():
        raise ZeroDivisionError
    assert _sampled_version(engine) == 2


def test_a_delivery_that_is_acknowledged_but_not_written_is_caught(make_publisher, engine, supervisor, monkeypatch):
    publisher = make_publisher()
    stale = {"w": torch.tensor([0.0, -1.0])}
    begin_update = engine.begin_update
    monkeypatch.setattr(engine, "begin_update", lambda version, weights: begin_update(version, stale))
    _publish(publisher, 0)
    with pytest.raises(WeightSyncError, match=r"version 1.*differ by 1 at token 1"):
        _publish(publisher, 1)
    assert publisher.served_version == 0
    assert isinstance(supervisor.failure, WeightSyncError)


def test_a_fault_of_the_engine_reaches_the_supervisor(make_publisher, engine, supervisor, monkeypatch):
    def broken(timeout_s: float) -> DeliveryReport:
        raise WeightSyncError("no answer")

    publisher = make_publisher()
    monkeypatch.setattr(engine, "finish_update", broken)
    with pytest.raises(WeightSyncError, match="no answer"):
        _publish(publisher, 0)
    assert "Raised in lit-asyncrl's weight publisher." in supervisor.failure.__notes__


def test_a_report_of_another_version_is_refused():
    with pytest.raises(WeightSyncError, match="version 5, which was sent, and reports 4"):
        check_delivery(DeliveryReport(4, [0.0], 0.0), Snapshot(5, {}, [0.0]), tolerance=1.0)


def test_nan_in_the_probe_is_refused():
    with pytest.raises(WeightSyncError, match="token 2"):
        check_delivery(DeliveryReport(5, [0.0, float("nan")], 0.0), Snapshot(5, {}, [0.5, 0.0]), tolerance=1.0)


def _noisy_engine(noise: list[float]) -> ScriptedEngine:
    """Reports the probe's log-probs with a given error, delivery by delivery."""
    errors = iter(noise)
    engine = ScriptedEngine(
        _respond, lambda version, weights, ids: [value + e for e in [next(errors)] for value in _probe(weights)]
    )
    engine.start("", eos_token_ids=[1], probe_ids=[1, 2, 3], max_model_len=None)
    return engine


@pytest.mark.parametrize(
    ("noise", "accepted"), [([0.03, 0.2], True), ([0.03, 0.4], False), ([0.0, 1e-5], True), ([0.0, 1e-4], False)]
)
def test_without_a_tolerance_ten_times_the_first_deliverys_noise_is_allowed(noise, accepted, supervisor):
    publisher = WeightPublisher(_noisy_engine(noise), supervisor=supervisor, timeout_s=5.0, max_noise=1.0)
    _publish(publisher, 0)
    try:
        if accepted:
            _publish(publisher, 1)
        else:
            with pytest.raises(WeightSyncError, match="version 1"):
                _publish(publisher, 1)
    finally:
        publisher.close()


def test_a_first_delivery_that_is_off_by_more_than_rounding_is_refused(supervisor):
    publisher = WeightPublisher(_noisy_engine([0.002]), supervisor=supervisor, timeout_s=5.0)
    try:
        with pytest.raises(WeightSyncError, match="version 0"):
            _publish(publisher, 0)
    finally:
        publisher.close()


def test_a_lag_counts_updates_where_a_version_stands_for_several(make_publisher):
    served: list[int] = []
    publisher = make_publisher(publish_lag=2, on_delivered=lambda published, version: served.append(version))
    for version in (0, 2, 4, 6):  # two updates of each batch
        _publish(publisher, version)
    assert served == [0, 0, 2, 4]
