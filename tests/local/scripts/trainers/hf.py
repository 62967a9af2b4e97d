"""A tiny GPT-2 with Hugging Face's Trainer, on as many processes as the run has; PARAMS say how."""

from __future__ import annotations

from typing import Any

import torch
from record import DIRECTORY, PARAMS, RESUME_FROM, SAVE_EVERY, STEPS, ended, evaluated, slow_saves, trained
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, the same in every process."""

    def __init__(self) -> None:
        # Longer than the training: each epoch would fork workers from a process with many threads, and with Python
        # before 3.11.10 such a child may hang (gh-112275). Persistent workers would draw other random numbers after a
        # resume.
        self.rows = torch.randint(16, (256, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class SlowTokens(Tokens):
    """The same, for an evaluation that takes its time."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        evaluated(index)
        return super().__getitem__(index)


class Record(TrainerCallback):
    """Records each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained(state.global_step)


def main() -> None:
    slow_saves()
    torch.manual_seed(0)
    # Dropout: the weights depend on random numbers, so that a resume must restore their generators.
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = GPT2LMHeadModel(config)
    callbacks: list[TrainerCallback] = [Record()]
    if PARAMS.get("adapter"):
        from slurmtrain.integrations.transformers import SlurmtrainCallback

        callbacks.append(SlurmtrainCallback())
    args = TrainingArguments(
        output_dir=str(DIRECTORY),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        save_steps=SAVE_EVERY,
        save_total_limit=3,
        eval_strategy="steps" if PARAMS.get("eval_every") else "no",
        eval_steps=PARAMS.get("eval_every"),
        enable_jit_checkpoint=PARAMS.get("jit", False),
        dataloader_num_workers=2,
        dataloader_multiprocessing_context="fork",
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(), eval_dataset=SlowTokens(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=RESUME_FROM)
    ended(model)


if __name__ == "__main__":
    main()
