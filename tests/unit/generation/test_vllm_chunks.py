"""Weights in chunks through a file in memory: planning, pieces, checksums, and how much memory it takes. No vLLM needed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from lit_asyncrl.generation.vllm_chunks import CHUNK_BYTES, ChunkFile, plan_chunks, read_pieces


@pytest.fixture
def file() -> Iterator[ChunkFile]:
    file = ChunkFile()
    yield file
    file.close()


def _delivered(
    file: ChunkFile, weights: dict[str, Tensor], dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES, checked: bool = True
) -> dict[str, Tensor]:
    """What arrives, put together piece by piece."""
    flat: dict[str, Tensor] = {}
    for chunk in plan_chunks(weights, dtype, chunk_bytes):
        for piece, elements in read_pieces(file.path, file.write_chunk(chunk, weights, checked=checked)):
            assert piece.shape == tuple(weights[piece.name].shape)
            assert flat.get(piece.name, elements[:0]).numel() == piece.start
            flat[piece.name] = torch.cat([flat.get(piece.name, elements[:0]), elements])
    return {name: tensor.view(weights[name].shape) for name, tensor in flat.items()}


def _weights() -> dict[str, Tensor]:
    return {
        "matrix": torch.randn(30, 50),
        "bias": torch.randn(7),
        "half": torch.randn(3, 5, dtype=torch.bfloat16),
        "steps": torch.arange(9),
    }


def test_small_tensors_share_a_chunk_at_aligned_places():
    # 7 float32 = 28 bytes, so the next piece begins at 64; 15 float32 = 60 bytes: the third at 128.
    weights = {"a": torch.zeros(7), "b": torch.zeros(3, 5), "c": torch.zeros(1)}
    (chunk,) = plan_chunks(weights, torch.float32, 1024)
    assert [(piece.name, piece.start, piece.numel, piece.offset) for piece in chunk] == [
        ("a", 0, 7, 0),
        ("b", 0, 15, 64),
        ("c", 0, 1, 128),
    ]


def test_a_tensor_larger_than_a_chunk_travels_as_pieces():
    # 256 bytes hold 64 float32: 150 elements are 64 + 64 + 22, and 22 of them (88 bytes) leave room from byte 128 on.
    chunks = plan_chunks({"large": torch.zeros(10, 15), "next": torch.zeros(40)}, torch.float32, 256)
    places = [[(piece.name, piece.start, piece.numel, piece.offset) for piece in chunk] for chunk in chunks]
    assert places == [
        [("large", 0, 64, 0)],
        [("large", 64, 64, 0)],
        [("large", 128, 22, 0), ("next", 0, 32, 128)],
        [("next", 32, 8, 0)],
    ]


@pytest.mark.parametrize("chunk_bytes", [256, 1000, CHUNK_BYTES])
def test_what_arrives_equals_what_was_sent_whatever_the_chunk_size(file: ChunkFile, chunk_bytes: int):
    weights = _weights()
    arrived = _delivered(file, weights, torch.float32, chunk_bytes)
    assert arrived.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(arrived[name], tensor.float() if tensor.is_floating_point() else tensor), name


def test_floating_point_tensors_are_rounded_to_the_served_dtype_and_integers_are_not(file: ChunkFile):
    weights = _weights()
    arrived = _delivered(file, weights, torch.bfloat16)
    assert torch.equal(arrived["matrix"], weights["matrix"].to(torch.bfloat16))
    assert torch.equal(arrived["steps"], weights["steps"])


def test_a_tensor_that_is_not_contiguous_arrives_in_order(file: ChunkFile):
    weights = {"transposed": torch.randn(20, 30).T}
    assert torch.equal(_delivered(file, weights, torch.float32, 256)["transposed"], weights["transposed"])


def test_the_checksum_is_the_xxh3_of_the_bytes_as_served(file: ChunkFile):
    weights = {"a": torch.tensor([1.0, 2.0])}
    (chunk,) = plan_chunks(weights, torch.bfloat16)
    (message,) = file.write_chunk(chunk, weights, checked=True)
    served = bytes([0x80, 0x3F, 0x00, 0x40])  # 1.0 is 0x3f80 and 2.0 is 0x4000, little-endian
    assert message["checksum"] == xxhash.xxh3_64_intdigest(served)


def test_an_update_without_checks_carries_no_checksum(file: ChunkFile):
    (chunk,) = plan_chunks({"a": torch.ones(3)}, torch.float32)
    assert file.write_chunk(chunk, {"a": torch.ones(3)}, checked=False)[0]["checksum"] is None


def test_a_changed_byte_is_refused_naming_the_tensor(file: ChunkFile):
    weights = _weights()
    (chunk,) = plan_chunks(weights, torch.float32)
    message = file.write_chunk(chunk, weights, checked=True)
    with Path(file.path).open("r+b") as raw:
        raw.seek(message[1]["offset"] + 2)
        raw.write(b"\x55")
    with pytest.raises(ValueError, match="the checksum of bias must be"):
        list(read_pieces(file.path, message))


def test_a_write_that_did_not_happen_is_refused(file: ChunkFile, monkeypatch: pytest.MonkeyPatch):
    (chunk,) = plan_chunks({"a": torch.ones(50)}, torch.float32)
    file.write_chunk(chunk, {"a": torch.ones(50)}, checked=True)
    monkeypatch.setattr(Tensor, "copy_", lambda self, *args, **kwargs: self)
    message = file.write_chunk(chunk, {"a": torch.full((50,), 2.0)}, checked=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the checksum of a must be"):
        list(read_pieces(file.path, message))


def test_a_truncated_file_is_refused_naming_both_sizes(file: ChunkFile):
    (chunk,) = plan_chunks({"a": torch.ones(50)}, torch.float32)
    message = file.write_chunk(chunk, {"a": torch.ones(50)}, checked=True)
    with Path(file.path).open("r+b") as raw:
        raw.truncate(100)
    with pytest.raises(ValueError, match=r"must hold 200 bytes, got 100 \(first tensor a\)"):
        list(read_pieces(file.path, message))


def test_a_receiver_cannot_write_into_the_sender_s_memory(file: ChunkFile):
    (chunk,) = plan_chunks({"a": torch.ones(50)}, torch.float32)
    message = file.write_chunk(chunk, {"a": torch.ones(50)}, checked=True)
    for _, elements in read_pieces(file.path, message):
        elements.zero_()
    assert all(bool((elements == 1).all()) for _, elements in read_pieces(file.path, message))


def test_a_file_in_a_folder_is_removed_by_close(tmp_path: Path):
    file = ChunkFile(str(tmp_path))
    assert [str(path) for path in tmp_path.iterdir()] == [file.path]
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_a_gigabyte_takes_at_most_256_mib_on_top_of_it():
    # The model's pages are never written, so they count nowhere; sender and receiver run in one process here, and the file's
    # pages count for it too. 0.25 GiB in one tensor, as large embeddings are, and a wire dtype that needs a copy.
    code = """
import psutil, torch
from lit_asyncrl.generation.vllm_chunks import ChunkFile, plan_chunks, read_pieces
weights = {"embedding": torch.zeros(2**26)} | {f"layer.{i}": torch.zeros(2**22) for i in range(48)}
total = sum(tensor.nbytes for tensor in weights.values())
process, file, peak = psutil.Process(), ChunkFile(), 0
before = process.memory_info().rss
for chunk in plan_chunks(weights, torch.bfloat16):
    for piece, elements in read_pieces(file.path, file.write_chunk(chunk, weights, checked=False)):
        received = elements.clone()  # what the receiver hands to the model's loader
        peak = max(peak, process.memory_info().rss - before)
print(total, peak)
"""
    process: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    total, peak = (int(number) for number in process.stdout.split())
    assert total >= 10**9
    assert peak <= 256 * 2**20, f"{peak / 2**20:.0f} MiB"
