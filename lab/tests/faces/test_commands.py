"""The commands verify, search, cluster, orl, and their error messages."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from cli_support import exit_code
from face_files import picture
from linattn.cli import main
from linattn_lab.faces.embedder import Embedder
from linattn_lab.faces.networks import NetworkSpec


def run(*words):
    return main(["lab", "faces", *map(str, words)])


def test_verify(photos, model, tmp_path, capsys):
    words = ["verify", photos / "ann" / "0.png", photos / "ann" / "1.png", "--model", model]
    assert run(*words, "--json", tmp_path / "v.json", "--exit-code") == 0
    said = capsys.readouterr().out
    answer = json.loads((tmp_path / "v.json").read_text())
    assert said.startswith("one person\nsquared distance ")
    assert "threshold 0.050" in said
    assert answer["same"] is True
    assert 0 <= answer["distance"] <= answer["threshold"] == 0.05
    assert "the model keeps no distances" in said
    other = [
        "verify",
        photos / "ann" / "0.png",
        photos / "bob" / "1.png",
        "--model",
        model,
        "--threshold",
        "0.0001",
    ]
    assert run(*other) == 0
    assert capsys.readouterr().out.startswith("different people\n")
    assert run(*other, "--exit-code") == 1


def test_verify_says_how_sure_once_pairs_are_kept(photos, model, tmp_path, capsys):
    own = shutil.copytree(model, tmp_path / "own")
    page = tmp_path / "pairs.html"
    assert run("pairs", photos, "--model", own, "--far", "0.2", "--keep", "--html", page) == 0
    threshold = Embedder.load(own).threshold
    assert threshold != 0.05
    assert f"now has threshold {threshold:.3f}" in capsys.readouterr().out
    words = ["verify", photos / "ann" / "0.png", photos / "ann" / "1.png", "--model", own]
    assert run(*words, "--json", tmp_path / "v.json") == 0
    assert re.search(r"how sure: [\d.]+ % that it is one person.*\(12 and 16 pairs\)", capsys.readouterr().out, re.S)
    assert json.loads((tmp_path / "v.json").read_text())["probability_same"] > 0.5
    text = page.read_text()
    assert text.count('<div class="pair">') == text.count("<figure") / 2 > 12
    assert set(re.findall(r"<script([^>]*)>", text)) <= {' type="application/json" data-chart', ' type="module"'}
    assert 'src="http' not in text


def test_search(photos, model, tmp_path, capsys):
    index = tmp_path / "index"
    run("embed", photos, "--model", model, "--index", index)
    wanted = tmp_path / "wanted.jpg"
    Image.open(photos / "bob" / "2.png").save(wanted, quality=97)
    capsys.readouterr()
    page, figures = tmp_path / "deep" / "found.html", tmp_path / "found.json"
    words = ["search", wanted, photos / "ann" / "0.png", "--index", index, "-k", "3", "--threshold", "0.05"]
    assert run(*words, "--html", page, "--json", figures) == 0
    said = capsys.readouterr().out
    assert f"{wanted}: looks like bob (nearest 0.0" in said
    answers = json.loads(figures.read_text())["answers"]
    assert [hit["person"] for hit in answers[0]["found"]] == ["bob"] * 3
    assert [hit["person"] for hit in answers[1]["found"]] == ["ann"] * 3
    assert answers[1]["itself"]
    assert "the picture itself left out" in said
    assert page.read_text().count("<figure") == 8
    assert run(*words, "--faiss-beyond", "0", "--json", tmp_path / "faiss.json") == 0
    assert json.loads((tmp_path / "faiss.json").read_text()) == json.loads(figures.read_text())


def test_search_says_nobody_and_names_what_it_cannot_read(photos, model, tmp_path, capsys):
    index = tmp_path / "index"
    run("embed", photos / "ann", "--model", model, "--index", index)
    picture(77).save(tmp_path / "stranger.png")
    (tmp_path / "text.jpg").write_text("no picture")
    capsys.readouterr()
    words = [tmp_path / "stranger.png", tmp_path / "text.jpg", tmp_path / "missing.png", "--index", index]
    assert run("search", *words, "--threshold", "1e-6") == 2
    said = capsys.readouterr()
    assert "stranger.png: nobody in the index (nearest" in said.out
    assert "text.jpg was skipped: cannot identify" in said.err
    assert "missing.png was skipped: " in said.err


def test_cluster_draws_sheet_and_page_and_copies(photos, model, tmp_path, capsys):
    out = {name: tmp_path / name for name in ("sheet.png", "page.html", "sorted", "c.json")}
    words = [
        "--picture",
        out["sheet.png"],
        "--html",
        out["page.html"],
        "--into",
        out["sorted"],
        "--json",
        out["c.json"],
    ]
    shutil.copy(photos / "ann" / "0.png", photos / "bob" / "4.png")
    (photos / "ann" / "0.png").unlink()
    threshold = ["--threshold", "0.01"]
    assert run("cluster", photos, "--model", model, *threshold, *words) == 0
    said = capsys.readouterr().out
    assert "8 pictures: 2 clusters, 0 alone, merged up to 0.010" in said
    assert "F1 0." in said
    sizes = {path.name: len(list(path.iterdir())) for path in out["sorted"].iterdir()}
    assert sizes == {"001": 4, "002": 4}
    assert sorted(len(group) for group in json.loads(out["c.json"].read_text())["clusters"]) == [4, 4]
    page = out["page.html"].read_text()
    assert page.count("<figure") == 8
    assert page.count('class="wrong"') == 1
    with Image.open(out["sheet.png"]) as sheet:
        assert sheet.size[0] > 1000
        assert sheet.size[1] > 200
        assert (217, 72, 15) in [colour for _, colour in sheet.getcolors(1 << 20)]
    assert run("cluster", photos, "--model", model, *words) == 2
    assert "not empty" in capsys.readouterr().err


def test_an_index_is_clustered_without_its_model_and_with_pictures_gone(photos, model, tmp_path, capsys):
    own = shutil.copytree(model, tmp_path / "own")
    run("embed", photos, "--model", own, "--index", tmp_path / "index")
    shutil.rmtree(own)
    shutil.rmtree(photos)
    words = ["--picture", tmp_path / "s.png", "--html", tmp_path / "p.html", "--into", tmp_path / "sorted"]
    assert run("cluster", "--index", tmp_path / "index", *words) == 0
    said = capsys.readouterr().out
    assert "8 pictures: " in said
    assert "merged up to 0.050" in said
    assert "copied 0 pictures" in said


def test_orl_becomes_a_folder(tmp_path, capsys, monkeypatch):
    whole = np.arange(400, dtype=np.uint8).repeat(112 * 92).reshape(400, 112, 92)
    monkeypatch.setattr("linattn_lab.data.orl_faces", lambda: (whole, np.repeat(np.arange(40), 10)))
    assert run("orl", tmp_path / "orl", "--people", "31-40") == 0
    assert "wrote 100 pictures of 10 people" in capsys.readouterr().out
    assert len(list((tmp_path / "orl").iterdir())) == 10
    with Image.open(tmp_path / "orl" / "s40" / "10.png") as image:
        assert image.size == (92, 112)
        assert image.getpixel((0, 0)) == 399 % 256
    assert run("orl", tmp_path / "orl", "--people", "0-40") == 2
    assert "like 1-30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["embed", "PHOTOS", "--model", "nowhere"], "no model in nowhere: `linattn lab faces train"),
        (["embed", "nowhere", "--model", "MODEL"], "nowhere is not a folder"),
        (["embed", "EMPTY", "--model", "MODEL"], "there are no pictures in"),
        (["embed", "PHOTOS", "--model", "MODEL", "--index", "PHOTOS"], "is there and is no index"),
        (["embed", "PHOTOS", "--model", "OTHER", "--index", "INDEX"], "was made with another network"),
        (["embed", "PHOTOS", "--model", "MODEL", "--index", "INDEX", "--storage", "int8"], "stores float32"),
        (["search", "A", "--index", "nowhere"], "no index in nowhere: `linattn lab faces embed"),
        (["search", "A", "--index", "INDEX", "--model", "OTHER"], "was made with another network"),
        (["search", "A", "--index", "INDEX", "-k", "0"], "-k must be at least 1"),
        (["cluster", "INDEX"], "is an index: name it by --index"),
        (["verify", "A", "missing.png", "--model", "MODEL"], "missing.png does not exist"),
        (["verify", "A", "PHOTOS", "--model", "MODEL"], "is not a picture"),
        (["pairs", "PHOTOS/ann", "--model", "MODEL"], "no pairs to judge by"),
        (["pairs", "PHOTOS", "--model", "MODEL", "--far", "2"], "--far must be at most 1"),
    ],
)
def test_errors_name_the_fix(words, said, photos, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    Embedder(NetworkSpec()).save(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    run("embed", photos, "--model", model, "--index", tmp_path / "index")
    places = {"PHOTOS": photos, "MODEL": model, "OTHER": tmp_path / "other", "EMPTY": tmp_path / "empty"}
    places |= {"INDEX": tmp_path / "index", "A": photos / "ann" / "0.png", "PHOTOS/ann": photos / "ann"}
    assert exit_code(["lab", "faces", *(str(places.get(word, word)) for word in words)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "4.1", "near", "nan"])
def test_a_threshold_is_a_squared_distance(wrong, capsys):
    with pytest.raises(SystemExit):
        run("cluster", "--threshold", wrong)
    assert "above 0 and at most 4" in capsys.readouterr().err


def test_help_teaches_the_whole_path(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    said = capsys.readouterr().out
    for name in ("orl", "train", "pairs", "embed", "verify", "search", "cluster"):
        assert f"linattn lab faces {name}" in said
