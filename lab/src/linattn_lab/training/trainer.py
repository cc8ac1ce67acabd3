"""The trainer of all labs: one loop, a checkpoint that survives `kill -9`, one process or several.

A task gives the trainer a model, examples and a loss; everything else is in `TrainConfig`. The order of the examples is a
function of the seed and the epoch alone, so a run that was killed goes on with the batches, the dropout and the losses
that it would have had. Under torchrun the processes share each batch, or each sequence of it; the losses are those of one
process.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from linattn._commandline import CommandError
from linattn.parallel import sequence_parallel

from .config import TrainConfig, batches, schedule
from .lock import training_lock
from .tensor_files import VERSION, read_tensors, write_tensors


class Trainer:
    """Trains a model.

    Args:
        model: its parameters are trained in place.
        loss: of the model and the examples of a batch: the SUM of the losses and what to divide it by (tokens, examples).
        train, validation: sequences of examples.
        config: see TrainConfig.
        folder: for checkpoints, the best weights and TensorBoard; None keeps nothing.
        size: of an example, so that a batch holds examples of like size; by default all are the same.
        order: of an epoch (0, 1, ...): its batches as lists of numbers of examples, as many batches in every epoch and
            the same ones whenever it is asked; by default `batches`.
        about: what is needed to make the model again; goes into the files beside the weights.
        sample: text shown in TensorBoard at each validation.
        optimizer: of the model's parameters; by default AdamW with the settings of `config`.
        sequence: processes that share each sequence. `loss` then runs under linattn.parallel.sequence_parallel, cuts its
            tokens with linattn.parallel.shard, and returns the sum and the number of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, list[Any]], tuple[Tensor, float]],
        train: Sequence[Any],
        validation: Sequence[Any],
        config: TrainConfig,
        folder: str | os.PathLike[str] | None = None,
        *,
        size: Callable[[Any], int] = lambda _: 1,
        order: Callable[[int], list[list[int]]] | None = None,
        about: dict[str, Any] | None = None,
        sample: Callable[[nn.Module], str] | None = None,
        sequence: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        if len(train) == 0:
            raise ValueError("there are no examples to train on.")
        self.model, self.loss, self.train_data, self.validation = model, loss, train, validation
        self.config, self.about, self.sample = config, about or {}, sample
        self.folder = None if folder is None else Path(folder)
        sizes = [size(example) for example in train]
        self.order = order or (lambda epoch: batches(sizes, config, epoch))
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if sequence < 1 or self.world % sequence:
            raise ValueError(f"{self.world} processes cannot share sequences in groups of {sequence}.")
        # Processes of one row share sequences; rows share the examples of a batch.
        self.row, self.rows = self.rank // sequence, self.world // sequence
        self.mesh = None
        if sequence > 1:
            self.mesh = init_device_mesh("cpu", (self.rows, sequence), mesh_dim_names=("data", "sequence"))
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = optimizer or torch.optim.AdamW(groups, lr=config.lr)
        self.step, self.history = 0, {"train": [], "validation": []}  # type: int, dict[str, list[tuple[int, float]]]
        self.best, self.since_best = math.inf, 0

    def run(self, *, resume: bool = True, show: bool = True) -> dict[str, list[tuple[int, float]]]:
        """Trains to the end, from the folder's checkpoint if there is one. Returns (step, loss) of both kinds.

        The folder is held meanwhile: a second training in it raises FolderInUse, a ValueError.
        """
        with nullcontext() if self.folder is None else training_lock(self.folder):
            return self._run(resume, show)

    def _run(self, resume: bool, show: bool) -> dict[str, list[tuple[int, float]]]:
        torch.manual_seed(self.config.seed + self.rank)
        if resume and self.folder is not None and (self.folder / "checkpoint.safetensors").exists():
            self.load(self.folder / "checkpoint.safetensors")
        model = DistributedDataParallel(self.model) if self.world > 1 else self.model
        writer = self._writer()
        hidden = None if show and self.rank == 0 else True  # None: hidden unless stderr is a terminal
        bar = tqdm(total=self.config.steps, initial=self.step, disable=hidden, unit="step")
        per_epoch = len(self.order(0))
        epoch, plan = -1, []  # type: int, list[list[int]]
        while self.step < self.config.steps and not self._exhausted():
            if self.step // per_epoch != epoch:
                epoch = self.step // per_epoch
                plan = self.order(epoch)
            loss, rate = self._train_step(model, plan[self.step % per_epoch])
            self.step += 1
            self.history["train"].append((self.step, loss))
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", lr=f"{rate:.1e}")
            if writer:
                writer.add_scalar("loss/train", loss, self.step)
                writer.add_scalar("lr", rate, self.step)
            last = self.step == self.config.steps
            if len(self.validation) and (self.step % self.config.validate_every == 0 or last):
                self._validate(writer, show and self.rank == 0)
            if self.step % self.config.checkpoint_every == 0 or last:
                self.save()
        bar.close()
        if writer:
            writer.close()
        return self.history

    def _train_step(self, model: nn.Module, indices: list[int]) -> tuple[float, float]:
        model.train()
        rate = self.config.lr * schedule(self.step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        own = [self.train_data[i] for i in indices[self.row :: self.rows]]
        if own:
            with self._over_shards():
                total, weight = self.loss(model, own)
        else:  # a last, small batch may leave a process without examples; it still takes part
            total, weight = torch.stack([p.sum() for p in model.parameters()]).sum() * 0.0, 0.0
        whole = self._sum_over_processes(torch.tensor([weight, float(total.detach())], dtype=torch.float64))
        # DistributedDataParallel averages gradients over processes; this makes it the gradient of the whole batch.
        (total * self.world / max(float(whole[0]), 1e-12)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(whole[1] / whole[0])
        if not math.isfinite(loss):
            raise CommandError(
                f"the loss became {loss} at step {self.step}: lower --lr or --clip, or look at the data."
            )
        return loss, rate

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Any]) -> float:
        """Mean loss over examples, shared among the processes."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        width = self.config.batch_size
        for start in range(self.row * width, len(examples), self.rows * width):
            with self._over_shards():
                total, weight = self.loss(
                    self.model, [examples[i] for i in range(start, min(start + width, len(examples)))]
                )
            totals += torch.tensor([float(total), weight], dtype=torch.float64)
        totals = self._sum_over_processes(totals)
        return float(totals[0] / totals[1].clamp_min(1e-12))

    def _validate(self, writer: Any, show: bool) -> None:
        loss = self.evaluate(self.validation)
        self.history["validation"].append((self.step, loss))
        if show:
            tqdm.write(f"step {self.step}: validation loss {loss:.4f}")
        improved = loss < self.best
        self.since_best = 0 if improved else self.since_best + 1
        if improved:
            self.best = loss
            if self.folder is not None and self.rank == 0:
                self.export(self.folder / "best.safetensors")
        if writer:
            writer.add_scalar("loss/validation", loss, self.step)
            if self.sample is not None:
                with torch.no_grad():
                    writer.add_text("sample", self.sample(self.model.eval()), self.step)

    def _over_shards(self) -> AbstractContextManager[Any]:
        """Where the loss of this process's part of each sequence is computed."""
        return nullcontext() if self.mesh is None else sequence_parallel(self.mesh)

    def _exhausted(self) -> bool:
        return 0 < self.config.patience <= self.since_best

    def _sum_over_processes(self, numbers: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def _writer(self) -> Any:
        if self.folder is None or self.rank > 0:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.step + 1)

    def export(self, path: str | os.PathLike[str]) -> None:
        """The weights and what they are, in one file."""
        facts = {"about": self.about, "config": asdict(self.config), "step": self.step, "validation": self.best}
        write_tensors(path, dict(self.model.state_dict()), {"version": VERSION, "facts": json.dumps(facts)})

    def save(self) -> None:
        """A checkpoint from which `run` goes on as if it had never stopped."""
        if self.folder is None:
            return
        generators = torch.get_rng_state().unsqueeze(0)
        if self.world > 1:
            gathered = [torch.empty_like(generators) for _ in range(self.world)]
            dist.all_gather(gathered, generators)
            generators = torch.cat(gathered)
        if self.rank == 0:
            tensors = {f"model.{name}": x for name, x in self.model.state_dict().items()}
            for index, state in self.optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{index}.{name}": x for name, x in state.items()}
            tensors["generators"] = generators
            facts = {"config": asdict(self.config), "step": self.step, "history": self.history}
            facts |= {"best": self.best if math.isfinite(self.best) else None, "since_best": self.since_best}
            write_tensors(
                self.folder / "checkpoint.safetensors", tensors, {"version": VERSION, "facts": json.dumps(facts)}
            )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes up a checkpoint. Another configuration than the one it was made with is refused, but for the steps."""
        tensors, metadata = read_tensors(path)
        facts = json.loads(metadata["facts"])
        for name, old in facts["config"].items():
            if name not in ("steps", "patience") and old != getattr(self.config, name):
                raise ValueError(
                    f"{os.fspath(path)} was made with {name}={old}, not {getattr(self.config, name)}: "
                    "train into another folder, or with the same settings."
                )
        self.model.load_state_dict({k.removeprefix("model."): x for k, x in tensors.items() if k.startswith("model.")})
        state: dict[int, dict[str, Tensor]] = {}
        for key, x in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".", 2)
                state.setdefault(int(index), {})[name] = x
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        own = tensors["generators"][self.rank % len(tensors["generators"])]
        torch.set_rng_state(own.clone())  # which reads from the start of the storage, whatever part of it the tensor is
        self.step, self.since_best = facts["step"], facts["since_best"]
        self.best = math.inf if facts["best"] is None else facts["best"]
        self.history = {kind: [(int(s), float(x)) for s, x in pairs] for kind, pairs in facts["history"].items()}
