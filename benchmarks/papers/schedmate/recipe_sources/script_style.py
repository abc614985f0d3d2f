# As people write it in a hurry: every size is a constant at the top.
import torch
from torch import nn

DIM = 96
BATCH_SIZE = 16
STEPS = 10


def load():
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


def run(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total = 0.0
    for _step in range(STEPS):
        x = torch.randn(BATCH_SIZE, DIM)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total / STEPS
