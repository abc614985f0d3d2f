import torch
from transformers import BertConfig, BertModel

LAYERS = 2


def load(hidden_size=64):
    config = BertConfig(
        vocab_size=1000,
        hidden_size=hidden_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * hidden_size,
    )
    return BertModel(config).eval()


@torch.no_grad()
def run(model, batch_size=8, max_length=64, items=16):
    vectors = []
    for start in range(0, items, batch_size):
        tokens = torch.randint(0, 1000, (min(batch_size, items - start), max_length))
        vectors.append(model(tokens).last_hidden_state.mean(dim=1))
    return torch.cat(vectors)
