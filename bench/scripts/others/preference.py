"""Preference tuning: a GPT-2 and its frozen copy, log-probabilities of pairs."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
policy = GPT2LMHeadModel(GPT2Config(n_layer=8)).cuda().to(torch.bfloat16)
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-6)


def likelihood(model, ids):
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2).sum(1)


for step in range(5):
    chosen, rejected = torch.randint(50257, (2, 6, 384)).cuda()
    with torch.no_grad():
        base = likelihood(reference, chosen) - likelihood(reference, rejected)
    margin = likelihood(policy, chosen) - likelihood(policy, rejected)
    loss = -torch.nn.functional.logsigmoid(0.1 * (margin - base)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), (margin > base).float().mean().item())
