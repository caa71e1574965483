"""Generate text: python generate.py [MODEL [PROMPT ...]]. MODEL is a folder or a hub name such as Qwen/Qwen3-0.6B."""

import sys

import cukern
from cukern.models import demo_checkpoint

llm = cukern.LLM(sys.argv[1] if len(sys.argv) > 1 else demo_checkpoint())
prompts = sys.argv[2:] or ["According to a careful calculation I have made", "The whale"]
sampling = cukern.SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=32, logprobs=True)

print(f"On {llm.model.device}, {len(prompts)} prompts in one batch:")
for prompt, completion in zip(prompts, llm.generate(prompts, sampling)):
    mean = sum(completion.logprobs) / len(completion.logprobs)
    print(f"- {prompt}{completion.text}\n  ({len(completion.token_ids)} tokens, mean log-probability {mean:.2f})")

print("The first one again, as it comes:", prompts[0], end="")
for piece in llm.stream(prompts[0], sampling):
    print(piece, end="", flush=True)
print()
