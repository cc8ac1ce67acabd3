"""The summarizer's model: any kernel in every place, cached decoding equal to teacher forcing, files, training."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("tokenizers", exc_type=ImportError)
pytest.importorskip("tensorboard", exc_type=ImportError)

from linattn.cli import main
from linattn.lab.summarize import decode
from linattn.lab.summarize.embeddings import from_company, log_frequency
from linattn.lab.summarize.model import CONFIGS, END, PAD, START, ModelConfig, Seq2Seq, padded
from linattn.lab.summarize.pairs import Pair, write_pairs
from linattn.lab.summarize.pointer import log_likelihood, log_mixture
from linattn.lab.summarize.summarizer import SHIPPED, Summarizer
from linattn.lab.summarize.tokens import Tokens
from linattn.lab.trainer import Trainer

VOCABULARY = 60
KERNELS = ["exact", "softmax", "elu", "relu", "positive", "taylor", "polynomial", "trig"]
CACHED = {"polynomial": 1e-3}  # its similarities grow with the square of the norms


def make(kernel="elu", seed=0, **options):
    torch.manual_seed(seed)
    return Seq2Seq(ModelConfig(vocabulary=VOCABULARY, kernel=kernel, **CONFIGS["tiny"] | options)).eval()


def batch(documents=3, source=19, target=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    document = torch.randint(3, VOCABULARY, (documents, source), generator=generator)
    summary = torch.randint(3, VOCABULARY, (documents, target), generator=generator)
    summary[0, :5] = document[0, 3:8]  # something to copy
    return document, torch.cat([torch.full((documents, 1), START), summary[:, :-1]], 1), summary


def step_by_step(model, source, given):
    """log p (B, T, V), one token at a time."""
    writing, said = model.start(model.encode(source)), []
    for token in given.unbind(1):
        step, writing = model.step(token, writing)
        said.append(step.log_probs)
    return torch.stack(said, 1)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_cached_decoding_is_teacher_forcing(kernel, norm_first):
    model = make(kernel, norm_first=norm_first)
    source, given, target = batch()
    source[1, 12:] = PAD
    cached = step_by_step(model, source, given)
    assert torch.allclose(cached.exp().sum(-1), torch.ones(3, 9), atol=1e-5)
    picked = cached.gather(-1, target[..., None]).squeeze(-1)
    assert torch.allclose(picked, model(source, given, target), atol=CACHED.get(kernel, 1e-4), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_changes_nothing(kernel):
    model = make(kernel)
    source, given, target = batch()
    alone = model(source[1:2, :12], given[1:2], target[1:2])
    source[1, 12:] = PAD
    assert torch.allclose(model(source, given, target)[1:2], alone, atol=1e-5)
    target[1, 6:] = PAD
    assert (model(source, given, target)[1] == 0).tolist() == [False] * 6 + [True] * 3


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["exact", "elu", "softmax"])
def test_a_selected_state_goes_on_as_that_document(kernel):
    model = make(kernel)
    source, given, _ = batch()
    order = torch.tensor([2, 0, 0])
    whole = step_by_step(model, source[order], given[order])
    writing = model.start(model.encode(source))
    for token in given[:, :4].unbind(1):
        _, writing = model.step(token, writing)
    writing = writing.select(order)
    for t in range(4, 9):
        step, writing = model.step(given[order, t], writing)
        assert torch.allclose(step.log_probs, whole[:, t], atol=1e-4)


@torch.no_grad()
def test_the_state_of_a_linear_kernel_does_not_grow_with_the_document():
    sizes = {}
    for kernel in ("elu", "exact"):
        model = make(kernel)
        pages = [model.encode(batch(1, source=n)[0]) for n in (50, 500)]
        sizes[kernel] = [layer.document.nbytes for page in pages for layer in model.start(page).layers[:1]]
    assert sizes["elu"][0] == sizes["elu"][1]
    assert sizes["exact"][1] > 9 * sizes["exact"][0]


def test_the_mixture_at_the_target_is_the_mixture():
    torch.manual_seed(0)
    logits, weights, gate = torch.randn(2, 3, 7), torch.rand(2, 3, 5).softmax(-1), torch.randn(2, 3)
    source, target = torch.randint(0, 7, (2, 5)), torch.randint(0, 7, (2, 3))
    whole = log_mixture(logits, weights, gate, source)
    written = logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    expected = whole.gather(-1, target[..., None]).squeeze(-1)
    assert torch.allclose(log_likelihood(written, weights, gate, source, target), expected, atol=1e-6)


def test_the_pointer_prefers_to_go_on_where_it_is():
    model = make()
    source = torch.tensor([[5, 6, 7, 8, 9, 6, 11]])
    page = model.encode(source)
    x = torch.zeros(1, 1, model.config.dim)
    none = torch.zeros(1, 1, 7, dtype=torch.bool)
    plain, _ = model.pointer(x, torch.tensor([[[50, 51]]]), none, page)
    after_6, _ = model.pointer(x, torch.tensor([[[6, 5]]]), none, page)  # "5 6" was written: 7 follows both, 11 only 6
    ratio = (after_6 / plain)[0, 0]
    assert ratio.argmax() == 2
    assert ratio[6] > 2 * ratio[[0, 1, 3, 4, 5]].max()
    again, _ = model.pointer(x, torch.tensor([[[50, 51]]]), source[:, None] == 6, page)
    assert ((again / plain)[0, 0] < 1).tolist() == [token == 6 for token in source[0].tolist()]


def best_by_force(model, source, tokens, penalty):
    """The best sequence of at most `tokens`, its end included, of all there are."""
    best, found = -torch.inf, None
    stack = [([], 0.0, model.start(model.encode(source)), START)]
    while stack:
        words, score, writing, last = stack.pop()
        step, writing = model.step(torch.tensor([last]), writing)
        for token in range(END, VOCABULARY):
            if token == END and not words:
                continue
            total = score + float(step.log_probs[0, token])
            length = len(words) + 1
            if token == END or length == tokens:
                if total / length**penalty > best:
                    best, found = total / length**penalty, words + [token] * (token != END)
            else:
                stack.append(([*words, token], total, writing, token))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["exact", "elu"])
def test_a_wide_beam_finds_the_best_of_all(kernel):
    model = make(kernel, seed=3)
    source = batch(2)[0]
    wide = decode.beam_search(model, source, beam=VOCABULARY - 2, max_tokens=2, length_penalty=1.0)
    assert wide == [best_by_force(model, source[i : i + 1], 2, 1.0) for i in range(2)]


@torch.no_grad()
def test_one_beam_is_greedy_and_documents_do_not_disturb_each_other():
    model = make(seed=5)
    rows = [row[:n] for row, n in zip(batch(4)[0].tolist(), (19, 11, 15, 7))]
    together = decode.write(model, padded(rows), 12)
    assert together == decode.beam_search(model, padded(rows), 1, 12, 1.0)
    assert together == [decode.write(model, padded([row]), 12)[0] for row in rows]
    beams = decode.beam_search(model, padded(rows), 3, 12, 1.0)
    assert beams == [decode.beam_search(model, padded([row]), 3, 12, 1.0)[0] for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_no_pair_of_tokens_is_written_twice(beam):
    model = make(seed=5)
    model.output_bias[7] = 20.0  # left to itself it would write nothing else
    model.pointer.gate.bias += 20.0
    for row in decode.beam_search(model, batch(3)[0], beam, 12, 1.0) + decode.write(model, batch(3)[0], 12):
        assert row[:2] == [7, 7]
        pairs = list(itertools.pairwise(row))
        assert len(pairs) == len(set(pairs))


def test_sampling_keeps_to_the_top():
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = decode.by_chance(top_p=0.75, generator=generator)(log_probs)
    assert set(drawn.tolist()) == {0, 1}
    assert (drawn == 0).float().mean() == pytest.approx(0.625, abs=0.04)
    assert set(decode.by_chance(temperature=0.01, generator=generator)(log_probs).tolist()) == {0}
    with pytest.raises(ValueError, match="top_p"):
        decode.by_chance(top_p=0.0)


@torch.no_grad()
def test_a_long_document_is_read():
    model = make("elu")
    source = torch.randint(3, VOCABULARY, (1, 65536))
    page = model.encode(source)
    assert torch.isfinite(page.memory).all()
    assert len(decode.write(model, source, 2)[0]) > 0


def test_tokens_of_like_company_get_like_vectors():
    # 10 and 11 stand in the same places, 12 in others
    texts = [[3, x, 4, 5] for x in (10, 11)] * 20 + [[6, 12, 7, 8]] * 20
    vectors = from_company(texts, 20, 6)
    assert vectors[10] @ vectors[11] > 0.9 > 0.5 > vectors[10] @ vectors[12]
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(20), atol=1e-5)
    assert log_frequency(texts, 20).exp().sum() == pytest.approx(1.0)


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
    models = [str(trained), f"{trained}:exact"]
    options = ["--data", str(folder), "--limit", "5", "--tokens", "64", "640", "--json", str(tmp_path / "f.json")]
    assert main(["lab", "summarize", "compare", *models, *options]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())["models"]
    assert [figures[name]["kernel"] for name in models] == ["elu", "exact"]
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
    exact, near = (Summarizer.load(trained, kernel=kernel).model for kernel in ("exact", "softmax"))
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
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-m", "linattn", "lab", "summarize", "train", *flags], check=True, env=environment)
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
