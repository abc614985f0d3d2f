"""What the text of Arlo's evaluation says in numbers; curves of its figures are not in it."""

from __future__ import annotations

from benchmarks.papers.arlo.cases import ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB

DT_, INFAAS_, ST_ = "DT", "INFaaS", "ST"
"""Systems as the paper names them; ours has several readings of two of them."""

MEAN_LESS: dict[str, dict[str, float]] = {
    "6a": {ST_: 70.3, DT_: 23.7, INFAAS_: 24.9},
    "6b": {ST_: 66.7, DT_: 29.2, INFAAS_: 39.3},
    "10a": {ST_: 70.3, DT_: 24.1, INFAAS_: 31.3},
    "10b": {ST_: 98.1, DT_: 30.7, INFAAS_: 41.7},
}
"""§5.1.1 and §5.2.2: by how many per cent Arlo's mean latency is below that of another system."""

TAIL_LESS: dict[str, dict[str, float]] = {
    "6": {ST_: 89.4, DT_: 25.9, INFAAS_: 40.1},
    "10": {ST_: 98.4, DT_: 26.0, INFAAS_: 29.3},
}
"""The same for the 98th percentile: the larger one of the two streams ("up to")."""

FIGURE_8: dict[str, tuple[float, float]] = {
    ST_: (8.13, 430.54), DT_: (6.38, 397.10), INFAAS_: (6.80, 404.12), "Arlo": (5.49, 330.41)
}  # fmt: skip
"""§5.1.3: GPUs on the mean over time, and the 98th percentile in milliseconds."""

TABLE_2 = {(50, 8): 0.156, (200, 12): 0.623, (1000, 16): 2.612}
"""Seconds."""
BAR_TABLE_2_S = 0.3
"""Our bar for 1,000 GPUs and 16 runtimes."""
FIGURE_9_MS = 0.737
"""2,400 requests, 1,200 instances."""

FIGURE_11: dict[int, tuple[float, float]] = {8: (14.16, 84.04), 16: (14.45, 81.74)}
"""§5.2.3: mean and 98th percentile by the number of runtimes."""
FIGURE_11_LATE = {4: 2.5, 8: 0.0}
"""Per cent of the requests above the objective."""

TABLE_3: dict[str, tuple[float, float, float]] = {
    ARLO_EVEN: (455.19, 21.13, 3407.02), ARLO_GLOBAL: (80.58, 8.21, 1514.53), ARLO: (11.51, 8.02, 75.04)
}  # fmt: skip
"""Mean, median and 98th percentile."""

TABLE_4: dict[int, dict[str, tuple[float, float]]] = {
    25: {ARLO_ILB: (1035.90, 9555.3), ARLO_IG: (150.21, 422.03), ARLO: (77.8, 414.58)},
    80: {ARLO_ILB: (77.83, 1024.78), ARLO_IG: (157.09, 1183.85), ARLO: (73.61, 810.41)},
    1000: {ARLO_ILB: (76.23, 419.04), ARLO_IG: (172.00, 990.29), ARLO: (76.09, 408.79)},
}
"""By GPUs: mean and 98th percentile."""
