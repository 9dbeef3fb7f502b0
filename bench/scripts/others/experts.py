"""A Mixtral of Transformers in bfloat16: experts by grouped matrix products, AdamW, clipping."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4, num_local_experts=8, vocab_size=32000,
)  # fmt: skip
config._experts_implementation = "grouped_mm"
model = MixtralForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(5):
    ids = torch.randint(32000, (4, 512), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
