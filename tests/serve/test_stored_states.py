"""Stored prefixes and saved states: found, shared, thinned, spilled, and refused where they do not belong."""

import json
import os

import pytest

pytest.importorskip("starlette")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn._tensor_files import read_tensors, write_tensors
from linattn.serve import caches, snapshots, state_folder, thinning
from linattn.serve.prefix_store import PrefixStore
from linattn.serve.saved_states import SavedStates
from linattn.serve.snapshots import MismatchError, Snapshot
from linattn.serve.state_folder import StateFolder
from serve_support import FAMILIES, run_all, run_job, served, service, text_of

TOKENS = [(7 * i) % 250 + 2 for i in range(300)]


def read(model, tokens):
    cache = model.new_cache()
    logits = model.read(cache, tokens, 0)
    return cache, logits


def next_logits(model, cache, position):
    return model.step([caches.fork(cache)], [9], [position])


@pytest.mark.parametrize(
    ("family", "kernel"),
    [(family, "softmax") for family in FAMILIES] + [("llama", "nearfar"), ("gemma3", "nearfar")],
)
def test_a_file_holds_the_whole_state(family, kernel, tmp_path):
    model = served(family, kernel)
    cache, _ = read(model, TOKENS)
    path = tmp_path / "x.state"
    snapshots.save(path, Snapshot(TOKENS, caches.compact(cache), {"name": "ü"}), model.fingerprint)
    found = snapshots.load(path, model.new_cache(), model.fingerprint)
    assert found.tokens == TOKENS
    assert found.about == {"name": "ü"}
    assert torch.equal(next_logits(model, found.cache, 300), next_logits(model, cache, 300))
    assert path.stat().st_size < 1.3 * caches.nbytes(cache) + 20000


def test_states_of_other_models_and_damaged_files_are_refused(tmp_path):
    model, other = served(), served(kernel="nearfar")
    prints = {made().fingerprint for made in (served, lambda: served("gemma3"), lambda: served(kernel="nearfar"))}
    assert len(prints) == 3
    assert served().fingerprint == model.fingerprint
    path = tmp_path / "x.state"
    snapshots.save(path, Snapshot(TOKENS, read(model, TOKENS)[0]), model.fingerprint)
    with pytest.raises(MismatchError, match="another model, kernel or calibration"):
        snapshots.load(path, other.new_cache(), other.fingerprint)
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[:-50], b"", b"x" * 200, whole[:500] + b"\0" * 40 + whole[540:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"x\.state"):
            snapshots.load(path, model.new_cache(), model.fingerprint)
    torch_file = tmp_path / "y.state"
    write_tensors(torch_file, {"a": torch.zeros(3)}, {"format": "other"})
    with pytest.raises(ValueError, match="not a saved state"):
        snapshots.load(torch_file, model.new_cache(), model.fingerprint)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=12), st.data())
def test_the_longest_prefix_is_found(stored, data):
    model = CACHED.setdefault("llama", served())
    store = PrefixStore(2**30, 64)
    for tokens in stored:
        store.put(tokens, model.new_cache(), chain=None)
    asked = data.draw(st.sampled_from(stored)) + data.draw(st.lists(st.integers(0, 3), max_size=6))
    found = store.find(asked)
    fitting = [len(tokens) for tokens in stored if tokens == asked[: len(tokens)] and len(tokens) < len(asked)]
    assert (found.length if found else 0) == max(fitting, default=0)


CACHED = {}


@given(st.integers(1, 400), st.sampled_from([1, 64, 512]))
def test_thinning_keeps_few_anchors_at_doubling_distances(count, every):
    kept = set()
    for i in range(1, count + 1):
        kept = thinning.keep([*kept, i * every], every)
    assert max(kept) == count * every
    assert len(kept) <= 2 * count.bit_length() + 1
    for place in range(
        every, count * every, every
    ):  # the nearest anchor before a place is not much farther than the end
        before = max((k for k in kept if k <= place), default=0)
        assert place - before <= 2 * (count * every - place) + every


@pytest.mark.parametrize("kernel", ["softmax", "nearfar"])
def test_memory_is_counted_once_and_kept_in_the_budget(kernel):
    model = served(kernel=kernel)
    cache, _ = read(model, TOKENS)
    store = PrefixStore(2**30, 64)
    store.put(TOKENS, caches.compact(cache), chain=1)
    one = store.memory
    assert one == sum(caches.storages(store.find([*TOKENS, 1]).cache).values())
    store.put(TOKENS, caches.compact(cache), chain=1)
    assert store.memory == one
    model.read(cache, TOKENS, 300)
    store.put(TOKENS * 2, caches.compact(cache), chain=1)
    if kernel == "softmax":  # the shorter one uses the buffers of the longer one
        assert store.memory == sum(caches.storages(store.find([*TOKENS * 2, 1]).cache).values())
    store.budget = one // 2
    for i in range(5):
        store.put([i, *TOKENS], caches.compact(read(model, [i, *TOKENS])[0]), chain=None)
        assert len(store) == 1
    assert store.find([4, *TOKENS, 1]).length == 301


def test_what_leaves_memory_goes_to_files_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(state_folder, "MOST_PENDING", 1000)  # a slow disk drops nothing here
    model = served(kernel="nearfar")
    texts = [text_of(i, 200) for i in range(4)]
    made = service(model, folder=tmp_path, memory=1)

    def each(made):
        async def run():
            return [await run_job(made, text) for text in texts]

        return run()

    first = run_all(made, each)[0]
    assert made.store.memory < 2 * 2**20
    assert len(list((tmp_path / "prefixes").glob("*"))) >= 4
    again = run_all(service(model, folder=tmp_path, memory=1), each)[0]  # as after a restart
    assert [found.texts for found in again] == [found.texts for found in first]
    assert all(found.cached >= 128 for found in again)
    for path in (tmp_path / "prefixes").glob("*"):
        path.write_bytes(path.read_bytes()[:-100])
    damaged = run_all(service(model, folder=tmp_path), each)[0]
    assert [found.texts for found in damaged] == [found.texts for found in first]
    assert all(found.cached == 0 for found in damaged)


def test_saved_states_survive_a_restart_and_their_names_are_not_paths(tmp_path):
    model = served(kernel="nearfar")
    made = service(model, folder=tmp_path)
    snapshot = Snapshot(TOKENS, read(model, TOKENS)[0], {"name": "../../etc/passwd", "kind": "text"})
    saved = made.saved.add(snapshot)
    made.folder.close()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [f"{saved.id}.safetensors"]
    again = service(model, folder=tmp_path)
    found = again.saved.get(saved.id)
    assert found.public() == saved.public()
    assert again.saved.tokens_of(found) == TOKENS
    assert again.store.find([*TOKENS, 1]).length == 300
    assert again.saved.get(f"../saved/{saved.id}") is None
    other = StateFolder(tmp_path, "another model", model.new_cache, 2**30)
    assert not SavedStates(PrefixStore(2**30, 64), other).get(saved.id).usable
    assert again.saved.delete(saved.id)
    assert not again.saved.delete(saved.id)
    assert list((tmp_path / "saved").iterdir()) == []
    again.folder.close()
    other.close()


def test_files_that_do_not_say_what_they_are_do_not_stop_a_server(tmp_path):
    model = served()
    made = service(model, folder=tmp_path)
    saved = made.saved.add(Snapshot(TOKENS, read(model, TOKENS)[0], {"kind": "text"}))
    made.folder.close()
    whole, header = read_tensors(saved.file)
    about = json.loads(header["about"])
    wrong = [{"tokens": "many"}, {"tokens": "299", "about": "{}"}, {"about": "[1]"}, {"about": "{}"}]
    wrong += [{"about": json.dumps({**about, "digest": "x", "created": "now"})}]
    for i, change in enumerate(wrong):
        write_tensors(tmp_path / "saved" / f"state-{i:024x}.safetensors", whole, {**header, **change})
    again = service(model, folder=tmp_path)
    assert {f"state-{i:024x}" for i in (1, 3, 4)} | {saved.id} == {state.id for state in again.saved.all()}
    with pytest.raises(ValueError, match="300 tokens in place of 299"):
        again.saved.tokens_of(again.saved.get(f"state-{1:024x}"))
    assert all(again.saved.delete(f"state-{i:024x}") for i in (1, 3, 4))
    assert again.store.find([*TOKENS, 1]).length == 300
    again.folder.close()


def test_a_second_server_leaves_alone_what_the_first_one_writes(tmp_path):
    made = StateFolder(tmp_path, "a model", served().new_cache, 2**30)
    written, left_over = (tmp_path / "saved" / f".linattn-{name}" for name in ("new", "old"))
    for path in (written, left_over):
        path.touch()
    os.utime(left_over, (1, 1))  # of a process that was killed long ago
    other = StateFolder(tmp_path, "a model", served().new_cache, 2**30)
    assert list((tmp_path / "saved").iterdir()) == [written]
    made.close()
    other.close()


def test_every_family_can_be_forked():
    for family in FAMILIES:
        model = served(family)
        cache, _ = read(model, TOKENS)
        before = next_logits(model, cache, 300)
        fork = caches.fork(cache)
        for i in range(3):
            model.step([fork], [20 + i], [300 + i])
        assert torch.equal(next_logits(model, cache, 300), before), family


def test_idle_conversations_keep_their_ends():
    """Under a tight budget, what a longer state of the same conversation replaces is dropped first."""
    model, conversations = served(kernel="nearfar"), 6
    texts = [f"{i} {text_of(i, 150)}" for i in range(conversations)]

    def turns(made):
        async def run():
            for _ in range(3):
                for i, text in enumerate(texts):
                    result = await run_job(made, text)
                    texts[i] = text + result.texts[0] + f" and {i} more"
            return [(await run_job(made, text)).cached for text in texts]

        return run()

    one = caches.nbytes(read(model, TOKENS)[0])
    made = service(model, memory=(conversations + 2) * one)
    cached = run_all(made, turns)[0]
    assert made.store.memory <= (conversations + 3) * one
    assert min(cached) > 150
