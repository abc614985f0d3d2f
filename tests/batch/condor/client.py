"""An HTCondor command as a process: `python -IS client.py FOLDER NAME WORDS...` (see `commands`)."""

import os
import socket
import sys

folder, *words = sys.argv[1:]
here = os.open(".", os.O_RDONLY)
os.chdir(folder)  # socket paths must be short
with socket.socket(socket.AF_UNIX) as door:
    door.connect("commands")
    socket.send_fds(door, ["\0".join(words).encode()], [1, 2, here])
    code = door.recv(1)
sys.exit(code[0] if code else 1)
