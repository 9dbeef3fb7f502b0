"""A Gemma 2 whose blocks are checkpointed, with an optimizer written by hand."""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

torch.manual_seed(0)
config = Gemma2Config(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=8,
    num_key_value_heads=4, head_dim=96, vocab_size=64000, attn_implementation="eager",
)  # fmt: skip
model = Gemma2ForCausalLM(config).cuda()
model.gradient_checkpointing_enable()
model.train()
momenta = {p: torch.zeros_like(p) for p in model.parameters()}


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            update = (0.9 * momenta[p] + 0.1 * p.grad).sign_()
            p.add_(update, alpha=-self.param_groups[0]["lr"])
            momenta[p].lerp_(p.grad, 0.01)


optimizer = Lion(model.parameters())
for step in range(5):
    ids = torch.randint(64000, (3, 640)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
