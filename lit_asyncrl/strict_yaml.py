"""Refuses what jsonargparse lets pass: duplicate keys, and empty sections under an unknown name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lit_asyncrl.errors import ConfigurationError

SECTIONS = {
    "seed_everything",
    "trainer",
    "model",
    "data",
    "ckpt_path",
    "output_dir",
    "weights_only",
    "return_predictions",
    "verbose",
}
"""Keys that may stand at the top of a config."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that raises on a duplicate key, naming its line."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if key in seen:
            raise ConfigurationError(
                f"Each key must stand once, got {key!r} on lines {seen[key]} and {line} of {key_node.start_mark.name}. "
                "Remove one."
            )
        seen[key] = line
        empty = isinstance(value_node, yaml.ScalarNode) and value_node.tag == "tag:yaml.org,2002:null" and value_node.value == ""
        if empty:
            raise ConfigurationError(
                f"{key} must have a value, got nothing on line {line} of {key_node.start_mark.name}. "
                "Write null, or remove the line."
            )
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def check_yaml_file(path: str) -> None:
    """Check one config file; the parser itself reads it afterwards.

    Raises:
        ConfigurationError: not YAML, not a mapping, a duplicate key, an empty key, or an unknown section; with file and line.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            content = yaml.load(file, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--config must be a YAML file, got {path!r} ({error}).") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--config must be a UTF-8 file, got {path!r} ({error}).") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"--config must hold a mapping at its top, got {type(content).__name__} in {path!r}.")
    unknown = sorted(str(key).removesuffix("+") for key in content if str(key).removesuffix("+") not in SECTIONS)
    if unknown:
        raise ConfigurationError(f"Top-level keys must be among {sorted(SECTIONS)}, got {unknown} in {path!r}.")
