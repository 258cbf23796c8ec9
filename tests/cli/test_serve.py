"""`mmspec serve` from the outside: what it says, what it refuses, how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request


def test_a_port_in_use_is_refused_before_models_are_loaded(fails):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in fails("serve", "--port", port)


def test_an_address_of_another_machine_is_refused(fails):
    assert "--host" in fails("serve", "--host", "192.0.2.1", "--port", "0")


def test_a_limit_that_is_none_is_refused(fails):
    for option in [
        "--wait-seconds=0",
        "--run-seconds=nan",
        "--allow-url-domain=http://a.org/",
        "--allow-origin=a.org",
    ]:
        assert fails("serve", option, "--port", "0")


def test_two_models_of_one_name_are_refused(fails, tiny_folder):
    assert "different names" in fails(
        "serve", tiny_folder, tiny_folder, "--port", "0", "--accelerator", "none"
    )


def test_a_missing_package_is_named(hide, fails):
    hide("uvicorn")
    assert "pip install 'mmspec[serve]'" in fails("serve")


def test_it_says_where_it_is_and_ends_with_ctrl_c(tiny_folder):
    command = [sys.executable, "-m", "mmspec", "serve", str(tiny_folder), "--port", "0", "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs of a shell may ignore it
    ) as server:
        assert server.stdout is not None
        said = ""
        while not said.endswith("}\n"):
            line = server.stdout.readline()
            assert line, server.communicate()[1]
            said += line
        where = json.loads(said)
        with urllib.request.urlopen(where["url"] + "/health", timeout=60) as answer:
            assert json.load(answer)["models"] == where["models"] == [tiny_folder.name]
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 130
    assert "Traceback" not in errors
    assert "stopped" in errors
