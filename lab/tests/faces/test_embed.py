"""The command `embed`: an index that follows a folder of images."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from face_files import broken_files, picture
from linattn.cli import main
from linattn_lab.faces.index import FaceIndex, file_digest


def run(*words):
    return main(["lab", "faces", *map(str, words)])


def test_embed_names_broken_files_and_goes_on(photos, model, tmp_path, capsys):
    names = broken_files(photos / "ann")
    assert run("embed", photos, "--model", model, "--index", tmp_path / "index") == 0
    said = capsys.readouterr().out
    assert f"8 pictures added, {len(names)} skipped:" in said
    assert all(f"{photos / 'ann' / name}: " in said for name in names)
    assert "holds 8 pictures of 2 people, 512 bytes each" in said


def test_an_index_grows_knows_copies_and_follows_moves(photos, model, tmp_path, capsys):
    where = ["--model", model, "--index", tmp_path / "index", "--storage", "int8"]
    shutil.copy(photos / "ann" / "0.png", photos / "ann" / "copy.png")
    run("embed", photos, *where)
    assert "8 pictures added, 1 known already\n" in capsys.readouterr().out
    picture(9).save(photos / "bob" / "new.png")
    shutil.move(photos / "ann" / "1.png", photos / "bob" / "1b.png")
    (photos / "ann" / "2.png").unlink()
    assert run("embed", photos, *where, "--prune") == 0
    said = capsys.readouterr().out
    assert "1 picture added, 8 known already (1 renamed), 1 removed\n" in said
    assert "holds 8 pictures of 2 people, 128 bytes each" in said
    index = FaceIndex(tmp_path / "index")
    assert index.face(file_digest(photos / "bob" / "1b.png")).person == "bob"


def test_copies_with_two_people_are_named_and_names_are_not_lost(photos, model, tmp_path, capsys):
    where = ["--model", model, "--index", tmp_path / "index"]
    shutil.copy(photos / "ann" / "0.png", photos / "bob" / "also.png")
    assert run("embed", photos, *where, "--json", tmp_path / "e.json") == 0
    said = capsys.readouterr().out
    assert f"the same contents with two people, counted for the first:\n  {photos / 'bob' / 'also.png'} is " in said
    figures = json.loads((tmp_path / "e.json").read_text())
    assert (figures["added"], figures["known"], figures["pictures"]) == (8, 1, 8)
    assert list(figures["doubtful"]) == [str(photos / "bob" / "also.png")]
    run("embed", photos / "bob", *where)
    assert {face.person for face in FaceIndex(tmp_path / "index").faces} == {"ann", "bob"}


def test_a_picture_that_was_overwritten_replaces_the_old_one(photos, model, tmp_path, capsys):
    where = ["--model", model, "--index", tmp_path / "index"]
    run("embed", photos, *where)
    picture(50).save(photos / "ann" / "0.png")
    shutil.copy(photos / "bob" / "1.png", photos / "bob" / "0.png")
    capsys.readouterr()
    run("embed", photos, *where)
    assert "1 picture added, 7 known already, 2 removed\n" in capsys.readouterr().out
    assert len(FaceIndex(tmp_path / "index")) == 7
    assert file_digest(photos / "ann" / "0.png") in FaceIndex(tmp_path / "index")


def test_two_pictures_that_change_places_change_names(photos, model, tmp_path, capsys):
    where = ["--model", model, "--index", tmp_path / "index"]
    run("embed", photos, *where)
    ann, bob = photos / "ann" / "0.png", photos / "bob" / "0.png"
    first, second = ann.read_bytes(), bob.read_bytes()
    ann.write_bytes(second)
    bob.write_bytes(first)
    capsys.readouterr()
    run("embed", photos, *where)
    assert capsys.readouterr().out.startswith("0 pictures added, 8 known already (2 renamed)\n")
    index = FaceIndex(tmp_path / "index")
    assert {path: index.face(file_digest(path)).person for path in (ann, bob)} == {ann: "ann", bob: "bob"}


def test_folders_too_deep_are_named_and_other_peoples_files_left_alone(photos, model, tmp_path, capsys):
    (photos / "ann" / "2020").mkdir()
    picture(51).save(photos / "ann" / "2020" / "deep.png")
    (photos / "ann" / "index.json").write_text("{}")
    run("embed", photos, "--model", model, "--index", tmp_path / "index")
    said = capsys.readouterr().out
    assert "8 pictures added, 1 skipped:" in said
    assert f"folders below those of people are not read: {photos / 'ann' / '2020'}\n" in said


def test_a_flat_folder_has_no_people(photos, model, tmp_path, capsys):
    run("embed", photos / "ann", "--model", model, "--index", photos / "ann" / "index")
    assert "holds 4 pictures, 512" in capsys.readouterr().out
    # The index lies among the pictures; its files are not taken for pictures of a person named index.
    run("embed", photos / "ann", "--model", model, "--index", photos / "ann" / "index")
    assert "0 pictures added, 4 known already\n" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode elsewhere")
def test_names_that_are_no_unicode(photos, model, tmp_path, capsys):
    """Old collections have names in Latin-1."""
    for old, new in (("0.png", b"andr\xe9.png"), ("1.png", "Анна.png".encode())):
        os.rename(os.fsencode(photos / "ann" / old), os.fsencode(photos / "ann") + b"/" + new)
    os.rename(photos / "ann", os.fsencode(photos) + b"/Andr\xe9e")
    Path(os.fsdecode(os.fsencode(photos) + b"/Andr\xe9e/\xe9.jpg")).write_text("no picture")
    where = ["--model", model, "--index", tmp_path / "index"]
    assert run("embed", photos, *where) == 0
    page = ["--html", tmp_path / "page.html"]
    assert run("search", photos / "bob" / "0.png", *where, "-k", "7", *page) == 0
    assert run("cluster", *where, *page, "--picture", tmp_path / "s.png", "--into", tmp_path / "out") == 0
    assert run("pairs", *where, *page) == 0
    assert "Andr?e" in capsys.readouterr().out
    assert "Анна" in (tmp_path / "page.html").read_text()


def test_files_that_cannot_be_written_are_named(photos, model, tmp_path, capsys):
    words = ["cluster", photos, "--model", model, "--picture", tmp_path / "s.png", "--html", tmp_path]
    assert run(*words) == 2
    assert str(tmp_path) in capsys.readouterr().err
