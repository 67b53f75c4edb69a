"""Loads the libraries, then becomes each command that a client asks for, in a fork."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch.distributed.run",
    "torchrec.distributed.model_parallel",
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
    "torchmetrics.classification",
    "scipy.optimize",
    "hydra",
)
PR_SET_PDEATHSIG = 1


class Server:
    """The listening socket, and a connection and a process for each command that runs."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{address}.new")
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        Path(f"{address}.new").rename(address)
        self._commands: dict[int, tuple[socket.socket, int]] = {}  # by number of the process

    def next_request(self) -> dict[str, Any]:
        """Serve clients until a fork has a command to become; return the request, in the fork."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._listener:
                    self._end(key.data, is_ended=isinstance(key.fileobj, int))
                    continue
                client, _ = self._listener.accept()
                with contextlib.suppress(OSError, ValueError):  # a client that was killed
                    if (request := self._fork(client)) is not None:
                        return request

    def _fork(self, client: socket.socket) -> dict[str, Any] | None:
        size, streams, _, _ = socket.recv_fds(client, 8, 3)
        data = b""
        while len(data) < int.from_bytes(size, "big"):
            if not (more := client.recv(2**16)):
                raise OSError("the client ended")
            data += more
        pid = os.fork()
        if pid == 0:
            self._close()
            client.close()
            for place, stream in enumerate(streams):
                os.dup2(stream, place)
        for stream in streams:
            os.close(stream)
        if pid == 0:
            request: dict[str, Any] = json.loads(data)
            return request
        client.sendall(f"{pid}\n".encode())
        ending = os.pidfd_open(pid)
        self._commands[pid] = client, ending
        for file in self._commands[pid]:
            self._selector.register(file, selectors.EVENT_READ, pid)
        return None

    def _end(self, pid: int, *, is_ended: bool) -> None:
        """Tell the client how its process ended, or kill the process of a client that is gone."""
        if pid not in self._commands:
            return  # both happened at once
        client, ending = self._commands.pop(pid)
        for file in (client, ending):
            self._selector.unregister(file)
        if not is_ended:
            os.kill(pid, signal.SIGKILL)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            client.sendall(f"{exit_code}\n".encode())
        client.close()
        os.close(ending)

    def _close(self) -> None:
        """Close what the fork does not need, or other clients would never see their end."""
        self._selector.close()
        self._listener.close()
        for client, ending in self._commands.values():
            client.close()
            os.close(ending)


def become(request: dict[str, Any]) -> None:
    """Run a command as `python ARGUMENTS` would, in its folder, environment and streams."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = request["arguments"]
    if arguments[0] == "-u":
        arguments = arguments[1:]
    for name, place, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(place, mode, buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if arguments[0] == "-m":
        sys.path[:0] = [str(Path.cwd()), *added]
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [str(Path(arguments[0]).resolve().parent), *added]
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    del sys.path[0]  # the folder of this file
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = Server(sys.argv[1]).next_request()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    become(request)


if __name__ == "__main__":
    main()
