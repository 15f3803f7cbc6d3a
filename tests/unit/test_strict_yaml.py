"""Config files: what jsonargparse lets pass is refused, with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.strict_yaml import check_yaml_file


def _check(folder: Path, text: str) -> None:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    check_yaml_file(str(file))


def test_a_sound_config_passes(tmp_path):
    _check(
        tmp_path, "trainer:\n  max_steps: 3\n  logger: null\n  callbacks+:\n    - class_path: AsyncRollout\ndata:\n  seed: 1\n"
    )


def test_a_duplicate_key_is_refused_with_file_and_both_lines(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'max_steps' on lines 2 and 4 of .*run\.yaml"):
        _check(tmp_path, "trainer:\n  max_steps: 3\n  devices: 1\n  max_steps: 4\n")


def test_a_duplicate_key_deep_inside_a_list_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'engine' on lines 5 and 6"):
        _check(
            tmp_path,
            "trainer:\n  callbacks:\n    - class_path: A\n      init_args:\n        engine: HFEngine\n        engine: X\n",
        )


def test_a_duplicate_section_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'data' on lines 1 and 3"):
        _check(tmp_path, "data:\n  seed: 1\ndata:\n  seed: 2\n")


def test_an_empty_misspelt_key_is_refused_with_its_line(tmp_path):
    with pytest.raises(ConfigurationError, match=r"trainerr must have a value, got nothing on line 3 of .*run\.yaml"):
        _check(tmp_path, "trainer:\n  max_steps: 1\ntrainerr:\n")


def test_an_empty_key_in_a_section_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="max_step must have a value, got nothing on line 2"):
        _check(tmp_path, "trainer:\n  max_step:\n")


def test_an_unknown_section_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="trainerr"):
        _check(tmp_path, "trainerr:\n  max_steps: 1\n")


def test_a_file_that_is_not_yaml_is_refused_with_its_line(tmp_path):
    with pytest.raises(ConfigurationError, match="line 2"):
        _check(tmp_path, "trainer:\n  max_steps: [1\n")


def test_a_file_without_a_mapping_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="list"):
        _check(tmp_path, "- trainer\n")


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="NoneType"):
        _check(tmp_path, "")


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"trainer: \xff\xfe\n")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        check_yaml_file(str(tmp_path / "run.yaml"))
