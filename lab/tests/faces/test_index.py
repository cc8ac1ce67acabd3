"""The index: growth, search, renaming, removal, errors."""

import numpy as np
import pytest

from face_rows import DIM, faces, unit
from linattn_lab.faces.index import FaceIndex
from linattn_lab.faces.index import face_index as index_module
from linattn_lab.faces.index.quantization import from_bytes, to_bytes


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
        for path in tmp_path.glob("shard-*"):  # as the message says
            path.unlink()
        assert FaceIndex(tmp_path).add(faces(2), unit(2)) == 2
        assert FaceIndex(tmp_path).faces == faces(2)

    def test_a_manifest_that_is_none(self, tmp_path):
        FaceIndex.create(tmp_path, DIM)
        manifest = tmp_path / "index.json"
        whole = manifest.read_text()
        for text, error in [
            ("{", "is damaged"),
            ("[]", "format None, not 2"),
            (whole.replace('"faces_index": 2', '"faces_index": 1'), "format 1, not 2"),
            (whole.replace("[]", '["../shard"]'), "its list of shards is"),
            (whole.replace("[]", "7"), "its list of shards is 7"),
        ]:
            manifest.write_text(text)
            with pytest.raises(ValueError, match=error):
                FaceIndex(tmp_path)
        manifest.unlink()
        (tmp_path / "shard-000000-0123456789abcdef.json").write_text("{}")
        with pytest.raises(ValueError, match=r"holds shards of an index without its index\.json"):
            FaceIndex.create(tmp_path, DIM)
