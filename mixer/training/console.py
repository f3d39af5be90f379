"""What a person sees of a run: a progress bar on a terminal, plain lines in a file."""

import os
import sys

from accelerate import Accelerator


class Console:
    """Prints for the main process alone."""

    def __init__(self, accelerator: Accelerator, steps: int):
        self.silent, self.steps, self.bar = not accelerator.is_main_process, steps, None

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        elif not self.silent:
            try:
                print(text, flush=True)
            except (
                BrokenPipeError
            ):  # the reader has gone, as `tee` does at Ctrl-C: the run goes on, and still saves
                os.dup2(
                    os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
                )  # or Python would fail once more as it ends

    def begin(self, step: int) -> None:
        """The bar, where there is a terminal to draw it on."""
        if self.silent or not sys.stdout.isatty():
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Progress(*columns, refresh_per_second=4)
        self.task = self.bar.add_task("", total=self.steps, completed=step)
        self.bar.start()

    def step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def line(self, line: dict) -> None:
        """A logging step's numbers."""
        text = f"loss {line['loss']:.4f}, lr {line['lr']:.2e}, grad norm {line['grad_norm']:.3f}"
        if line.get("skipped_steps"):
            text += f", {line['skipped_steps']} skipped"
        if "loss_scale" in line:
            text += f", loss scale {line['loss_scale']:.0f}"
        text += f", {line['tokens_per_second']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=line["step"], description=text)
        else:
            self.say(f"step {line['step']}/{self.steps}: {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
