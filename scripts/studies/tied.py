"""Commands that Linux ends when the process that started them dies, however it dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dlrm_sharded.ranks.process import die_with_parent


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def tied_command(command: Sequence[str]) -> list[str]:
    """Return the command that runs another one as a child that ends with this process."""
    return module_command("studies.tied", str(os.getpid()), *command)


def main(parent: int, command: Sequence[str]) -> None:
    """Become the command, which inherits the setting."""
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"process {parent} died before it could be waited for")
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
