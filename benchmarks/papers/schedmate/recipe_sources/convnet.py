import torch
import torch.nn.functional as F
from torch import nn


class ConvNet(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.relu(self.second(x))
        return self.head(x.mean(dim=(2, 3)))


def load(channels=16):
    return ConvNet(channels).eval()


def run(net, image_size=32, batch_size=8):
    with torch.no_grad():
        return net(torch.randn(batch_size, 3, image_size, image_size)).softmax(dim=-1)
