"""What earlier versions called `mixer curves`."""

from mixer.commands.curves import main
from mixer.common.errors import run_command

if __name__ == "__main__":
    run_command(main)
