"""Word problems with TRL and peft, as docs/smollm2.md trains adapters on them here.

    pip install trl peft torch
    python docs/scripts/word_problems_trl.py MODEL word_problems trl_merged

Same data, prompts, batch, lengths, learning rate, rank and loss; transformers generates, in
float32. Prints the mean reward of each step, CPU seconds and the peak of memory, and writes the
merged weights, which `fp8rl eval` reads.
"""

from __future__ import annotations

import pathlib
import re
import resource
import sys
import time

_SYSTEM = "Answer with the number."
_STEPS, _PROMPTS, _GROUP, _NEW, _RANK = 24, 4, 8, 24, 16
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1]) if found else None


def main(checkpoint: str, data: str, target: str) -> None:
    """Trains, and writes the merged model to `target`."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def conversation(row):
        turns = [("system", _SYSTEM), ("user", row["question"])]
        return {"prompt": [{"role": role, "content": text} for role, text in turns]}

    def reward(completions, answer, **_):
        texts = [turns[0]["content"] for turns in completions]
        return [float(_last_number(t) == float(a)) for t, a in zip(texts, answer, strict=True)]

    class Rewards(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if logs and "reward" in logs:
                print(state.global_step, round(logs["reward"], 3), flush=True)

    settings = GRPOConfig(
        per_device_train_batch_size=_PROMPTS * _GROUP,
        num_generations=_GROUP,
        max_completion_length=_NEW,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        loss_type="dapo",
        learning_rate=3e-4,
        adam_beta2=0.95,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        max_steps=_STEPS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        output_dir="/tmp/word_problems_trl",
    )
    rows = load_dataset("json", data_files=str(pathlib.Path(data) / "train.jsonl"), split="train")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32"),
        reward_funcs=reward,
        args=settings,
        train_dataset=rows.map(conversation),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        peft_config=LoraConfig(r=_RANK, lora_alpha=32, target_modules="all-linear"),
        callbacks=[Rewards()],
    )
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{_STEPS} steps: {wall:.0f} s, {cpu:.0f} CPU seconds, peak {peak:.1f} GiB")
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(target)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
