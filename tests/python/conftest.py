# SPDX-License-Identifier: Apache-2.0
"""A kvcached of its own for each test module: a socket in a folder of its own; host memory, or with
--device cuda the first GPU's."""
import ctypes
import os
import signal
import subprocess
import time

import pytest

import kvclient

DEADLINE_S = 60  # of anything that should take no time: machines may be busy


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


MEMORY = {"host": ["--host", "256M"], "cuda": ["--gpus", "0", "--reserve", "4G"]}


def pytest_addoption(parser):
    parser.addoption("--device", choices=MEMORY, default="host", help="where the pools lie")


@pytest.fixture(scope="session")
def device(pytestconfig):
    return pytestconfig.getoption("--device")


class Daemon:
    def __init__(self, folder, *options):
        self.socket = os.path.join(folder, "kvcached.sock")
        self.log = os.path.join(folder, "daemon.log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [os.environ["KVCACHED_BIN"], "--socket", self.socket, *options],
                stderr=log, preexec_fn=die_with_parent)
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                kvclient.Client(self.socket).close()
                return
            except kvclient.KvError:
                assert self.process.poll() is None, open(self.log).read()
                assert time.monotonic() < end, "kvcached doesn't answer"
                time.sleep(0.02)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, device):
    started = Daemon(tmp_path_factory.mktemp("daemon"), *MEMORY[device])
    os.environ["KVCACHED_SOCKET"] = started.socket
    yield started
    started.stop()


@pytest.fixture
def client(daemon):
    with kvclient.Client(name="test") as opened:
        yield opened
        assert opened.check().n_errors == 0


def until(condition, what):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)
