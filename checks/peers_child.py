"""`python -m checks.peers_child PARENT_PID COMMAND...`: becomes COMMAND, as a process that dies with its parent."""

from __future__ import annotations

import os
import sys

from cli.child import die_with_parent

if __name__ == "__main__":
    if sys.platform == "linux":
        die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
