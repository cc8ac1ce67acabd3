"""Faces for people: the index that grows, exact search, clusters, pairs, and the commands on pictures of any kind."""

import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.cluster import AgglomerativeClustering

from linattn.cli import main
from linattn.lab.faces import index as index_module
from linattn.lab.faces.cluster import agreement, cluster, typical_first
from linattn.lab.faces.embedder import Embedder
from linattn.lab.faces.gather import add_folder
from linattn.lab.faces.index import Face, FaceIndex, file_digest
from linattn.lab.faces.nearest import nearest, squared_distances
from linattn.lab.faces.networks import NetworkSpec
from linattn.lab.faces.pairs import find_pairs
from linattn.lab.faces.quantise import from_bytes, to_bytes
from linattn.lab.faces.sure import Sureness, calibrate

DIM = 32


def unit(count, dim=DIM, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def people(count, each, spread=0.5, seed=0):
    """Rows around `count` centres, and whose they are."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((count, DIM))
    x = np.repeat(centres, each, 0) + spread * rng.standard_normal((count * each, DIM))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), np.repeat(np.arange(count), each)


def faces(count, start=0, person=None):
    return [Face(f"/nowhere/{i}.png", person, f"{i:064x}") for i in range(start, start + count)]


class TestQuantise:
    def test_a_face_of_128_numbers_takes_128_bytes_and_keeps_its_distances(self):
        x = unit(300, 128)
        stored = to_bytes(x)
        assert stored.dtype == np.int8
        assert stored[0].nbytes == 128
        again = from_bytes(stored)
        assert np.linalg.norm(again, axis=1) == pytest.approx(1, abs=1e-6)
        assert np.abs(squared_distances(x, x) - squared_distances(again, again)).max() < 0.01

    def test_stored_bytes_read_back_are_stored_the_same(self):
        stored = to_bytes(unit(100))
        assert np.array_equal(to_bytes(from_bytes(stored)), stored)


class TestNearest:
    @pytest.mark.parametrize("by_faiss", [False, True])
    @pytest.mark.parametrize("rows", [7, 100, 1000])
    def test_it_is_the_sorted_distance_matrix(self, by_faiss, rows):
        base, queries = unit(500), unit(20, seed=1)
        chunks = [base[i : i + rows] for i in range(0, len(base), rows)]
        distances, places = nearest(queries, chunks, 9, by_faiss=by_faiss)
        every = ((queries[:, None].astype(np.float64) - base) ** 2).sum(-1)
        expected = np.argsort(every, axis=1, kind="stable")[:, :9]
        assert np.array_equal(places, expected)
        assert distances == pytest.approx(np.take_along_axis(every, expected, 1), abs=1e-6)

    @pytest.mark.parametrize("by_faiss", [False, True])
    def test_equal_rows_come_in_order_and_the_row_itself_is_at_zero(self, by_faiss):
        base = np.concatenate([unit(50), unit(50)])
        distances, places = nearest(base[3:4], [base[:60], base[60:]], 2, by_faiss=by_faiss)
        assert places.tolist() == [[3, 53]]
        assert distances.tolist() == [[0.0, 0.0]]

    def test_fewer_rows_than_asked_for(self):
        assert nearest(unit(2), [unit(3)], 5)[1].shape == (2, 3)
        assert nearest(unit(2), [], 5)[1].shape == (2, 0)
        with pytest.raises(ValueError, match="k must be 1"):
            nearest(unit(2), [unit(3)], 0)


@pytest.mark.parametrize("storage", ["float32", "int8"])
class TestIndex:
    def test_it_grows_and_is_read_back(self, tmp_path, storage, monkeypatch):
        monkeypatch.setattr(index_module, "SHARD_ROWS", 10)
        index = FaceIndex.create(tmp_path / "index", DIM, storage)
        x = unit(47)
        for start in range(0, 47, 6):
            part = faces(min(6, 47 - start), start)
            assert index.add(part, x[start : start + 6]) == len(part)
        again = FaceIndex(tmp_path / "index")
        assert again.faces == index.faces == faces(47)
        assert len(list((tmp_path / "index").glob("shard-*.json"))) == len(again._shards) < 12
        assert np.array_equal(again.embeddings(), index.embeddings())
        expected = x if storage == "float32" else from_bytes(to_bytes(x))
        assert np.array_equal(again.embeddings(), expected)

    def test_what_is_there_is_not_added_twice(self, tmp_path, storage):
        index = FaceIndex.create(tmp_path, DIM, storage)
        x = unit(5)
        assert index.add([*faces(3), *faces(2)], x) == 3
        assert index.add(faces(5), x) == 2
        assert index.faces == faces(5)
        assert index.add(faces(5), x) == 0

    def test_faiss_gives_the_same_result(self, tmp_path, storage, monkeypatch):
        monkeypatch.setattr(index_module, "SHARD_ROWS", 20)
        index = FaceIndex.create(tmp_path, DIM, storage)
        index.add(faces(700), unit(700))
        queries = unit(300, seed=2)
        plain = index.search(queries, 6, faiss_beyond=700)
        by_faiss = index.search(queries, 6, faiss_beyond=699)
        assert np.array_equal(plain[1], by_faiss[1])
        assert np.array_equal(plain[0], by_faiss[0])

    def test_pictures_are_renamed_and_removed(self, tmp_path, storage, monkeypatch):
        monkeypatch.setattr(index_module, "SHARD_ROWS", 4)
        index = FaceIndex.create(tmp_path, DIM, storage)
        index.add(faces(10), unit(10))
        before = index.embeddings()
        ann = faces(10, person="ann")
        assert index.rename(ann[2:5]) == 3
        assert index.rename(ann[2:5]) == 0
        assert FaceIndex(tmp_path).faces == [*faces(2), *ann[2:5], *faces(5, 5)]
        assert index.remove([face.digest for face in ann[4:6]] + ["unknown"]) == 2
        assert FaceIndex(tmp_path).faces == index.faces == [*faces(2), *ann[2:4], *faces(4, 6)]
        assert np.array_equal(FaceIndex(tmp_path).embeddings(), before[[0, 1, 2, 3, 6, 7, 8, 9]])
        index.remove([face.digest for face in index.faces])
        assert len(FaceIndex(tmp_path)) == 0
        assert index.embeddings().shape == (0, DIM)

    def test_two_writers_lose_nothing(self, tmp_path, storage):
        FaceIndex.create(tmp_path, DIM, storage).add(faces(3), unit(20)[:3])
        one, two = FaceIndex(tmp_path), FaceIndex(tmp_path)
        x = unit(20)
        for i in range(3, 20):
            (one if i % 2 else two).add(faces(1, i), x[i : i + 1])
        assert sorted(face.digest for face in FaceIndex(tmp_path).faces) == [face.digest for face in faces(20)]


class TestKilled:
    def test_stopped_between_any_two_file_operations_nothing_is_lost_or_doubled(self, tmp_path, monkeypatch):
        """Every step of an add that touches the disk is made the last one, in turn."""
        x = unit(8)
        for stop in range(5):
            folder = tmp_path / str(stop)
            FaceIndex.create(folder, DIM).add(faces(5), x[:5])
            index = FaceIndex(folder)
            with monkeypatch.context() as patch:
                steps = {"left": stop}

                def killable(real, steps=steps):
                    def step(*args, **options):
                        if steps["left"] == 0:
                            raise KeyboardInterrupt
                        steps["left"] -= 1
                        return real(*args, **options)

                    return step

                patch.setattr(index_module, "write_file", killable(index_module.write_file))
                patch.setattr(index_module, "write_json", killable(index_module.write_json))
                patch.setattr(Path, "unlink", killable(Path.unlink))
                if stop < 4:
                    with pytest.raises(KeyboardInterrupt):
                        index.add(faces(3, 5), x[5:])
                else:
                    index.add(faces(3, 5), x[5:])
            after = FaceIndex(folder)
            assert after.faces == faces(8 if stop >= 2 else 5)
            assert np.array_equal(after.embeddings(), x[: len(after)])
            after.add(faces(8), x)
            last = FaceIndex(folder)
            assert sorted(face.file for face in last.faces) == sorted(face.file for face in faces(8))
            order = [faces(8).index(face) for face in last.faces]
            assert np.array_equal(last.embeddings(), x[order])

    def test_a_process_killed_in_the_middle_leaves_a_whole_index(self, tmp_path):
        script = (
            "import sys, numpy as np\n"
            "from linattn.lab.faces.index import Face, FaceIndex\n"
            "index = FaceIndex.create(sys.argv[1], 4)\n"
            "for i in range(100000):\n"
            "    index.add([Face(f'{i}', None, f'{i}')], np.eye(4, dtype=np.float32)[i % 4][None])\n"
            "    print(i, flush=True)\n"
        )
        folder = tmp_path / "index"
        with subprocess.Popen(
            [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            said = -1
            while said < 60:
                said = int(process.stdout.readline())
            time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split("\n")[:-1]  # what follows the last line end was cut off
            said = int(rest[-1]) if rest else said
        index = FaceIndex(folder)
        assert len(index) in (said + 1, said + 2)
        assert [face.file for face in index.faces] == [str(i) for i in range(len(index))]
        assert np.array_equal(index.embeddings(), np.eye(4, dtype=np.float32)[np.arange(len(index)) % 4])


class TestIndexErrors:
    def test_they_say_what_to_do(self, tmp_path):
        with pytest.raises(ValueError, match="no index of faces: make one"):
            FaceIndex(tmp_path)
        index = FaceIndex.create(tmp_path, DIM)
        with pytest.raises(ValueError, match="holds an index already"):
            FaceIndex.create(tmp_path, DIM)
        with pytest.raises(ValueError, match=r"need embeddings \(2, 32\), got \(2, 31\)"):
            index.add(faces(2), np.ones((2, 31)))
        with pytest.raises(ValueError, match="length one"):
            index.add(faces(2), np.ones((2, DIM)))
        with pytest.raises(ValueError, match=r"queries must be \(Q, 32\)"):
            index.search(np.ones((1, 31)))
        with pytest.raises(ValueError, match="storage must be one of"):
            FaceIndex.create(tmp_path / "other", DIM, "float16")
        index.add(faces(2), unit(2))
        (shard,) = tmp_path.glob("shard-*.safetensors")
        shard.write_bytes(shard.read_bytes()[:50])
        with pytest.raises(ValueError, match=f"{shard.name} is damaged .* delete"):
            FaceIndex(tmp_path).embeddings()
        shard.with_suffix(".json").write_text("{")
        with pytest.raises(ValueError, match="is damaged"):
            FaceIndex(tmp_path)


class TestCluster:
    @pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9, 1.3, 2.0])
    def test_groups_clustered_one_by_one_are_scikit_learns_clusters_of_the_whole(self, threshold):
        x, _ = people(30, 8)
        whole = AgglomerativeClustering(
            n_clusters=None, metric="precomputed", linkage="average", distance_threshold=threshold
        ).fit_predict(squared_distances(x.astype(np.float64), x.astype(np.float64)))
        labels = cluster(x, threshold)
        match = agreement(labels, list(whole))
        assert (match.precision, match.recall) == (1.0, 1.0)
        assert labels.max() == whole.max()
        sizes = np.bincount(labels)
        assert (np.diff(sizes) <= 0).all()

    def test_people_far_apart_are_found(self):
        x, who = people(12, 5, spread=0.2)
        assert agreement(cluster(x, 0.6), list(who)).f1 == 1.0

    def test_agreement_counts_pairs(self):
        match = agreement(np.array([0, 0, 0, 1, 1]), ["a", "a", "b", "b", "b"])
        assert (match.precision, match.recall) == (2 / 4, 2 / 4)
        assert agreement(np.array([0, 1]), ["a", "b"]).f1 == 1.0

    def test_what_may_not_belong_comes_last(self):
        x = np.array([[0.6, 0.8], [1, 0], [0.99, np.sqrt(1 - 0.99**2)], [-1, 0]], np.float32)
        assert typical_first(x, np.array([0, 0, 0, 1])) == [[2, 1, 0], [3]]

    def test_equal_pictures_and_one_picture(self):
        assert cluster(np.repeat(unit(1), 3, 0), 0.1).tolist() == [0, 0, 0]
        assert cluster(unit(1), 0.1).tolist() == [0]
        assert cluster(unit(0), 0.1).tolist() == []


class TestPairs:
    def test_counts_thresholds_and_the_pairs_shown_are_those_of_the_whole_matrix(self):
        x, who = people(20, 20, spread=0.9)
        names = [None if i % 50 == 0 else f"p{person}" for i, person in enumerate(who)]
        kept = [i for i, name in enumerate(names) if name is not None]
        found = find_pairs(x, names, 0.9, show=5)
        apart = squared_distances(x, x)
        same = {(i, j): apart[i, j] for i in kept for j in kept if i < j and who[i] == who[j]}
        different = {(i, j): apart[i, j] for i in kept for j in kept if i < j and who[i] != who[j]}
        assert len(found.same) == len(same)
        assert len(found.different) == len(different)
        assert found.accepted() == pytest.approx(np.mean([d <= 0.9 for d in same.values()]))
        assert found.mistaken() == pytest.approx(np.mean([d <= 0.9 for d in different.values()]))
        for kind, pairs, inside, farthest in [
            ("accepted", same, True, False),
            ("missed", same, False, False),
            ("rejected", different, False, False),
            ("mistaken", different, True, False),
            ("worst missed", same, False, True),
            ("worst mistaken", different, True, True),
        ]:
            these = {pair: d for pair, d in pairs.items() if (d <= 0.9) == inside}
            expected = sorted(these, key=lambda p: abs(these[p] - 0.9), reverse=farthest)[:5]
            shown = found.shown[kind]
            assert [p.distance for p in shown] == pytest.approx([these[p] for p in expected], abs=1e-6), kind
            assert found.count(kind) == len(these)
            assert all((p.first, p.second) in these for p in shown)

    def test_a_threshold_for_a_share_of_false_accepts_is_the_largest_that_keeps_it(self):
        x, who = people(15, 6)
        found = find_pairs(x, [str(p) for p in who], 1.0)
        for far in (0.1, 0.01, 0.001):
            threshold = found.threshold_for(far)
            assert found.mistaken(threshold) <= far
            assert found.mistaken(threshold + 1e-5) > far or found.mistaken(threshold) == far

    def test_no_pairs_no_page(self):
        for names in (["a", "a"], ["a", "b"], [None, None]):
            with pytest.raises(ValueError, match="no pairs to judge by"):
                find_pairs(unit(2), names, 1.0)


class TestSureness:
    def test_it_falls_with_distance_and_matches_the_pairs(self):
        rng = np.random.default_rng(0)
        same, different = rng.normal(0.6, 0.2, 4000).clip(0, 4), rng.normal(1.6, 0.3, 40000).clip(0, 4)
        calibration = json.loads(json.dumps(calibrate(same, different)))
        sure = [Sureness.of(d, calibration) for d in np.linspace(0, 3, 31)]
        assert (np.diff([at.probability for at in sure]) <= 0).all()
        assert sure[0].probability > 0.99
        assert sure[-1].probability < 0.01
        middle = Sureness.of(0.8, calibration)
        assert middle.missed == pytest.approx((same > 0.8).mean(), abs=0.01)
        assert middle.mistaken == pytest.approx((different <= 0.8).mean(), abs=0.001)
        # Among pairs near a distance, with both kinds equally likely, the probability is the share of one person.
        near = [(np.abs(kind - 1.05) < 0.05).mean() for kind in (same, different)]
        assert Sureness.of(1.05, calibration).probability == pytest.approx(near[0] / sum(near), abs=0.1)

    def test_it_needs_both_kinds(self):
        with pytest.raises(ValueError, match="got 0 and 3"):
            calibrate(np.array([]), np.ones(3))


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
        for suffix in ("png", "jpg", "bmp", "webp", "gif", "tif"):
            picture(2).save(tmp_path / f"whole.{suffix}")
            data = (tmp_path / f"whole.{suffix}").read_bytes()
            for i in range(25):
                wrong = bytearray(data[: int(rng.integers(1, len(data) + 1))])
                for place in rng.integers(0, len(wrong), 6):
                    wrong[place] = int(rng.integers(0, 256))
                (tmp_path / "photos" / f"{i}.{suffix}").write_bytes(bytes(wrong))
        index = FaceIndex.create(tmp_path / "index", 128)
        tally = add_folder(index, tmp_path / "photos", Embedder.load(model))
        assert tally.added + tally.known + len(tally.broken) == 150
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
        assert "1 pictures added, 8 known already (1 renamed), 1 removed\n" in said
        assert "holds 8 pictures of 2 people, 128 bytes each" in said
        index = FaceIndex(tmp_path / "index")
        assert index.face(file_digest(photos / "bob" / "1b.png")).person == "bob"

    def test_a_flat_folder_has_no_people(self, photos, model, tmp_path, capsys):
        self.run("embed", photos / "ann", "--model", model, "--index", photos / "ann" / "index")
        assert "holds 4 pictures, 512" in capsys.readouterr().out
        # The index lies among the pictures; its files are not taken for pictures of a person named index.
        self.run("embed", photos / "ann", "--model", model, "--index", photos / "ann" / "index")
        assert "0 pictures added, 4 known already\n" in capsys.readouterr().out

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
            (["embed", "EMPTY", "--model", "MODEL"], "there are no files in"),
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
