"""What the fork server of the gangs imports once, with one thread before anything can start more."""

import torch

torch.set_num_threads(1)

import tuning.tiny  # noqa: E402, F401

import stoker.tuning.tune  # noqa: E402, F401
