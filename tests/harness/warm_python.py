"""What stands in for `python` and the scripts beside it in `warm_environment`: see warm_server.py.

It is run with `python -I -S`, and imports next to nothing. The first arguments are the server's socket and the program
that it stands for.
"""

import os
import signal
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket

path, program, *arguments = sys.argv[1:]
words = [program, *arguments]
connection = socket(AF_UNIX)
try:
    connection.connect(path)
except OSError:
    os.execv(program, words)

import array  # noqa: E402
import json  # noqa: E402

mask = os.umask(0)
os.umask(mask)
request = {
    "words": words,
    "numbers": [0, 1, 2],
    "folder": os.getcwd(),
    "umask": mask,
    "session": True,
}
request["environment"] = dict(os.environ)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: connection.send(bytes([number])))
files = array.array("i", [0, 1, 2])
connection.sendmsg([json.dumps(request).encode()], [(SOL_SOCKET, SCM_RIGHTS, files)])
answer = connection.recv(4)
if answer == b"no" or not answer:
    os.execv(program, words)
status = os.waitstatus_to_exitcode(array.array("i", answer)[0])
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
