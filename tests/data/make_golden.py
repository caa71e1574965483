"""Write golden.npz into a checkpoint folder: what Hugging Face transformers computes in float32 on the CPU.

The prompt is the `input_ids` of the folder's golden_rounded_rope.npz. Fields:

  input_ids       int64   [B, S]
  logits          float32 [B, S, V]         of the whole prompt
  hidden          float32 [L + 1, B, S, H]  embeddings, then the output of every decoder layer, before the final norm
  greedy_ids      int64   [B, N]            greedy continuation, no stop at an end token
  greedy_logprobs float32 [B, N]            log-softmax of the chosen token at each step
  greedy_gap      float32 [B, N]            its logit minus the runner-up's: where small, half precision may differ
  lowp_max_err, lowp_rel_l2 float32         error of transformers itself when it runs in the checkpoint's dtype

Needs torch and transformers.   Usage: python make_golden.py FOLDER ...
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

NEW_TOKENS = 16


@torch.no_grad()
def golden(folder: Path) -> dict[str, np.ndarray]:
    ids = torch.from_numpy(np.load(folder / "golden_rounded_rope.npz")["input_ids"])
    # from_pretrained keeps the rotary frequencies in float32 in any dtype, as inference does everywhere;
    # model.to(dtype) would round them
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda m, i, out: layers.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.model.layers
    ]
    logits = model(ids).logits.numpy()
    for hook in hooks:
        hook.remove()
    hidden = torch.stack([model.model.embed_tokens(ids), *layers]).numpy()

    tokens, logprobs, gaps = [], [], []
    current = ids
    for _ in range(NEW_TOKENS):
        last = model(current).logits[:, -1].double()
        chosen = last.argmax(-1)
        top = last.topk(2, -1).values
        logprobs.append(torch.log_softmax(last, -1).gather(1, chosen[:, None])[:, 0])
        gaps.append(top[:, 0] - top[:, 1])
        tokens.append(chosen)
        current = torch.cat([current, chosen[:, None]], 1)

    config = json.loads((folder / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    low = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert low.model.rotary_emb.inv_freq.dtype == torch.float32
    error = low(ids).logits.float().numpy() - logits
    return {
        "input_ids": ids.numpy(),
        "logits": logits,
        "hidden": hidden,
        "greedy_ids": torch.stack(tokens, 1).numpy(),
        "greedy_logprobs": torch.stack(logprobs, 1).float().numpy(),
        "greedy_gap": torch.stack(gaps, 1).float().numpy(),
        "lowp_max_err": np.float32(np.abs(error).max()),
        "lowp_rel_l2": np.float32(np.linalg.norm(error) / np.linalg.norm(logits)),
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        values = golden(path)
        np.savez_compressed(path / "golden.npz", **values)
        print(
            path.name,
            f"smallest gap {values['greedy_gap'].min():.4f}",
            f"low-precision error: max {values['lowp_max_err']:.4f}, relative L2 {values['lowp_rel_l2']:.2e}",
        )
