"""A language model of two LSTM layers, packed sequences of several lengths, SGD with clipping."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(0)
embed, head = nn.Embedding(10000, 650).cuda(), nn.Linear(650, 10000).cuda()
lstm = nn.LSTM(650, 650, num_layers=2, dropout=0.3, batch_first=True).cuda()
parameters = [*embed.parameters(), *lstm.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=1.0)
for step in range(5):
    lengths = torch.randint(40, 120, (64,))
    tokens = torch.randint(10000, (64, 121)).cuda()
    packed = pack_padded_sequence(
        embed(tokens[:, :-1]), lengths, batch_first=True, enforce_sorted=False
    )
    hidden, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    logits = head(hidden)
    targets = tokens[:, 1 : 1 + logits.shape[1]]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 0.25)
    optimizer.step()
    print(step, loss.item())
