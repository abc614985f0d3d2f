"""Imports of the gangs' fork server, done with one thread."""

import torch

torch.set_num_threads(1)

import tuning.tiny  # noqa: E402, F401

import stoker.tuning.tune  # noqa: E402, F401
