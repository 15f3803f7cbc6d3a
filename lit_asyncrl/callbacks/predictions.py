"""PredictionWriter: `predict` as JSONL, one completion with its rewards per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter


class PredictionWriter(BasePredictionWriter):
    """Writes what `predict` returns.

    Args:
        path: file to write (made anew); its folder is made if missing.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the file, empty."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append one held-out set's completions."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"set": batch.name, **record}) + "\n" for record in prediction)
