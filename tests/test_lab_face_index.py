"""The index of faces: bytes, exact search, growth, and what a kill leaves."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from linattn.lab.faces import index as index_module
from linattn.lab.faces.index import Face, FaceIndex
from linattn.lab.faces.nearest import nearest, squared_distances
from linattn.lab.faces.quantise import from_bytes, to_bytes

DIM = 32


def unit(count, dim=DIM, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


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
                patch.setattr(index_module, "write_text", killable(index_module.write_text))
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
