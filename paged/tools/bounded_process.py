"""Processes for work that cannot be interrupted, with limits of time and memory that the system enforces.

A root process starts once and loads its modules. Every piece of work runs in a branch: a fork of the root, which takes
milliseconds to make and inherits the root's state. A branch can branch again. A branch ends when its work reaches a
limit, when its `Branch` is closed or dropped, and when the process that holds the `Branch` ends in any way.

A branch that ends at a limit or by a crash of its work reports this before it ends. A branch that ends without a report
was ended by the system, or could not be made for lack of processes, descriptors or memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from paged.errors import PagedError, UnsupportedError

_REQUEST = struct.Struct("<Idd")  # bytes that follow (0 asks for a branch), limits of CPU time and of real time in s
_REPLY = struct.Struct("<Id")  # bytes that follow, CPU time used in s
# Code of a root. Python runs it in isolated mode, so that neither environment nor working folder can replace modules.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from paged.tools.bounded_process import serve; "
    "serve(sys.argv[1], int(sys.argv[2]))"
)
_PIECE = 1 << 16


class ProcessEndedError(PagedError):
    """The process of a `Branch` ended at a limit or by a crash before it answered."""


class ProcessLostError(ProcessEndedError):
    """The system ended a process or could not start one; the same work may succeed later."""


class Reply(NamedTuple):
    """Answer of a branch, and the CPU time used in seconds."""

    message: bytes
    cpu_s: float


class Branch:
    """Caller's end of a process that answers one request at a time."""

    def __init__(self, connection: socket.socket, life: socket.socket | None = None) -> None:
        """life: connection whose closing ends the process; the process writes the reason of its own end there."""
        self._socket, self._life = connection, life
        self._is_closed = False
        self._last_words = b""

    def branch(self) -> Branch:
        """Return a copy of the process in its current state; no request may be in progress.

        Raises:
            ProcessEndedError: the process has ended. If the copy cannot be made, its first reply raises this.
        """
        with contextlib.ExitStack() as opened:
            try:
                parent_end, child_end = map(opened.enter_context, socket.socketpair())
                parent_life, child_life = map(opened.enter_context, socket.socketpair())
            except OSError as error:
                raise ProcessLostError(f"no process could be asked for: {error}") from error
            try:
                socket.send_fds(self._socket, [_REQUEST.pack(0, 0, 0)], [child_end.fileno(), child_life.fileno()])
            except OSError as error:
                raise self._ended() from error
            child_end.close()
            child_life.close()
            opened.pop_all()
        return Branch(parent_end, parent_life)

    def send(self, message: bytes, *, cpu_s: float, seconds: float) -> None:
        """Send a request. The process ends if the request takes more CPU time than `cpu_s` or more time than `seconds`.

        If the process has already ended, receiving the reply raises the error.
        """
        with contextlib.suppress(OSError):
            self._socket.sendall(_REQUEST.pack(len(message), cpu_s, seconds) + message)

    def is_ready(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds for a reply or the end of the process; return whether one came."""
        return _is_readable(self._socket, timeout)

    def receive(self) -> Reply:
        """Wait for the reply to the request.

        Raises:
            ProcessEndedError: the process has ended.
        """
        header = _receive(self._socket, _REPLY.size)
        if len(header) == _REPLY.size:
            size, cpu_s = _REPLY.unpack(header)
            message = _receive(self._socket, size)
            if len(message) == size:
                return Reply(message, cpu_s)
        raise self._ended()

    async def ask(self, message: bytes, *, seconds: float, cpu_s: float | None = None) -> Reply:
        """Send a request and await the reply. cpu_s: limit of CPU time; None for `seconds`.

        Raises:
            ProcessEndedError: the process has ended.
        """
        import asyncio  # imported here, because it would double the start time of the root

        loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self.send, message, cpu_s=cpu_s or seconds, seconds=seconds)
        except RuntimeError as error:
            raise ProcessLostError(f"no thread to ask a process: {error}") from error
        is_here = loop.create_future()

        def wake() -> None:
            loop.remove_reader(self._socket)
            if not is_here.done():  # may be cancelled at the same moment
                is_here.set_result(None)

        loop.add_reader(self._socket, wake)
        try:
            await is_here
        finally:
            loop.remove_reader(self._socket)
        return self.receive()

    def close(self) -> None:
        """End the process, whatever it does. A caller that waits for a reply gets `ProcessEndedError`."""
        self._is_closed = True
        for connection in (self._life, self._socket):
            if connection is not None:
                with contextlib.suppress(OSError):  # the process has already ended
                    connection.shutdown(socket.SHUT_RDWR)

    def _ended(self) -> ProcessEndedError:
        """Return the error that tells why the process ended."""
        if self._life is not None and not self._last_words:
            # Read only after the process has ended, because reading may send a signal to a live process.
            with contextlib.suppress(OSError):
                self._last_words = self._life.recv(_PIECE, socket.MSG_DONTWAIT)
        if self._is_closed or self._last_words:
            return ProcessEndedError("the process has ended")
        return ProcessLostError("the system ended a process, or had none to give")


class Root:
    """Process with a loaded module, to make branches from. It starts on first use, and again after it has ended.

    The process ends when its `Root` is dropped.

    Args:
        module: module whose `handler()` returns the function that answers requests, from bytes to bytes.
        niceness: niceness of the process; higher values give way to the caller's work.
    """

    def __init__(self, module: str, *, niceness: int = 0) -> None:
        self._arguments = [module, str(niceness)]
        self._forget()
        # The root belongs to the parent. What is registered stays for ever, so it must not keep the root.
        forget = weakref.WeakMethod(self._forget)

        def forget_in_child() -> None:
            method = forget()
            if method is not None:
                method()

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=forget_in_child)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: Branch | None = None

    def branch(self) -> Branch:
        """Return a copy of the process.

        Raises:
            ProcessLostError: a process cannot be started.
            UnsupportedError: this system has no fork.
        """
        with self._lock:
            # A root sends nothing, so a readable socket means that it has ended.
            if self._process is None or self._process.is_ready():
                self._process = None  # first, in case a new process cannot be started
                self._process = self._start()
            return self._process.branch()

    def _start(self) -> Branch:
        if not hasattr(os, "fork"):
            raise UnsupportedError("processes with limits of time and memory need a system with fork")
        try:
            parent_end, child_end = socket.socketpair()
        except OSError as error:
            raise ProcessLostError(f"a process with limits of time and memory cannot start: {error}") from error
        paths = [os.path.abspath(path) for path in sys.path]
        # Limit libraries to one thread, because a fork copies only the calling thread.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, *self._arguments, *paths],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                # Only the caller gets the terminal's interrupts. A new session would do the same, but Linux shares a
                # CPU among sessions first (sched_autogroup), so the root would get half of it despite its niceness.
                process_group=0,
            )
        except (OSError, ValueError) as error:
            parent_end.close()
            raise ProcessLostError(f"a process with limits of time and memory cannot start: {error}") from error
        finally:
            child_end.close()
        branch = Branch(parent_end)
        weakref.finalize(branch, _end, process, os.getpid())
        return branch


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a root process."""
    if owner == os.getpid():  # not in a fork of the owner
        process.kill()
        process.wait()


def serve(module: str, niceness: int) -> None:
    """Answer requests from stdin, in this process and its branches, until the other end is closed."""
    life: socket.socket | None = None
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended branches leave no zombies
    os.nice(niceness)
    handle = import_module(module).handler()
    while True:
        try:
            header, descriptors, _, _ = socket.recv_fds(connection, _REQUEST.size, 2)
        except OSError:
            header, descriptors = b"", []
        if len(header) < _REQUEST.size:
            os._exit(0)
        size, cpu_s, seconds = _REQUEST.unpack(header)
        if size == 0:
            if len(descriptors) == 2 and _is_child():
                connection.close()
                if life is not None:
                    life.close()
                connection = socket.socket(fileno=descriptors[0])
                life = socket.socket(fileno=descriptors[1])
                _end_with(life)
            else:  # if there is no copy, the requester sees closed connections
                for descriptor in descriptors:
                    os.close(descriptor)
            continue
        message = _receive(connection, size)
        before = time.process_time()
        # These signals have no Python handlers, so the system ends the process even within a C++ function.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = handle(message)
        except BaseException as error:
            if life is not None and not isinstance(error, MemoryError):
                life.sendall(f"{type(error).__name__}\n".encode())
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(OSError):  # the requester is gone
            connection.sendall(_REPLY.pack(len(answer), time.process_time() - before) + answer)


def _is_child() -> bool:
    """Fork; return whether this is the child process. If the system refuses a fork, there is no child."""
    try:
        return os.fork() == 0
    except OSError:
        return False


def _end_with(life: socket.socket) -> None:
    """Let SIGIO end this process when the other end is closed, even within a C++ function.

    The connection carries no requests, because a late SIGIO for bytes already read would end the process. A limit or a
    crash is reported there before it ends the process.
    """
    import fcntl  # missing on systems without fork

    faulthandler.enable(life, all_threads=False)
    for limit in (signal.SIGPROF, signal.SIGALRM):
        faulthandler.register(limit, life, all_threads=False, chain=True)

    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if _is_readable(life):  # closed before the signal was set up
        os._exit(0)


def _is_readable(connection: socket.socket, timeout: float = 0.0) -> bool:
    """Wait up to `timeout` seconds for bytes or the end of a connection; return whether one came."""
    waiter = select.poll()
    waiter.register(connection, select.POLLIN)
    return bool(waiter.poll(max(timeout, 0.0) * 1000))


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or fewer if the other end is closed."""
    parts = bytearray()
    while len(parts) < size:
        try:
            data = connection.recv(min(size - len(parts), _PIECE))
        except OSError:
            break
        if not data:
            break
        parts += data
    return bytes(parts)


def _data_bytes() -> int:
    """Return the size of this process's data segment in bytes."""
    import resource

    with open("/proc/self/statm") as counts:
        pages = int(counts.read().split()[5])
    return pages * resource.getpagesize()


@lru_cache(maxsize=1)
def _own_memory() -> int:
    """Return the size of the data segment at the first call."""
    return _data_bytes()


def limit_memory(num_bytes: int) -> None:
    """Limit the data segment of this process to its size at the first call plus `num_bytes`."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # the system has no such limits
        import resource

        # Write no core dump when a signal ends the process.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _own_memory() + num_bytes
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def may_have_memory(num_bytes: int) -> bool:
    """Return whether the system has the memory that `limit_memory(num_bytes)` allows this process.

    After a MemoryError, False means that the system is short of memory, so the work is not at fault.
    """
    try:
        spare = _own_memory() + num_bytes - _data_bytes()
        # Try to map half of the spare bytes, because the allocator rounds up and keeps some freed memory.
        mmap.mmap(-1, max(spare // 2, mmap.PAGESIZE)).close()
    except (OSError, MemoryError):
        return False
    return True
