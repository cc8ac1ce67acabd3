"""Linear purification: the worked examples, scikit-learn's rules, its twins, and the gain on real pictures."""

import json
import warnings

import numpy as np
import pytest
from sklearn.exceptions import SkipTestWarning
from sklearn.linear_model import Ridge
from sklearn.utils.estimator_checks import check_estimator

from cli_support import refusal
from linattn.cli import main
from linattn_lab.purification import LinearPurifier, loss, sweep_lambda
from linattn_lab.purification.datasets import fashion, orl

# The worked example, samples in rows.
EXAMPLE = np.array([[-2.17, 1.98, 2.41, -2.03], [0.02, -0.01, 0.01, -0.02]]).T


@pytest.mark.parametrize("solver", ["closed", "gradient"])
def test_it_keeps_scikit_learns_rules(solver):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)  # array API checks need an environment variable of scipy's
        check_estimator(LinearPurifier(solver=solver))


def test_the_worked_example_identity_against_dropping_the_second_coordinate():
    identity, first = np.eye(2), np.diag([1.0, 0.0])
    for lam in (0.0005, 0.001, 0.002):
        assert loss(identity, EXAMPLE, lam) == pytest.approx(2 * lam)
        assert loss(first, EXAMPLE, lam) == pytest.approx(0.001 + lam)
    assert loss(identity, EXAMPLE, 0.001) == pytest.approx(loss(first, EXAMPLE, 0.001))
    best = LinearPurifier(0.001).fit(EXAMPLE).matrix_
    assert loss(best, EXAMPLE, 0.001) < loss(first, EXAMPLE, 0.001)


def test_singular_values_are_kept_and_dropped_exactly_when_lambda_is_from_1_to_4():
    values = np.array([10, 8, 4, 1, 0.5, 0.36, 0.16, 0.01])
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 8)))[0] for n in (20, 8))
    purifier = LinearPurifier().fit((left * values) @ right.T)
    assert purifier.singular_values_ == pytest.approx(values)

    def separates(lam):
        kept = purifier.shrinkage(lam)
        return bool((kept[:3] >= 0.8 - 1e-12).all() and (kept[3:] <= 0.5 + 1e-12).all())

    assert [separates(lam) for lam in (0.99, 1, 2, 4, 4.01)] == [False, True, True, True, False]


@pytest.mark.parametrize("shape", [(50, 12), (12, 50)])
def test_w_is_ridges_and_minimises_the_loss(shape):
    X = np.random.default_rng(1).normal(size=shape)
    purifier = LinearPurifier(0.7).fit(X)
    ridge = Ridge(alpha=0.7, fit_intercept=False, solver="svd").fit(X, X)
    assert np.abs(purifier.matrix_ - ridge.coef_).max() < 1e-10
    assert np.abs(purifier.transform(X) - X @ purifier.matrix_).max() < 1e-12
    base = loss(purifier.matrix_, X, 0.7)
    for _ in range(5):
        nearby = purifier.matrix_ + 1e-3 * np.random.default_rng(2).normal(size=(shape[1], shape[1]))
        assert loss(nearby, X, 0.7) > base


@pytest.mark.parametrize("shape", [(50, 12), (12, 50)])
def test_the_gradient_twin_comes_to_the_same_w(shape):
    X = np.random.default_rng(1).normal(size=shape)
    closed, descent = LinearPurifier(0.3).fit(X), LinearPurifier(0.3, solver="gradient").fit(X)
    assert np.abs(closed.matrix_ - descent.matrix_).max() < 1e-6
    assert np.abs(closed.transform(X) - descent.transform(X)).max() < 1e-6
    assert descent.n_iter_ > 10


def test_descent_that_cannot_finish_says_so():
    with pytest.raises(ValueError, match="did not come within 1e-07 in 3 steps"):
        LinearPurifier(1e-3, solver="gradient", max_iter=3).fit(EXAMPLE)


@pytest.mark.parametrize("portions", [[1, 1, 38], [20, 20], [7, 30, 3]])
def test_portions_come_to_the_same_as_the_whole(portions):
    X = np.random.default_rng(3).normal(size=(40, 15))
    streamed = LinearPurifier(2.0)
    for part in np.split(X, np.cumsum(portions)[:-1]):
        streamed.partial_fit(part)
    whole = LinearPurifier(2.0).fit(X)
    assert np.abs(streamed.matrix_ - whole.matrix_).max() < 1e-12
    assert streamed.n_samples_seen_ == 40
    few = LinearPurifier(2.0).fit(X[:5]).partial_fit(X[5:])  # the first fit keeps directions instead of a covariance
    assert np.abs(few.matrix_ - whole.matrix_).max() < 1e-12


def test_a_new_lambda_counts_from_the_next_fit():
    purifier = LinearPurifier(1.0).fit(EXAMPLE)
    before = purifier.matrix_
    purifier.set_params(lam=100.0)
    assert np.array_equal(purifier.matrix_, before)
    assert not np.allclose(purifier.fit(EXAMPLE).matrix_, before)


@pytest.mark.parametrize(("options", "said"), [({"lam": 0.0}, "positive, got 0"), ({"solver": "sgd"}, "got 'sgd'")])
def test_bad_parameters_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        LinearPurifier(**options).fit(EXAMPLE)


def test_held_out_pictures_choose_the_lambda_of_theory():
    """For samples of a known distribution the best lambda is n sigma^2."""
    rng = np.random.default_rng(4)
    mix = rng.normal(size=(6, 20))
    train, held_out = (rng.normal(size=(n, 6)) @ mix for n in (4000, 2000))
    purifier = LinearPurifier().fit(train)
    lambdas = [4000 * 0.25 * factor for factor in (0.01, 0.1, 1, 10, 100)]
    sweep = sweep_lambda(purifier, held_out + 0.5 * rng.normal(size=held_out.shape), held_out, lambdas)
    assert sweep.best == 1000
    assert sweep.gains[2] > 4


def test_faces_are_split_by_person_and_pictures_do_not_overlap():
    _, (fit, held_out, test) = orl(0, seed=5)
    assert [len(x) for x in (fit, held_out, test)] == [300, 50, 50]
    flat = np.concatenate([fit, held_out, test]).reshape(400, -1)
    assert len(np.unique(flat, axis=0)) == 400
    _, (fit, held_out, test) = fashion(200, seed=5)
    assert [x.shape for x in (fit, held_out, test)] == [(200, 28, 28), (1000, 28, 28), (1000, 28, 28)]


def test_the_command_gains_on_real_pictures_and_beats_pca(tmp_path, capsys):
    figures, picture = tmp_path / "p.json", tmp_path / "p.png"
    assert main(["lab", "purify", "--train", "2000", "--json", str(figures), "--picture", str(picture)]) == 0
    found = json.loads(figures.read_text())
    assert set(found) == {"ridge_max_diff", "gradient_max_diff", "gain_db"}
    assert found["ridge_max_diff"] < 1e-10
    assert found["gradient_max_diff"] < 1e-6
    assert set(found["gain_db"]) == {"fashion", "orl"}
    for gain in found["gain_db"].values():
        assert gain["purifier"] > gain["pca"] > 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "lambda" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"), [(["--noise", "0"], "--noise must be"), (["--train", "5"], "--train must be")]
)
def test_mistakes_get_one_sentence(words, said, capfd):
    assert said in refusal(["lab", "purify", *words], capfd)
