"""lm-eval: log likelihoods by completions, with the server's tokenizer, and answers by chats, on a task of our own."""

import os
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

DEMO = sys.argv[1]
TASKS = Path(__file__).parents[1] / "tasks"
os.chdir(TASKS)  # tasks name their files from here


def results_of(model: str, task: str, **more: Any) -> dict[str, Any]:
    arguments = {"model": "demo", "num_concurrent": 4, "max_retries": 1, **more}
    name = "completions" if model == "local-completions" else "chat/completions"
    found: Any = lm_eval.simple_evaluate(
        model=model,
        model_args={**arguments, "base_url": f"{DEMO}/v1/{name}"},
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
    )
    results: dict[str, Any] = found["results"][task]
    return results


for tokenized in (True, False):
    chosen = results_of(
        "local-completions", "nova_capitals", tokenizer_backend="remote", tokenized_requests=tokenized, batch_size=4
    )
    assert chosen["acc,none"] == 1.0, chosen
said = results_of("local-chat-completions", "nova_sums")
assert said["exact_match,number"] == 1.0, said
print("ok")
