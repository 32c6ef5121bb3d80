"""Starts a script once for each GPU of this machine, or WORLD_SIZE times: python -m apex.parallel.multiproc

usage: python -m apex.parallel.multiproc script.py [arguments ...]
       WORLD_SIZE=4 python -m apex.parallel.multiproc script.py [arguments ...]
       python -m apex.parallel.multiproc -m package.module [arguments ...]

Each process finds what torch.distributed.init_process_group() reads (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) in its environment. A script that has options --rank and --world-size
gets them too, as from public apex. Rank 0 writes to this terminal; the output of rank N goes to GPU_N.log here.

If a process fails, the others are ended, and its exit code is this command's (128 + N after signal N). One
machine only; for more, see torchrun.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

GRACE = 10.0  # seconds between asking a process to end and killing it


def docstring_hack():
    """Does nothing: in public apex it holds what this module's docstring says."""


def world_size(arguments):
    """How many processes: --world-size, WORLD_SIZE, or one for each GPU."""
    if "--world-size" in arguments[:-1]:
        return int(arguments[arguments.index("--world-size") + 1])
    if os.environ.get("WORLD_SIZE"):
        return int(os.environ["WORLD_SIZE"])
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        print("multiproc: no GPU, so one process; WORLD_SIZE=N starts N", file=sys.stderr)
    return max(gpus, 1)


def command(arguments, rank, ranks):
    """The command line of one process."""
    arguments = list(arguments)
    try:
        text = Path(arguments[0]).read_text(errors="ignore")
    except OSError:
        text = ""
    for option, value in (("--world-size", ranks), ("--rank", rank)):
        if option in arguments[:-1]:
            arguments[arguments.index(option) + 1] = str(value)
        elif f'"{option}"' in text or f"'{option}'" in text:
            arguments += [option, str(value)]
    return [sys.executable, *arguments]


def environment(rank, ranks, port):
    """What a process finds in its environment."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", port),
    }
    threads = {} if ranks == 1 else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1)}
    return {**os.environ, **{name: str(value) for name, value in {**given, **threads}.items()}}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def output(rank):
    """Where a process writes; None: to this terminal."""
    if rank == 0:
        return None
    try:
        return open(f"GPU_{rank}.log", "w")
    except OSError:  # a folder that cannot be written to
        return None


def end(processes):
    """Asks all processes to end, and kills those that do not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait(processes):
    """Waits for all; returns the first failure's exit code, or 0, and then no process is left."""
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                code = codes[failed]
                where = "" if failed == 0 else f"; see GPU_{failed}.log"
                print(f"multiproc: rank {failed} ended with exit code {code}{where}", file=sys.stderr)
                return code if code > 0 else 128 - code
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.05)
    finally:
        end(processes)


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    ranks = world_size(arguments)
    if ranks < 1:
        print(f"multiproc: {ranks} processes were asked for; at least 1 is needed", file=sys.stderr)
        return 2
    port = free_port()
    # The end of this process is the end of all, by whichever signal.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    processes = []
    try:
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    command(arguments, rank, ranks),
                    env=environment(rank, ranks, port),
                    stdout=output(rank),
                    stderr=None if rank == 0 else subprocess.STDOUT,
                )
            )
        return wait(processes)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        end(processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
