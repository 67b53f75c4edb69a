"""Loads the libraries, then becomes each command that a client asks for, in a fork."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
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


def next_request(address: str) -> dict[str, Any]:
    """Serve clients until a fork has a command to become; return the request, in the fork."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    Path(f"{address}.new").rename(address)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(client)
        client.close()


def keep(client: socket.socket) -> dict[str, Any]:
    """Fork the command that a client asks for, and end with it; return the request, in the fork.

    A client that was killed takes its command with it.
    """
    try:
        size, streams, _, _ = socket.recv_fds(client, 8, 3)
        data = client.makefile("rb").read(int.from_bytes(size, "big"))
        request: dict[str, Any] = json.loads(data)
    except (OSError, ValueError):  # it was killed before
        os._exit(1)
    pid = os.fork()
    if pid == 0:
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
        for descriptor in (client.detach(), *streams):
            os.close(descriptor)
        return request
    for stream in streams:
        os.close(stream)
    client.sendall(f"{pid}\n".encode())
    threading.Thread(target=kill_without, args=(client, pid), daemon=True).start()
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def kill_without(client: socket.socket, pid: int) -> None:
    """Kill a command as soon as its client has gone."""
    with contextlib.suppress(OSError):
        client.recv(1)
        os.kill(pid, signal.SIGKILL)


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
    request = next_request(sys.argv[1])
    end(lambda: become(request))


if __name__ == "__main__":
    main()
