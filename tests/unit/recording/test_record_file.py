"""The file of a record: nothing is lost but a torn last line, nothing is overwritten, and what is no record is refused."""

from __future__ import annotations

import json

import pytest
import torch

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.pool.tape import Decision
from lit_asyncrl.recording.configuration import check_configuration, check_tape, flatten
from lit_asyncrl.recording.events import (
    completion_event,
    completion_of,
    decision_of,
    newest_version,
    take_event,
    to_line,
)
from lit_asyncrl.recording.file import FORMAT, Header, RecordWriter, read_events, read_header
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import Completion

HEADER = Header({"data.seed": 0}, seed=0, num_threads=1, device="cpu", torch="2.13.0")


def write(path, events) -> bytes:
    writer = RecordWriter(str(path), Supervisor())
    writer.start(HEADER)
    for event in events:
        writer.put(lambda event=event: event)
    writer.close()
    return path.read_bytes()


def through_json(event):
    return json.loads(to_line(event))


def test_a_completion_comes_back_exactly():
    logprobs = [-float(torch.rand(())) for _ in range(5)]  # of float32
    completion = Completion(70_000, [1, 151_000, 7, 7, 2], logprobs, [3, 3, 4, 4, 9], "stop")
    assert completion_of(through_json(completion_event(completion))[1:]) == completion


def test_a_completion_without_tokens_comes_back():
    completion = Completion(3, [], [], [], "abort")
    event = through_json(completion_event(completion))
    assert completion_of(event[1:]) == completion and newest_version(event) == -1


def test_a_token_costs_less_than_eleven_bytes_in_a_long_response():
    # 4 + 4 bytes in base64 of 4/3: 10.7 a token; the rest of the line is some 70 bytes
    completion = Completion(1, [5] * 1000, [-0.5] * 1000, [0] * 1000, "length")
    assert len(to_line(completion_event(completion))) < 11_000


def test_a_decision_comes_back_exactly():
    decision = Decision(4, [3, 1], [4, 2], [0], {1: torch.tensor([True, False, True])}, {3: torch.tensor([0.0, -0.1, -3.3e-7])})
    again = decision_of(through_json(take_event(decision)))
    assert (again.policy_version, again.taken, again.completed_versions, again.rejected) == (4, [3, 1], [4, 2], [0])
    assert again.reduced[1].tolist() == [True, False, True]
    assert torch.equal(again.logprobs[3], decision.logprobs[3])
    assert again.group_ids == {0, 1, 3}


def test_events_come_back_in_order(tmp_path):
    events = [["left", i, "dropped", "truncated"] for i in range(50)]
    write(tmp_path / "new" / "run.record", events)
    assert read_events(str(tmp_path / "new" / "run.record")) == events
    assert read_header(str(tmp_path / "new" / "run.record")) == HEADER


def test_a_record_cut_at_any_byte_gives_its_whole_lines_or_is_refused(tmp_path):
    events = [["left", 0, "dropped", "truncated"], ["left", 1, "failed", "reward"]]
    content = write(tmp_path / "run.record", events)
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    cut = tmp_path / "cut.record"
    for size in range(len(content) + 1):
        cut.write_bytes(content[:size])
        whole_lines = sum(end <= size for end in ends)
        if whole_lines:
            assert read_header(str(cut)) == HEADER
            assert read_events(str(cut)) == events[: whole_lines - 1]
        else:
            with pytest.raises(ConfigurationError, match="does not begin with the header of a record"):
                read_header(str(cut))


@pytest.mark.parametrize("line", ["123", "null", '["header"]', f'["header",{FORMAT},{{}}]', f'["header",{FORMAT},null]'])
def test_a_first_line_that_is_no_header_is_refused(tmp_path, line):
    (tmp_path / "run.record").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"does not begin with the header of a record|its header lacks a field"):
        read_header(str(tmp_path / "run.record"))


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    content = write(tmp_path / "run.record", [["left", 0, "dropped", "truncated"], ["left", 1, "failed", "reward"]])
    (tmp_path / "run.record").write_bytes(content.replace(b'["left",0,', b'["left,0,'))
    with pytest.raises(ConfigurationError, match="line 2 is damaged"):
        read_events(str(tmp_path / "run.record"))


def test_another_format_is_refused(tmp_path):
    content = write(tmp_path / "run.record", [])
    (tmp_path / "run.record").write_bytes(content.replace(b'["header",1,', b'["header",9,'))
    with pytest.raises(ConfigurationError, match="its format is 9"):
        read_header(str(tmp_path / "run.record"))


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.record.*No such file"):
        check_tape(None, str(tmp_path / "none.record"), {})


def test_an_existing_record_is_not_overwritten(tmp_path):
    content = write(tmp_path / "run.record", [])
    with pytest.raises(ConfigurationError, match=r"record_run must name a new file"):
        RecordWriter(str(tmp_path / "run.record"), Supervisor()).start(HEADER)
    assert (tmp_path / "run.record").read_bytes() == content


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"record_run must be a file that can be written"):
        RecordWriter(str(tmp_path / "file" / "run.record"), Supervisor()).start(HEADER)


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, recwarn):
    class Full:
        def write(self, line):
            raise OSError(28, "No space left on device")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    supervisor = Supervisor()
    writer = RecordWriter(str(tmp_path / "run.record"), supervisor)
    writer.start(HEADER)
    whole, writer._file = writer._file, Full()
    writer.put(lambda: ["left", 0, "dropped", "truncated"])
    writer._thread.join(10.0)
    for _ in range(3):  # nobody will write them
        writer.put(lambda: ["left", 0, "dropped", "truncated"])
    assert not writer._inbox._items
    writer.close()
    whole.close()
    assert supervisor.failure is None
    assert any("No space left on device" in str(warning.message) for warning in recwarn)


def test_a_fault_of_the_writer_reaches_the_supervisor(tmp_path):
    supervisor = Supervisor()
    writer = RecordWriter(str(tmp_path / "run.record"), supervisor)
    writer.start(HEADER)
    writer.put(lambda: [object()])
    writer.close()
    assert isinstance(supervisor.failure, TypeError)


def test_a_changed_key_is_refused_with_both_values():
    with pytest.raises(ConfigurationError, match=r"data\.batch_groups must be 4 as in the recorded run, got 8"):
        check_configuration({"data.batch_groups": 4, "data.seed": 0}, {"data.batch_groups": 8, "data.seed": 0})


def test_a_key_that_is_new_or_gone_is_refused():
    with pytest.raises(ConfigurationError, match=r"EssLrScale must be 'left out'.*model\.x must be 1 .* got 'left out'"):
        check_configuration({"model.x": 1}, {"EssLrScale": "EssLrScale"})


@pytest.mark.parametrize(
    "key",
    [
        "trainer.logger",
        "trainer.logger.save_dir",
        "trainer.default_root_dir",
        "trainer.enable_progress_bar",
        "TQDMProgressBar.refresh_rate",
        "AsyncRollout.engine.num_slots",
        "AsyncRollout.record_run",
        "AsyncRollout.replay_run",
        "data.save_rollouts",
        "data.data_timeout_s",
    ],
)
def test_keys_that_change_no_weight_may_differ(key):
    check_configuration({key: "one"}, {key: "other"})


def test_fewer_updates_may_be_replayed_and_not_more():
    check_configuration({"trainer.max_steps": 20}, {"trainer.max_steps": 3})
    check_configuration({"trainer.max_steps": -1}, {"trainer.max_steps": 3})
    with pytest.raises(ConfigurationError, match=r"trainer\.max_steps must be 20"):
        check_configuration({"trainer.max_steps": 20}, {"trainer.max_steps": 21})


def test_recording_a_replay_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"must be left out with AsyncRollout\.replay_run"):
        check_tape(str(tmp_path / "a"), str(tmp_path / "b"), {})


def test_settings_are_found_under_the_keys_they_are_typed_with():
    nested = {
        "trainer": {
            "devices": [0, 1],
            "callbacks": [
                {"class_path": "lit_asyncrl.callbacks.AsyncRollout", "init_args": {"engine": {"class_path": "x.HFEngine"}}}
            ],
        },
        "model": {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-4}, "dict_kwargs": {"fused": True}}},
        "data": {"sampler": None},
    }
    assert flatten(nested) == {
        "trainer.devices.0": 0,
        "trainer.devices.1": 1,
        "AsyncRollout": "AsyncRollout",
        "AsyncRollout.engine": "HFEngine",
        "model.optimizer": "AdamW",
        "model.optimizer.lr": 3e-4,
        "model.optimizer.fused": True,
        "data.sampler": None,
    }
