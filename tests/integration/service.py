#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvcached as a service manager runs it: a socket that is passed, datagrams, a watchdog. $1: the build folder."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

BUILD = os.path.realpath(sys.argv[1])
KVCACHED = os.path.join(BUILD, "daemon/kvcached")
KVCTL = os.path.join(BUILD, "tools/kvctl")
DEADLINE = 30
LOOP = os.environ.get("KV_TEST_EVENT_LOOP")
OPTIONS = ["--host", "64M"] + (["--event-loop", LOOP] if LOOP else [])
folder = tempfile.mkdtemp(prefix="kvcached-test.")
running = []


def soon(what, condition):
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    sys.exit(f"not within {DEADLINE} s: {what}")


class Manager:
    """What systemd is to a service: the listening socket, the one for datagrams, the start."""

    def __init__(self, name, abstract=False, kind=socket.SOCK_SEQPACKET):
        self.path = os.path.join(folder, name + ".sock")
        self.listener = socket.socket(socket.AF_UNIX, kind)
        self.listener.bind(self.path)
        self.listener.listen(16)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify_name = f"@{folder}/{name}" if abstract else os.path.join(folder, name + ".notify")
        self.notify.bind("\0" + self.notify_name[1:] if abstract else self.notify_name)
        self.notify.settimeout(0.05)
        self.heard = []
        self.log = os.path.join(folder, name + ".log")
        self.pid = None

    def start(self, options=(), n_fds=1, watchdog_s=0, before=()):
        env = dict(os.environ, NOTIFY_SOCKET=self.notify_name, LISTEN_FDS=str(n_fds), LISTEN_FDNAMES="x")
        env.pop("KVCACHED_SOCKET", None)
        env.pop("XDG_RUNTIME_DIR", None)
        if watchdog_s:
            env["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        command = [*before, KVCACHED, *OPTIONS, *options]
        self.pid = os.fork()
        if not self.pid:
            log = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            # Not to be the same number: then it would keep its flag of being closed.
            os.dup2(os.dup(self.listener.fileno()), 3, inheritable=True)
            env["LISTEN_PID"] = env["WATCHDOG_PID"] = str(os.getpid())
            os.execvpe(command[0], command, env)
        running.append(self.pid)

    def lines(self):
        try:
            while True:
                self.heard += self.notify.recv(4096).decode().splitlines()
        except TimeoutError:
            pass
        return self.heard

    def hears(self, line):
        soon(f"{line} (heard: {self.heard})", lambda: any(x.startswith(line) for x in self.lines()))

    def kvctl(self, *args):
        return subprocess.run([KVCTL, "-s", self.path, "-t", "20", *args], capture_output=True, text=True,
                              timeout=60, check=False)

    def stats(self):
        r = self.kvctl("--json", "stats")
        assert r.returncode == 0, r.stderr
        return json.loads(r.stdout)["daemon"]

    def ended(self):
        pid, status = soon("its end", lambda: (lambda r: r if r[0] else None)(os.waitpid(self.pid, os.WNOHANG)))
        running.remove(pid)
        return os.waitstatus_to_exitcode(status)

    def stop(self):
        os.kill(self.pid, signal.SIGTERM)
        status = self.ended()
        assert status == 0, f"status {status}: {open(self.log).read()}"


def a_socket_that_is_passed_is_served_and_stays():
    m = Manager("passed")
    early = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    early.connect(m.path)  # before anything runs
    m.start()
    m.hears("READY=1")
    m.hears("STATUS=worker ")
    r = m.kvctl("ping")
    assert r.returncode == 0, r.stderr
    assert m.stats()["n_clients"] >= 1
    env = open(f"/proc/{m.stats()['worker_pid']}/environ").read()
    assert "LISTEN_" not in env and "NOTIFY_SOCKET" not in env, env
    assert f"KVCACHED_SOCKET={m.path}" in env
    m.stop()
    m.hears("STOPPING=1")
    assert os.path.exists(m.path), "the manager's socket was removed"
    # Started again on the same socket, as after a restart of the service.
    m.heard.clear()
    m.start()
    m.hears("READY=1")
    assert m.kvctl("ping").returncode == 0
    m.stop()


def datagrams_go_to_an_abstract_socket_too():
    m = Manager("abstract", abstract=True)
    m.start(options=["--socket", m.path])  # named as well: the same
    m.hears("READY=1")
    m.stop()


def a_socket_that_is_not_for_us_is_refused():
    for name, kind, n_fds, options, words in (
        ("stream", socket.SOCK_STREAM, 1, [], "no AF_UNIX socket of SOCK_SEQPACKET"),
        ("two", socket.SOCK_SEQPACKET, 2, [], "LISTEN_FDS is 2"),
        ("other", socket.SOCK_SEQPACKET, 1, ["--socket", folder + "/elsewhere.sock"], "was passed"),
    ):
        m = Manager(name, kind=kind)
        m.start(options=options, n_fds=n_fds)
        assert m.ended() == 1
        assert words in open(m.log).read(), open(m.log).read()
        assert "READY=1" not in m.lines()


def a_stuck_worker_costs_a_worker_and_not_the_service():
    m = Manager("watchdog")
    m.start(watchdog_s=4)
    m.hears("READY=1")
    m.hears("WATCHDOG=1")
    before = m.stats()
    os.kill(before["worker_pid"], signal.SIGSTOP)
    m.heard.clear()
    start = time.monotonic()
    after = soon("another worker", lambda: (s := m.stats())["worker_restarts"] and s)
    assert after["pid"] == before["pid"] and after["worker_pid"] != before["worker_pid"]
    assert time.monotonic() - start > 0.5
    assert "has not turned its loop" in open(m.log).read()
    m.heard.clear()
    m.hears("WATCHDOG=1")
    m.stop()


def without_a_watchdog_a_stopped_worker_is_left_alone():
    m = Manager("no_watchdog")
    m.start()
    m.hears("READY=1")
    worker = m.stats()["worker_pid"]
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1)
    os.kill(worker, signal.SIGCONT)
    assert m.stats()["worker_pid"] == worker
    assert "WATCHDOG=1" not in m.lines()
    m.stop()


def all_of_its_processes_work_without_any_privilege():
    """As the unit has it: another user, no capability, none to be had."""
    if os.geteuid():
        return
    m = Manager("unprivileged")
    os.chmod(folder, 0o755)
    os.chmod(m.path, 0o666)
    os.chmod(m.notify_name, 0o666)
    drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--reuid=65534",
            "--regid=65534", "--clear-groups"]
    if subprocess.run([*drop, KVCACHED, "--version"], capture_output=True, check=False).returncode:
        return
    m.start(before=drop)
    m.hears("READY=1")
    daemon = m.stats()
    with open(f"/proc/{daemon['worker_pid']}/status") as f:
        status = f.read()
    assert "CapBnd:\t0000000000000000" in status and "NoNewPrivs:\t1" in status, status
    holder = subprocess.Popen([os.path.join(BUILD, "tests/support/holder"), "p", "20", "64"],
                              env=dict(os.environ, KVCACHED_SOCKET=m.path), stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline().startswith("ready")
    os.kill(daemon["worker_pid"], signal.SIGKILL)
    soon("another worker", lambda: m.stats()["worker_restarts"] == 1)
    holder.stdin.close()
    assert holder.wait(DEADLINE) == 0
    r = m.kvctl("check")
    assert r.returncode == 0, r.stdout + r.stderr
    r = m.kvctl("pool", "drop", "p")  # which the mover has to clean
    assert r.returncode == 0, r.stderr
    soon("clean memory", lambda: all(g["bytes_scrubbing"] == 0 for g in
                                     json.loads(m.kvctl("--json", "stats").stdout)["gpus"]))
    m.stop()


try:
    if LOOP == "io_uring" and subprocess.run([KVCTL, "doctor", "io_uring"], capture_output=True,
                                             check=False).returncode:
        sys.exit(77)
    for test in (
        a_socket_that_is_passed_is_served_and_stays,
        datagrams_go_to_an_abstract_socket_too,
        a_socket_that_is_not_for_us_is_refused,
        a_stuck_worker_costs_a_worker_and_not_the_service,
        without_a_watchdog_a_stopped_worker_is_left_alone,
        all_of_its_processes_work_without_any_privilege,
    ):
        print(test.__name__, flush=True)
        test()
finally:
    for process in running:
        os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
