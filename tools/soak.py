"""Kills a run again and again at random instants, resumes it, and checks that nothing was lost or done twice.

    python tools/soak.py kill --rounds 50 --unbroken 10    # about 20 minutes on two cores
    python tools/soak.py cycles --rounds 200               # starts and stops in one process; about 15 minutes

`kill` ends the trainer with SIGKILL after a random time, waits until its children have noticed, and goes on with `--ckpt_path
last`, until all updates are made. Checked, over what the checkpoints kept: every dispatched group is settled exactly once,
`policy_version` rises by one, the learning rate follows its schedule, the ledger closes, and trained responses are as long as in
runs that nobody killed; with `--unbroken` above 0 also that the accuracy is within the range of so many of those.
`cycles` checks that threads, descriptors, children, mapped shared memory and resident memory do not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer

LOG = "LIT_ASYNCRL_SOAK_LOG"
"""Environment variable with the path of the run's settle log."""

LEARNING_RATE, GAMMA = 3e-4, 0.995
"""Base rate and its factor from update to update: a resumed run that forgot its place would show."""

MAX_LENGTH_BIAS = 0.03
"""Largest relative difference of the mean trained response length from unbroken runs."""

LEFTOVER_S = 10.0
"""Longest time for the processes of a killed run to notice it."""


class SettleLog(Callback):
    """Writes, line by line, what a run resumes from, what it settles, and what it updates."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where this process begins, and listen: everything is restored, and nothing is generated yet."""
        self._file = Path(os.environ[LOG]).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed with the process
        self._lock = threading.Lock()
        self._data: Any = trainer.datamodule  # type: ignore[attr-defined]
        ledger = self._data.pool.ledger
        open_groups = ledger.state_dict()["open"][:, 0].tolist()
        settled = self._data.prompts.state_dict()["next_group_id"]
        self._write({"start": pl_module.policy_version, "open": open_groups, "next_group_id": settled, "pid": os.getpid()})
        ledger.on_settled(lambda group_id, state: self._write({"settled": group_id, "state": state}))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the update."""
        optimizer: Any = pl_module.optimizers()
        self._write(
            {
                "update": pl_module.policy_version,
                "step": trainer.global_step,
                "lr": optimizer.param_groups[0]["lr"],
                "tokens": batch.num_trained_tokens,
                "trajectories": batch.num_trajectories,
            }
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end, also of a process that had nothing left to train."""
        rows = self._data.pool.ledger.rows()
        self._write(
            {
                "end": pl_module.policy_version,
                "dispatched": self._data.pool.ledger.num_dispatched,
                "prompts": sum(row.prompts for row in rows),
                "open": self._data.pool.ledger.state_dict()["open"][:, 0].tolist(),
                "next_group_id": self._data.prompts.state_dict()["next_group_id"],
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(record) + "\n")


# ---------------------------------------------------------------- runs


def command(folder: Path, updates: int, seed: int, *, resume: bool) -> list[str]:
    """The command line of a run in `folder`."""
    overlay = folder / "soak.yaml"
    overlay.write_text("trainer:\n  callbacks+:\n    - class_path: soak.SettleLog\n", encoding="utf-8")
    arguments = [
        "fit",
        "--config=smoke",
        f"--config={overlay}",
        f"--seed_everything={seed}",
        f"--trainer.max_steps={updates}",
        "--trainer.val_check_interval=1000000",
        "--trainer.enable_progress_bar=false",
        f"--trainer.logger.init_args.save_dir={folder}",
        f"--model.optimizer.init_args.lr={LEARNING_RATE}",
        "--model.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR",
        f"--model.lr_scheduler.gamma={GAMMA}",
        "--data.evaluation.heldout.final_num_prompts=512",
    ]
    return [sys.executable, "-m", "lit_asyncrl", *arguments, *(["--ckpt_path=last"] if resume else [])]


def start(folder: Path, updates: int, seed: int, *, resume: bool) -> subprocess.Popen[bytes]:
    """Start a run; its output goes to a file in `folder`."""
    environment = os.environ | {
        LOG: str(folder / "settled.jsonl"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            command(folder, updates, seed, resume=resume), stdout=output, stderr=output, env=environment, start_new_session=True
        )


def kill_trainer(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """SIGKILL for the trainer alone: its children must notice by themselves. Gives the children."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    return children


def run_killed(folder: Path, updates: int, seed: int, rounds: int, draw: random.Random, timeout_s: float) -> int:
    """Kill and resume `rounds` times, then let the run end; the number of kills that met a live run.

    Raises:
        SystemExit: a run failed by itself, did not end in time, or left processes behind.
    """
    kills = 0
    for number in range(rounds + 1):
        process = start(folder, updates, seed, resume=number > 0)
        last = number == rounds
        limit_s = timeout_s if last else draw.uniform(1.0, 16.0)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            children = kill_trainer(process)
            if last:
                raise SystemExit(f"the run did not end within {timeout_s:.0f} s; see {folder / 'output.txt'}") from None
            kills += 1
            _, alive = psutil.wait_procs(children, timeout=LEFTOVER_S)
            if alive:
                raise SystemExit(f"{alive} outlived their trainer, killed after {limit_s:.2f} s, by {LEFTOVER_S:.0f} s") from None
            continue
        if code != 0:
            raise SystemExit(f"the run failed by itself with {code} in round {number}; see {folder / 'output.txt'}")
        if last:
            return kills
        # It ended before the time was up: later rounds resume a finished run, which must end at once.
    return kills


# ---------------------------------------------------------------- checks


def read_log(folder: Path) -> list[list[dict[str, Any]]]:
    """The settle log by process; a torn last line of a killed process is left out."""
    processes: list[list[dict[str, Any]]] = []
    path = folder / "settled.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        for part in line.replace('}{"', '}\n{"').split("\n"):  # a torn line has no end
            try:
                record = json.loads(part)
            except ValueError:
                continue
            if "start" in record:
                processes.append([])
            processes[-1].append(record)
    return processes


def check(folder: Path, updates: int) -> dict[str, Any]:
    """Everything that must hold of a finished run; numbers of it.

    Raises:
        SystemExit: what does not hold.
    """
    processes = read_log(folder)
    settled: dict[int, str] = {}
    chain: dict[int, dict[str, Any]] = {}
    for records in processes:
        begin = records[0]
        # What the checkpoint does not know of did not happen: those groups are open again, or were never dispatched.
        open_groups, number = set(begin["open"]), begin["next_group_id"]
        settled = {group: state for group, state in settled.items() if group < number and group not in open_groups}
        unknown = set(range(number)) - open_groups - set(settled)
        require(not unknown, f"groups {sorted(unknown)[:5]} are settled in the checkpoint, and were never seen to be")
        chain = {version: record for version, record in chain.items() if version <= begin["start"]}
        require(len(chain) == begin["start"], f"the checkpoint is of update {begin['start']}, and {len(chain)} were seen")
        for record in records[1:]:
            if "settled" in record:
                group = record["settled"]
                require(group not in settled, f"group {group} is settled twice: {settled.get(group)} and {record['state']}")
                settled[group] = record["state"]
            elif "update" in record:
                version = record["update"]
                require(version == len(chain) + 1, f"update {version} follows update {len(chain)}")
                chain[version] = record
    end = processes[-1][-1]
    require("end" in end, "the last process wrote no end")
    require(end["end"] == updates == len(chain), f"{end['end']} updates at the end, {len(chain)} seen, {updates} asked for")
    require(end["prompts"] == end["dispatched"], f"the ledger has {end['prompts']} prompts of {end['dispatched']} dispatched")
    missing = set(range(end["next_group_id"])) - set(end["open"]) - set(settled)
    require(not missing, f"groups {sorted(missing)[:5]} vanished")
    for version, record in chain.items():
        rate = LEARNING_RATE * GAMMA**version
        require(abs(record["lr"] / rate - 1) < 1e-6, f"the rate after update {version} is {record['lr']}, not {rate}")
        require(record["step"] == version, f"update {version} is step {record['step']}")
    tokens, trajectories = (sum(record[key] for record in chain.values()) for key in ("tokens", "trajectories"))
    [*_, summary] = sorted(folder.rglob("summary.json"), key=lambda path: path.stat().st_mtime)
    return {
        "processes": len(processes),
        "states": dict(Counter(settled.values())),
        "mean_length": tokens / trajectories,
        "accuracy": json.loads(summary.read_text(encoding="utf-8"))["accuracy_after"],
    }


def require(holds: bool, message: str) -> None:
    """Leave with the message unless it holds."""
    if not holds:
        raise SystemExit(f"BROKEN: {message}")


def kill(arguments: argparse.Namespace, folder: Path) -> None:
    """Killed runs against unbroken ones."""
    unbroken = []
    for seed in range(max(1, arguments.unbroken)):
        place = folder / f"unbroken-{seed}"
        place.mkdir(parents=True)
        run_killed(place, arguments.updates, seed, 0, random.Random(0), arguments.timeout)
        unbroken.append(check(place, arguments.updates))
        print(f"unbroken, seed {seed}: {unbroken[-1]}", flush=True)
    place = folder / "killed"
    place.mkdir()
    # The killed run has the first seed; its own randomness is that of timing.
    kills = run_killed(place, arguments.updates, 0, arguments.rounds, random.Random(arguments.seed), arguments.timeout)
    killed = check(place, arguments.updates)
    print(f"killed {kills} times: {killed}")
    length = statistics.mean(run["mean_length"] for run in unbroken)
    bias = killed["mean_length"] / length - 1
    require(abs(bias) <= MAX_LENGTH_BIAS, f"trained responses are {bias:+.1%} as long as in unbroken runs")
    if arguments.unbroken:
        low, high = (limit(run["accuracy"] for run in unbroken) for limit in (min, max))
        require(low <= killed["accuracy"] <= high, f"accuracy {killed['accuracy']:.3f} is outside [{low:.3f}, {high:.3f}]")
    print(f"all holds: length {bias:+.1%}, every group settled once, rates and updates without a gap")


# ---------------------------------------------------------------- cycles


def footprint() -> dict[str, float]:
    """What a process and its children hold now."""
    process = psutil.Process()
    return {
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "children": len(process.children(recursive=True)),
        "shared memory": sum(
            "/dev/shm/" in line or "/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()
        ),
        "memory, MiB": process.memory_info().rss / 2**20,
    }


def cycles(arguments: argparse.Namespace, folder: Path) -> None:
    """Start and stop runs of two updates in this process."""
    from lit_asyncrl.cli import run

    sys.argv[1:] = []  # Lightning warns of arguments of its own beside those

    def cycle() -> None:
        run(
            [
                "fit",
                "--config=smoke",
                "--trainer.max_steps=2",
                "--trainer.logger=false",
                "--trainer.enable_checkpointing=false",
                "--trainer.callbacks=[AsyncRollout]",
                "--trainer.callbacks.evaluate_first=false",
                "--trainer.callbacks.evaluate_last=false",
                "--trainer.enable_progress_bar=false",
                "--data.batch_groups=2",
                f"--trainer.default_root_dir={folder}",
            ]
        )

    for _ in range(5):
        cycle()
    before = footprint()
    started = time.monotonic()
    for number in range(arguments.rounds):
        cycle()
        if (number + 1) % 20 == 0:
            print(f"{number + 1} cycles, {time.monotonic() - started:.0f} s: {footprint()}", flush=True)
    after = footprint()
    deadline = time.monotonic() + LEFTOVER_S
    while after["threads"] > before["threads"] and time.monotonic() < deadline:  # those that are ending
        time.sleep(0.1)
        after = footprint()
    for key in ("threads", "descriptors", "children", "shared memory"):
        require(after[key] <= before[key], f"{key} grew from {before[key]:g} to {after[key]:g}")
    growth = after["memory, MiB"] - before["memory, MiB"]
    require(growth < 20 + 0.1 * arguments.rounds, f"memory grew by {growth:.0f} MiB in {arguments.rounds} cycles")
    print(f"all holds: before {before}, after {after}")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kill", "cycles"))
    parser.add_argument("--rounds", type=int, default=10, help="kills, or cycles (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=200, help="of a run that is killed (default: %(default)s)")
    parser.add_argument("--unbroken", type=int, default=0, help="runs that give the range of accuracies; 0: it is not compared")
    parser.add_argument("--seed", type=int, default=0, help="of the instants of the kills (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="new folder to leave logs and checkpoints in (default: removed at the end)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        {"kill": kill, "cycles": cycles}[arguments.what](arguments, folder)


if __name__ == "__main__":
    main()
