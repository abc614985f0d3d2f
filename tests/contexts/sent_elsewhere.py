"""Send functions to a process without their modules, and compare the results."""

import pickle
import subprocess
import sys

from stoker.contexts import payloads
from stoker.contexts.payloads import dumps_code

THERE = """
import pickle, sys
from stoker.contexts import payloads
from stoker.contexts.payloads import loads_code
sent, ended = pickle.loads(sys.stdin.buffer.read()), {}
for name, data in sent.items():
    try:
        result = loads_code(data)[0]()
        ended[name] = payloads.dumps(result, what="result")
    except BaseException as error:
        ended[name] = repr(error)
sys.stdout.buffer.write(pickle.dumps(ended))
"""


def outcomes(here):
    """Run each function in another process; return `ok` or an error for each function."""
    sent, found = {}, {}
    for name, function in dict(here).items():
        if name.partition("_")[0] in ("use", "make", "refuse"):
            try:
                sent[name] = dumps_code(function, what="function")
            except Exception as error:
                found[name] = str(error)
    given = pickle.dumps(sent)
    done = subprocess.run([sys.executable, "-c", THERE], input=given, capture_output=True, check=True, cwd="/")
    for name, data in pickle.loads(done.stdout).items():
        if isinstance(data, str):
            found[name] = data
            continue
        back = payloads.loads(data, keep_classes=True)
        wanted = here[name]() if name.startswith("make") else True
        same = type(back) is type(wanted) and back == wanted
        found[name] = "ok" if same else f"{back!r} of {type(back)} instead of {wanted!r}"
    return found
