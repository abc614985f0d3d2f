import torch
from transformers import LlamaConfig, LlamaForCausalLM


def load(hidden_size=64, num_hidden_layers=2):
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def run(model, batch_size=1, prompt_length=16, max_new_tokens=8):
    prompts = torch.randint(1, 512, (batch_size, prompt_length))
    with torch.inference_mode():
        return model.generate(prompts, max_new_tokens=max_new_tokens, do_sample=False)
