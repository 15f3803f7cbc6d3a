"""Dependencies point one way, each heavy package has one owner, and nothing evaluates text as code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lit_asyncrl

ROOT = Path(lit_asyncrl.__file__).parent
PACKAGE = "lit_asyncrl"

# Lower layers know nothing of higher ones. Parts of one layer that are separate packages never import each other.
LAYERS = (
    {"types", "errors", "seeds", "strict_yaml", "timing", "waits"},
    {"interfaces", "supervisor", "watchdog", "policy"},
    {"algorithm"},
    {"tasks", "generation", "pool"},
    {"evaluation", "simulation", "recording"},
    {"module", "checkpoint_io", "checkpoints", "checks", "datamodule", "loaders", "callbacks"},
    {"planning"},
    {"cli"},
    {"__main__"},
)
SIBLINGS = ("tasks", "generation", "pool")
LIGHTNING_OWNERS = {"module", "checkpoint_io", "checkpoints", "datamodule", "callbacks", "planning", "cli"}


def _sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def _part(path: Path) -> str:
    """Top-level part of the package that a file belongs to: `pool`, `module`, ..."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _imported_parts(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith(PACKAGE + ".") and name.count(".")}


def _imports_package(path: Path, package: str) -> bool:
    return any(name.split(".")[0] == package for name in _imports(path))


def _layer(part: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def test_every_part_of_the_package_has_a_layer():
    parts = {_part(path) for path in _sources()} - {"__init__"}
    assert parts == set().union(*LAYERS)


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_to_lower_layers_only(path):
    part = _part(path)
    if part == "__init__":
        return
    type_checking_only = {("datamodule", "module")}  # the annotation of the module that a datamodule serves
    for other in _imported_parts(path) - {part}:
        if (part, other) in type_checking_only:
            continue
        assert _layer(other) <= _layer(part), f"{path} imports {other}, which is above {part}"


@pytest.mark.parametrize("part", SIBLINGS)
def test_siblings_never_import_each_other(part):
    for path in (ROOT / part).rglob("*.py"):
        assert not _imported_parts(path) & (set(SIBLINGS) - {part}), path


def test_vllm_is_imported_by_its_engine_alone():
    owners = [path for path in _sources() if _imports_package(path, "vllm")]
    assert all(path.parent.name == "generation" and path.name.startswith("vllm") for path in owners)


def test_torchrl_is_imported_by_the_pool_alone():
    assert {_part(path) for path in _sources() if _imports_package(path, "torchrl")} == {"pool"}


def test_lightning_is_imported_from_the_module_up():
    owners = {_part(p) for p in _sources() for name in ("lightning", "pytorch_lightning") if _imports_package(p, name)}
    assert owners <= LIGHTNING_OWNERS


def test_nothing_evaluates_text_as_code():
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"


def test_the_algorithm_package_needs_torch_alone():
    blocked = (
        "lightning",
        "pytorch_lightning",
        "torchrl",
        "tensordict",
        "transformers",
        "jsonargparse",
        "yaml",
        "psutil",
        "rich",
    )
    names = [f"{PACKAGE}.algorithm.{path.stem}" for path in (ROOT / "algorithm").glob("*.py") if path.stem != "__init__"]
    program = f"""
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not allowed here")
sys.meta_path.insert(0, Blocker())
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_cheap():
    program = f"import sys, {PACKAGE}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
