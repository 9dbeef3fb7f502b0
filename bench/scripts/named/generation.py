"""Generation: a Llama in bfloat16, batches of prompts, a static cache."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
for length in (128, 384):
    prompts = torch.randint(3, 32000, (16, length), device="cuda")
    with torch.inference_mode():
        answer = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            pad_token_id=0,
        )
    print(answer.shape)
