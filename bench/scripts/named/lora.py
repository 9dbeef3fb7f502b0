"""peft: LoRA on a Qwen2 of random weights in bfloat16, gradients checkpointed, fused AdamW."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
config = Qwen2Config(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=50000,
)
model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW(
    [each for each in model.parameters() if each.requires_grad], lr=1e-4, fused=True
)
model.train()
for step in range(6):
    ids = torch.randint(50000, (4, 1024), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
