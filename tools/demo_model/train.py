# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Trains the demo model, or fine-tunes a pruned one, on the CPU.

Two single-threaded processes each take half of a batch and exchange gradients:
with other work on the machine that is faster than one process with two threads,
which would wait for each other in every operator. A run is a function of its
recipe: the batch of a step depends on the seed and the step alone, so a run that
was stopped resumes from its last checkpoint and ends the same.

    python -m tools.demo_model.train pretrain --work-dir build/demo_model
    python -m tools.demo_model.train finetune --work-dir build/demo_model
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tools.demo_model.config import ModelConfig
from tools.demo_model.data import Data
from tools.demo_model.evaluate import heldout_sums, summary
from tools.demo_model.files import made
from tools.demo_model.model import DemoModel

WORKERS = 2
CHECKPOINT_SECONDS = 180


@dataclass(frozen=True)
class Recipe:
    """What decides a run. Loads, losses and learning rates are per step.

    Attributes:
        source: Name of the state that the run starts from; None: random weights.
        steps: Optimizer steps.
        decay: Steps of the learning rate's linear fall to 0 at the end.
        peak_lr: Learning rate between warm-up and fall.
        warmup: Steps of linear warm-up.
        drop: Share of residual branch outputs dropped.
        batch: Windows a step, of `window` tokens.
        long_every: One step in so many has fewer, longer windows of the same
            number of tokens, so that every distance up to `long_window` is seen.
        mtp_weight: Weight of the MTP layer's loss beside the trunk's.
        balance_rate: Step of the routers' selection bias, scaled as the learning
            rate is.
    """

    source: str | None
    steps: int
    decay: int
    peak_lr: float
    warmup: int
    seed: int = 1611
    drop: float = 0.05
    batch: int = 12
    window: int = 256
    long_every: int = 12
    long_window: int = 1536
    mtp_weight: float = 0.2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    balance_rate: float = 2e-3
    eval_every: int = 250

    def lr(self, step: int) -> float:
        """Learning rate of `step`, counted from 0."""
        rise = (step + 1) / self.warmup
        fall = (self.steps - step) / self.decay
        return self.peak_lr * min(1.0, rise, fall)

    def batch_shape(self, step: int) -> tuple[int, int]:
        """Windows and tokens a window of `step`."""
        if step % self.long_every == self.long_every - 1:
            return self.batch * self.window // self.long_window, self.long_window
        return self.batch, self.window


RECIPES = {
    "pretrain": Recipe(source=None, steps=2000, decay=450, peak_lr=1.2e-3, warmup=100),
    "finetune": Recipe(
        source="pruned", steps=600, decay=580, peak_lr=3e-4, warmup=20, seed=1612
    ),
}


class Exchange:
    """One flat float32 buffer of all gradients and router loads, summed at once."""

    def __init__(self, model: DemoModel):
        self.parameters = list(model.parameters())
        self.routers = model.routers()
        sizes = [weight.numel() for weight in self.parameters]
        widths = [len(router.load) for router in self.routers]
        self.flat = torch.zeros(sum(sizes) + sum(widths))
        pieces = self.flat.split(sizes + widths)
        for weight, piece in zip(self.parameters, pieces):
            weight.grad = piece.view_as(weight)
        for router, piece in zip(self.routers, pieces[len(sizes) :]):
            router.load = piece

    def reduce(self) -> None:
        """Sums the buffer over all workers."""
        dist.all_reduce(self.flat)

    def clear(self) -> None:
        """Zeroes the gradients and loads."""
        self.flat.zero_()


def optimizer_for(model: DemoModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas, fused=True)


class Trainer:
    """One worker of a run."""

    def __init__(self, name: str, work_dir: Path):
        self.recipe = recipe = RECIPES[name]
        self.rank = dist.get_rank()
        self.state_file = work_dir / f"{name}.pt"
        self.log_file = work_dir / f"{name}.jsonl"
        self.data = Data(work_dir)
        self.step = 0
        torch.manual_seed(recipe.seed)
        state = resumed = None
        if self.state_file.exists():
            state = resumed = torch.load(self.state_file)
        elif recipe.source:
            state = torch.load(made(work_dir, f"{recipe.source}.pt"))
        widths = state["widths"] if state else ModelConfig().widths
        self.model = DemoModel(ModelConfig().with_widths(widths))
        if state:
            self.model.load_state_dict(state["model"])
        self.model.compute_dtype = torch.bfloat16
        self.model.compile_pieces()
        self.exchange = Exchange(self.model)
        self.optimizer = optimizer_for(self.model, recipe)
        if resumed and "optimizer" in resumed:
            self.optimizer.load_state_dict(resumed["optimizer"])
            self.step = resumed["step"]
        if self.rank == 0:
            self._cut_log()

    def _cut_log(self) -> None:
        """Drops log lines of steps that will be made again."""
        lines = self.log_file.read_text().splitlines() if self.step else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        self.log_file.write_text("".join(line + "\n" for line in kept))

    def log(self, **fields: float) -> None:
        """Appends one line to the log."""
        line = json.dumps(
            {
                key: round(value, 5) if isinstance(value, float) else value
                for key, value in fields.items()
            }
        )
        print(line, flush=True)
        with self.log_file.open("a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Writes a checkpoint, whole or not at all."""
        partial = self.state_file.with_suffix(".partial")
        torch.save(
            {
                "widths": self.model.config.widths,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
            },
            partial,
        )
        partial.replace(self.state_file)

    def train_step(self) -> Tensor:
        """One optimizer step; returns the trunk's and the MTP layer's loss."""
        recipe, model = self.recipe, self.model
        batch, window = recipe.batch_shape(self.step)
        windows = self.data.windows(recipe.seed, self.step, batch, window + 2)
        # Each worker has its own random numbers for dropout.
        torch.manual_seed(recipe.seed + WORKERS * self.step + self.rank)
        model.train()
        model.drop = recipe.drop
        losses = torch.stack(model.losses(windows[self.rank :: WORKERS]))
        (losses @ torch.tensor([1.0, recipe.mtp_weight])).div(WORKERS).backward()
        self.exchange.reduce()
        torch.nn.utils.clip_grad_norm_(self.exchange.parameters, recipe.clip)
        lr = recipe.lr(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for router in self.exchange.routers:
            router.balance(recipe.balance_rate * lr / recipe.peak_lr)
        self.exchange.clear()
        self.step += 1
        return losses.detach()

    def measure(self) -> dict[str, float]:
        """Measures on the held-out chapters, each worker on its half."""
        self.model.eval()
        self.model.drop = 0.0
        # Chapters of many lengths would have the compiled pieces made again.
        with torch.compiler.set_stance("force_eager"):
            sums = heldout_sums(self.model, self.data.heldout[self.rank :: WORKERS])
        dist.all_reduce(sums)
        return summary(sums, self.data.heldout_bytes)

    def run(self) -> None:
        """Trains to the last step of the recipe."""
        recipe = self.recipe
        saved = started = time.monotonic()
        sums, count = torch.zeros(2), 0
        while self.step < recipe.steps:
            sums += self.train_step()
            count += 1
            last = self.step == recipe.steps
            if self.step % 20 == 0 or last:
                losses = sums / count
                dist.all_reduce(losses)
                if self.rank == 0:
                    main, mtp = (losses / WORKERS).tolist()
                    seconds = (time.monotonic() - started) / count
                    self.log(step=self.step, loss=main, mtp=mtp, step_s=seconds)
                started = time.monotonic()
                sums, count = torch.zeros(2), 0
            if self.step % recipe.eval_every == 0 or last:
                measured = self.measure()
                if self.rank == 0:
                    self.log(step=self.step, **measured)
                started = time.monotonic()
            if self.rank == 0 and (
                last or time.monotonic() - saved > CHECKPOINT_SECONDS
            ):
                self.save()
                saved = time.monotonic()
        dist.barrier()


def worker(rank: int, name: str, work_dir: Path) -> None:
    """Body of one process."""
    torch.set_num_threads(1)
    rendezvous = work_dir / f"{name}.rendezvous"
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORKERS
    )
    Trainer(name, work_dir.resolve()).run()
    dist.destroy_process_group()


def main() -> None:
    """Starts the workers of one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", choices=sorted(RECIPES))
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    work_dir = args.work_dir.resolve()
    (work_dir / f"{args.run}.rendezvous").unlink(missing_ok=True)
    # Keep freed memory: torch's large buffers would be mapped anew in every step.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**32))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**34))
    torch.multiprocessing.spawn(worker, (args.run, work_dir), nprocs=WORKERS)


if __name__ == "__main__":
    main()
