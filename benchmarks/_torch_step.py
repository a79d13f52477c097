"""GPT-2's train step in PyTorch (CPU, fp32), the model from transformers, in a process of its own.

    python -m benchmarks._torch_step FOLDER TOKENS.npy LEARNING_RATE

FOLDER holds the weights. Each line on standard input asks for one step; the answer is its loss and
its seconds.
"""

from __future__ import annotations

import sys
import time

import numpy as np


def main() -> None:
    """Loads the model, then steps on demand."""
    import torch
    from transformers import GPT2LMHeadModel

    folder, tokens_file, learning_rate = sys.argv[1:]
    tokens = torch.from_numpy(np.load(tokens_file).astype(np.int64))
    model = GPT2LMHeadModel.from_pretrained(
        folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, dtype=torch.float32
    )
    model.train()
    decays = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=float(learning_rate),
        betas=(0.9, 0.95),
        eps=1e-8,
    )

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        print(loss, time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
