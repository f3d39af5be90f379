"""Processes that train on the GPUs of a machine: those of one GPU take turns, and none outlives its
parent. A run that is under way when both get a signal is saved first.
"""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from mixer.common.locks import locked
from mixer.training.loop import Step, Trainer

SAVING = 20.0  # seconds before the end at which a run is stopped, to save and report


class NoTime(Exception):
    """A run is left to the next command."""


def workers(folder: Path, at_once: int) -> list[ProcessPoolExecutor]:
    """`at_once` processes for each visible GPU, which see that one alone; as if there were one GPU
    where there is none. Their locks are in `folder`.
    """
    gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    # A fork has imported everything already, but CUDA does not survive one.
    context = multiprocessing.get_context("spawn" if gpus else "fork")
    found = []
    for gpu in (visible[:gpus] or [""]) * at_once:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        about = (os.getpid(), folder / f"gpu-{gpu}.lock")
        found.append(ProcessPoolExecutor(1, context, start_worker, about))
        found[-1].submit(os.getpid)  # starts the process
    return found


def start_worker(parent: int, lock: Path) -> None:
    """Gives this process an end with its parent, and its runs turns on their GPU."""
    signal.signal(signal.SIGTERM, stop_start)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    take_turns(lock)


turn = ExitStack()  # holds the GPU's lock from a run's first step on, until `train` is done with it


def take_turns(lock: Path) -> None:
    """Has the runs of this process wait for the lock before their first step."""
    step = Trainer.step

    def step_in_turn(trainer: Trainer) -> Step:
        if not getattr(trainer, "has_turn", False):
            turn.enter_context(locked(lock))
            trainer.has_turn = True
        return step(trainer)

    Trainer.step = step_in_turn


def stop_start(*_) -> None:
    """What a signal does outside of training, which answers it by saving."""
    raise NoTime("a run that took long to start")


def end_with(parent: int) -> None:
    """Ends this process after its parent, and after a run that a signal to both has stopped."""
    while os.getppid() == parent:
        time.sleep(0.5)
    training.acquire(timeout=SAVING)
    os._exit(1)


training = threading.Lock()  # held during each run of this process
