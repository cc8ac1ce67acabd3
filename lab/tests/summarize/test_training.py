"""Training, checkpoints, model files, and the weights that come with the package."""

import json

import pytest
import torch

import warm_python
from linattn.cli import main
from linattn_lab.summarize.pairs import Pair, write_pairs
from linattn_lab.summarize.summarizer import SHIPPED, Summarizer
from linattn_lab.summarize.tokenizer import Tokens
from linattn_lab.training.trainer import Trainer

WORDS = ["small", "fast", "tool", "library", "parser", "editor", "text", "images", "sound", "files", "reads", "shows"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared pairs: the summary is the name in the document and the word after 'that'."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = torch.Generator().manual_seed(0)

    def pair(i):
        pick = [WORDS[j] for j in torch.randint(len(WORDS), (6 + i % 9,), generator=generator)]
        return Pair(" ".join(["This", "is", pick[0], pick[1], "that", *pick[2:]]), f"{pick[0]} {pick[1]}", f"s{i}")

    pairs = [pair(i) for i in range(260)]
    for name, part in {"train": pairs[:200], "validation": pairs[200:230], "test": pairs[230:]}.items():
        write_pairs(folder / f"{name}.jsonl", part)
    Tokens.train([p.document for p in pairs], 320).save(folder / "tokens.json")
    return folder


SETTINGS = {"config": "tiny", "steps": 40, "batch-size": 32, "lr": 0.01, "warmup": 5, "validate-every": 20}


FLAGS = [word for name, value in (SETTINGS | {"checkpoint-every": 10}).items() for word in (f"--{name}", str(value))]


def train(folder, out, *more):
    return main(["lab", "summarize", "train", "--data", str(folder), "--out", str(out), *FLAGS, *more])


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    assert train(folder, out) == 0
    return out


def test_training_learns_to_copy(trained):
    log = json.loads((trained / "log.json").read_text())
    losses = dict(log["history"]["validation"])
    assert losses[40] < 0.5 * log["history"]["train"][0][1]
    said = Summarizer.load(trained).summarize(["This is small parser that reads text files and more"], beam=2)
    assert said[0].split()[0] == "small"
    assert log["facts"]["model"]["kernel"] == "elu"
    assert any((trained / "tensorboard").iterdir())


def test_a_run_that_was_stopped_goes_on_to_the_same_losses(folder, trained, tmp_path, monkeypatch):
    step = Trainer._train_step

    def stopping(self, *args):
        if self.step == 27:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Trainer, "_train_step", stopping)
    assert train(folder, tmp_path) == 130
    monkeypatch.undo()
    assert train(folder, tmp_path) == 0
    whole, resumed = (json.loads((path / "log.json").read_text())["history"] for path in (trained, tmp_path))
    assert resumed == whole


def test_training_goes_on_from_a_model_with_long_documents(folder, trained, tmp_path):
    start = ["--start", str(trained / "model.safetensors"), "--lengthen", "0.5", "--lengthen-to", "200"]
    assert train(folder, tmp_path, *start, "--steps", "10", "--lr", "1e-3") == 0
    first, before = (json.loads((path / "log.json").read_text()) for path in (tmp_path, trained))
    assert first["history"]["train"][0][1] < 0.5 * before["history"]["train"][0][1]
    assert first["facts"]["lengthen"] == 0.5
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        (other / name).write_text((folder / name).read_text())
    Tokens.train(["quite another text"], 280).save(other / "tokens.json")
    assert train(other, tmp_path / "no", *start) == 2  # another vocabulary


def test_models_side_by_side(folder, trained, tmp_path, capsys):
    models = [str(trained), f"{trained}:softmax"]
    options = ["--data", str(folder), "--limit", "5", "--tokens", "64", "640", "--json", str(tmp_path / "f.json")]
    assert main(["lab", "summarize", "compare", *models, *options]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())["models"]
    assert [figures[name]["kernel"] for name in models] == ["elu", "softmax"]
    validation = dict(json.loads((trained / "log.json").read_text())["history"]["validation"])
    assert figures[models[0]]["loss"] == pytest.approx(min(validation.values()), rel=1e-2)  # half precision
    assert figures[models[0]]["rouge1"] > 30
    assert all(found["read"]["640"]["seconds"] > 0 and found["step"] > 0 for found in figures.values())
    assert "read 640" in capsys.readouterr().out


def test_one_file_holds_weights_configuration_and_vocabulary(trained, tmp_path):
    before = Summarizer.load(trained)
    before.save(tmp_path / "copy.safetensors")
    after = Summarizer.load(tmp_path / "copy.safetensors")
    documents = ["This is fast editor that shows images", "This is sound library for files"]
    assert after.summarize(documents) == before.summarize(documents)
    assert after.tokens.to_json() == before.tokens.to_json()
    assert after.facts["model"] == before.facts["model"]
    with pytest.raises(ValueError, match="no vocabulary"):
        Summarizer.load(trained / "best.safetensors")
    with pytest.raises(ValueError, match="summarize train"):
        Summarizer.load(tmp_path / "nothing.safetensors")


@torch.no_grad()
def test_another_kernel_on_the_same_weights(trained):
    """Near/far softmax of a short document is exact softmax."""
    exact, near = (Summarizer.load(trained, kernel=kernel).model for kernel in ("softmax", "nearfar"))
    source = torch.randint(3, 300, (2, 40))
    assert torch.allclose(exact.encode(source).memory, near.encode(source).memory, atol=1e-4)
    elu = Summarizer.load(trained).model
    assert not torch.allclose(exact.encode(source).memory, elu.encode(source).memory, atol=1e-2)


def test_an_explanation_is_the_summary_with_its_sources(trained):
    document = "This is small parser that reads text files"
    summarizer = Summarizer.load(trained)
    told = summarizer.explain(document, beam=2)
    assert told.summary == summarizer.summarize([document], beam=2)[0]
    assert told.attention.shape == (len(told.output), len(told.source))
    assert torch.allclose(told.attention.sum(-1), torch.ones(len(told.output)), atol=1e-5)
    assert ((told.copy > 0) & (told.copy < 1)).all()
    first, last = told.source[int(told.attention[0].argmax())]
    assert document[first:last].strip() in told.summary
    with pytest.raises(ValueError, match="empty"):
        summarizer.explain("")
    with pytest.raises(ValueError, match="document 1 is empty"):
        summarizer.summarize(["text", ""])


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(folder, trained, tmp_path):
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert train(folder, alone, "--dropout", "0", "--steps", "10") == 0
    flags = ["--data", str(folder), "--out", str(both), *FLAGS, "--dropout", "0", "--steps", "10"]
    for done in warm_python.run_ranks(2, "-m", "linattn", "lab", "summarize", "train", *flags):
        assert done.returncode == 0, done.stderr
    one, two = (json.loads((path / "log.json").read_text())["history"]["train"] for path in (alone, both))
    assert [x for _, x in two] == pytest.approx([x for _, x in one], rel=1e-3)


def test_the_shipped_weights_work_at_once(tmp_path, capsys):
    assert SHIPPED.stat().st_size < 25 * 2**20
    document = tmp_path / "tool.txt"
    document.write_text(
        "Frobnicate is a small command line tool to convert images between many formats. It reads PNG, JPEG and TIFF "
        "files, and can also resize them.\n\nThis package contains the documentation."
    )
    assert main(["lab", "summarize", "run", str(document)]) == 0
    said = capsys.readouterr().out.lower()
    assert "documentation" in said or "images" in said
    log = json.loads((SHIPPED.parent / "log.json").read_text())
    assert log[-1]["facts"] == Summarizer.load().facts
