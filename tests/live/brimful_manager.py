"""A manager that stops reading messages when a few bytes wait for its disk."""

from __future__ import annotations

import sys

from stoker.manager.live import server
from stoker.manager.main import main

server.FULL_BYTES = 4000
sys.exit(main(sys.argv[1:]))
