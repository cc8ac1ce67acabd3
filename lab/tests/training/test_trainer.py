"""The labs' trainer: it learns, survives being killed, and is the same in one process and in two."""

import argparse
import json
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import warm_python
from linattn.cli import main
from linattn_lab.training.config import TrainConfig, add_flags, batches, config_from, schedule
from linattn_lab.training.lock import FolderInUse, training_lock
from linattn_lab.training.tensor_files import read_tensors
from linattn_lab.training.trainer import Trainer
from trainer_task import loss, make

TASK = str(Path(__file__).parents[1] / "trainer_task.py")


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


@contextmanager
def slow_run(folder):
    """A training of many seconds in a process of its own, past its first checkpoint, killed at the end."""
    with warm_python.Process(TASK, "slow", str(folder)) as process:
        start = time.monotonic()
        while not (folder / "checkpoint.safetensors").exists() and time.monotonic() - start < 120:
            time.sleep(0.05)
        assert process.poll() is None
        yield process


def test_a_killed_run_resumes_to_the_same_losses(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint.safetensors"
    with slow_run(tmp_path / "run") as process:
        time.sleep(0.5)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    resumed = make(tmp_path / "run", steps=400, checkpoint_every=5)
    resumed.load(checkpoint)
    assert 0 < resumed.step < 400
    assert resumed.run(show=False) == make(None, steps=400, checkpoint_every=5).run(show=False)


def test_two_processes_have_the_losses_of_one(tmp_path):
    (tmp_path / "run").mkdir()
    for done in warm_python.run_ranks(2, TASK, "shared", str(tmp_path / "run")):
        assert done.returncode == 0, done.stderr
    shared = json.loads((tmp_path / "run" / "history.json").read_text())
    alone = make(None, dropout=0.0).run(show=False)
    for kind in ("train", "validation"):
        steps, losses = zip(*alone[kind])
        assert [step for step, _ in shared[kind]] == list(steps)
        assert [loss for _, loss in shared[kind]] == pytest.approx(list(losses), rel=1e-4)


REFUSED = r"another process is training in .*: wait until it has ended, or train into another folder"


def test_a_second_training_in_a_folder_is_refused_and_a_killed_one_goes_on(tmp_path):
    with slow_run(tmp_path / "run") as process:
        before = (tmp_path / "run" / "best.safetensors").exists()
        with pytest.raises(FolderInUse, match=REFUSED):
            make(tmp_path / "run", steps=400, checkpoint_every=5).run(show=False)
        with pytest.raises(FolderInUse, match=REFUSED), training_lock(tmp_path / "run" / ".." / "run"):
            pass
        make(tmp_path / "other", steps=3).run(show=False)
        assert process.poll() is None
    assert not before or (tmp_path / "run" / "best.safetensors").exists()
    again = make(tmp_path / "run", steps=400, checkpoint_every=5)
    again.load(tmp_path / "run" / "checkpoint.safetensors")
    assert 0 < again.step < 400
    assert make(tmp_path / "run", steps=400, checkpoint_every=5).run(show=False)["train"][-1][0] == 400


def test_every_process_of_a_run_is_told_that_the_folder_is_taken(tmp_path):
    with training_lock(tmp_path):
        both = warm_python.run_ranks(2, TASK, "refused", str(tmp_path))
    for rank, done in enumerate(both):
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(f"{rank}: {REFUSED}.*\n", done.stdout)


def test_the_folder_is_free_again_after_a_training_an_error_and_for_the_same_thread(tmp_path):
    trainer = make(tmp_path, steps=3)
    trainer.loss = lambda model, batch: (model(torch.cat(batch)).sum() * torch.inf, 1.0)
    with pytest.raises(RuntimeError, match="the loss became"):
        trainer.run(show=False)
    with training_lock(tmp_path):  # as a command does around its trainer
        make(tmp_path, steps=3).run(show=False)
        refused = []

        def other():
            try:
                make(tmp_path, steps=4).run(show=False)
            except FolderInUse as error:
                refused.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(refused) == 1
    assert make(tmp_path, steps=4).run(show=False)["train"][-1][0] == 4


@pytest.mark.parametrize(
    "words",
    [
        ["summarize", "train", "--out", "{folder}"],
        ["difficulty", "train", "--pictures", "60", "--test", "20", "--folder", "{folder}"],
        ["difficulty", "report", "--pictures", "60", "--test", "20", "--folder", "{folder}"],
        ["early-exit", "train", "--train", "60", "--test", "20", "--folder", "{parent}"],
        ["faces", "train", "orl", "--model", "{folder}"],
        ["faces", "report", "--seeds", "1", "--no-ablations", "--folder", "{folder}"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_that_trains_refuses_a_folder_in_which_another_process_trains(tmp_path, capsys, words):
    folder = tmp_path / "exits"  # where early-exit puts its network
    words = [word.format(folder=folder, parent=tmp_path) for word in words]
    held, done = threading.Event(), threading.Event()

    def hold():
        with training_lock(folder):
            held.set()
            done.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        assert main(["lab", *words]) == 2
    finally:
        done.set()
        thread.join()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("linattn lab ")]
    assert len(lines) == 1
    assert re.search(REFUSED, lines[0])
    assert [path.name for path in folder.iterdir()] == ["training.lock"]


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
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_flags_make_a_configuration():
    parser = argparse.ArgumentParser()
    add_flags(parser, TrainConfig(lr=0.5))
    config = config_from(parser.parse_args(["--batch-size", "7", "--seed", "3"]))
    assert (config.lr, config.batch_size, config.seed) == (0.5, 7, 3)
    assert "optimizer steps in all (default 1000)" in parser.format_help()


def test_a_task_may_give_the_order_and_norms_keep_their_averages(tmp_path):
    """Batches come from `order`, and a run in two halves goes on with the running averages of BatchNorm."""
    seen = []

    def order(epoch):
        return [[epoch, 7], [3, 3, 3]]

    def norm_loss(model, batch):
        x = torch.stack([example[0] for example in batch])
        if model.training:
            seen.append([int(example[1]) for example in batch])
        return (model(x) - x).square().sum(), float(len(x))

    def trainer(folder, steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i) for i in range(20)]
        config = TrainConfig(steps=steps, warmup=0, final_lr=1.0, checkpoint_every=3, validate_every=6)
        return Trainer(model, norm_loss, data, data, config, folder, order=order)

    whole = trainer(tmp_path / "whole", 6)
    whole.run(show=False)
    assert seen == [[0, 7], [3, 3, 3], [1, 7], [3, 3, 3], [2, 7], [3, 3, 3]]
    trainer(tmp_path / "half", 3).run(show=False)
    resumed = trainer(tmp_path / "half", 6)
    resumed.run(show=False)
    assert resumed.history["train"] == whole.history["train"]
    assert resumed.history["validation"][-1] == whole.history["validation"][-1]
    tensors, _ = read_tensors(tmp_path / "half" / "checkpoint.safetensors")
    assert torch.equal(tensors["model.1.running_mean"], whole.model[1].running_mean)
    assert int(tensors["model.1.num_batches_tracked"]) == 6


def test_training_shows_no_bar_in_a_pipe(capfd):
    model = torch.nn.Linear(1, 1)
    data = [torch.ones(1)] * 4
    loss = lambda model, batch: (model(torch.stack(batch)).square().sum(), float(len(batch)))  # noqa: E731
    Trainer(model, loss, data, data, TrainConfig(steps=2, batch_size=2, warmup=1, validate_every=1)).run()
    shown = capfd.readouterr()
    assert shown.err == ""
    assert shown.out.count("validation loss") == 2
