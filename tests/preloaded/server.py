"""Loads the libraries, then becomes each command that a client asks for, in a fork."""

import atexit
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
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "torch.distributed.run",
    "torchrec.distributed.model_parallel",
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
    "torch.distributed.optim",
    "torch.utils.tensorboard",
    "torchmetrics.classification",
    "torchx.runner",
    "fsspec.core",
    "hydra",
    "matplotlib.backends.backend_agg",
    "polars",
    "pytest",
    "safetensors.torch",
    "scipy.optimize",
)
PROJECT = (
    "dlrm_sharded.commands.train",
    "dlrm_sharded.commands.compare",
    "dlrm_sharded.commands.calibrate",
    "dlrm_sharded.commands.train_policy",
    "dlrm_torchx.launch",
)
"""Modules of this checkout that import most of it."""

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1


class Server:
    """The listening socket, and the connection of each command that runs."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{address}.new")
        self._listener.listen(64)
        self._ended, self._wakeup = socket.socketpair()  # readable when a process has ended
        self._wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for source in (self._listener, self._ended):
            self._selector.register(source, selectors.EVENT_READ)
        Path(f"{address}.new").rename(address)
        self._clients: dict[int, socket.socket] = {}  # by number of the process

    def next_request(self) -> dict[str, Any]:
        """Serve clients until a fork has a command to become; return the request, in the fork."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ended:
                    self._ended.recv(2**12)
                    self._report_ended()
                elif key.fileobj is not self._listener:
                    if key.data in self._clients:  # the client was killed
                        self._selector.unregister(key.fileobj)
                        os.kill(key.data, signal.SIGKILL)
                else:
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
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, pid)
        client.sendall(f"{pid}\n".encode())
        return None

    def _report_ended(self) -> None:
        """Tell clients how their processes ended."""
        for pid in list(self._clients):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                continue
            client = self._clients.pop(pid)
            with contextlib.suppress(KeyError):  # the client went first
                self._selector.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            client.close()

    def _close(self) -> None:
        """Close what the fork does not need, or other clients would never see their end."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for source in (self._listener, self._ended, self._wakeup, *self._clients.values()):
            source.close()


def become(request: dict[str, Any]) -> None:
    """Run a command as `python ARGUMENTS` would, in its folder, environment and streams."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    arguments = request["arguments"]
    if arguments[0] == "-u":
        arguments = arguments[1:]
    for name, place, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(place, mode, buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    forget_modules(arguments[1] if arguments[0] == "-m" else "", added)
    if arguments[0] == "-m":
        sys.path[:0] = [str(Path.cwd()), *added]
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [str(Path(arguments[0]).resolve().parent), *added]
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def forget_modules(run: str, path: list[str]) -> None:
    """Let a command load the module that it runs, and all of the project if it is of another place.

    Args:
        run: name of the module that is run, or "".
        path: folders that the command finds modules in first.
    """
    first = next((folder for folder in path if Path(folder, "dlrm_sharded").is_dir()), None)
    is_other = first is None or Path(first).resolve() != ROOT
    for name in list(sys.modules):
        if name == run or (is_other and name.partition(".")[0] in ("dlrm_sharded", "dlrm_torchx")):
            del sys.modules[name]
    if (loaded := sys.modules.get("dlrm_sharded.ranks.process")) is not None:
        defaults = (os.getppid(), signal.SIGKILL)  # which is read when it is loaded
        loaded.die_with_parent.__defaults__ = defaults


def end(run: Callable[[], None]) -> NoReturn:
    """End as Python does after a program, but leave the objects of the libraries as they are.

    Python would take all of them down, which costs every fork a third of a second.
    """
    exit_code: object = 0
    try:
        run()
    except SystemExit as ended:
        exit_code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        exit_code = 1
        if isinstance(error, KeyboardInterrupt):
            exit_code = -signal.SIGINT
    if exit_code is not None and not isinstance(exit_code, int):
        print(exit_code, file=sys.stderr)
        exit_code = 1
    for last in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            last()
        except BaseException as error:  # as that of a signal, which changes no exit code by now
            sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stdout.flush()
        sys.stderr.flush()
    if exit_code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((exit_code or 0) & 0xFF)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    del sys.path[0]  # the folder of this file
    try:
        sys.path[:0] = project = [str(ROOT), str(ROOT / "launch")]
        for name in (*LIBRARIES, *PROJECT):
            importlib.import_module(name)
        del sys.path[: len(project)]
    except BaseException:
        Path(sys.argv[1]).with_name("failed").touch()  # workers wait for the socket
        raise
    gc.collect()
    gc.freeze()
    request = Server(sys.argv[1]).next_request()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    end(lambda: become(request))


if __name__ == "__main__":
    main()
