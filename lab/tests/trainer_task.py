"""A small task for the trainer's tests, with dropout and examples of different sizes; other processes run it too."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import linattn
from linattn_lab.training.config import TrainConfig
from linattn_lab.training.trainer import Trainer

DEFAULTS = {
    "steps": 60,
    "batch_size": 8,
    "lr": 1e-2,
    "warmup": 5,
    "validate_every": 20,
    "checkpoint_every": 10,
    "bucket": 3,
}


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=generator)
    return [torch.randn(int(n), 4, generator=generator) for n in lengths]


def loss(model, batch):
    x = torch.cat(batch)
    return (model(x) - x.flip(-1)).square().sum(), float(len(x))


def make(folder, dropout=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
    config = TrainConfig(**{**DEFAULTS, **options})
    return Trainer(model, loss, examples(100, 1), examples(20, 2), config, folder, size=len, about={"task": "flip"})


def slow_run(folder):
    """Long enough to be killed in the middle."""
    import time

    trainer = make(folder, steps=400, checkpoint_every=5)
    step = trainer._train_step
    trainer._train_step = lambda *args: (time.sleep(0.01), step(*args))[1]
    trainer.run(show=False)


def shared_run(folder):
    """One of several processes; the first writes down the losses."""
    import json
    from pathlib import Path

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    history = make(folder, dropout=0.0).run(show=False)
    if dist.get_rank() == 0:
        Path(folder, "history.json").write_text(json.dumps(history))
    leave()


def refused_run(folder):
    """Several processes that find the folder taken: each says so."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        make(folder).run(show=False)
    except ValueError as error:
        print(f"{dist.get_rank()}: {error}", flush=True)
    leave()


class SequenceModel(nn.Module):
    """A token mixer with a convolution and a state, and one with positions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.mixers = nn.ModuleList(
            [linattn.nn.Mamba2(16, num_heads=2, head_dim=8, state_size=8), linattn.nn.Retention(16, num_heads=2)]
        )
        self.head = nn.Linear(16, 12)

    def forward(self, ids):
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(x)
        return self.head(x)


def sequence_loss(model, batch):
    ids = torch.stack(batch)
    shown, targets = ids[:, :-1], ids[:, 1:]
    if dist.is_initialized():
        shown, targets = (linattn.parallel.shard(x).contiguous() for x in (shown, targets))
    total = nn.functional.cross_entropy(model(shown).flatten(0, 1), targets.flatten(), reduction="sum")
    return total, float(targets.numel())


def sequence_trainer(folder, sequence=1, steps=8):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    learnt, validation = (torch.randint(12, (count, 18), generator=generator) for count in (20, 6))
    config = TrainConfig(**{**DEFAULTS, "steps": steps, "batch_size": 4, "checkpoint_every": 3, "validate_every": 4})
    return Trainer(
        SequenceModel().double(), sequence_loss, list(learnt), list(validation), config, folder, sequence=sequence
    )


def over_shards(who, folder):
    """A case for parallel_support.Pool: data and sequence parallelism, stopped after a few steps and taken up again."""
    sequence_trainer(folder, sequence=2, steps=5).run(show=False)
    return sequence_trainer(folder, sequence=2, steps=8).run(show=False)


def leave():
    """Ends the process once all are done: without Python's finalization, in which gloo's threads can abort."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    {"slow": slow_run, "shared": shared_run, "refused": refused_run}[sys.argv[1]](sys.argv[2])
