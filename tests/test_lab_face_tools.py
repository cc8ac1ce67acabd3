"""Faces for people: the commands, on pictures of any kind."""

import io
import json
import os
import re
import shutil
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from linattn.cli import main
from linattn.lab.faces.embedder import Embedder
from linattn.lab.faces.gather import add_folder
from linattn.lab.faces.index import FaceIndex, file_digest
from linattn.lab.faces.networks import NetworkSpec


def picture(seed=0, size=(46, 56)):
    """A blotchy grey picture, so that scaling and compression leave it recognisable."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 6), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Embedder(NetworkSpec(), threshold=0.05).save(folder)
    return folder


@pytest.fixture
def photos(tmp_path):
    """ann and bob with 4 pictures each, all of one person alike, and one of them with a broken file."""
    for number, name in enumerate(["ann", "bob"]):
        (tmp_path / "photos" / name).mkdir(parents=True)
        base = np.asarray(picture(number), np.int16)
        for i in range(4):
            noise = np.random.default_rng(10 * number + i).integers(-6, 7, base.shape)
            Image.fromarray((base + noise).clip(0, 255).astype(np.uint8)).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def broken_files(folder):
    """Files that are no pictures, each in its way; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole.jpg"
    picture(5, (400, 400)).save(whole, quality=95)
    data = whole.read_bytes()
    whole.unlink()
    texture = io.BytesIO()
    picture(5).convert("RGB").save(texture, "DDS")
    flags = bytearray(texture.getvalue())
    flags[80:84] = b"\x80\0\0\0"  # Pillow raises NotImplementedError
    header = b"\x89PNG\r\n\x1a\n"
    size = struct.pack(">IIBBBBB", 10, 10, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
    contents = {
        "truncated.jpg": data[: len(data) // 2],
        "zero.jpg": b"",
        "text.jpg": b"this is no picture\n",
        "header.png": header,
        "no-pixels.png": header + chunk,
        "tiff.tif": b"II*\x00\x08\x00\x00\x00\xff\xff",
        "gif.gif": b"GIF89a",
        "flags.dds": bytes(flags),
        "bmp.bmp": b"BM" + b"\xff" * 30,
        "webp.webp": b"RIFF\x10\x00\x00\x00WEBPVP8 ",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return sorted(contents)


class TestFormats:
    def embedding_of(self, path, model):
        return Embedder.load(model).embed([path])[0].numpy()

    @pytest.mark.parametrize(
        ("name", "mode", "options"),
        [
            ("a.png", "L", {}),
            ("a.png", "RGB", {}),
            ("a.jpg", "L", {"quality": 95}),
            ("a.jpg", "CMYK", {"quality": 95}),
            ("a.bmp", "RGB", {}),
            ("a.webp", "RGB", {"lossless": True}),
            ("a.gif", "L", {}),
            ("a.tif", "L", {}),
            ("a.png", "P", {"transparency": 0}),
            ("a.png", "I;16", {}),
            ("A.PNG", "RGBA", {}),
            ("a.png", "1", {}),
        ],
    )
    def test_a_picture_is_the_same_face_in_every_format(self, name, mode, options, tmp_path, model):
        plain = picture(3)
        plain.save(tmp_path / "plain.png")
        if mode == "I;16":
            image = Image.fromarray(np.asarray(plain).astype(np.uint16) * 257)
        elif mode == "P":  # colour 0 is used nowhere, and transparent
            grey = np.asarray(plain).clip(1)
            image = Image.frombytes("P", plain.size, grey.tobytes())
            image.putpalette([v for i in range(256) for v in (i, i, i)])
        else:
            image = plain.convert(mode)
        (tmp_path / "other").mkdir()
        image.save(tmp_path / "other" / name, **options)
        picture(4).save(tmp_path / "stranger.png")
        own, same, stranger = (
            self.embedding_of(tmp_path / part, model) for part in ("plain.png", f"other/{name}", "stranger.png")
        )
        # Black and white alone is another picture; it must be read, not be equal.
        allowed = 4 if mode == "1" else 0.05 * ((own - stranger) ** 2).sum()
        assert ((own - same) ** 2).sum() < allowed

    def test_exif_rotation_is_undone(self, tmp_path, model):
        upright = picture(4)
        upright.save(tmp_path / "upright.png")
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees clockwise
        upright.rotate(90, expand=True).save(tmp_path / "lying.jpg", exif=exif, quality=98)
        upright.rotate(90, expand=True).save(tmp_path / "as-it-lies.jpg", quality=98)
        own, same, lying = (
            self.embedding_of(tmp_path / part, model) for part in ("upright.png", "lying.jpg", "as-it-lies.jpg")
        )
        assert ((own - same) ** 2).sum() < 0.05 * ((own - lying) ** 2).sum()

    @pytest.mark.parametrize("size", [(1, 1), (3, 500), (2000, 30), (1500, 1800)])
    def test_any_size(self, size, tmp_path, model):
        picture(1, size).save(tmp_path / "a.png")
        assert np.isfinite(self.embedding_of(tmp_path / "a.png", model)).all()

    def test_damaged_pictures_are_named_and_never_end_a_run(self, tmp_path, model):
        """Pictures of all formats with bytes changed at random: read or skipped, nothing else."""
        rng = np.random.default_rng(0)
        (tmp_path / "photos").mkdir()
        for suffix in ("png", "jpg", "bmp", "webp", "gif", "tif", "dds"):
            picture(2).convert("RGB" if suffix == "dds" else "L").save(tmp_path / f"whole.{suffix}")
            data = (tmp_path / f"whole.{suffix}").read_bytes()
            for i in range(25):
                wrong = bytearray(data[: int(rng.integers(1, len(data) + 1))])
                for place in rng.integers(0, len(wrong), 6):
                    wrong[place] = int(rng.integers(0, 256))
                (tmp_path / "photos" / f"{i}.{suffix}").write_bytes(bytes(wrong))
        index = FaceIndex.create(tmp_path / "index", 128)
        tally = add_folder(index, tmp_path / "photos", Embedder.load(model))
        assert tally.added + tally.known + len(tally.broken) == 175
        assert len(tally.broken) > 50
        assert np.isfinite(index.embeddings()).all()


class TestCommands:
    def run(self, *words):
        return main(["lab", "faces", *map(str, words)])

    def test_embed_names_broken_files_and_goes_on(self, photos, model, tmp_path, capsys):
        names = broken_files(photos / "ann")
        assert self.run("embed", photos, "--model", model, "--index", tmp_path / "index") == 0
        said = capsys.readouterr().out
        assert f"8 pictures added, {len(names)} skipped:" in said
        assert all(f"{photos / 'ann' / name}: " in said for name in names)
        assert "holds 8 pictures of 2 people, 512 bytes each" in said

    def test_an_index_grows_knows_copies_and_follows_moves(self, photos, model, tmp_path, capsys):
        where = ["--model", model, "--index", tmp_path / "index", "--storage", "int8"]
        shutil.copy(photos / "ann" / "0.png", photos / "ann" / "copy.png")
        self.run("embed", photos, *where)
        assert "8 pictures added, 1 known already\n" in capsys.readouterr().out
        picture(9).save(photos / "bob" / "new.png")
        shutil.move(photos / "ann" / "1.png", photos / "bob" / "1b.png")
        (photos / "ann" / "2.png").unlink()
        assert self.run("embed", photos, *where, "--prune") == 0
        said = capsys.readouterr().out
        assert "1 picture added, 8 known already (1 renamed), 1 removed\n" in said
        assert "holds 8 pictures of 2 people, 128 bytes each" in said
        index = FaceIndex(tmp_path / "index")
        assert index.face(file_digest(photos / "bob" / "1b.png")).person == "bob"

    def test_copies_with_two_people_are_named_and_names_are_not_lost(self, photos, model, tmp_path, capsys):
        where = ["--model", model, "--index", tmp_path / "index"]
        shutil.copy(photos / "ann" / "0.png", photos / "bob" / "also.png")
        assert self.run("embed", photos, *where, "--json", tmp_path / "e.json") == 0
        said = capsys.readouterr().out
        assert f"the same contents with two people, counted for the first:\n  {photos / 'bob' / 'also.png'} is " in said
        figures = json.loads((tmp_path / "e.json").read_text())
        assert (figures["added"], figures["known"], figures["pictures"]) == (8, 1, 8)
        assert list(figures["doubtful"]) == [str(photos / "bob" / "also.png")]
        self.run("embed", photos / "bob", *where)
        assert {face.person for face in FaceIndex(tmp_path / "index").faces} == {"ann", "bob"}

    def test_a_picture_that_was_overwritten_replaces_the_old_one(self, photos, model, tmp_path, capsys):
        where = ["--model", model, "--index", tmp_path / "index"]
        self.run("embed", photos, *where)
        picture(50).save(photos / "ann" / "0.png")
        shutil.copy(photos / "bob" / "1.png", photos / "bob" / "0.png")
        capsys.readouterr()
        self.run("embed", photos, *where)
        assert "1 picture added, 7 known already, 2 removed\n" in capsys.readouterr().out
        assert len(FaceIndex(tmp_path / "index")) == 7
        assert file_digest(photos / "ann" / "0.png") in FaceIndex(tmp_path / "index")

    def test_two_pictures_that_change_places_change_names(self, photos, model, tmp_path, capsys):
        where = ["--model", model, "--index", tmp_path / "index"]
        self.run("embed", photos, *where)
        ann, bob = photos / "ann" / "0.png", photos / "bob" / "0.png"
        first, second = ann.read_bytes(), bob.read_bytes()
        ann.write_bytes(second)
        bob.write_bytes(first)
        capsys.readouterr()
        self.run("embed", photos, *where)
        assert capsys.readouterr().out.startswith("0 pictures added, 8 known already (2 renamed)\n")
        index = FaceIndex(tmp_path / "index")
        assert {path: index.face(file_digest(path)).person for path in (ann, bob)} == {ann: "ann", bob: "bob"}

    def test_folders_too_deep_are_named_and_other_peoples_files_left_alone(self, photos, model, tmp_path, capsys):
        (photos / "ann" / "2020").mkdir()
        picture(51).save(photos / "ann" / "2020" / "deep.png")
        (photos / "ann" / "index.json").write_text("{}")
        self.run("embed", photos, "--model", model, "--index", tmp_path / "index")
        said = capsys.readouterr().out
        assert "8 pictures added, 1 skipped:" in said
        assert f"folders below those of people are not read: {photos / 'ann' / '2020'}\n" in said

    def test_a_flat_folder_has_no_people(self, photos, model, tmp_path, capsys):
        self.run("embed", photos / "ann", "--model", model, "--index", photos / "ann" / "index")
        assert "holds 4 pictures, 512" in capsys.readouterr().out
        # The index lies among the pictures; its files are not taken for pictures of a person named index.
        self.run("embed", photos / "ann", "--model", model, "--index", photos / "ann" / "index")
        assert "0 pictures added, 4 known already\n" in capsys.readouterr().out

    @pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode elsewhere")
    def test_names_that_are_no_unicode(self, photos, model, tmp_path, capsys):
        """Old collections have names in Latin-1."""
        for old, new in (("0.png", b"andr\xe9.png"), ("1.png", "Анна.png".encode())):
            os.rename(os.fsencode(photos / "ann" / old), os.fsencode(photos / "ann") + b"/" + new)
        os.rename(photos / "ann", os.fsencode(photos) + b"/Andr\xe9e")
        Path(os.fsdecode(os.fsencode(photos) + b"/Andr\xe9e/\xe9.jpg")).write_text("no picture")
        where = ["--model", model, "--index", tmp_path / "index"]
        assert self.run("embed", photos, *where) == 0
        page = ["--html", tmp_path / "page.html"]
        assert self.run("search", photos / "bob" / "0.png", *where, "-k", "7", *page) == 0
        assert self.run("cluster", *where, *page, "--picture", tmp_path / "s.png", "--into", tmp_path / "out") == 0
        assert self.run("pairs", *where, *page) == 0
        assert "Andr?e" in capsys.readouterr().out
        assert "Анна" in (tmp_path / "page.html").read_text()

    def test_files_that_cannot_be_written_are_named(self, photos, model, tmp_path, capsys):
        words = ["cluster", photos, "--model", model, "--picture", tmp_path / "s.png", "--html", tmp_path]
        assert self.run(*words) == 2
        assert str(tmp_path) in capsys.readouterr().err

    def test_verify(self, photos, model, tmp_path, capsys):
        words = ["verify", photos / "ann" / "0.png", photos / "ann" / "1.png", "--model", model]
        assert self.run(*words, "--json", tmp_path / "v.json", "--exit-code") == 0
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
        assert self.run(*other) == 0
        assert capsys.readouterr().out.startswith("different people\n")
        assert self.run(*other, "--exit-code") == 1

    def test_verify_says_how_sure_once_pairs_are_kept(self, photos, model, tmp_path, capsys):
        own = shutil.copytree(model, tmp_path / "own")
        page = tmp_path / "pairs.html"
        assert self.run("pairs", photos, "--model", own, "--far", "0.2", "--keep", "--html", page) == 0
        threshold = Embedder.load(own).threshold
        assert threshold != 0.05
        assert f"now has threshold {threshold:.3f}" in capsys.readouterr().out
        words = ["verify", photos / "ann" / "0.png", photos / "ann" / "1.png", "--model", own]
        assert self.run(*words, "--json", tmp_path / "v.json") == 0
        assert re.search(
            r"how sure: [\d.]+ % that it is one person.*\(12 and 16 pairs\)", capsys.readouterr().out, re.S
        )
        assert json.loads((tmp_path / "v.json").read_text())["probability_same"] > 0.5
        text = page.read_text()
        assert text.count('<div class="pair">') == text.count("<figure") / 2 > 12
        assert "<script" not in text
        assert 'src="http' not in text

    def test_search(self, photos, model, tmp_path, capsys):
        index = tmp_path / "index"
        self.run("embed", photos, "--model", model, "--index", index)
        wanted = tmp_path / "wanted.jpg"
        Image.open(photos / "bob" / "2.png").save(wanted, quality=97)
        capsys.readouterr()
        page, figures = tmp_path / "deep" / "found.html", tmp_path / "found.json"
        words = ["search", wanted, photos / "ann" / "0.png", "--index", index, "-k", "3", "--threshold", "0.05"]
        assert self.run(*words, "--html", page, "--json", figures) == 0
        said = capsys.readouterr().out
        assert f"{wanted}: looks like bob (nearest 0.0" in said
        answers = json.loads(figures.read_text())["answers"]
        assert [hit["person"] for hit in answers[0]["found"]] == ["bob"] * 3
        assert [hit["person"] for hit in answers[1]["found"]] == ["ann"] * 3
        assert answers[1]["itself"]
        assert "the picture itself left out" in said
        assert page.read_text().count("<figure") == 8
        assert self.run(*words, "--faiss-beyond", "0", "--json", tmp_path / "faiss.json") == 0
        assert json.loads((tmp_path / "faiss.json").read_text()) == json.loads(figures.read_text())

    def test_search_says_nobody_and_names_what_it_cannot_read(self, photos, model, tmp_path, capsys):
        index = tmp_path / "index"
        self.run("embed", photos / "ann", "--model", model, "--index", index)
        picture(77).save(tmp_path / "stranger.png")
        (tmp_path / "text.jpg").write_text("no picture")
        capsys.readouterr()
        words = [tmp_path / "stranger.png", tmp_path / "text.jpg", tmp_path / "missing.png", "--index", index]
        assert self.run("search", *words, "--threshold", "1e-6") == 2
        said = capsys.readouterr()
        assert "stranger.png: nobody in the index (nearest" in said.out
        assert "text.jpg was skipped: cannot identify" in said.err
        assert "missing.png was skipped: " in said.err

    def test_cluster_draws_sheet_and_page_and_copies(self, photos, model, tmp_path, capsys):
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
        assert self.run("cluster", photos, "--model", model, *threshold, *words) == 0
        said = capsys.readouterr().out
        assert "8 pictures: 2 clusters, 0 alone, at threshold 0.010" in said
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
        assert self.run("cluster", photos, "--model", model, *words) == 2
        assert "not empty" in capsys.readouterr().err

    def test_an_index_is_clustered_without_its_model_and_with_pictures_gone(self, photos, model, tmp_path, capsys):
        own = shutil.copytree(model, tmp_path / "own")
        self.run("embed", photos, "--model", own, "--index", tmp_path / "index")
        shutil.rmtree(own)
        shutil.rmtree(photos)
        words = ["--picture", tmp_path / "s.png", "--html", tmp_path / "p.html", "--into", tmp_path / "sorted"]
        assert self.run("cluster", "--index", tmp_path / "index", *words) == 0
        said = capsys.readouterr().out
        assert "8 pictures: " in said
        assert "at threshold 0.050" in said
        assert "copied 0 pictures" in said

    def test_orl_becomes_a_folder(self, tmp_path, capsys, monkeypatch):
        whole = np.arange(400, dtype=np.uint8).repeat(112 * 92).reshape(400, 112, 92)
        monkeypatch.setattr("linattn.lab.data.orl_faces", lambda: (whole, np.repeat(np.arange(40), 10)))
        assert self.run("orl", tmp_path / "orl", "--people", "31-40") == 0
        assert "wrote 100 pictures of 10 people" in capsys.readouterr().out
        assert len(list((tmp_path / "orl").iterdir())) == 10
        with Image.open(tmp_path / "orl" / "s40" / "10.png") as image:
            assert image.size == (92, 112)
            assert image.getpixel((0, 0)) == 399 % 256
        assert self.run("orl", tmp_path / "orl", "--people", "0-40") == 2
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
            (["search", "A", "--index", "INDEX", "-k", "0"], "-k must be 1"),
            (["cluster", "INDEX"], "is an index: name it by --index"),
            (["verify", "A", "missing.png", "--model", "MODEL"], "missing.png does not exist"),
            (["verify", "A", "PHOTOS", "--model", "MODEL"], "is not a picture"),
            (["pairs", "PHOTOS/ann", "--model", "MODEL"], "no pairs to judge by"),
            (["pairs", "PHOTOS", "--model", "MODEL", "--far", "2"], "--far must be between 0 and 1"),
        ],
    )
    def test_errors_name_the_fix(self, words, said, photos, model, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        torch.manual_seed(1)
        Embedder(NetworkSpec()).save(tmp_path / "other")
        (tmp_path / "empty").mkdir()
        self.run("embed", photos, "--model", model, "--index", tmp_path / "index")
        places = {"PHOTOS": photos, "MODEL": model, "OTHER": tmp_path / "other", "EMPTY": tmp_path / "empty"}
        places |= {"INDEX": tmp_path / "index", "A": photos / "ann" / "0.png", "PHOTOS/ann": photos / "ann"}
        assert self.run(*[places.get(word, word) for word in words]) == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize("wrong", ["0", "4.1", "near", "nan"])
    def test_a_threshold_is_a_squared_distance(self, wrong, capsys):
        with pytest.raises(SystemExit):
            self.run("cluster", "--threshold", wrong)
        assert "above 0 and at most 4" in capsys.readouterr().err

    def test_help_teaches_the_whole_path(self, capsys):
        with pytest.raises(SystemExit):
            self.run("--help")
        said = capsys.readouterr().out
        for name in ("orl", "train", "pairs", "embed", "verify", "search", "cluster"):
            assert f"linattn lab faces {name}" in said
