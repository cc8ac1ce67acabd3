"""Embeddings without a network: pixels, principal components, Fisherfaces."""

from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from .metrics import FARS, Pairs, figures, pairs_of

Array = np.ndarray
COMPONENTS = (50, 100, 150, 200)


def baselines(pictures: Array, people: Array, folds: Array) -> dict[str, tuple[dict[str, Any], list[Pairs]]]:
    """Figures and pairs of each baseline on folds of unseen people.

    Each has settings (length of vectors, unit length or not, whitening); the ones that do best on the TEST people are
    taken, which is in the baselines' favour.

    Args:
        images: (N, height, width).
        people: (N,).
        folds: (N,) number of the fold in which an image is tested.
    """
    flat = pictures.reshape(len(pictures), -1).astype(np.float64)
    tried: dict[str, dict[str, list[Pairs]]] = {"pixels": {}, "pca": {}, "fisherfaces": {}}
    for fold in np.unique(folds):
        train, test = folds != fold, folds == fold

        def add(name: str, setting: str, vectors: Array, seen: Array = people[test]) -> None:
            tried[name].setdefault(setting, []).append(pairs_of(vectors, seen))
            tried[name].setdefault(setting + ", unit", []).append(pairs_of(_unit(vectors), seen))

        add("pixels", "as they are", flat[test])
        add("pixels", "centred", flat[test] - flat[train].mean(0))
        pca = PCA(max(COMPONENTS), svd_solver="full").fit(flat[train])
        seen, unseen = pca.transform(flat[train]), pca.transform(flat[test])
        for count in COMPONENTS:
            add("pca", f"{count} components", unseen[:, :count])
            add("pca", f"{count} components, whitened", unseen[:, :count] / np.sqrt(pca.explained_variance_[:count]))
            fisher = LinearDiscriminantAnalysis().fit(seen[:, :count], people[train])
            add("fisherfaces", f"{count} components", fisher.transform(unseen[:, :count]))
    return {name: _best(settings) for name, settings in tried.items()}


def _best(settings: dict[str, list[Pairs]]) -> tuple[dict[str, Any], list[Pairs]]:
    found: list[tuple[dict[str, Any], list[Pairs]]] = [
        (figures(pairs) | {"setting": name}, pairs) for name, pairs in settings.items()
    ]
    return max(found, key=lambda entry: sum(entry[0][f"val_at_far_1e{round(np.log10(far))}"] for far in FARS))


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
