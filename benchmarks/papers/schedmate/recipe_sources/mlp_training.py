import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, width, classes=10):
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = torch.relu(self.inner(x))
        return self.head(torch.relu(self.middle(x)))


def load(width=64):
    return Classifier(width)


def run(model, batch_size=32, epochs=1, items=512):
    rows = TensorDataset(torch.randn(items, 64), torch.randint(0, 10, (items,)))
    loader = DataLoader(rows, batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    for _epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
    return loss.item()
