#!/usr/bin/env bash
# Installs PyTorch's CPU build into the active virtual environment: a plain install can bring gigabytes of CUDA libraries.
# Tries the package index that pip is set up with first (a CPU build may be offered there), then PyTorch's own CPU index.
set -euo pipefail
version="2.13.0"
python - <<PY && exit 0
import importlib.metadata as m, sys
try:
    sys.exit(0 if m.version("torch").startswith("$version") else 1)
except m.PackageNotFoundError:
    sys.exit(1)
PY
pip install --quiet "torch==$version+cpu" 2>/dev/null ||
    pip install --quiet "torch==$version" --index-url https://download.pytorch.org/whl/cpu ||
    pip install --quiet "torch==$version"
