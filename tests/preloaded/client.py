"""Runs a command as a fork of the server: `python -I -S client.py SOCKET [-u] -m MODULE ...`."""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def pass_on(number: int, pid: int) -> None:
    """Send a signal to the process, which may have ended by itself, with an exit code to come."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main(address: str, arguments: list[str]) -> None:
    first = next(argument for argument in arguments if argument != "-u")
    if first.startswith("-") and first != "-m":  # other flags need an interpreter of its own
        os.execv(sys.executable, [sys.executable, *arguments])
    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "ignored": ignored,
    }
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(data).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(data)
        answers = server.makefile()
        pid = int(answers.readline())
        for number in set(PASSED_ON) - set(ignored):
            signal.signal(number, lambda number, _: pass_on(number, pid))
        exit_code = int(answers.readline())
    if exit_code < 0:  # by a signal
        if -exit_code != signal.SIGKILL:  # which no process can handle
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
