"""The index under kills, and shared by processes and threads."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import warm_python
from face_rows import DIM, faces, unit
from linattn_lab.faces.index import FaceIndex
from linattn_lab.faces.index import face_index as index_module
from linattn_lab.faces.index import shards as shards_module


class TestKilled:
    def test_stopped_between_any_two_file_operations_nothing_is_lost_or_doubled(self, tmp_path, monkeypatch):
        """Every step of an add that touches the disk is made the last one, in turn."""
        x = unit(8)
        for stop in range(6):  # embeddings, names, the manifest, two deletions; then none is left out
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

                patch.setattr(shards_module, "write_file", killable(shards_module.write_file))
                patch.setattr(Path, "unlink", killable(Path.unlink))
                if stop < 5:
                    with pytest.raises(KeyboardInterrupt):
                        index.add(faces(3, 5), x[5:])
                else:
                    index.add(faces(3, 5), x[5:])
            after = FaceIndex(folder)
            assert after.faces == faces(8 if stop >= 3 else 5)
            assert np.array_equal(after.embeddings(), x[: len(after)])
            after.add(faces(8), x)
            last = FaceIndex(folder)
            assert sorted(face.file for face in last.faces) == sorted(face.file for face in faces(8))
            order = [faces(8).index(face) for face in last.faces]
            assert np.array_equal(last.embeddings(), x[order])
            if stop < 3:  # something was added after the kill: what it left is gone
                assert len(list(folder.glob("shard-*"))) == 2

    def test_a_process_killed_in_the_middle_leaves_a_whole_index(self, tmp_path):
        script = (
            "import sys, numpy as np\n"
            "from linattn_lab.faces.index import Face, FaceIndex\n"
            "index = FaceIndex.create(sys.argv[1], 4)\n"
            "for i in range(100000):\n"
            "    index.add([Face(f'{i}', None, f'{i}')], np.eye(4, dtype=np.float32)[i % 4][None])\n"
            "    print(i, flush=True)\n"
        )
        folder = tmp_path / "index"
        with warm_python.Process("-c", script, str(folder)) as process:
            said = -1
            while said < 60:
                said = int(process.stdout.readline())
            time.sleep(0.01)
            process.kill()
            rest = process.stdout.read().split("\n")[:-1]  # what follows the last line end was cut off
            said = int(rest[-1]) if rest else said
        index = FaceIndex(folder)
        assert len(index) in (said + 1, said + 2)
        assert [face.file for face in index.faces] == [str(i) for i in range(len(index))]
        assert np.array_equal(index.embeddings(), np.eye(4, dtype=np.float32)[np.arange(len(index)) % 4])


WRITER = """
import sys, hashlib, numpy as np
from linattn_lab.faces.index import FaceIndex, Face
folder, own, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
index = FaceIndex(folder)
print("ready", flush=True)
sys.stdin.readline()
for n in range(count):
    face = Face(f"{own}-{n}", "p", hashlib.sha256(f"{own}-{n}".encode()).hexdigest())
    assert index.add([face], np.eye(4, dtype=np.float32)[[n % 4]]) == 1
    print(face.file, flush=True)
"""


class Writers:
    """Processes that add faces to one index at the same time, each its own. Leaving the `with` ends them."""

    def __init__(self, folder, processes, count):
        words = ["-c", WRITER, str(folder)]
        self.processes = [warm_python.Process(*words, str(i), str(count)) for i in range(processes)]
        for process in self.processes:
            assert process.stdout.readline() == "ready\n"
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            with process:
                pass

    def finish(self):
        """Files whose add() returned; each process must end well."""
        promised = [process.communicate(timeout=120)[0].split() for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(self.processes)
        return [name for names in promised for name in names]


class TestConcurrent:
    def test_what_several_processes_add_is_all_there(self, tmp_path):
        FaceIndex.create(tmp_path, 4)
        with Writers(tmp_path, 3, 40) as writers:
            promised = writers.finish()
        assert len(promised) == 120
        index = FaceIndex(tmp_path)
        assert sorted(face.file for face in index.faces) == sorted(promised)
        at = [int(face.file.split("-")[1]) % 4 for face in index.faces]
        assert np.array_equal(index.embeddings(), np.eye(4, dtype=np.float32)[at])
        assert len(list(tmp_path.glob("shard-*"))) == 2

    def test_readers_meanwhile_see_a_whole_index_that_only_grows(self, tmp_path):
        FaceIndex.create(tmp_path, 4)
        lasting, sizes = FaceIndex(tmp_path), [0]
        with Writers(tmp_path, 2, 40) as writers:
            while any(process.poll() is None for process in writers.processes):
                fresh = FaceIndex(tmp_path)
                own = {face.file.split("-")[0]: [] for face in fresh.faces}
                for face in fresh.faces:
                    own[face.file.split("-")[0]].append(int(face.file.split("-")[1]))
                assert all(numbers == list(range(len(numbers))) for numbers in own.values())
                assert len(fresh) >= sizes[-1]
                sizes.append(len(fresh))
                lasting.reload()
                embeddings = lasting.embeddings()
                assert len(embeddings) == len(lasting.faces) >= sizes[-1]
                if len(lasting):
                    distances, places = lasting.search(np.eye(4, dtype=np.float32)[:1], 1)
                    assert distances[0, 0] == 0
                    assert lasting.faces[places[0, 0]].file.split("-")[1] == "0"
            assert len(writers.finish()) == len(FaceIndex(tmp_path)) == 80

    @pytest.mark.parametrize("shared", [True, False], ids=["one object", "an object each"])
    def test_threads_lose_nothing(self, tmp_path, shared):
        index, x = FaceIndex.create(tmp_path, DIM), unit(60)
        failed = []

        def work(start):
            try:
                own = index if shared else FaceIndex(tmp_path)
                for i in range(start, 60, 3):
                    assert own.add(faces(1, i), x[i : i + 1]) == 1
                    assert own.search(x[i : i + 1], 1)[0][0, 0] == 0
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        again = FaceIndex(tmp_path)
        order = [int(face.digest, 16) for face in again.faces]
        assert sorted(order) == list(range(60))
        assert np.array_equal(again.embeddings(), x[order])

    def test_a_writer_that_was_killed_does_not_keep_the_lock(self, tmp_path):
        FaceIndex.create(tmp_path, 4)
        with Writers(tmp_path, 1, 100000) as writers:
            for _ in range(20):
                writers.processes[0].stdout.readline()
        assert FaceIndex(tmp_path).add(faces(1), np.eye(4, dtype=np.float32)[:1]) == 1

    def test_a_change_starts_from_what_others_have_written(self, tmp_path):
        one = FaceIndex.create(tmp_path, DIM)
        one.add(faces(4), unit(4))
        two = FaceIndex(tmp_path)
        one.add(faces(2, 4), unit(6)[4:])
        assert two.rename(faces(2, 4, person="ann")) == 2  # added by the other object
        assert one.remove([faces(1)[0].digest]) == 1
        assert two.remove([faces(1)[0].digest]) == 0  # the other was first
        expected = [*faces(3, 1), *faces(2, 4, person="ann")]
        assert FaceIndex(tmp_path).faces == one.faces == two.faces == expected
        assert np.array_equal(FaceIndex(tmp_path).embeddings(), np.concatenate([unit(4)[1:], unit(6)[4:]]))

    def test_two_that_make_an_index_make_one(self, tmp_path):
        made, refused = [], []

        def make():
            try:
                made.append(FaceIndex.create(tmp_path / "index", DIM))
            except index_module.IndexExists as error:
                refused.append(error)

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), len(refused)) == (1, 3)

    def test_a_writer_that_never_ends_is_reported(self, tmp_path, monkeypatch):
        index = FaceIndex.create(tmp_path, DIM)
        monkeypatch.setattr(shards_module, "LOCK_SECONDS", 0.05)
        held, done = threading.Event(), threading.Event()

        def hold():
            with index._files.writing():
                held.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        with pytest.raises(ValueError, match=r"another process has been writing to .* wait until it has ended"):
            index.add(faces(1), unit(1))
        done.set()
        thread.join()
        assert index.add(faces(1), unit(1)) == 1
