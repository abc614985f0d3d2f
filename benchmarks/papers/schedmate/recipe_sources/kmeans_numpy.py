import numpy as np


def load(n_samples=2000, dim=16):
    return np.random.default_rng(0).standard_normal((n_samples, dim))


def run(points, clusters=8, max_iters=10):
    centers = points[:clusters].copy()
    for _iteration in range(max_iters):
        distance = ((points[:, None, :] - centers[None]) ** 2).sum(axis=-1)
        nearest = distance.argmin(axis=1)
        for cluster in range(clusters):
            mine = points[nearest == cluster]
            if len(mine):
                centers[cluster] = mine.mean(axis=0)
    return centers
