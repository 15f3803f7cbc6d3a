"""`lit-asyncrl`: the command line (LightningCLI), exit codes, and configs found by name.

lit-asyncrl fit --config vcpo                                  # a packaged config, or any path
lit-asyncrl fit --config vcpo --config my.yaml --trainer.max_steps=50
lit-asyncrl validate|test|predict --config vcpo --ckpt_path last.ckpt
lit-asyncrl export --ckpt_path last.ckpt --output_dir my-model
lit-asyncrl plan --config vcpo                                 # predicted staleness, from briefly measured rates
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import lightning.pytorch as pl
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Imported so that their classes are found by short name on the command line and in YAML.
import lit_asyncrl.algorithm.advantages
import lit_asyncrl.algorithm.losses
import lit_asyncrl.generation.hf
import lit_asyncrl.generation.vllm
import lit_asyncrl.generation.vllm_server
import lit_asyncrl.pool.pace
import lit_asyncrl.tasks.arithmetic
import lit_asyncrl.tasks.countdown
import lit_asyncrl.tasks.jsonl
import lit_asyncrl.tasks.mixture  # noqa: F401
from lit_asyncrl.callbacks import AsyncRollout, CollapseGuard, EssLrScale, GradientAlignmentControl, RunReport  # noqa: F401
from lit_asyncrl.callbacks.async_rollout import check_settings
from lit_asyncrl.callbacks.predictions import PredictionWriter
from lit_asyncrl.callbacks.signals import EXIT_CODES
from lit_asyncrl.checkpoints import export_policy, newest_checkpoint, read_checkpoint
from lit_asyncrl.datamodule import RolloutDataModule, check_files, lag_of
from lit_asyncrl.errors import AsyncRLError, CheckpointError, ConfigurationError, DataError, StopRequested
from lit_asyncrl.module import PolicyModule
from lit_asyncrl.planning.plan import Plan, plan_run
from lit_asyncrl.planning.rates import GivenRates
from lit_asyncrl.recording.configuration import flatten
from lit_asyncrl.simulation.lengths import LengthShape
from lit_asyncrl.strict_yaml import check_yaml_file

MEANT = (
    ".*does not have many workers.*",  # the loaders only hand on what the pool holds
    ".*Couldn't infer the batch indices.*",  # an evaluation batch is a whole held-out set
    ".*The dirpath has changed from.*",  # each run has a folder of its own
    "(?s).*ModelCheckpoint.*manual.*optimiz.*",  # a checkpoint holds the weights after the update
    ".*in eval mode at the start of training.*",  # no dropout: log-probs must not be noisy
    ".*treespec, LeafSpec.*",  # Lightning's own call of PyTorch
)
"""Warnings of Lightning that describe this project's intent."""


class Trainer(pl.Trainer):
    """Lightning's Trainer with two more commands."""

    def export(self, model: PolicyModule, ckpt_path: str, output_dir: str, datamodule: RolloutDataModule | None = None) -> str:
        """Write a checkpoint's policy as a Hugging Face folder.

        Args:
            model: gives nothing but the command line its schema; the checkpoint names the model folder.
            ckpt_path: checkpoint to read.
            output_dir: folder to write.
            datamodule: not used; LightningCLI passes it to every subcommand.
        """
        folder = export_policy(ckpt_path, output_dir)
        print(f"exported to {folder}")  # noqa: T201 - the command's output
        return folder

    def plan(
        self,
        model: PolicyModule,
        datamodule: RolloutDataModule,
        token_s: float | None = None,
        train_s: float | None = None,
        mean_tokens: float | None = None,
        lengths: LengthShape = "exponential",
        summary: str | None = None,
        num_slots: int | None = None,
    ) -> Plan:
        """Predict staleness, rejection, utilisation and length bias of a run (docs/staleness.md); nothing is trained.

        Args:
            model: policy, whose rates are measured unless they are given.
            datamodule: settings of the run.
            token_s: seconds per token of one response while every slot is busy; with train_s and mean_tokens nothing is measured.
            train_s: seconds per update.
            mean_tokens: mean response length.
            lengths: shape of the distribution of response lengths, where they are not measured.
            summary: summary.json of an earlier run, to take the rates from.
            num_slots: responses decoded at once, where the engine does not say.
        """
        given = GivenRates(token_s, train_s, mean_tokens, lengths)
        prediction = plan_run(self, model, datamodule, given, summary=summary, num_slots=num_slots)
        print(prediction.text())  # noqa: T201 - the command's output
        return prediction


class AsyncRLCLI(LightningCLI):
    """LightningCLI with the project's defaults and checks."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set defaults that this project needs; a config or a flag overrides them."""
        parser.set_defaults(
            {
                "trainer.accelerator": "auto",
                "trainer.devices": 1,
                "trainer.max_steps": 300,
                "trainer.max_epochs": -1,
                "trainer.log_every_n_steps": 1,
                "trainer.num_sanity_val_steps": 0,
                "trainer.check_val_every_n_epoch": None,
                "trainer.enable_model_summary": False,
            }
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """fit, validate, test, predict, export, and plan."""
        loaders = {"model", "dataloaders", "datamodule"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": loaders,
            "test": loaders,
            "predict": loaders,
            "export": {"model", "datamodule"},
            "plan": {"model", "datamodule"},
        }

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and check the checkpoint before Lightning looks for hyperparameters in it.

        Raises:
            CheckpointError: the file is missing, torn or foreign.
        """
        super().parse_arguments(parser, args)
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if path is not None and path not in ("last", "best", "hpc") and "://" not in path:
            read_checkpoint(path)

    def before_fit(self) -> None:
        """Refuse a run that cannot work, and find what it goes on with."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, AsyncRollout):
                callback.configuration = flatten(self.config[self.subcommand].as_dict())
        refuse_early(self.trainer, self.model, self.datamodule)
        self._find_last()

    def before_validate(self) -> None:
        """Find the checkpoint."""
        self._find_last()

    def before_test(self) -> None:
        """Find the checkpoint."""
        self._find_last()

    def before_predict(self) -> None:
        """Find the checkpoint."""
        self._find_last()

    def _find_last(self) -> None:
        """`--ckpt_path last` means earlier runs too: Lightning would look into this run's new folder alone.

        Raises:
            CheckpointError: there is nothing to evaluate.
        """
        arguments = self.config_init[self.subcommand]
        if arguments.get("ckpt_path") != "last":
            return
        arguments["ckpt_path"] = newest_checkpoint(self.trainer)
        if arguments["ckpt_path"] is None and self.subcommand != "fit":
            raise CheckpointError("ckpt_path must name a checkpoint to evaluate, got last, and none was found. Give its path.")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """`predict` always writes its completions; a config may hold a PredictionWriter with another path."""
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self.subcommand == "predict" and not any(isinstance(callback, PredictionWriter) for callback in callbacks):
            callbacks.append(PredictionWriter())
        return trainer

    def before_instantiate_classes(self) -> None:
        """Check what can be checked before anything exists."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        trainer: Any = config.trainer
        for key, remedy in (
            ("gradient_clip_val", "model.max_grad_norm"),
            ("accumulate_grad_batches", "data.max_tokens_per_micro_batch"),
        ):
            value = getattr(trainer, key, None)
            if value is not None and (key, value) != ("accumulate_grad_batches", 1):
                raise ConfigurationError(f"trainer.{key} must be left out, got {value} (manual optimization). Set {remedy}.")
        trainer.callbacks = join_rollouts(trainer.callbacks)
        if self.subcommand == "export":
            check_writable(config.output_dir, "output_dir")
        if trainer.enable_progress_bar is False and trainer.callbacks:
            trainer.callbacks = [c for c in trainer.callbacks if not c.class_path.endswith("ProgressBar")]
        if self.subcommand == "fit":
            check_writable(str(trainer.default_root_dir or "."), "trainer.default_root_dir")
            for logger in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
                save_dir = getattr(getattr(logger, "init_args", None), "save_dir", None)
                if save_dir is not None:
                    check_writable(str(save_dir), "trainer.logger.save_dir")
            if config.data.save_rollouts is not None:
                check_writable(config.data.save_rollouts, "data.save_rollouts")


def join_rollouts(callbacks: Any) -> Any:
    """One AsyncRollout of several: the first, with what the later ones set to something else than its default.

    So a file of `configs/engine` can append (`callbacks+`) an AsyncRollout that holds an engine, and leave the rest alone.
    """
    callbacks = callbacks if callbacks is None or isinstance(callbacks, list) else [callbacks]  # one may be given as it is
    rollouts = [c for c in callbacks or () if getattr(c, "class_path", "").rpartition(".")[2] == AsyncRollout.__name__]
    if len(rollouts) < 2:
        return callbacks
    defaults = {name: p.default for name, p in inspect.signature(AsyncRollout).parameters.items()}
    for extra in rollouts[1:]:
        for name, value in vars(extra.init_args).items():
            if value != defaults.get(name):
                setattr(rollouts[0].init_args, name, value)
    return [c for c in callbacks if not any(c is extra for extra in rollouts[1:])]


def refuse_early(trainer: Any, module: PolicyModule, data: RolloutDataModule) -> None:
    """Every check that needs no running part, before Lightning makes a log folder.

    Raises:
        ConfigurationError, DataError: what is wrong, and the remedy.
    """
    check_files(trainer)
    data.prepare(module, lag_of(trainer))
    for callback in trainer.callbacks:
        if isinstance(callback, AsyncRollout):
            check_settings(callback, trainer, module, data)


def check_writable(folder: str, key: str) -> None:
    """Refuse a folder that cannot be written, before anything starts.

    Raises:
        ConfigurationError: naming key, folder and cause.
    """
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        with tempfile.TemporaryFile(dir=path):  # permission bits say nothing to root, nor of a read-only file system
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{key} must be a folder that can be written, got {folder!r} ({path}: {error.strerror})."
        ) from error


def resolve_configs(args: list[str]) -> list[str]:
    """Replace `--config NAME` by the packaged config of that name where no such file exists, and check every file strictly.

    Raises:
        ConfigurationError: no such config, or a file with a duplicate or empty unknown key.
    """
    resolved = list(args)
    for i, arg in enumerate(resolved):
        if arg in ("--config", "-c") and i + 1 < len(resolved):
            resolved[i + 1] = find_config(resolved[i + 1])
            check_yaml_file(resolved[i + 1])
        elif arg.startswith("--config="):
            path = find_config(arg.removeprefix("--config="))
            check_yaml_file(path)
            resolved[i] = f"--config={path}"
    return resolved


def packaged_configs() -> Path:
    """The folder of configs that ship: inside an installed package, beside it in a checkout."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs"


def find_config(name: str) -> str:
    """A path as it is if the file exists, else the packaged config of that name (`vcpo`, `experiment/pace`, `configs/vcpo.yaml`).

    Raises:
        ConfigurationError: neither exists.
    """
    if Path(name).is_file():
        return name
    root = packaged_configs()
    stem = name.removeprefix("configs/").removesuffix(".yaml")
    packaged = root / f"{stem}.yaml"
    if packaged.is_file():
        return str(packaged)
    known = sorted(str(p.relative_to(root).with_suffix("")) for p in root.rglob("*.yaml"))
    raise ConfigurationError(f"--config must be a file or one of {known}, got {name!r}.")


def run(args: ArgsType = None) -> AsyncRLCLI:
    """Parse and run; for use from Python. `args` as on the command line."""
    arguments = resolve_configs(list(args) if args is not None else sys.argv[1:])
    if args is None:
        sys.argv[1:] = arguments
    quiet_lightning()
    return AsyncRLCLI(
        PolicyModule,
        RolloutDataModule,
        trainer_class=Trainer,
        save_config_callback=SaveConfigCallback,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        args=None if args is None else arguments,
    )


def quiet_lightning() -> None:
    """Drop Lightning's product tips, and warnings about what is meant to be as it is."""
    for message in MEANT:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.getMessage())


def user_error(error: BaseException | None) -> BaseException | None:
    """The user's mistake in a chain of exceptions (the parser wraps those of constructors), or None if there is none."""
    while error is not None:
        if isinstance(error, (ConfigurationError, DataError, CheckpointError, MisconfigurationException)):
            return error
        error = error.__cause__ or error.__context__
    return None


def main(args: ArgsType = None) -> None:
    """Run the command. Exits with 0, 1 (error), 2 (wrong arguments or files), 130 (SIGINT) or 143 (SIGTERM).

    The command itself begins in `__main__.py`, which takes signals over before this module's imports.
    """
    try:
        cli = run(args)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_CODES["SIGINT"]) from None
    except StopRequested as request:  # before training began, or in `predict`
        raise SystemExit(EXIT_CODES.get(str(request), 1)) from None
    except SystemExit as leaving:  # Lightning's exit, with 1, after a Ctrl-C while the engine started
        if isinstance(leaving.__context__, KeyboardInterrupt):
            raise SystemExit(EXIT_CODES["SIGINT"]) from None
        raise
    except Exception as error:
        refusal = user_error(error)
        if refusal is None:
            raise
        print(f"lit-asyncrl: {refusal}", file=sys.stderr)  # noqa: T201 - the command's error output
        raise SystemExit(2) from None
    reason = getattr(cli.datamodule, "supervisor", None) and cli.datamodule.supervisor.stop_reason
    if reason in EXIT_CODES:
        raise SystemExit(EXIT_CODES[reason])


__all__ = ["AsyncRLCLI", "AsyncRLError", "PredictionWriter", "main", "run"]

if __name__ == "__main__":
    main()
