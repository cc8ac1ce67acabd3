"""The labs' trainer: it learns, survives being killed, and is the same in one process and in two."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from linattn.lab.trainer import TrainConfig, Trainer, add_flags, batches, config_from, read_tensors, schedule

# A task with dropout and examples of different sizes, in a file so that other processes can run it.
TASK = """
import sys, torch, torch.distributed as dist
from torch import nn
from linattn.lab.trainer import TrainConfig, Trainer

def examples(count, seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(int(torch.randint(2, 9, (1,), generator=g)), 4, generator=g) for _ in range(count)]

def loss(model, batch):
    x = torch.cat(batch)
    return (model(x) - x.flip(-1)).square().sum(), float(len(x))

def make(folder, dropout=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
    config = TrainConfig(**{"steps": 60, "batch_size": 8, "lr": 1e-2, "warmup": 5, "validate_every": 20,
                            "checkpoint_every": 10, "bucket": 3, **options})
    return Trainer(model, loss, examples(100, 1), examples(20, 2), config, folder, size=len, about={"task": "flip"})
"""
exec(TASK)


def test_it_learns_and_writes_down_what_it_did(tmp_path):
    trainer = make(tmp_path, steps=200, dropout=0.0)
    history = trainer.run(show=False)
    assert history["train"][-1][1] < 0.2 * history["train"][0][1]
    assert history["validation"][-1][1] < 0.3
    assert [step for step, _ in history["validation"]] == list(range(20, 201, 20))
    tensors, metadata = read_tensors(tmp_path / "best.safetensors")
    facts = json.loads(metadata["facts"])
    assert facts["about"] == {"task": "flip"}
    assert facts["validation"] == min(loss for _, loss in history["validation"])
    assert set(tensors) == set(trainer.model.state_dict())
    assert list((tmp_path / "tensorboard").iterdir())
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_run_in_two_halves_has_the_losses_of_one(tmp_path):
    whole = make(tmp_path / "whole").run(show=False)
    half = make(tmp_path / "half")
    half.config.steps = 60

    class Stop(Exception):
        pass

    original = half._train_step

    def stopping(*args):
        if half.step == 35:  # five steps after a checkpoint: those five are done again
            raise Stop
        return original(*args)

    half._train_step = stopping
    with pytest.raises(Stop):
        half.run(show=False)
    again = make(tmp_path / "half")
    assert again.run(show=False) == whole
    assert again.step == 60


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_losses(tmp_path):
    script = TASK + (
        "import time\n"
        "t = make(sys.argv[1], steps=400, checkpoint_every=5)\n"
        "step = t._train_step\n"
        "t._train_step = lambda *a: (time.sleep(0.01), step(*a))[1]\n"
        "t.run(show=False)\n"
    )
    (tmp_path / "task.py").write_text(script)
    process = subprocess.Popen([sys.executable, str(tmp_path / "task.py"), str(tmp_path / "run")])
    checkpoint, start = tmp_path / "run" / "checkpoint.safetensors", time.monotonic()
    while not checkpoint.exists() and time.monotonic() - start < 120:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = make(tmp_path / "run", steps=400, checkpoint_every=5)
    resumed.load(checkpoint)
    assert 0 < resumed.step < 400
    assert resumed.run(show=False) == make(None, steps=400, checkpoint_every=5).run(show=False)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(tmp_path):
    script = TASK + (
        "import json\n"
        "torch.set_num_threads(1)\n"
        "dist.init_process_group('gloo')\n"
        "history = make(sys.argv[1], dropout=0.0).run(show=False)\n"
        "if dist.get_rank() == 0: json.dump(history, open(sys.argv[1] + '/history.json', 'w'))\n"
        "dist.destroy_process_group()\n"
    )
    (tmp_path / "task.py").write_text(script)
    (tmp_path / "run").mkdir()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*words, str(tmp_path / "task.py"), str(tmp_path / "run")], check=True, capture_output=True)
    shared = json.loads((tmp_path / "run" / "history.json").read_text())
    alone = make(None, dropout=0.0).run(show=False)
    for kind in ("train", "validation"):
        steps, losses = zip(*alone[kind])
        assert [step for step, _ in shared[kind]] == list(steps)
        assert [loss for _, loss in shared[kind]] == pytest.approx(list(losses), rel=1e-4)


def test_early_stopping():
    trainer = make(None, lr=0.0, weight_decay=0.0, patience=2, steps=1000)
    assert [step for step, _ in trainer.run(show=False)["validation"]] == [20, 40, 60]


def test_another_configuration_is_not_mixed_in(tmp_path):
    make(tmp_path, steps=10).run(show=False)
    with pytest.raises(ValueError, match=r"was made with lr=0.01, not 0.5: train into another folder"):
        make(tmp_path, steps=20, lr=0.5).run(show=False)
    longer = make(tmp_path, steps=20)
    assert longer.run(show=False)["train"][-1][0] == 20
    fresh = make(tmp_path, steps=10, lr=0.5)
    assert fresh.run(resume=False, show=False)["train"][0][0] == 1


def test_a_loss_that_is_not_finite_stops_the_run():
    trainer = make(None)
    trainer.loss = lambda model, batch: (model(torch.cat(batch)).sum() * torch.inf, 1.0)
    with pytest.raises(RuntimeError, match=r"the loss became (nan|-?inf) at step 0: lower --lr"):
        trainer.run(show=False)
    with pytest.raises(ValueError, match="no examples to train on"):
        Trainer(nn.Linear(1, 1), loss, [], [], TrainConfig())


def test_batches_hold_every_example_once_and_examples_of_like_size():
    sizes = [int(x) for x in torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(0))]
    config = TrainConfig(batch_size=10, bucket=10)
    plan = batches(sizes, config, 3)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    spread = sum(max(sizes[i] for i in batch) - min(sizes[i] for i in batch) for batch in plan) / len(plan)
    assert spread < 20
    assert batches(sizes, config, 3) == plan
    assert batches(sizes, config, 4) != plan


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(steps=100, warmup=10, final_lr=0.1)
    rates = [schedule(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_flags_make_a_configuration():
    import argparse

    parser = argparse.ArgumentParser()
    add_flags(parser, TrainConfig(lr=0.5))
    config = config_from(parser.parse_args(["--batch-size", "7", "--seed", "3"]))
    assert (config.lr, config.batch_size, config.seed) == (0.5, 7, 3)
    assert "optimizer steps in all (default 1000)" in parser.format_help()
