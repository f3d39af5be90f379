"""What a run prints: a progress bar on a terminal, plain lines otherwise."""

import os
import sys
from datetime import timedelta

from accelerate import Accelerator


class Console:
    """Prints; only the main process does."""

    def __init__(self, accelerator: Accelerator, steps: int):
        self.silent, self.steps, self.bar = not accelerator.is_main_process, steps, None

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        elif not self.silent:
            try:
                print(text, flush=True)
            except BrokenPipeError:
                # The reader has ended, as `tee` does at Ctrl-C. The run continues, and still saves.
                sys.stdout = open(os.devnull, "w")

    def begin(self, step: int) -> None:
        """Shows the bar if there is a terminal; `step` steps are already done."""
        if self.silent or not sys.stdout.isatty():
            return
        from rich import progress

        columns = (
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
        )
        self.bar = progress.Progress(*columns, refresh_per_second=4)
        self.task = self.bar.add_task("", total=self.steps, completed=step)
        self.bar.start()

    def step(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def line(self, line: dict) -> None:
        """Shows a line of metrics."""
        text = f"loss {line['loss']:.4f}, lr {line['lr']:.2e}, grad norm {line['grad_norm']:.3f}"
        if line.get("skipped_steps"):
            text += f", {line['skipped_steps']} skipped"
        if "loss_scale" in line:
            text += f", loss scale {line['loss_scale']:.0f}"
        text += f", {line['tokens_per_second']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=line["step"], description=text)
        else:
            tokens = line["tokens"] / line["step"] * (self.steps - line["step"])
            left = timedelta(seconds=round(tokens / line["tokens_per_second"]))
            self.say(f"step {line['step']}/{self.steps}: {text}, {left} left")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
