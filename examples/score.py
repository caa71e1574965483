"""Rank continuations by their log-probability: python score.py [MODEL [PROMPT COMPLETION ...]]."""

import sys

import cukern
from cukern.models import demo_checkpoint

llm = cukern.LLM(sys.argv[1] if len(sys.argv) > 1 else demo_checkpoint())
prompt, *completions = sys.argv[2:] or ["The whale", " swims in the sea", " is a fish", " reads the newspaper"]

print(f"On {llm.model.device}: {prompt} ...")
scored = zip(llm.score(prompt, completions), completions)
for score, text in sorted(scored, key=lambda pair: pair[0].total, reverse=True):
    print(f"{score.total:9.3f}  {len(score.token_ids)} tokens, {score.is_greedy.sum()} of them greedy  {text}")

# A token's log-probability is the same number wherever it comes from: here, and while it was generated.
sampling = cukern.SamplingParams(temperature=0.8, seed=1, max_tokens=16, logprobs=True)
(generated,) = llm.generate(prompt, sampling)
(again,) = llm.score(prompt, generated.token_ids, temperature=0.8)
largest = abs(again.logprobs - generated.logprobs).max()
print(f"16 generated tokens scored again: largest difference {largest:g} (exactly 0 on a GPU)")
