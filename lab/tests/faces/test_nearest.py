"""Exact nearest neighbours, and embeddings in few bytes."""

import numpy as np
import pytest

from face_rows import unit
from linattn_lab.faces.index.quantization import from_bytes, to_bytes
from linattn_lab.faces.index.search import nearest, squared_distances


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

    @pytest.mark.parametrize("by_faiss", [False, True])
    def test_more_rows_that_are_equally_near_than_there_are_candidates(self, by_faiss):
        base = unit(400)
        base[5::4] = base[5]
        distances, places = nearest(base[5:7], [base[:150], base[150:]], 3, by_faiss=by_faiss)
        assert places[0].tolist() == [5, 9, 13]
        assert distances[0].tolist() == [0, 0, 0]
        every = ((base[6].astype(np.float64) - base) ** 2).sum(-1)
        assert places[1].tolist() == np.argsort(every, kind="stable")[:3].tolist()

    @pytest.mark.parametrize("by_faiss", [False, True])
    def test_rows_that_float32_cannot_tell_apart_are_told_apart(self, by_faiss):
        generator = np.random.default_rng(0)
        query = unit(1, 64)
        base = (query + 1e-5 * generator.normal(size=(500, 64))).astype(np.float32)
        base /= np.linalg.norm(base, axis=1, keepdims=True)
        every = ((query.astype(np.float64) - base) ** 2).sum(-1)
        places = nearest(query, [base], 4, by_faiss=by_faiss)[1]
        assert places[0].tolist() == np.argsort(every, kind="stable")[:4].tolist()

    def test_fewer_rows_than_asked_for(self):
        assert nearest(unit(2), [unit(3)], 5)[1].shape == (2, 3)
        assert nearest(unit(2), [], 5)[1].shape == (2, 0)
        with pytest.raises(ValueError, match="k must be 1"):
            nearest(unit(2), [unit(3)], 0)
