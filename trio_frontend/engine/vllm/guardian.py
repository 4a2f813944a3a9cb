"""Starts a command that must not outlive its owner, whatever ends the owner: python guardian.py FD COMMAND...

FD is one end of a socket pair, the owner has the other. This process becomes COMMAND (same process id). Before, it leaves a guardian
behind, in a session of its own: when the owner's end closes, which the kernel does even for a process that is killed, the guardian ends
the command's process group, SIGTERM first. Run as a script, without the package: it must start in no time.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL."""


def guard(fd: int, group: int) -> None:
    os.setsid()
    os.closerange(0, fd)
    os.closerange(fd + 1, 256)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.set_blocking(fd, True)
    os.read(fd, 1)  # nobody writes: this is the end of the owner, or of its interest
    try:
        os.killpg(group, signal.SIGTERM)
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            time.sleep(0.05)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # nothing is left of it
        pass


def main() -> None:
    fd, command = int(sys.argv[1]), sys.argv[2:]
    group = os.getpgrp()
    intermediate = os.fork()
    if intermediate == 0:
        # Twice, so that the guardian is no child of the command, which may wait for any of its children.
        if os.fork() == 0:
            guard(fd, group)
        os._exit(0)
    os.waitpid(intermediate, 0)
    os.set_inheritable(fd, False)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
