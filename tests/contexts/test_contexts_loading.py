"""Run the real client of the Hugging Face hub against local ports that refuse or hang."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
from free_port import free_port
from new_process import run_python

pytest.importorskip("huggingface_hub")

PROGRAM = """
    import logging, sys, time
    from huggingface_hub import hf_hub_download
    from stoker.contexts.loading import HubLogHandler

    retries = []
    class Count(logging.Handler):
        def emit(self, record):
            retries.append(record.getMessage())
    logging.getLogger("huggingface_hub").addHandler(Count())
    watch = HubLogHandler()
    with watch:
        for file in ("config.json", "model.safetensors"):
            try:
                hf_hub_download("gpt2", file)
            except Exception as error:
                print(bool(watch.advice(error)))
    print(sum("thrown while requesting" in text for text in retries))
    print(bool(watch.unreachable))
"""


def run(endpoint: str, folder: str, **more: str) -> list[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": folder, **more}
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        if name not in more:
            environment.pop(name, None)
    return run_python(PROGRAM, env=environment).split()


def test_model_hub_that_refuses_connections_is_not_contacted_again(tmp_path):
    assert run(f"http://127.0.0.1:{free_port()}", str(tmp_path)) == ["True", "True", "0", "True"]
    offline = run("http://127.0.0.1:9", str(tmp_path), HF_HUB_OFFLINE="1")
    assert offline == ["True", "True", "0", "False"], "a user who is offline gets the advice, too"


def test_model_hub_behind_a_firewall_is_not_contacted_again(tmp_path):
    with contextlib.ExitStack() as open_sockets:
        full = open_sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):  # with a full queue the kernel drops further packets, like a firewall
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        endpoint = f"http://127.0.0.1:{full.getsockname()[1]}"
        assert run(endpoint, str(tmp_path), HF_HUB_ETAG_TIMEOUT="1") == ["True", "True", "0", "True"]
