"""Train the GPT of experiments/gpt by DeepSpeed's engine: a script as its users write them, and five calls more."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import slurmtrain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))
from train import PARAMS, Gpt, batch_of, loss_of, standard_library


def main() -> None:
    """Train, and save when asked to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=PARAMS["steps"])
    parser.add_argument("--save", default="out")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    # Added by DeepSpeed's launcher.
    parser.add_argument("--local_rank", type=int, default=0)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Gpt(PARAMS["width"], PARAMS["heads"], PARAMS["layers"], PARAMS["context"])
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    text = standard_library()
    if args.resume:
        engine.load_checkpoint(str(args.resume.parent), tag=args.resume.name)
    slurmtrain.progress(engine.global_steps, args.steps)
    while engine.global_steps < args.steps:
        whole = batch_of(text, engine.global_steps, engine.train_batch_size(), PARAMS["context"], 0)
        own, following = (part[rank::ranks].to(engine.device) for part in whole)
        loss = loss_of(engine(own), following)
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        slurmtrain.log(loss=mean)
        slurmtrain.progress(engine.global_steps, args.steps)
        time.sleep(args.seconds_per_step)
        stopping = engine.global_steps < args.steps and slurmtrain.stop_requested()
        if stopping or engine.global_steps % 100 == 0 or engine.global_steps == args.steps:
            engine.save_checkpoint(args.save)
        if stopping:
            slurmtrain.leave()


if __name__ == "__main__":
    main()
