"""A process ends with the one that started it, also if that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

DEADLINE_S = 60
CHILD = """
import subprocess, sys, time
from penstock.runtime.io.process_end import end_with_parent
end_with_parent()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys, time
from penstock.runtime.io.process_end import parent_pipe
with parent_pipe() as (descriptor, variable):
    subprocess.Popen(
        [sys.executable, "-c", {CHILD!r}],
        pass_fds=(descriptor,), start_new_session=True, env={{**os.environ, **variable}},
    )
    time.sleep(600)
"""


def test_a_killed_parent_takes_its_child_and_the_child_of_that_with_it() -> None:
    """All three hold the write end of the pipe that is the standard output of the parent, so it ends with the last."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        parent.send_signal(signal.SIGKILL)
        try:
            rest, _ = parent.communicate(timeout=DEADLINE_S)
        finally:
            parent.kill()
    assert rest == ""


def test_a_process_without_such_a_parent_has_no_thread_for_it() -> None:
    """The variable is removed, so that the processes that it starts do not take its descriptor for theirs."""
    program = (
        "import os, threading\nfrom penstock.runtime.io.process_end import end_with_parent\nend_with_parent()\n"
        "print(threading.active_count(), os.environ.get('PENSTOCK_PARENT_PIPE'))"
    )
    for more in ({}, {"PENSTOCK_PARENT_PIPE": "text"}):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, **more}
        )
        assert done.stdout == "1 None\n"
